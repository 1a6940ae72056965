"""Attention over pinned tokens and a recent window, at any chunk size, registered with transformers.

Token t attends to {j <= t : j < S or t - j <= R}. A recent key is seen at its true distance t - j, a sink at
min(t, S + R) - i. This equals StreamingLLM token by token (Xiao et al. 2023, keys at their place in the cache), but
needs no key to be rotated twice: window scores use the query rotated to t, sink scores the query rotated to
min(t, S + R), under one softmax.

The products themselves are in ``kernels``: torch for the CPU (and as reference), Triton for CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from streamllm_core.cache import RollingCache
from streamllm_core.kernels import sink_window, sink_window_torch
from streamllm_core.kernels.scoring import Scoring
from streamllm_core.layout import MicroBatch
from streamllm_core.rotary import Rotary

# transformers builds no attention mask for a name that its mask registry does not know.
NAME = "streamllm_rolling"


@dataclass
class PassState:
    """What the attention modules of a model need to know of the pass being run; one object, shared by all of them."""

    cache: RollingCache | None = None
    rotary: Rotary | None = None
    batches: list[MicroBatch] = field(default_factory=list)
    batch: MicroBatch | None = None  # the one that is going through a layer
    tap_layer: int | None = None  # hidden states of ``tap_rows`` behind this layer are kept in ``tapped``
    tap_rows: Tensor | None = None
    tapped: Tensor | None = None


def rolling_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a decoder layer.

    Args:
        module: the attention module; ``module.rolling`` is the PassState, ``module.layer_idx`` its layer.
        query: [1, heads, tokens, head_dim], not rotated; key, value: [1, kv_heads, tokens, head_dim].
        scaling: factor on the scores; None means head_dim ** -0.5.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        s_aux: [heads] learned logits that take part in the softmax without a value (GPT-OSS).

    Returns:
        ([1, tokens, heads, head_dim], None).
    """
    state: PassState = module.rolling
    assert state.cache is not None and state.rotary is not None and state.batch is not None
    batch, ring = state.batch, state.cache.layers[module.layer_idx]
    evicting = batch.memo(("evicting", ring.pins, ring.recent), lambda: any(ring.evicts(run) for run in batch.runs))
    recent = ring.recent if evicting else None
    window_query, sink_query, key = state.rotary.rotate(module, batch, query, key, recent)
    ring.write(batch, key[0], value[0])
    scoring = Scoring(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, s_aux)
    kernel = sink_window if sink_window.available(query.device) else sink_window_torch
    attended = kernel.attend(ring, batch, window_query[0], sink_query[0], scoring)
    return attended[None], None


AttentionInterface.register(NAME, rolling_attention)
