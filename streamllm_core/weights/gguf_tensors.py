"""Which checkpoint tensor each GGUF tensor is, and in which order its rows are stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamllm_core.errors import ModelError
from streamllm_core.weights.gguf_file import GGUFFile

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_OUTPUT_BIAS = {"attn_output.bias": "self_attn.o_proj.bias"}
_MLP_BIAS = {
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
}
_QK_NORM = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
# Tables of rotary frequencies: configuration, not weights.
FREQUENCY_FACTORS = "rope_freqs.weight"

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the converted checkpoint: its new name, where it comes from, and its row order (None: as is)."""

    name: str
    source: str
    order: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class CheckpointPlan:
    """All tensors of the converted checkpoint in the order a forward pass needs them, and what their presence means."""

    tensors: tuple[TensorPlan, ...]
    tied: bool
    attention_bias: bool
    mlp_bias: bool


def plan_checkpoint(file: GGUFFile, architecture: str, layers: int, heads: int, kv_heads: int) -> CheckpointPlan:
    """Match every tensor of the file; ModelError for one that is missing, and for one that would go unused."""
    attention_bias = architecture == "llama" and "blk.0.attn_q.bias" in file.tensors
    mlp_bias = architecture == "llama" and "blk.0.ffn_up.bias" in file.tensors
    layer = dict(_LAYER)
    if architecture == "qwen2" or attention_bias:
        layer |= _QKV_BIAS
    if attention_bias:
        layer |= _OUTPUT_BIAS
    if mlp_bias:
        layer |= _MLP_BIAS
    if architecture == "qwen3":
        layer |= _QK_NORM
    tied = "output.weight" not in file.tensors
    first, *last = [name for name in _TOP if not (tied and name == "output.weight")]
    sources = {first: _TOP[first]}
    sources |= {f"blk.{i}.{old}": f"model.layers.{i}.{new}" for i in range(layers) for old, new in layer.items()}
    sources |= {name: _TOP[name] for name in last}
    missing = [name for name in sources if name not in file.tensors]
    if missing:
        raise ModelError(f"{file.path}: a {architecture} model needs a tensor {missing[0]}, which is not in the file")
    unused = [name for name in file.tensors if name not in sources and name != FREQUENCY_FACTORS]
    if unused:
        raise ModelError(
            f"{file.path}: its tensor {unused[0]} is no part of a plain {architecture} model; this variant is not "
            "supported as GGUF: use the model's safetensors"
        )
    orders: dict[str, npt.NDArray[np.int64]] = {}
    if architecture == "llama":
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            rows = file.tensors[f"blk.0.{part}.weight"].shape[0]
            if rows % (2 * count):
                raise ModelError(f"{file.path}: {part} has {rows} rows, which {count} heads do not divide")
            orders[part] = unpermuted_rows(rows, count)
    return CheckpointPlan(
        tuple(TensorPlan(new, old, orders.get(_part(old))) for old, new in sources.items()),
        tied,
        attention_bias,
        mlp_bias,
    )


def unpermuted_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """For each row of a checkpoint's q or k projection, the row of a llama-type GGUF that holds it.

    llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of each head: [2, d/2] becomes
    [d/2, 2]. transformers rotates halves, and gets them back here.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _part(source: str) -> str:
    return source.split(".")[2] if source.startswith("blk.") else ""
