"""EngineConfig: the sizes of an engine, frozen, and what they ask of the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from streamllm_core.architectures import head_shape, layer_geometries
from streamllm_core.cache import RollingCache
from streamllm_core.drafting import DEFAULT_DRAFTS
from streamllm_core.kv_storage import KVDtype
from streamllm_core.memory.budget import Demand

# What an engine takes when nothing else is asked for: streams, tokens in a pass, tokens in a layer.
_MOST = {"cpu": (16, 1024, 512), "cuda": (128, 32_768, 4096)}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine, in tokens unless said otherwise. None: chosen from the device and the budget.

    window: R, how many tokens before the query stay visible beside the pinned ones.
    sinks: the longest pinned prefix, S.
    excursion: the longest question + answer that is to be rewound.
    streams: texts in flight.
    pass_tokens: how many tokens one pass over the weights takes at most.
    micro_tokens: how many of them go through a layer together; bounds the activation memory.
    kv_dtype: how keys and values are kept: as computed, or in one byte each (twice the streams in the same memory).
    read_tokens, answer_tokens: what a typical text (or a segment with its question) reads and generates; memory is
        shared out accordingly.
    draft_tokens: how many tokens are guessed ahead at most, so that one pass can confirm several; None: 8 when layers
        are streamed (a pass then takes as long for one token as for many), else 0.
    """

    window: int = 2048
    sinks: int = 4
    excursion: int = 512
    streams: int | None = None
    pass_tokens: int | None = None
    micro_tokens: int | None = None
    kv_dtype: KVDtype = "auto"
    read_tokens: int = 1000
    answer_tokens: int = 100
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0 or self.excursion < 0:
            raise ValueError("window must be at least 1, sinks and excursion at least 0")
        for name in ("streams", "pass_tokens", "micro_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.draft_tokens is not None and self.draft_tokens < 0:
            raise ValueError(f"draft_tokens must be at least 0, not {self.draft_tokens}")


def demand(config: EngineConfig, model_config: Any, device: torch.device, dtype: torch.dtype) -> Demand:
    """What an engine wants of the memory."""
    streams, pass_tokens, micro_tokens = _MOST[device.type]
    geometries = layer_geometries(model_config, config.window)
    _, kv_heads, head_dim = head_shape(model_config)

    def cache_bytes(headroom: int) -> int:
        return RollingCache.stream_bytes(geometries, config.sinks, headroom, kv_heads, head_dim, dtype, config.kv_dtype)

    drafts = DEFAULT_DRAFTS if config.draft_tokens is None else config.draft_tokens
    return Demand(
        config.window,
        max(config.excursion, 1 + drafts),
        cache_bytes,
        config.streams or streams,
        pass_tokens,
        micro_tokens,
        config.pass_tokens,
        config.micro_tokens,
        config.read_tokens,
        config.answer_tokens,
    )


def within(config: EngineConfig, trained_context: int) -> EngineConfig:
    """``config`` with a window that the model was trained for."""
    return replace(config, window=max(1, min(config.window, trained_context - config.sinks - 1)))
