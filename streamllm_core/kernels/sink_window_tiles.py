"""How the attention kernel divides its work on a card: tile sizes, warps, pipeline stages, parts of the window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# The least number of rows that a tensor core product takes.
FEWEST_ROWS = 16
# Parts of a window that one program each walks over, at most, and the least number of key tiles that is worth one.
MOST_SPLITS = 16
TILES_PER_SPLIT = 2


@dataclass(frozen=True)
class Card:
    """Shared memory that one program may use, in bytes, and the number of multiprocessors."""

    shared_memory: int
    processors: int

    @staticmethod
    @cache
    def of(device: torch.device) -> Card:
        properties: Any = torch.cuda.get_device_properties(device)
        return Card(properties.shared_memory_per_block_optin, properties.multi_processor_count)


@dataclass(frozen=True)
class Tiles:
    """``rows`` (queries × query heads of one KV head) against ``keys`` of the window, or ``sinks`` pinned ones, at a
    time."""

    rows: int
    keys: int
    warps: int
    stages: int
    sinks: int = 32


def choose_tiles(card: Card, queries: int, group: int, head_dim: int, dtype: torch.dtype, stored: torch.dtype) -> Tiles:
    """Tiles for runs of at most ``queries`` tokens, ``group`` query heads to a KV head; ``stored``: the cache's dtype.

    Measured on an H200, bf16, 28 / 4 heads of 128, window 2,048: 128 rows, 64 keys, 8 warps and 3 stages for prefill;
    16, 64, 4, 3 for decode, where several programs share a multiprocessor. An int8 cache, whose tiles are widened in
    registers, does better with 64 rows and 4 warps, and with 2 warps for decode. Other cards and head dims take what
    fits their shared memory and, in what the compiler reports, their registers.
    """
    padded = power_of_2(head_dim)
    roomy = card.shared_memory > 160_000  # A100, H100 and newer server cards
    # float32 is multiplied without tensor cores, and so is all on Turing, for which Triton has no such code.
    plain = dtype == torch.float32 or card.shared_memory <= 65_536
    widened = stored == torch.int8
    most = 32 if plain else 128 if roomy and padded <= 128 and not widened else 64
    rows = max(power_of_2(group), min(power_of_2(queries * group), most))
    keys = 64 if roomy and padded * dtype.itemsize <= 256 else 32
    stage = 2 * keys * padded * stored.itemsize
    left = card.shared_memory - rows * padded * dtype.itemsize
    stages = 1 if plain else max(1, min(3, left // stage))
    many = rows >= 32 if plain else rows * max(padded, 128) >= 16_384
    few = widened and not plain and rows <= FEWEST_ROWS
    return Tiles(rows, keys, warps=8 if many else 2 if few else 4, stages=stages)


def choose_splits(card: Card, programs: int, window: int, tiles: Tiles) -> int:
    """Into how many parts ``window`` keys are split, so that a few programs do not leave the card idle."""
    return max(1, min(MOST_SPLITS, 2 * card.processors // programs, window // (TILES_PER_SPLIT * tiles.keys)))


def power_of_2(number: int) -> int:
    """The next power of two, at least FEWEST_ROWS."""
    return max(FEWEST_ROWS, 1 << (number - 1).bit_length())
