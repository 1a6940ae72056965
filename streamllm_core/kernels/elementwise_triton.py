"""The Triton programs behind ``elementwise``; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["outer", "rows"])  # numbers of tokens: no recompilation for each
def rms_norm(
    x,
    weight,
    output,
    outer,
    rows,
    x_outer,
    x_row,
    out_outer,
    out_row,
    width,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of [outer, rows, width] a program, each read and written once."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (index < outer * rows)[:, None] & (column < width)[None, :]
    source = (index // rows) * x_outer + (index % rows) * x_row
    value = tl.load(x + source[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    value = value * scale[:, None]
    if ROUND_FIRST:
        value = value.to(output.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    target = (index // rows) * out_outer + (index % rows) * out_row
    value = value * factor[None, :]
    tl.store(output + target[:, None] + column[None, :], value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def gate(gate, up, gate_row, up_row, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK values of one row a program: gate = activation(gate) * up."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = gate + row * gate_row + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # 0.5 (1 + tanh u) = sigmoid(2 u)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    else:
        value = value * tl.sigmoid(value)
    value = value.to(gate.dtype.element_ty).to(tl.float32)  # as the activation alone would have been stored
    tl.store(place, (value * other).to(gate.dtype.element_ty), mask=inside)


@triton.jit
def _turn(first, second, cos, sin):
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def rotate(
    query,
    key,
    sink_query,
    window_cos,
    window_sin,
    sink_cos,
    sink_sin,
    heads,
    key_heads,
    q_head,
    q_token,
    k_head,
    k_token,
    s_head,
    s_token,
    step,
    apart,
    head_dim,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KEY_HEADS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    """One token a program: all of its heads, so that its angles are read once. Pair i is made of the dimensions
    ``step`` * i and ``step`` * i + ``apart``."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS_PADDED)
    live = pair < PAIRS
    cos = tl.load(window_cos + token * PAIRS + pair, mask=live, other=0.0)
    sin = tl.load(window_sin + token * PAIRS + pair, mask=live, other=0.0)

    head = tl.arange(0, HEADS_PADDED)
    inside = (head < heads)[:, None] & live[None, :]
    place = query + token * q_token + head[:, None] * q_head + pair[None, :] * step
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + apart, mask=inside, other=0.0).to(tl.float32)

    key_head = tl.arange(0, KEY_HEADS_PADDED)
    key_inside = (key_head < key_heads)[:, None] & live[None, :]
    key_place = key + token * k_token + key_head[:, None] * k_head + pair[None, :] * step
    key_first = tl.load(key_place, mask=key_inside, other=0.0).to(tl.float32)
    key_second = tl.load(key_place + apart, mask=key_inside, other=0.0).to(tl.float32)

    key_first, key_second = _turn(key_first, key_second, cos, sin)
    tl.store(key_place, key_first.to(key.dtype.element_ty), mask=key_inside)
    tl.store(key_place + apart, key_second.to(key.dtype.element_ty), mask=key_inside)

    new_first, new_second = _turn(first, second, cos, sin)
    tl.store(place, new_first.to(query.dtype.element_ty), mask=inside)
    tl.store(place + apart, new_second.to(query.dtype.element_ty), mask=inside)
    if SINKS:
        cos = tl.load(sink_cos + token * PAIRS + pair, mask=live, other=0.0)
        sin = tl.load(sink_sin + token * PAIRS + pair, mask=live, other=0.0)
        new_first, new_second = _turn(first, second, cos, sin)
        target = sink_query + token * s_token + head[:, None] * s_head + pair[None, :] * step
        tl.store(target, new_first.to(query.dtype.element_ty), mask=inside)
        tl.store(target + apart, new_second.to(query.dtype.element_ty), mask=inside)
        if REST_PADDED > 0:  # dimensions that do not turn
            rest = 2 * PAIRS + tl.arange(0, REST_PADDED)
            kept = (head < heads)[:, None] & (rest < head_dim)[None, :]
            value = tl.load(query + token * q_token + head[:, None] * q_head + rest[None, :], mask=kept, other=0.0)
            tl.store(sink_query + token * s_token + head[:, None] * s_head + rest[None, :], value, mask=kept)
