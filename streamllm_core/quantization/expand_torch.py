"""Expansion in torch: the reference of the Triton kernels, and what runs on the CPU.

Products of a scale with a quant are exact in float32 (at most 11 + 8 + 5 bits), so the order of the operations, and
whether a multiplication and an addition are fused, change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from streamllm_core.quantization.formats import Format, GroupFormat

PIECE = 1 << 18  # values expanded at a time: 1 MB in float32
LOW = 15

_PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16}


def expand(format: Format, packed: Tensor, out: Tensor) -> None:
    """Same contract as ``expansion.expand``."""
    if format.name in _PLAIN:
        out.view(-1).copy_(packed.view(_PLAIN[format.name]))
        return
    values = out.view(-1)
    for start, blocks in _grouped(format, packed, out) if isinstance(format, GroupFormat) else _blocks(format, packed):
        piece = values[start : start + blocks.numel()]
        piece.copy_(blocks.view(-1))


def _grouped(format: GroupFormat, packed: Tensor, out: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first value, float32 values [groups, group]), a piece at a time."""
    group = format.group(out.shape)
    quants, scales, minima = format.planes(packed, out.shape)
    step = max(1, PIECE // group)
    scratch = torch.empty(min(step, len(quants)), group, device=packed.device)
    for start in range(0, len(quants), step):
        part = quants[start : start + step]
        values = scratch[: len(part)]
        if minima is None:
            values.copy_(part.view(torch.int8))
            values *= scales[start : start + step, None].float()
        else:
            _unpack_halves(part, values)
            values *= scales[start : start + step, None].float()
            values += minima[start : start + step, None].float()
        yield start * group, values


def _blocks(format: Format, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first value, float32 values [blocks, block]), a piece at a time."""
    blocks = packed.view(-1, format.block_bytes)
    values_of = _BLOCKS[format.name]
    step = max(1, PIECE // format.block)
    for start in range(0, len(blocks), step):
        yield start * format.block, values_of(blocks[start : start + step])


def _unpack_halves(quants: Tensor, values: Tensor) -> None:
    """Quants uint8 [..., n]: low halves become the first n of values [..., 2n], high halves the rest."""
    half = quants.shape[-1]
    values[..., :half].copy_(quants & LOW)
    values[..., half:].copy_(quants >> 4)


def _halves(quants: Tensor) -> Tensor:
    """uint8 [blocks, n] → uint8 [blocks, 2n]: low halves, then high halves."""
    return torch.cat([quants & LOW, quants >> 4], -1)


def _number(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte ``offset`` of each block, float32 [blocks, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    """32 bits at byte ``offset`` of each block, at the place of 16: uint8 [blocks, 32]."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, offset : offset + 4, None] >> bits & 1) << 4).view(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_halves(blocks[:, 2:]).float() - 8) * _number(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, 4:]).float() * _number(blocks, 0) + _number(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return ((_halves(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16) * _number(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return quants.float() * _number(blocks, 0) + _number(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _number(blocks, 0)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits from 12 bytes: uint8 [blocks, 12] → two of uint8 [blocks, 8]."""
    scales, minima, rest = packed.split(4, -1)
    return (
        torch.cat([scales & 63, rest & LOW | scales >> 2 & 48], -1),
        torch.cat([minima & 63, rest >> 4 | minima >> 2 & 48], -1),
    )


def _scaled(blocks: Tensor, quants: Tensor) -> Tensor:
    """Q4_K and Q5_K: quants uint8 [blocks, 8, 32] with the scale and the minimum of each 32."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scale = scales.float() * _number(blocks, 0)
    minimum = minima.float() * _number(blocks, 2)
    return quants.float() * scale[:, :, None] - minimum[:, :, None]


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(blocks, _halves(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, None, 16:48] >> bits[:, None] & 1) << 4
    return _scaled(blocks, _halves(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32) | high)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts[:, None] & 3) << 4
    quants = _halves(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32) | high
    scales = blocks[:, 192:208].view(torch.int8).float() * _number(blocks, 208)
    return (quants.view(-1, 16, 16).float() - 32) * scales[:, :, None]


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
