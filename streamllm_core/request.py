"""Request: what a stream is asked to do, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from streamllm_core.cache import Mark, Stream
from streamllm_core.sampling import GREEDY, Sampling


@dataclass(eq=False)
class Request:
    """Append ``tokens`` to a stream, then generate up to ``max_new_tokens``.

    stop: tokens that end the answer (not included in it).
    excursion: rewind the stream when done, as if nothing had happened.
    score: collect log p of each of ``tokens`` in ``logprobs`` (the stream's very first token has none).
    spans: [start, stop) ranges of ``tokens``; ``span_states`` float32 [spans, hidden] gets the mean hidden state of
        each at two thirds of the depth (zeros where a range is empty).

    Raises ValueError for spans beyond the tokens and for a negative number of new ones.
    """

    stream: Stream
    tokens: Sequence[int]
    max_new_tokens: int = 0
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()
    excursion: bool = False
    score: bool = False
    spans: Sequence[tuple[int, int]] = ()

    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    span_states: Tensor | None = None
    most_drafts: int = 0  # how many drafted tokens are worth a try now; 0 until the engine sets it
    finish_reason: Literal["stop", "length"] | None = None
    stopped_by: int | None = None  # which of ``stop`` it was
    fed: int = 0  # how many of ``tokens`` are in the cache
    mark: Mark | None = None
    pending: int | None = None  # generated, but not yet in the cache

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, not {self.max_new_tokens}")
        if any(not 0 <= start <= stop <= len(self.tokens) for start, stop in self.spans):
            raise ValueError(f"spans must lie within the {len(self.tokens)} tokens: {list(self.spans)}")

    @property
    def decoding(self) -> bool:
        return self.pending is not None

    @property
    def acceptable(self) -> int:
        """How many drafted tokens the answer has room for, one token of the model's own behind them."""
        return min(self.most_drafts, self.max_new_tokens - len(self.generated) - 1)

    def absorb(self, tokens: Sequence[int]) -> None:
        """``tokens`` (some of ours, or the pending one) have gone through a pass."""
        if self.decoding:
            self.pending = None
        else:
            self.fed += len(tokens)

    def accept(self, token: int) -> None:
        """``token`` follows; finish if it ends the answer or is the last one allowed."""
        self.pending = None
        if token in self.stop:
            self.finish_reason, self.stopped_by = "stop", token
            return
        self.generated.append(token)
        if len(self.generated) == self.max_new_tokens:
            self.finish_reason = "length"
        else:
            self.pending = token
