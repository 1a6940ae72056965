"""Tiny random models of every supported architecture, saved by transformers itself.

All parameters are random, norm weights, biases and sinks too: as transformers initialises them (ones and zeros) they
would hide a norm at the wrong place, a forgotten bias or a softmax without its sink.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCABULARY = 211
EOS = 2
LENGTH = 88  # tokens of a text: more than any native sliding window here, and any original context but LongRoPE's
WEIGHT_SCALE = 0.16  # of hidden size 64: keeps activations near one and makes attention pick its keys
ORIGINAL_CONTEXT = 40  # of the rotary embeddings scaled by llama3's and YaRN's rules
LONGROPE_CONTEXT = 128  # beyond it LongRoPE changes its frequencies

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL_CONTEXT,
)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL_CONTEXT)
# 12 of 16 dimensions turn, so six pairs; the long factors must change the logits visibly.
LONGROPE = _rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    long_factor=[1.0, 1.6, 2.4, 4.0, 7.0, 12.0],
    original_max_position_embeddings=LONGROPE_CONTEXT,
    partial_rotary_factor=0.75,
)
GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    }
}

# name: (model type, what differs from BASE)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-tied": ("llama", {**LLAMA3, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "llama-yarn-biases": ("llama", {**YARN, "attention_bias": True, "mlp_bias": True}),
    "llama-dynamic": ("llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 128, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 24}),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA3_ROPE,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 4096, "sliding_window": 30}),
    "phi3-longrope": ("phi3", {**LONGROPE, "original_max_position_embeddings": LONGROPE_CONTEXT}),
    "gpt_neox": ("gpt_neox", {**_rope("default", partial_rotary_factor=0.25)}),
    "gpt_neox-serial": ("gpt_neox", {**_rope("default", partial_rotary_factor=0.5), "use_parallel_residual": False}),
    "glm": ("glm", {**_rope("default", partial_rotary_factor=0.5), "head_dim": 16, "attention_bias": True}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.11,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "gpt_oss": (
        "gpt_oss",
        {**YARN, "head_dim": 16, "sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "stablelm": ("stablelm", {**_rope("default", partial_rotary_factor=0.25), "use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {**_rope("default", partial_rotary_factor=0.5), "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 24, "use_bias": True, "tie_word_embeddings": True}),
    "smollm3": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],  # dense first: layers of different sizes share the scratchpads
        },
    ),
}


def tiny_config(name: str) -> PretrainedConfig:
    """The configuration of ``TINY[name]``."""
    kind, changes = TINY[name]
    options = {**BASE, **changes}
    if kind == "gpt_neox":  # has no grouped queries; a stray option would be kept and saved
        del options["num_key_value_heads"]
    return AutoConfig.for_model(kind, **options)


def save_tiny(name: str, folder: Path, seed: int = 0) -> Path:
    """Save ``TINY[name]`` with random parameters as a model folder (float32, no tokenizer)."""
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter a random value, of a size at which each of them matters to the logits."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(parameter) for module in model.modules() if _is_norm(module) for parameter in module.parameters()}
    centre = 0.0 if "gemma" in type(model).__name__.lower() else 1.0  # Gemma's norms add the one themselves
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("bias", "sinks")):
            parameter.copy_(0.5 * noise)
        elif id(parameter) in norms:
            parameter.copy_(centre + 0.3 * noise)
        else:
            parameter.copy_(WEIGHT_SCALE * noise)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def random_text(seed: int, length: int = LENGTH, batch: int = 1) -> Tensor:
    """Token ids int64 [batch, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def load_stock(folder: Path, attention: str = "eager") -> Any:
    """The folder as stock transformers runs it, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
