"""The output projection: whole on the device, or in tiles of rows that are streamed or expanded one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from streamllm_core.links import Link
from streamllm_core.memory.scratchpad import SLOTS
from streamllm_core.skeleton import Skeleton

TILE_BYTES = 64 * 10**6  # of a tile as it is computed with


class Tiles(Protocol):
    """Gives the weights of one tile after the other, [rows, hidden] in the type that is computed in."""

    rows: list[range]

    def weights(self) -> Iterator[Tensor]:
        """Each tensor is valid until the next one is asked for."""


class Head:
    """Logits of given rows. Bias, scale and softcap are the model file's own, and act on each entry of the vocabulary
    alone, so a tile of the projection gives a tile of the logits."""

    def __init__(self, skeleton: Skeleton, tiles: Tiles | None) -> None:
        """``tiles`` None: the weight lies in the skeleton."""
        self._skeleton = skeleton
        self._tiles = tiles

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocabulary]."""
        if self._tiles is None:
            return self._skeleton.logits(hidden)
        vocabulary = self._tiles.rows[-1].stop
        output = torch.empty(len(hidden), vocabulary, dtype=torch.float32, device=hidden.device)
        for rows, weight in zip(self._tiles.rows, self._tiles.weights(), strict=True):
            with self._skeleton.output_rows(weight, rows):
                output[:, rows.start : rows.stop] = self._skeleton.logits(hidden)
        return output


class ResidentTiles:
    """A packed head that stays on the device and is expanded tile by tile."""

    def __init__(self, rows: list[range], expand: Callable[[int], Tensor]) -> None:
        """``expand(number)`` brings a tile into the workspace."""
        self.rows = rows
        self._expand = expand

    def weights(self) -> Iterator[Tensor]:
        for number in range(len(self.rows)):
            yield self._expand(number)


class StreamedTiles:
    """A head whose tiles come over a link, two under way at a time. Outside the cycle of the layers: only passes that
    generate need it."""

    def __init__(self, rows: list[range], link: Link, ready: Callable[[int, int], Tensor]) -> None:
        """``ready(number, slot)`` is the weight of a tile that has arrived in a slot."""
        self.rows = rows
        self.bytes_moved = 0
        self._link = link
        self._ready = ready

    def weights(self) -> Iterator[Tensor]:
        for slot in range(min(SLOTS, len(self.rows))):
            self._link.free(slot)
            self._link.start(slot, slot)
        for number in range(len(self.rows)):
            slot = number % SLOTS
            self._link.wait(slot)
            yield self._ready(number, slot)
            self._link.free(slot)
            if number + SLOTS < len(self.rows):
                self._link.start(number + SLOTS, slot)


def tile_rows(vocabulary: int, row_bytes: int) -> list[range]:
    """The vocabulary cut into tiles of at most TILE_BYTES, in rows that products like (multiples of 64)."""
    step = max(64, TILE_BYTES // row_bytes // 64 * 64)
    return [range(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step)]
