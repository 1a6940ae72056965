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
    bytes_moved: int

    def weights(self) -> Iterator[Tensor]:
        """Each tensor is valid until the next one is asked for."""


class Head:
    """Logits of given rows. Bias, scale and softcap are the model file's own, and act on each entry of the vocabulary
    alone, so a tile of the projection gives a tile of the logits."""

    def __init__(self, skeleton: Skeleton, tiles: Tiles | None, most_rows: int) -> None:
        """``tiles`` None: the weight lies in the skeleton. ``most_rows``: how many rows of logits may exist at once."""
        self._skeleton = skeleton
        self._tiles = tiles
        self._most_rows = most_rows

    @property
    def bytes_moved(self) -> int:
        """Over a link, until now."""
        return self._tiles.bytes_moved if self._tiles is not None else 0

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocabulary]."""
        if self._tiles is None:
            return self._skeleton.logits(hidden)
        vocabulary = self._tiles.rows[-1].stop
        output = torch.empty(len(hidden), vocabulary, dtype=torch.float32, device=hidden.device)
        for rows, tile in self._tiles_of(hidden):
            output[:, rows.start : rows.stop] = tile
        return output

    def best(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → the token with the largest logit, the first of equals, int64 [rows]. Needs no row of logits
        as a whole, so one pass over a streamed head serves any number of rows."""
        if self._tiles is None:
            return torch.cat([self._skeleton.logits(part).argmax(-1) for part in hidden.split(self._most_rows)])
        tokens = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        top = torch.full((len(hidden),), float("-inf"), device=hidden.device)
        for rows, tile in self._tiles_of(hidden):
            largest, place = tile.max(-1)
            tokens = torch.where(largest > top, place + rows.start, tokens)
            top = torch.maximum(top, largest)
        return tokens

    def _tiles_of(self, hidden: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Rows of the vocabulary, and the logits of ``hidden`` for them."""
        assert self._tiles is not None
        for rows, weight in zip(self._tiles.rows, self._tiles.weights(), strict=True):
            with self._skeleton.output_rows(weight, rows):
                yield rows, self._skeleton.logits(hidden)


class ResidentTiles:
    """A packed head that stays on the device and is expanded tile by tile."""

    def __init__(self, rows: list[range], expand: Callable[[int], Tensor]) -> None:
        """``expand(number)`` brings a tile into the workspace."""
        self.rows = rows
        self.bytes_moved = 0
        self._expand = expand

    def weights(self) -> Iterator[Tensor]:
        for number in range(len(self.rows)):
            yield self._expand(number)


class StreamedTiles:
    """A head whose tiles come over a link, two under way at a time. Outside the cycle of the layers: only passes that
    generate need it."""

    def __init__(self, rows: list[range], nbytes: int, link: Link, ready: Callable[[int, int], Tensor]) -> None:
        """``nbytes``: of all tiles. ``ready(number, slot)`` is the weight of a tile that has arrived in a slot."""
        self.rows = rows
        self.bytes_moved = 0
        self._nbytes = nbytes
        self._link = link
        self._ready = ready

    def weights(self) -> Iterator[Tensor]:
        self.bytes_moved += self._nbytes
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
