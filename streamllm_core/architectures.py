"""The allowlist: which model types run, and what each decoder layer keeps in its rolling cache.

An architecture stands here only when its logits equal stock transformers' with all norm weights, biases and sinks
randomised (tests/streamllm_core/test_architectures.py). Everything else is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from streamllm_core.errors import ModelError

SUPPORTED = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "glm",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)

# Why a well-known model type does not run (yet): the reader of the error learns what would have to be built.
REFUSED = {
    "bloom": "it uses ALiBi instead of rotary positions",
    "cohere2": "its full-attention layers have no positions",
    "deepseek_v2": "its latent attention (MLA) stores no plain keys",
    "deepseek_v3": "its latent attention (MLA) stores no plain keys",
    "exaone4": "its full-attention layers have no positions",
    "falcon_mamba": "it is a state-space model",
    "gemma3": "only its text model runs: use a checkpoint of type gemma3_text",
    "gemma3n": "it shares keys between layers",
    "gpt2": "it uses learned positions",
    "hunyuan_v1_dense": "it normalises queries and keys after the rotary embedding",
    "hunyuan_v1_moe": "it normalises queries and keys after the rotary embedding",
    "jamba": "it mixes in state-space layers",
    "llama4": "its attention scale depends on the position",
    "mamba": "it is a state-space model",
    "ministral3": "its attention scale depends on the position",
    "mpt": "it uses ALiBi instead of rotary positions",
    "nanochat": "it normalises queries and keys after the rotary embedding",
    "opt": "it uses learned positions",
}

# Activations of these leave float16's range (65,504) in normal use; they were trained in bfloat16.
OVERFLOWS_FLOAT16 = frozenset({"gemma2", "gemma3_text"})

LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class LayerGeometry:
    """What one layer remembers: S pinned tokens if ``pins``, and the ``recent`` tokens before the query.

    A native sliding layer of width W sees a query and the W - 1 tokens before it: no pins, ``recent = W - 1``.
    ``layer_type`` is the key of the rotary table for models that have one for each type, else None.
    """

    pins: bool
    recent: int
    layer_type: str | None = None


def check_supported(config: Any) -> None:
    """Raise ModelError, naming the model type and the reason, unless ``config`` is on the allowlist."""
    kind = config.model_type
    if kind not in SUPPORTED:
        why = REFUSED.get(kind, "it has not been checked against stock transformers")
        raise ModelError(
            f"models of type '{kind}' are not supported: {why}. Supported: {', '.join(sorted(SUPPORTED))}."
        )
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ModelError(f"this '{kind}' checkpoint attends to later tokens as well; only causal models are supported.")
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"this '{kind}' checkpoint carries a quantization_config, which is not supported; "
            "use the unquantized checkpoint or a GGUF file."
        )


def check_range(config: Any, dtype: torch.dtype) -> None:
    """Raise ModelError for a model that cannot be computed in ``dtype`` without overflow."""
    if dtype == torch.float16 and config.model_type in OVERFLOWS_FLOAT16:
        raise ModelError(
            f"models of type '{config.model_type}' overflow in float16; use --dtype bfloat16 on a card that has it, "
            "else float32."
        )


def layer_geometries(config: Any, window: int) -> list[LayerGeometry]:
    """One geometry a layer, for a rolling window of ``window`` recent tokens."""
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        sliding = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    unknown = sorted(set(kinds) - LAYER_TYPES.keys())
    if unknown:
        raise ModelError(f"'{config.model_type}' has layers of type {', '.join(unknown)}, which are not supported.")
    return [
        LayerGeometry(False, min(sliding - 1, window), kind)
        if LAYER_TYPES[kind] and sliding
        else LayerGeometry(True, window, kind)
        for kind in kinds
    ]


def head_shape(config: Any) -> tuple[int, int, int]:
    """(query heads, key/value heads, head dimension)."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, head_dim
