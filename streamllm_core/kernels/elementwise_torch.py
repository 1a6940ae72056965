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


def rotate(
    query: Tensor, key: Tensor, window: Tables, sinks: Tables | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn query and key [1, heads, tokens, head_dim] by the angles of ``window``, and the query by those of ``sinks``
    as well. Returns window query, sink query (the same without ``sinks``) and key.

    Tables: cosines and sines [tokens, pairs] in float32; the 2 * pairs leading dimensions turn, dimension i with
    pairs + i or, ``interleaved``, 2 i with 2 i + 1. Computed in float32. The CUDA kernel overwrites its arguments.
    """
    window_query = _turned(query, *window, interleaved)
    sink_query = window_query if sinks is None else _turned(query, *sinks, interleaved)
    return window_query, sink_query, _turned(key, *window, interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    exact = x.to(cos.dtype)
    first, second = exact[..., :pairs], exact[..., pairs : 2 * pairs]
    if interleaved:
        first, second = exact[..., : 2 * pairs : 2], exact[..., 1 : 2 * pairs : 2]
    new_first = (first * cos).addcmul_(second, sin, value=-1)
    new_second = (second * cos).addcmul_(first, sin)
    parts = [torch.stack([new_first, new_second], -1).flatten(-2)] if interleaved else [new_first, new_second]
    return torch.cat([*parts, exact[..., 2 * pairs :]], -1).to(x.dtype)
