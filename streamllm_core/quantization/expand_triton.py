"""Expansion on CUDA: one launch a tensor, a program for some dozens of blocks. Imported only where Triton is.

Halves of bytes are joined and put in order in registers, so that every program stores one contiguous piece. GGUF's
blocks of 18, 34 or 210 bytes are aligned to 2 bytes only, so theirs are narrow loads, next to each other.
Arithmetic is in float32, for cards without bf16; offsets have 64 bits, for a layer's experts may be over 2^31 values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamllm_core.quantization.formats import Format, Int4, Int8

TILE = 4096  # values a program


def expand(format: Format, packed: Tensor, out: Tensor) -> None:
    """Same contract as ``expansion.expand``, for every format whose blocks have more than one value."""
    if isinstance(format, Int8):
        quants, scales = format.planes(packed, out.shape)
        groups, group = quants.shape
        tile = TILE // group
        _int8[(triton.cdiv(groups, tile),)](quants, scales, out, groups, BLOCKS=tile, GROUP=group)
        return
    if isinstance(format, Int4):
        *planes, row_scales, row_minima = format.planes(packed, out.shape)
        groups, tile = out.numel() // 32, TILE // 32
        rows = row_scales.view(torch.int16), row_minima.view(torch.int16)
        _int4[(triton.cdiv(groups, tile),)](*planes, *rows, out, groups, out.shape[-1] // 32, BLOCKS=tile)
        return
    kernel, options = _KERNELS[format.name]
    blocks, tile = out.numel() // format.block, TILE // format.block
    kernel[(triton.cdiv(blocks, tile),)](
        packed, packed.view(torch.float16), out, blocks, BLOCKS=tile, BYTES=format.block_bytes, **options
    )


@triton.jit
def _blocks(count, BLOCKS: tl.constexpr):
    """This program's blocks, int64 [BLOCKS], and which of them exist."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    return block, block < count


@triton.jit
def _in_order(low, high):
    """[A, B] and [A, B], the low and the high halves of bytes → [A, 2B], each line's low ones first."""
    joined = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(joined, (joined.shape[0], 2 * joined.shape[2]))


