"""The elementwise work round the matrix products in torch: reference of ``elementwise`` and its twin for CPUs.

Each function rounds where stock transformers rounds. Written with as few passes over memory as torch allows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Tables = tuple[Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dimension, computed in float32 (Zhang & Sennrich 2019).

    ``round_first``: the normalised values are rounded to the dtype of x before they are multiplied.
    """
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if round_first:
        return (exact * scale).to(x.dtype).mul_(weight + offset if offset else weight)
    return (exact * scale).mul_(weight.float() + offset if offset else weight).to(x.dtype)


def gate_(gate: Tensor, up: Tensor, activation: str) -> None:
    """gate = activation(gate) * up, in place. ``activation``: "silu" or "gelu_tanh"."""
    if activation == "silu":
        F.silu(gate, inplace=True)
    else:
        torch.ops.aten.gelu_(gate, approximate="tanh")
    gate.mul_(up)


def rotate_(query: Tensor, key: Tensor, window: Tables, sinks: Tables | None, interleaved: bool) -> Tensor | None:
    """Turn query and key [1, heads, tokens, head_dim] in place by the angles of ``window``; the query turned by those
    of ``sinks`` instead is returned.

    Tables: cosines and sines [tokens, pairs] in float32; the 2 * pairs leading dimensions turn, dimension i with
    pairs + i or, ``interleaved``, 2 i with 2 i + 1.
    """
    sink_query = None
    if sinks is not None:
        sink_query = query.clone()
        _turn_(sink_query, *sinks, interleaved)
    _turn_(query, *window, interleaved)
    _turn_(key, *window, interleaved)
    return sink_query


def _turn_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    if interleaved:
        first, second = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)
