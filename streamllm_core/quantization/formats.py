"""The packed formats: our own int8 and int4, and the block types of GGUF files.

A packed tensor is one flat block of uint8. In a GGUF type, blocks follow each other, quants and scales mixed, row by
row (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Ours are planar: all quants, then all scales,
then all minima, so that a device reads each of them in wide loads.
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


class Planes(NamedTuple):
    """A tensor in one of our formats, taken apart: quants uint8 [groups, bytes of a group], scales float16 [groups],
    minima float16 [groups] if the format has them."""

    quants: Tensor
    scales: Tensor
    minima: Tensor | None


@dataclass(frozen=True)
class GroupFormat(Format):
    """Quants of ``bits`` bits in groups along the last dimension, a float16 scale and maybe a minimum for each.

    A group has 64 values, or 32 where the last dimension is no multiple of 64: hence a ``block`` of 32.

    int8: value = quant * scale, quants -127 … 127; 8.25 bits a value.
    int4: value = quant * scale + minimum, quants 0 … 15; 4.5 bits a value. Byte j of a group has value j in its low
    half and value j + group / 2 in its high half, so that either half of the group is written in one piece.
    """

    bits: int
    has_minima: bool

    def group(self, shape: Sequence[int]) -> int:
        """Values of a group in a tensor of this shape."""
        return 2 * self.block if shape[-1] % (2 * self.block) == 0 else self.block

    def nbytes(self, shape: Sequence[int]) -> int:
        groups = math.prod(shape) // self.group(shape)
        return groups * (self.group(shape) * self.bits // 8 + (4 if self.has_minima else 2))

    def rows(self, packed: Tensor, shape: Sequence[int], rows: range) -> Tensor:
        a_row = shape[1] // self.group(shape)  # groups
        planes = [plane for plane in self.planes(packed, shape) if plane is not None]
        cut = [plane[rows.start * a_row : rows.stop * a_row].reshape(-1).view(torch.uint8) for plane in planes]
        return torch.cat(cut)

    def planes(self, packed: Tensor, shape: Sequence[int]) -> Planes:
        """Views into ``packed``, uint8 [nbytes(shape)] that begins at an even address."""
        group = self.group(shape)
        groups = math.prod(shape) // group
        quants, numbers = packed.split([groups * group * self.bits // 8, groups * (4 if self.has_minima else 2)])
        scales, *minima = numbers.view(torch.float16).split(groups)
        return Planes(quants.view(groups, -1), scales, *minima or [None])


def _gguf(name: str) -> Format:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return Format(name, block, block_bytes)


GGUF_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

INT8 = GroupFormat("int8", 32, 34, bits=8, has_minima=False)
INT4 = GroupFormat("int4", 32, 20, bits=4, has_minima=True)

FORMATS: dict[str, Format] = {
    format.name: format for format in (INT8, INT4, *(_gguf(name) for name in (*GGUF_BLOCKS, "F16", "BF16")))
}
