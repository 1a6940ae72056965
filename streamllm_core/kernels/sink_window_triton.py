"""The Triton programs behind ``sink_window``; imported only where Triton is installed.

Scores are kept in base 2: softmax is taken with exp2, whose scale the host has multiplied by log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The running maximum begins at FLOOR, below every real score. A score of NEVER, times any scale, lies so far below
# that its share is exactly 0, also in a row that has seen nothing yet.
FLOOR = tl.constexpr(-1e20)
NEVER = tl.constexpr(-1e30)


@triton.jit
def _widen(stored, dtype: tl.constexpr):
    """Exact. fp8 goes by way of fp16: Ada has no other conversion."""
    if stored.dtype == tl.float8e4nv:
        stored = stored.to(tl.float16)
    return stored.to(dtype)


@triton.jit
def _score(query, keys, peaks, inner, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """[M, N] products that only lack the scale."""
    score = tl.dot(query, _widen(keys, query.dtype), input_precision=PRECISION)
    if SCALED:
        score *= peaks[None, :]
    if CAPPED:  # tanh
        score = 2 * tl.sigmoid(score * inner) - 1
    return score


@triton.jit
def _accumulate(
    total, weight, top, score, scale, values, peaks, dtype: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr
):
    """One step of the online softmax."""
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    share = tl.exp2(score * scale - new_top[:, None])
    decay = tl.exp2(top - new_top)
    weight = weight * decay + tl.sum(share, 1)
    if SCALED:
        share *= peaks[None, :]
    total = tl.dot(share.to(dtype), _widen(values, dtype), total * decay[:, None], input_precision=PRECISION)
    return total, weight, new_top


@triton.jit
def _load(
    keys, values, key_peaks, value_peaks, row, held, D: tl.constexpr, D_PADDED: tl.constexpr, SCALED: tl.constexpr
):
    """Keys [D, N], values [N, D] and their peaks [N] in these rows of a slot. A slot's offsets fit 32 bits."""
    dim = tl.arange(0, D_PADDED)
    across, down = held[None, :], held[:, None]
    if D != D_PADDED:
        across = across & (dim < D)[:, None]
        down = down & (dim < D)[None, :]
    k = tl.load(keys + (row[None, :] * D + dim[:, None]), mask=across, other=0.0)
    v = tl.load(values + (row[:, None] * D + dim[None, :]), mask=down, other=0.0)
    k_peak = row
    v_peak = row
    if SCALED:
        k_peak = tl.load(key_peaks + row, mask=held, other=0.0)
        v_peak = tl.load(value_peaks + row, mask=held, other=0.0)
    return k, v, k_peak, v_peak


@triton.jit
def _visible(position, query, recent, end, line, HOLES: tl.constexpr):
    """Window keys at ``position`` [1, N] that queries at ``query`` [M, 1] see."""
    distance = query - position
    seen = (distance >= 0) & (distance <= recent) & (position < end)
    for hole in tl.static_range(HOLES):
        start = tl.load(line + 5 + 2 * hole)
        stop = tl.load(line + 6 + 2 * hole)
        seen = seen & ((position < start) | (position >= stop))
    return seen


