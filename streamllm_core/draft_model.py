"""A small model on the device that guesses what a large, streamed one will answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamllm_core.cache import Stream
from streamllm_core.drafting import recent_tokens
from streamllm_core.engine import Engine
from streamllm_core.engine_config import EngineConfig
from streamllm_core.errors import ModelError
from streamllm_core.request import Request

if TYPE_CHECKING:
    from streamllm_core.model import StreamingModel

WINDOW, SINKS = 512, 4
MICRO_TOKENS = 256  # also the headroom of its cache


@dataclass
class _Follower:
    """A stream of the small model that reads after one of the large model: its position p is p + ``shift`` there."""

    stream: Stream
    shift: int


class ModelDrafter:
    """Drafts with a model of its own: one follower for each stream that generates, all of them in shared passes.

    A follower begins with the last ``WINDOW`` tokens of its stream and afterwards reads only what is new, from the
    first token on in which the two differ.
    """

    def __init__(self, model: StreamingModel, streams: int | None = None) -> None:
        """``streams``: how many texts it follows at most. Raises ModelError when not all of ``model`` is on the device,
        WindowError, BudgetError."""
        if model.streamer.order:
            raise ModelError(
                f"a draft model must stay on the device, but {len(model.streamer.order)} layers of {model.name} do not "
                "fit; choose a smaller one or raise the memory budget."
            )
        window = min(WINDOW, model.trained_context - SINKS - 1)
        self._engine = model.engine(
            EngineConfig(
                window=window,
                sinks=SINKS,
                excursion=0,
                streams=streams,
                micro_tokens=MICRO_TOKENS,
                draft_tokens=0,
            )
        )
        self._followers: dict[Stream, _Follower] = {}

    @property
    def nbytes(self) -> int:
        """What model and cache take on the device."""
        return self._engine.plan.placement.total + self._engine.plan.batching.total

    @property
    def passes(self) -> int:
        """Over the weights of the small model."""
        return self._engine.passes

    def attach(self, engine: Engine) -> None:
        """Draft for ``engine``. Raises ModelError when the two models' tokens are not the same."""
        small, large = self._engine.model, engine.model
        sizes = small.config.vocab_size, large.config.vocab_size
        # Sizes of one family may differ by rows that no token uses.
        if sizes[0] != sizes[1] and small.tokenizer.get_vocab() != large.tokenizer.get_vocab():
            raise ModelError(
                f"{small.name} cannot draft for {large.name}: their vocabularies ({sizes[0]} and {sizes[1]} tokens) "
                "are not the same."
            )
        engine.drafter = self

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        if self._engine.busy:  # a pass broke off
            for stream in list(self._followers):
                self.forget(stream)
        drafts: dict[int, Request] = {}
        for index, (request, count) in enumerate(zip(requests, most, strict=True)):
            ids = recent_tokens(request)
            follower, known = self._follow(request.stream, ids)
            if follower is not None:
                drafts[index] = Request(follower.stream, ids[known:].tolist(), count, stop=request.stop)
                self._engine.submit(drafts[index])
        while self._engine.busy:
            self._engine.step()
        return [drafts[index].generated if index in drafts else [] for index in range(len(requests))]

    def forget(self, stream: Stream) -> None:
        follower = self._followers.pop(stream, None)
        if follower is not None:
            self._engine.close(follower.stream)

    def _follow(self, stream: Stream, ids: NDArray[np.int32]) -> tuple[_Follower | None, int]:
        """The follower of ``stream``, and how many of ``ids`` (up to the pending token) it has behind it. None when all
        of them are taken."""
        first = stream.length + 1 - len(ids)  # the position of ids[0]
        follower = self._followers.get(stream)
        if follower is not None:
            common = self._common(follower, ids, first)
            if common is not None and len(ids) - common <= WINDOW:
                follower.stream.cut(first + common - follower.shift)
                return follower, common
            self.forget(stream)
        if not self._engine.free_streams:
            return None, 0
        known = max(0, len(ids) - WINDOW)
        self._followers[stream] = _Follower(self._engine.open(sinks=SINKS), first + known)
        return self._followers[stream], known

    def _common(self, follower: _Follower, ids: NDArray[np.int32], first: int) -> int | None:
        """How many of ``ids`` the follower has read, but never the last one; None when it cannot go back there."""
        theirs = follower.stream.history.last(follower.stream.length)
        begin = follower.stream.length - len(theirs) + follower.shift
        start, stop = max(first, begin), min(first + len(ids) - 1, begin + len(theirs))
        if start >= stop:
            return None
        differ = np.flatnonzero(ids[start - first : stop - first] != theirs[start - begin : stop - begin])
        same = int(differ[0]) if len(differ) else stop - start
        back = follower.stream.reach - (start + same - follower.shift)
        return start - first + same if same and back <= self._engine.cache.headroom else None
