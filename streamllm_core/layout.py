"""Which tokens of which streams make up a pass: packed rows, no padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """``count`` consecutive tokens of one stream, standing in rows ``offset`` … of a micro-batch.

    ``start`` is the stream position of the first of them, ``sinks`` the stream's number of pinned tokens, ``holes``
    its evicted spans [start, stop) in stream positions.
    """

    slot: int
    offset: int
    count: int
    start: int
    sinks: int
    holes: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.count


class MicroBatch:
    """The rows [first, first + tokens) of a pass that go through a layer together.

    ``taken``: which tokens of the pass they are, in the order in which the pass was asked for.

    Tensors (positions, slots, sinks: int64 [tokens]) are made once a pass and shared by all layers; so is whatever
    the attention derives from them, kept by ``memo``.
    """

    def __init__(self, runs: list[Run], first: int, device: torch.device, taken: Sequence[range] = ()) -> None:
        self.runs = runs
        self.taken = taken
        self.first = first
        self.tokens = sum(run.count for run in runs)
        self.device = device
        self._memo: dict[Hashable, Any] = {}
        counts = torch.tensor([run.count for run in runs])
        self.positions = torch.cat([torch.arange(run.start, run.stop) for run in runs]).to(device)
        self.slots = torch.tensor([run.slot for run in runs]).repeat_interleave(counts).to(device)
        self.sinks = torch.tensor([run.sinks for run in runs]).repeat_interleave(counts).to(device)

    def memo(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of ``build()``, made at the first call with this key."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]  # type: ignore[no-any-return]


def micro_batches(runs: list[Run], limit: int, device: torch.device, chunk: int | None = None) -> list[MicroBatch]:
    """Cut a pass into micro-batches of at most ``limit`` tokens, at most ``chunk`` of them of one stream.

    Many streams go through a layer together, so rows change places: a micro-batch takes a chunk of each stream that has
    tokens left, and ``MicroBatch.taken`` tells which tokens of the pass, counted as ``runs`` give them, its rows are.
    A run that contains both pinned and other tokens is cut at the last pinned one: queries past the sinks always
    find themselves in the window, which keeps the two softmax groups of attention non-empty.
    """
    places = list(accumulate((run.count for run in runs), initial=0))
    waiting = list(zip(runs, places, strict=False))  # what is left of each run, and the place of its first token
    batches: list[MicroBatch] = []
    first = 0
    while waiting:
        parts: list[Run] = []
        taken: list[range] = []
        left: list[tuple[Run, int]] = []
        room = limit
        for run, place in waiting:
            count = min(run.count, chunk or limit, room)
            parts += _parts(replace(run, offset=limit - room, count=count)) if count else []
            taken += [range(place, place + count)] if count else []
            if count < run.count:
                left.append((replace(run, start=run.start + count, count=run.count - count), place + count))
            room -= count
        batches.append(MicroBatch(parts, first, device, taken))
        first += limit - room
        waiting = left
    return batches


def _parts(run: Run) -> list[Run]:
    """``run``, cut behind its last pinned token."""
    pinned = run.sinks - run.start
    if not 0 < pinned < run.count:
        return [run]
    rest = replace(run, offset=run.offset + pinned, start=run.sinks, count=run.count - pinned)
    return [replace(run, count=pinned), rest]