# The integers that depend on the configuration take part in no specialisation; S is not even an argument.
@triton.jit(do_not_specialize=["recent", "capacity", "rows"])
def attention(
    window_query,
    sink_query,
    keys,
    values,
    key_peaks,
    value_peaks,
    output,
    logsum,
    table,
    s_aux,
    recent,
    capacity,
    rows,
    wq_head,
    wq_token,
    sq_head,
    sq_token,
    scale,
    inner,
    unit,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    N_SINKS: tl.constexpr,
    FIELDS: tl.constexpr,
    HOLES: tl.constexpr,
    CAPPED: tl.constexpr,
    AUX: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M rows against their sinks and one part of their window: program (line of the table, KV head, part)."""
    line = table + tl.program_id(0) * FIELDS
    first_row = tl.load(line)
    count = tl.load(line + 1)
    start = tl.load(line + 2)
    slot = tl.load(line + 3)
    sinks = tl.load(line + 4)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    dtype: tl.constexpr = window_query.dtype.element_ty

    token = tl.arange(0, M) // GROUP
    head = kv * GROUP + tl.arange(0, M) % GROUP
    live = token < count
    query = start + token
    dim = tl.arange(0, D_PADDED)
    inside = live[:, None] & (dim < D)[None, :]
    place = (first_row + token).to(tl.int64)
    base = (slot.to(tl.int64) * tl.num_programs(1) + kv) * rows
    keys += base * D
    values += base * D
    key_peaks += base
    value_peaks += base

    top = tl.full([M], FLOOR, tl.float32)
    weight = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D_PADDED], tl.float32)
    if AUX:
        aux = tl.load(s_aux + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        top = tl.where(part == 0, aux, top)
        weight += tl.where(part == 0, 1.0, 0.0)

    # No branch round this loop: with one, ptxas serialises every matrix product of the kernel on Hopper (C7515).
    pinned = tl.where(part == 0, sinks, 0)
    offset = place * sq_token + head * sq_head
    q = tl.load(sink_query + (offset[:, None] + dim[None, :]), mask=inside & (pinned > 0), other=0.0)
    for begin in range(0, pinned, N_SINKS):
        row = begin + tl.arange(0, N_SINKS)
        held = row < pinned
        k, v, k_peak, v_peak = _load(keys, values, key_peaks, value_peaks, row, held, D, D_PADDED, SCALED)
        score = _score(q, k, k_peak, inner, CAPPED, SCALED, PRECISION)
        score = tl.where(held[None, :] & (row[None, :] <= query[:, None]), score, NEVER)
        total, weight, top = _accumulate(total, weight, top, score, scale, v, v_peak, dtype, SCALED, PRECISION)

    offset = place * wq_token + head * wq_head
    q = tl.load(window_query + (offset[:, None] + dim[None, :]), mask=inside, other=0.0)
    first = tl.maximum(sinks, start - recent)
    end = start + count
    if SPLIT:
        size = tl.cdiv(tl.cdiv(end - first, tl.num_programs(2)), N) * N
        first += part * size
        end = tl.minimum(end, first + size)
    # Tiles that begin in [clear_from, clear_to] are seen whole by every query.
    clear_from = start + count - 1 - recent
    clear_to = tl.minimum(start + 1, end) - N
    if HOLES > 0:
        clear_to = first - 1
    turned = first - sinks - (first - sinks) // capacity * capacity  # the walk meets the ring's end once at most
    for begin in range(first, end, N):
        position = begin + tl.arange(0, N)
        row = position - first + turned
        row = sinks + tl.where(row >= capacity, row - capacity, row)
        k, v, k_peak, v_peak = _load(keys, values, key_peaks, value_peaks, row, position < end, D, D_PADDED, SCALED)
        score = _score(q, k, k_peak, inner, CAPPED, SCALED, PRECISION)
        if (begin < clear_from) | (begin > clear_to):
            seen = _visible(position[None, :], query[:, None], recent, end, line, HOLES)
            score = tl.where(seen, score, NEVER)
        total, weight, top = _accumulate(total, weight, top, score, scale, v, v_peak, dtype, SCALED, PRECISION)

    total = total * (unit / tl.maximum(weight, 1e-30))[:, None]
    if SPLIT:
        place = (part * tl.num_programs(0) + tl.program_id(0)) * (M // GROUP) + token
    offset = place * (tl.num_programs(1) * GROUP) + head
    if SPLIT:
        tl.store(logsum + offset, top + tl.log2(tl.maximum(weight, 1e-30)), mask=live)
    tl.store(output + (offset[:, None] * D + dim[None, :]), total.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def merge(
    partial,
    logsum,
    output,
    table,
    splits,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    FIELDS: tl.constexpr,
    MOST: tl.constexpr,
):
    """The parts of one query and head as if they had been one softmax: program (query of a table line, head)."""
    index = tl.program_id(0)
    heads = tl.num_programs(1)
    line = table + index // QUERIES * FIELDS
    token = index % QUERIES
    if token < tl.load(line + 1):
        part = tl.arange(0, MOST)
        dim = tl.arange(0, D_PADDED)
        there = part < splits
        offset = (part * tl.num_programs(0) + index) * heads + tl.program_id(1)
        weight = tl.load(logsum + offset, mask=there, other=FLOOR)
        share = tl.exp2(weight - tl.max(weight, 0))
        mask = there[:, None] & (dim < D)[None, :]
        values = tl.load(partial + (offset[:, None] * D + dim[None, :]), mask=mask, other=0.0)
        total = tl.sum(values * share[:, None], 0) / tl.sum(share, 0)
        place = (tl.load(line) + token).to(tl.int64) * heads + tl.program_id(1)
        tl.store(output + (place * D + dim), total.to(output.dtype.element_ty), mask=dim < D)
