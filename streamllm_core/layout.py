"""Which tokens of which streams make up a pass: packed rows, no padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
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

    Tensors (positions, slots, sinks: int64 [tokens]) are made once a pass and shared by all layers; so is whatever
    the attention derives from them, kept by ``memo``.
    """

    def __init__(self, runs: list[Run], first: int, device: torch.device) -> None:
        self.runs = runs
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
    """Cut a pass into micro-batches of at most ``limit`` tokens, at most ``chunk`` of them of one stream, in row order.

    A run that contains both pinned and other tokens is cut at the last pinned one: queries past the sinks always
    find themselves in the window, which keeps the two softmax groups of attention non-empty.
    """
    groups: list[list[Run]] = [[]]
    first = [0]  # row of the pass at which each group begins
    room = limit
    chunk = chunk or limit
    for run in runs:
        start = run.start
        left = chunk  # of this stream in this micro-batch
        while start < run.stop:
            if room == 0 or left == 0:
                first.append(first[-1] + limit - room)
                groups.append([])
                room, left = limit, chunk
            border = run.sinks if start < run.sinks else run.stop
            stop = min(run.stop, border, start + min(room, left))
            groups[-1].append(Run(run.slot, limit - room, stop - start, start, run.sinks, run.holes))
            room -= stop - start
            left -= stop - start
            start = stop
    return [MicroBatch(group, row, device) for group, row in zip(groups, first, strict=True)]