@triton.jit
def _store(out, values, block, live):
    """values [BLOCKS, block] to their place, cast to its type."""
    size: tl.constexpr = values.shape[1]
    place = out + block[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _int8(quants, scales, out, count, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    block, live = _blocks(count, BLOCKS)
    scale = tl.load(scales + block, mask=live, other=0.0).to(tl.float32)
    place = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    quant = tl.load(quants + place, mask=live[:, None], other=0)
    _store(out, quant.to(tl.float32) * scale[:, None], block, live)


@triton.jit
def _from_bfloat16(bits):
    """int16 → float32, on any card."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _int4(quants, scales, minima, row_scales, row_minima, out, count, groups_a_row, BLOCKS: tl.constexpr):
    block, live = _blocks(count, BLOCKS)
    row = block // groups_a_row
    scale = tl.load(scales + block, mask=live, other=0).to(tl.float32)
    scale *= _from_bfloat16(tl.load(row_scales + row, mask=live, other=0))
    minimum = tl.load(minima + block, mask=live, other=0).to(tl.float32)
    minimum *= _from_bfloat16(tl.load(row_minima + row, mask=live, other=0))
    byte = tl.load(quants + block[:, None] * 16 + tl.arange(0, 16)[None, :], mask=live[:, None], other=0)
    quant = _in_order(byte & 15, byte >> 4).to(tl.float32)
    _store(out, quant * scale[:, None] + minimum[:, None], block, live)


@triton.jit
def _thirty_two(
    packed, numbers, out, count, BLOCKS: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr, MINIMUM: tl.constexpr
):
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum if any, fifth bits if any, 16 bytes of halves."""
    block, live = _blocks(count, BLOCKS)
    number = numbers + block * (BYTES // 2)
    scale = tl.load(number, mask=live, other=0.0).to(tl.float32)
    start = packed + block[:, None] * BYTES
    byte = tl.load(start + (BYTES - 16) + tl.arange(0, 16)[None, :], mask=live[:, None], other=0)
    quant = _in_order(byte & 15, byte >> 4)
    if BITS == 5:
        low = tl.load(number + (BYTES - 20) // 2, mask=live, other=0.0).to(tl.uint16, bitcast=True)
        high = tl.load(number + (BYTES - 18) // 2, mask=live, other=0.0).to(tl.uint16, bitcast=True)
        bits = low.to(tl.uint32) | high.to(tl.uint32) << 16
        fifth = (bits[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]) & 1
        quant = quant | (fifth << 4).to(tl.uint8)
    if MINIMUM:
        minimum = tl.load(number + 1, mask=live, other=0.0).to(tl.float32)
        values = quant.to(tl.float32) * scale[:, None] + minimum[:, None]
    else:
        values = (quant.to(tl.float32) - (8 if BITS == 4 else 16)) * scale[:, None]
    _store(out, values, block, live)


@triton.jit
def _q8_0(packed, numbers, out, count, BLOCKS: tl.constexpr, BYTES: tl.constexpr):
    """Scale, 32 bytes."""
    block, live = _blocks(count, BLOCKS)
    scale = tl.load(numbers + block * (BYTES // 2), mask=live, other=0.0).to(tl.float32)
    place = block[:, None] * BYTES + 2 + tl.arange(0, 32)[None, :]
    quant = tl.load(packed + place, mask=live[:, None], other=0).to(tl.int8, bitcast=True)
    _store(out, quant.to(tl.float32) * scale[:, None], block, live)


@triton.jit
def _q4_k_q5_k(packed, numbers, out, count, BLOCKS: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Scale of scales, scale of minima, 12 bytes with eight scales and minima of 6 bits, fifth bits if any, halves:
    32 bytes hold the low halves of 32 values and the high halves of the next 32."""
    block, live = _blocks(count, BLOCKS)
    number = numbers + block * (BYTES // 2)
    scale_of_scales = tl.load(number, mask=live, other=0.0).to(tl.float32)
    scale_of_minima = tl.load(number + 1, mask=live, other=0.0).to(tl.float32)
    part = tl.arange(0, 8)[None, :]
    six = packed + block[:, None] * BYTES + 4 + part % 4
    scale = tl.load(six, mask=live[:, None], other=0)
    minimum = tl.load(six + 4, mask=live[:, None], other=0)
    rest = tl.load(six + 8, mask=live[:, None], other=0)
    scale = tl.where(part < 4, scale & 63, (rest & 15) | ((scale >> 2) & 48))
    minimum = tl.where(part < 4, minimum & 63, (rest >> 4) | ((minimum >> 2) & 48))
    scales = tl.reshape(scale.to(tl.float32) * scale_of_scales[:, None], (BLOCKS * 8,))
    minima = tl.reshape(minimum.to(tl.float32) * scale_of_minima[:, None], (BLOCKS * 8,))

    line = tl.program_id(0).to(tl.int64) * (BLOCKS * 4) + tl.arange(0, BLOCKS * 4)  # of 32 bytes
    held = line < count * 4
    start = (line // 4) * BYTES + (BYTES - 128) + (line % 4) * 32
    byte = tl.load(packed + start[:, None] + tl.arange(0, 32)[None, :], mask=held[:, None], other=0)
    quant = tl.reshape(_in_order(byte & 15, byte >> 4), (BLOCKS * 8, 32))
    part_of_all = tl.program_id(0).to(tl.int64) * (BLOCKS * 8) + tl.arange(0, BLOCKS * 8)  # of 32 values
    if BITS == 5:
        high = packed + ((part_of_all // 8) * BYTES)[:, None] + 16 + tl.arange(0, 32)[None, :]
        fifth = tl.load(high, mask=(part_of_all < count * 8)[:, None], other=0)
        quant = quant | ((fifth >> (part_of_all % 8).to(tl.uint8)[:, None]) & 1) << 4
    values = quant.to(tl.float32) * scales[:, None] - minima[:, None]
    _store(out, values, part_of_all, part_of_all < count * 8)


@triton.jit
def _q6_k(packed, numbers, out, count, BLOCKS: tl.constexpr, BYTES: tl.constexpr):
    """128 bytes of halves (64 bytes hold the low halves of 64 values and the high halves of the next 64), 64 bytes
    with two more bits of each value, 16 scales int8, the scale of the scales."""
    line = tl.program_id(0).to(tl.int64) * (BLOCKS * 2) + tl.arange(0, BLOCKS * 2)  # of 64 bytes
    start = (line // 2) * BYTES + (line % 2) * 64
    byte = tl.load(packed + start[:, None] + tl.arange(0, 64)[None, :], mask=(line < count * 2)[:, None], other=0)
    quant = tl.reshape(_in_order(byte & 15, byte >> 4), (BLOCKS * 8, 32))

    part = tl.program_id(0).to(tl.int64) * (BLOCKS * 8) + tl.arange(0, BLOCKS * 8)  # of 32 values
    start = (part // 8) * BYTES + 128 + (part % 8 // 4) * 32
    high = tl.load(packed + start[:, None] + tl.arange(0, 32)[None, :], mask=(part < count * 8)[:, None], other=0)
    quant = quant | ((high >> (part % 4 * 2).to(tl.uint8)[:, None]) & 3) << 4
    quant = tl.reshape(quant, (BLOCKS * 16, 16)).to(tl.float32) - 32

    scaled = tl.program_id(0).to(tl.int64) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)  # 16 values with a scale
    live = scaled < count * 16
    block = scaled // 16
    scale = tl.load(packed + block * BYTES + 192 + scaled % 16, mask=live, other=0).to(tl.int8, bitcast=True)
    scale_of_scales = tl.load(numbers + block * (BYTES // 2) + 104, mask=live, other=0.0).to(tl.float32)
    _store(out, quant * (scale.to(tl.float32) * scale_of_scales)[:, None], scaled, live)


_KERNELS = {
    "Q4_0": (_thirty_two, {"BITS": 4, "MINIMUM": False}),
    "Q4_1": (_thirty_two, {"BITS": 4, "MINIMUM": True}),
    "Q5_0": (_thirty_two, {"BITS": 5, "MINIMUM": False}),
    "Q5_1": (_thirty_two, {"BITS": 5, "MINIMUM": True}),
    "Q8_0": (_q8_0, {}),
    "Q4_K": (_q4_k_q5_k, {"BITS": 4}),
    "Q5_K": (_q4_k_q5_k, {"BITS": 5}),
    "Q6_K": (_q6_k, {}),
}
