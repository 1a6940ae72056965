"""Weights into int8 and int4, group by group, in pieces of bounded size."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm_core.quantization.formats import Format, GroupFormat

PIECE = 1 << 20  # values at a time: 4 MB in float32, a few such temporaries
SHRINKS = (1.0, 0.94, 0.88, 0.82, 0.76)  # of a group's range: what lies outside is clipped
LEVELS = 15
TINIEST, LARGEST = 2.0**-24, 65504.0  # of float16


def quantize(format: Format, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Pack a float tensor with two or three dimensions: uint8 [format.nbytes(tensor.shape)] on the tensor's device.

    The arithmetic runs on ``device``, piece by piece; None means the tensor's own. Scales are float16, never zero and
    never infinite: weights below 3e-8 become zero. Raises ValueError for a format that is not int8 or int4, a shape
    that it does not hold, and weights that are not finite or beyond float16 (65,504).
    """
    if not isinstance(format, GroupFormat):
        raise ValueError(f"weights are quantized to int8 or int4, not to {format.name}")
    if not format.holds(tensor.shape):
        raise ValueError(f"{format.name} does not hold a tensor of shape {list(tensor.shape)}")
    packed = torch.empty(format.nbytes(tensor.shape), dtype=torch.uint8, device=tensor.device)
    quants, scales, minima = format.planes(packed, tensor.shape)
    groups = tensor.reshape(len(scales), -1)
    step = max(1, PIECE // groups.shape[1])
    for start in range(0, len(groups), step):
        piece = slice(start, start + step)
        weights = groups[piece].to(device or tensor.device, torch.float32)
        if not weights.abs().amax() <= LARGEST:  # nor is NaN
            raise ValueError(f"weights are infinite, no numbers, or larger than {LARGEST:,.0f}")
        if minima is None:
            quants[piece], scales[piece] = _symmetric(weights)
        else:
            quants[piece], scales[piece], minima[piece] = _asymmetric(weights)
    return packed


def _symmetric(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quants uint8 (the bits of int8) and scales float16 of float32 [groups, group]."""
    exact = (weights.abs().amax(-1) / 127).clamp_min_(TINIEST)
    scales = exact.half()
    up = scales.float() < exact  # rounded down, the largest weight would be clipped
    scales = (scales.view(torch.int16) + up).view(torch.float16)
    quants = (weights / scales[:, None].float()).round_()
    return quants.to(torch.int8).view(torch.uint8), scales


def _asymmetric(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quants (two a byte), scales and minima of float32 [groups, group], with the least squared error found."""
    scale, minimum = _least_squares(weights)
    scales = scale.clamp_(TINIEST, LARGEST).half()
    minima = minimum.clamp_(-LARGEST, LARGEST).half()
    quants = _levels(weights, scales.float(), minima.float()).to(torch.uint8)
    low, high = quants.chunk(2, -1)
    return low | high << 4, scales[:, 0], minima[:, 0]


def _least_squares(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, float32 [groups, 1].

    For each of a few clipped ranges the weights are rounded, and the line through (level, weight) is fitted; its
    squared error is the weights' variance less covariance² / variance of the levels.
    """
    count = weights.shape[1]
    mean = weights.mean(-1, keepdim=True)
    centred = weights - mean
    low, high = centred.amin(-1, keepdim=True), centred.amax(-1, keepdim=True)
    best = torch.full_like(mean, -1)
    scale, minimum = torch.zeros_like(mean), mean.clone()
    for shrink in SHRINKS:
        levels = _levels(centred, ((high - low) * (shrink / LEVELS)).clamp_min_(TINIEST), low * shrink)
        average = levels.mean(-1, keepdim=True)
        covariance = (levels * centred).sum(-1, keepdim=True)
        variance = levels.square_().sum(-1, keepdim=True) - count * average.square()
        slope = covariance / variance.clamp_min(1e-6)  # of a constant group: 0
        explained = slope * covariance
        better = explained > best
        best = torch.where(better, explained, best)
        scale = torch.where(better, slope, scale)
        minimum = torch.where(better, mean - slope * average, minimum)
    return scale, minimum


def _levels(weights: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Nearest of the 16 levels, float32."""
    inverse = scale.reciprocal()
    return torch.addcmul(-minimum * inverse, weights, inverse).round_().clamp_(0, LEVELS)
