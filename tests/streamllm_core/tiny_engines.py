"""Engines whose every limit is soon reached, and short ways to read and to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamllm_core import Engine, EngineConfig, Request, Stream, StreamingModel

WINDOW, SINKS, HEADROOM = 24, 4, 16
SIZES = {
    "window": WINDOW,
    "sinks": SINKS,
    "excursion": HEADROOM,
    "streams": 4,
    "pass_tokens": 12,
    "micro_tokens": 8,
}


def small_engine(model: StreamingModel, **config: Any) -> Engine:
    return model.engine(EngineConfig(**(SIZES | config)))


def random_tokens(count: int, seed: int = 0, vocabulary: int = 97) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(engine: Engine, *requests: Request) -> list[Request]:
    """Submit and step until all is done; the requests in the order they finished."""
    finished = []
    for request in requests:
        engine.submit(request)
    while engine.busy:
        finished += engine.step()
    return finished


def read(engine: Engine, stream: Stream, tokens: Sequence[int], pass_tokens: int | None = None) -> Tensor:
    """Append tokens, ``pass_tokens`` at a time: logits [tokens, vocabulary] on the CPU."""
    size = pass_tokens or engine.pass_tokens
    parts = [engine.forward([(stream, tokens[start : start + size])]) for start in range(0, len(tokens), size)]
    return engine.model.head(torch.cat(parts)).cpu()


def fill(engine: Engine, slots: Sequence[int], value: float) -> None:
    """Overwrite all keys and values of these slots."""
    for layer in engine.cache.layers:
        for slot in slots:
            layer.keys[slot].fill_(value)
            layer.values[slot].fill_(value)
