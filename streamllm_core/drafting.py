"""Guessing the next tokens of an answer, so that one pass over the weights can confirm several of them.

What is drafted never changes what is answered (Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", 2023): the engine keeps drafted tokens as long as they are those that it would have chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streamllm_core.cache import Stream
from streamllm_core.request import Request

DEFAULT_DRAFTS = 8
LONGEST_MATCH = 3


class Drafter(Protocol):
    """Guesses how answers go on."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """For each decoding request, up to ``most`` tokens that may follow its pending one."""

    def forget(self, stream: Stream) -> None:
        """The stream is closed."""


class NgramDrafter:
    """What followed the last time that the text read as it does now (prompt lookup, Saxena 2023).

    Looks in the recent tokens of the request's own stream: document, question and answer.
    """

    def __init__(self, longest: int = LONGEST_MATCH, shortest: int = 1) -> None:
        """Matches of ``longest`` tokens are preferred, those of fewer than ``shortest`` not taken."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"1 <= shortest <= longest must hold, not {shortest} and {longest}")
        self._longest = longest
        self._shortest = shortest

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [self._continuation(recent_tokens(each), count) for each, count in zip(requests, most, strict=True)]

    def forget(self, stream: Stream) -> None:
        """Nothing is kept."""

    def _continuation(self, ids: NDArray[np.int32], most: int) -> list[int]:
        """The tokens behind the latest of the longest matches; a match that overlaps the end goes round."""
        if most < 1:
            return []
        ends = np.flatnonzero(ids[:-1] == ids[-1])
        matched = int(len(ends) > 0)
        while 0 < matched < self._longest:
            longer = ends[ends >= matched]
            longer = longer[ids[longer - matched] == ids[-1 - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if matched < self._shortest:
            return []
        followers = ids[ends[-1] + 1 :]
        return followers[np.arange(most) % len(followers)].tolist()  # type: ignore[no-any-return]


def recent_tokens(request: Request) -> NDArray[np.int32]:
    """The last token ids of a request that is decoding: its stream's, and the pending one."""
    stream = request.stream
    assert request.pending is not None
    stream.history.write(stream.length, (request.pending,))  # where it is going to stand
    return stream.history.last(stream.length + 1)


def adapted(limit: int, drafted: int, kept: int, most: int) -> int:
    """How many tokens to draft next: twice as many when all were kept, else at least half as many."""
    return min(2 * limit, most) if kept == drafted else max(kept + 1, limit // 2)
