"""A tiny Llama folder, written tensor by tensor: every weight random, norms too, so that no term can hide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_llama(
    folder: Path,
    *,
    layers: int = 3,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 97,
    context: int = 4096,
    seed: int = 0,
    extra: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """config.json and model.safetensors in ``folder``: ``extra`` tensors are added, ``config`` replaces settings."""
    random = torch.Generator().manual_seed(seed)
    inner, kv_size = hidden * 3 // 2, hidden // heads * kv_heads

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * 1.5 * columns**-0.5

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(hidden, generator=random)

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=random),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(vocabulary, hidden),
    }
    for index in range(layers):
        layer = f"model.layers.{index}."
        tensors |= {
            f"{layer}input_layernorm.weight": norm(),
            f"{layer}post_attention_layernorm.weight": norm(),
            f"{layer}self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{layer}self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{layer}self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{layer}self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{layer}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.down_proj.weight": matrix(hidden, inner),
        }
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | config))
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors", {"format": "pt"})
    return folder
