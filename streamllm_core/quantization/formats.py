"""The packed formats: our own int8 and int4, and the block types of GGUF files.

A packed tensor is one flat block of uint8. In a GGUF type, blocks follow each other, quants and scales mixed, row by
row (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Ours are planar: all quants, then all scales,
and so on, so that a device reads each of them in wide loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """``block`` values along the last dimension of a tensor stand in ``block_bytes`` bytes."""

    name: str
    block: int
    block_bytes: int

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape can be packed: two or three dimensions, the last a multiple of ``block``."""
        return len(shape) in (2, 3) and shape[-1] % self.block == 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Packed size of a tensor of this shape, which the format holds."""
        return math.prod(shape) // self.block * self.block_bytes

    def rows(self, packed: Tensor, shape: Sequence[int], rows: range) -> Tensor:
        """Some rows of a packed tensor [all rows, columns], packed in the same way."""
        row_bytes = self.nbytes((1, shape[1]))
        return packed[rows.start * row_bytes : rows.stop * row_bytes]


class Int8Planes(NamedTuple):
    """quants int8 [groups, group], scales float16 [groups]"""

    quants: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Int8(Format):
    """value = quant * scale: quants of -127 … 127, a float16 scale for each group; 8.25 bits a value.

    A group has 64 values, or 32 where the last dimension is no multiple of 64: hence a ``block`` of 32.
    """

    def group(self, shape: Sequence[int]) -> int:
        """Values of a group in a tensor of this shape."""
        return 64 if shape[-1] % 64 == 0 else 32

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) + 2 * (math.prod(shape) // self.group(shape))

    def rows(self, packed: Tensor, shape: Sequence[int], rows: range) -> Tensor:
        return _rows_of_planes(self.planes(packed, shape), shape[0], rows)

    def planes(self, packed: Tensor, shape: Sequence[int]) -> Int8Planes:
        """Views into ``packed``, uint8 [nbytes(shape)] that begins at an even address."""
        values = math.prod(shape)
        quants, scales = packed[:values], packed[values:]
        return Int8Planes(quants.view(torch.int8).view(-1, self.group(shape)), scales.view(torch.float16))


class Int4Planes(NamedTuple):
    """quants uint8 [groups, 16], scales uint8 [groups], minima int8 [groups], row_scales and row_minima bfloat16 [rows]

    The rows are those of all leading dimensions together.
    """

    quants: Tensor
    scales: Tensor
    minima: Tensor
    row_scales: Tensor
    row_minima: Tensor


@dataclass(frozen=True)
class Int4(Format):
    """value = quant * (scale * row scale) + minimum * row minimum, in groups of 32 with quants of 0 … 15.

    A group's scale (0 … 255) and minimum (-127 … 127) take 8 bits, in units of the row's bfloat16 numbers: 4.5 bits a
    value and 32 a row, the size of groups of 64 with two float16 numbers each, at a quarter less squared error. Byte j
    of a group has value j in its low half and value j + 16 in its high half.
    """

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // 32 * 18 + math.prod(shape[:-1]) * 4

    def rows(self, packed: Tensor, shape: Sequence[int], rows: range) -> Tensor:
        return _rows_of_planes(self.planes(packed, shape), shape[0], rows)

    def planes(self, packed: Tensor, shape: Sequence[int]) -> Int4Planes:
        """Views into ``packed``, uint8 [nbytes(shape)] that begins at an even address."""
        groups, rows = math.prod(shape) // 32, math.prod(shape[:-1])
        quants, scales, minima, numbers = packed.split([16 * groups, groups, groups, 4 * rows])
        row_scales, row_minima = numbers.view(torch.bfloat16).split(rows)
        return Int4Planes(quants.view(groups, 16), scales, minima.view(torch.int8), row_scales, row_minima)


def _rows_of_planes(planes: Sequence[Tensor], all_rows: int, rows: range) -> Tensor:
    parts = (plane.reshape(all_rows, -1)[rows.start : rows.stop].reshape(-1) for plane in planes)
    return torch.cat([part.view(torch.uint8) for part in parts])


def _gguf(name: str) -> Format:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return Format(name, block, block_bytes)


GGUF_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

INT8 = Int8("int8", 32, 34)
INT4 = Int4("int4", 32, 18)

FORMATS: dict[str, Format] = {
    format.name: format for format in (INT8, INT4, *(_gguf(name) for name in (*GGUF_BLOCKS, "F16", "BF16")))
}
