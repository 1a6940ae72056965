"""Tiny random models, and GGUF files of them as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

Q = GGMLQuantizationType
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama with llama3 rope, untied": lambda: LlamaConfig(
        **SHAPE | {"hidden_size": 128}, rope_parameters=LLAMA3, tie_word_embeddings=False
    ),
    "llama with biases": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama with linear rope": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "qwen2 with yarn": lambda: Qwen2Config(**SHAPE, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3 with its own head size": lambda: Qwen3Config(**SHAPE, head_dim=32),
}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with everything random, norms and biases too: defaults of 1 and 0 would hide a lost tensor."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    return model


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType = Q.F32,
    *,
    extra: Callable[[GGUFWriter], Any] = lambda writer: None,
) -> None:
    """Write the model with its matrices in type `kind`, and give the model those rounded values itself."""
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _write_rope(writer, model, head_dim)
    extra(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        layer = stem.removeprefix("model.layers.").split(".", 1) if stem.startswith("model.layers.") else None
        part = _NAMES[layer[1] if layer else stem]
        values = tensor.numpy()
        if config.model_type == "llama" and part in heads:
            values = interleaved(values, heads[part])
        quantised = kind if values.ndim == 2 else Q.F32
        data = quantize(values, quantised)
        rounded = dequantize(data, quantised)
        writer.add_tensor(f"blk.{layer[0]}.{part}.{ending}" if layer else f"{part}.{ending}", data, raw_dtype=quantised)
        if config.model_type == "llama" and part in heads:
            rounded = halved(rounded, heads[part])
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(rounded)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores them: the two halves of each head take turns."""
    out = np.empty_like(values)
    size = len(values) // heads
    for head in range(heads):
        rows = values[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = rows[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = rows[size // 2 :]
    return out


def halved(values: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    parts = []
    for rows in np.split(values, heads):
        parts += [rows[0::2], rows[1::2]]
    return np.concatenate(parts)


def stored_values(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a GGUF in float32, by the gguf package's own reader."""
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in GGUFReader(path).tensors}


def byte_level_vocabulary() -> list[str]:
    """The 256 symbols of byte-level BPE, in GPT-2's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [chr(256 + i) for i in range(256 - len(printable))]
    return [chr(byte) for byte in printable] + shifted


def add_tokenizer(writer: GGUFWriter, pre: str, *, kind: str = "gpt2", add_bos: bool | None = None) -> None:
    """A byte-level vocabulary of 320 tokens with a few merges, two control tokens and a user-defined one."""
    merged = ["in", "Ġin", "12", "123", "Ġ1", "Ġthe", "Ġt", "he", "th", "the"]
    merges = ["i n", "Ġ in", "1 2", "12 3", "Ġ 1", "Ġ t", "h e", "Ġt he", "t h", "th e"]
    tokens = ["<end>", "<turn>", "<keep me>", *byte_level_vocabulary(), *merged]
    tokens += [f"<unused{i}>" for i in range(SHAPE["vocab_size"] - len(tokens))]
    types = [3, 3, 4, *[1] * (256 + len(merged))]
    types += [5] * (SHAPE["vocab_size"] - len(types))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}")
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)


def _write_rope(writer: GGUFWriter, model: PreTrainedModel, head_dim: int) -> None:
    rope = model.config.rope_parameters
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        scaled = model.model.rotary_emb.inv_freq.double().numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
