"""The elementwise work round the matrix products on CUDA, one launch each. ``elementwise_torch`` is its reference and
has the same contracts; 16-bit and float32 tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm_core.kernels.elementwise_torch import Tables

WIDEST_NORM = 16384  # values of a row that one program holds
NORM_TILE = 4096  # values of a program when rows are short
GATE_BLOCK = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """See ``elementwise_torch.rms_norm``. The output lies in memory as x does."""
    import triton

    from streamllm_core.kernels.elementwise_triton import rms_norm as kernel

    rows = x.reshape(-1, *x.shape[-2:])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    outer, inner, width = rows.shape
    output = torch.empty_like(rows)
    block = triton.next_power_of_2(width)
    tile = max(1, NORM_TILE // block)
    kernel[(triton.cdiv(outer * inner, tile),)](
        rows,
        weight,
        output,
        outer,
        inner,
        *rows.stride()[:2],
        *output.stride()[:2],
        width,
        eps,
        offset,
        ROUND_FIRST=round_first,
        ROWS=tile,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return output.reshape(x.shape)


def gate_(gate: Tensor, up: Tensor, activation: str) -> None:
    """See ``elementwise_torch.gate_``."""
    import triton

    from streamllm_core.kernels.elementwise_triton import gate as kernel

    width = gate.shape[-1]
    rows, others = gate.view(-1, width), up.view(-1, width)
    kernel[(len(rows) * triton.cdiv(width, GATE_BLOCK),)](
        rows, others, rows.stride(0), others.stride(0), width, GELU=activation == "gelu_tanh", BLOCK=GATE_BLOCK
    )


def rotate(
    query: Tensor, key: Tensor, window: Tables, sinks: Tables | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``elementwise_torch.rotate``. Query and key are turned where they are: they are read and written once."""
    import triton

    from streamllm_core.kernels.elementwise_triton import rotate as kernel

    _, heads, tokens, head_dim = query.shape
    key_heads, pairs = key.shape[1], window[0].shape[-1]
    sink_query = query if sinks is None else torch.empty_like(query)
    pairs_padded, heads_padded = triton.next_power_of_2(pairs), triton.next_power_of_2(heads)
    kernel[(tokens,)](
        query,
        key,
        sink_query,
        *window,
        *(sinks or window),
        heads,
        key_heads,
        *query.stride()[1:3],
        *key.stride()[1:3],
        *sink_query.stride()[1:3],
        2 if interleaved else 1,
        1 if interleaved else pairs,
        head_dim,
        SINKS=sinks is not None,
        PAIRS=pairs,
        PAIRS_PADDED=pairs_padded,
        HEADS_PADDED=heads_padded,
        KEY_HEADS_PADDED=triton.next_power_of_2(key_heads),
        REST_PADDED=triton.next_power_of_2(head_dim - 2 * pairs) if head_dim > 2 * pairs else 0,
        num_warps=min(16, max(1, pairs_padded * heads_padded // 512)),
    )
    return query, sink_query, key
