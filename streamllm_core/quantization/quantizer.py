"""Weights into int8 and int4, group by group, some rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm_core.quantization.formats import Format, Int4, Int8

PIECE = 1 << 20  # values at a time: 4 MB in float32, a few such temporaries
SHRINKS = (1.0, 0.93, 0.86, 0.79)  # of a group's range: what lies outside is clipped
REFITS = 2  # of the best line found
LEVELS = 15
TINIEST, LARGEST = 2.0**-24, 65504.0  # of float16
NOTHING = 1e-30  # keeps scales of groups without any spread from being zero


def quantize(format: Format, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Pack a float tensor with two or three dimensions: uint8 [format.nbytes(tensor.shape)] on the tensor's device.

    The arithmetic runs on ``device``, piece by piece; None means the tensor's own. Scales are never zero and never
    infinite, but those of int8 are float16: there, weights below 3e-8 become zero. Raises ValueError for a format that
    is not int8 or int4, a shape that it does not hold, and weights that are not finite or beyond float16 (65,504).
    """
    if not isinstance(format, Int8 | Int4):
        raise ValueError(f"weights are quantized to int8 or int4, not to {format.name}")
    if not format.holds(tensor.shape):
        raise ValueError(f"{format.name} does not hold a tensor of shape {list(tensor.shape)}")
    packed = torch.empty(format.nbytes(tensor.shape), dtype=torch.uint8, device=tensor.device)
    rows = tensor.reshape(-1, tensor.shape[-1])
    planes = [plane.view(len(rows), -1) for plane in format.planes(packed, tensor.shape)]
    step = max(1, PIECE // rows.shape[1])
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        weights = rows[piece].to(device or tensor.device, torch.float32)
        if not weights.abs().amax() <= LARGEST:  # nor is NaN
            raise ValueError(f"weights are infinite, no numbers, or larger than {LARGEST:,.0f}")
        group = format.group(tensor.shape) if isinstance(format, Int8) else format.block
        grouped = weights.view(len(weights), -1, group)
        parts = _symmetric(grouped) if isinstance(format, Int8) else _asymmetric(grouped)
        for plane, part in zip(planes, parts, strict=True):
            plane[piece] = part.view(len(weights), -1)
    return packed


def _symmetric(weights: Tensor) -> tuple[Tensor, ...]:
    """The planes of int8 for float32 [rows, groups, group]."""
    exact = (weights.abs().amax(-1) / 127).clamp_min_(TINIEST)
    scales = exact.half()
    up = scales.float() < exact  # rounded down, the largest weight would be clipped
    scales = (scales.view(torch.int16) + up).view(torch.float16)
    return (weights / scales[..., None].float()).round_().to(torch.int8), scales


def _asymmetric(weights: Tensor) -> tuple[Tensor, ...]:
    """The planes of int4 for float32 [rows, groups, 32], with the least squared error found."""
    scale, minimum = _least_squares(weights)
    row_scales, scales = _in_units_of_the_row(scale[..., 0], 255)
    row_minima, minima = _in_units_of_the_row(minimum[..., 0], 127)
    scales.clamp_min_(1)
    scale, minimum = scales * row_scales.float(), minima * row_minima.float()
    low, high = _levels(weights, scale[..., None], minimum[..., None]).to(torch.uint8).chunk(2, -1)
    return low | high << 4, scales.to(torch.uint8), minima.to(torch.int8), row_scales, row_minima


def _in_units_of_the_row(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """float32 [rows, groups] → units bfloat16 [rows, 1] and whole numbers of at most ``most`` of them, as float32."""
    exact = (numbers.abs().amax(-1, keepdim=True) / most).clamp_min_(NOTHING)
    units = exact.bfloat16()
    units = (units.view(torch.int16) + (units.float() < exact)).view(torch.bfloat16)
    return units, (numbers / units.float()).round_()


def _least_squares(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, float32 [rows, groups, 1].

    For each of a few clipped ranges the weights are rounded, and the line through (level, weight) is fitted; its
    squared error is the weights' variance less covariance² / variance of the levels. Then again from the best line.
    """
    mean = weights.mean(-1, keepdim=True)
    centred = weights - mean
    low, high = centred.amin(-1, keepdim=True), centred.amax(-1, keepdim=True)
    best = torch.full_like(mean, -1)
    scale, minimum = torch.zeros_like(mean), torch.zeros_like(mean)
    for shrink in (*SHRINKS, *[None] * REFITS):
        if shrink is None:
            levels = _levels(centred, scale, minimum)
        else:
            levels = _levels(centred, (high - low) * (shrink / LEVELS), low * shrink)
        average = levels.mean(-1, keepdim=True)
        covariance = (levels * centred).sum(-1, keepdim=True)
        variance = levels.square_().sum(-1, keepdim=True) - weights.shape[-1] * average.square()
        slope = covariance / variance.clamp_min(1e-6)  # of a constant group: 0
        explained = slope * covariance
        better = explained > best
        best = torch.where(better, explained, best)
        scale = torch.where(better, slope, scale)
        minimum = torch.where(better, -slope * average, minimum)
    return scale, minimum + mean


def _levels(weights: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Nearest of the 16 levels, float32."""
    inverse = scale.clamp_min(NOTHING).reciprocal()
    return torch.addcmul(-minimum * inverse, weights, inverse).round_().clamp_(0, LEVELS)
