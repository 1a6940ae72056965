"""The Triton program behind ``sink_window``; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)  # a score below every real one that still subtracts cleanly


@triton.jit
def _visible(position, query, first, recent, line, HOLES: tl.constexpr):
    """Window keys at ``position`` [1, N] that queries at ``query`` [M, 1] see."""
    distance = query - position
    seen = (distance >= 0) & (distance <= recent) & (position >= first)
    for hole in tl.static_range(HOLES):
        start = tl.load(line + 5 + 2 * hole)
        stop = tl.load(line + 6 + 2 * hole)
        seen = seen & ((position < start) | (position >= stop))
    return seen


@triton.jit
def _score(query, keys, scale, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in base 2: softmax is taken with exp2."""
    score = tl.dot(query, keys, input_precision=PRECISION) * scale
    if CAPPED:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    return score * LOG2E


@triton.jit
def _accumulate(total, weight, top, score, seen, values, PRECISION: tl.constexpr):
    """One step of the online softmax."""
    score = tl.where(seen, score, NEVER)
    new_top = tl.maximum(top, tl.max(score, 1))
    share = tl.where(seen, tl.exp2(score - new_top[:, None]), 0.0)
    decay = tl.exp2(top - new_top)
    total = total * decay[:, None] + tl.dot(share.to(values.dtype), values, input_precision=PRECISION)
    return total, weight * decay + tl.sum(share, 1), new_top


@triton.jit
def kernel(
    window_query,
    sink_query,
    keys,
    values,
    output,
    table,
    s_aux,
    recent,
    capacity,
    wq_head,
    wq_token,
    sq_head,
    sq_token,
    kv_slot,
    kv_head,
    kv_row,
    out_token,
    out_head,
    scale,
    softcap,
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
    PRECISION: tl.constexpr,
):
    line = table + tl.program_id(0) * FIELDS
    first_row = tl.load(line)
    count = tl.load(line + 1)
    start = tl.load(line + 2)
    slot = tl.load(line + 3)
    sinks = tl.load(line + 4)
    kv = tl.program_id(1)

    row = tl.arange(0, M)
    token = row // GROUP
    head = kv * GROUP + row % GROUP
    live = token < count
    query = start + token
    dim = tl.arange(0, D_PADDED)
    inside = live[:, None] & (dim < D)[None, :]
    base = slot.to(tl.int64) * kv_slot + kv * kv_head
    place = (first_row + token).to(tl.int64)

    top = tl.full([M], NEVER, tl.float32)
    weight = tl.zeros([M], tl.float32)
    total = tl.zeros([M, D_PADDED], tl.float32)
    if AUX:
        top = tl.load(s_aux + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        weight += 1.0

    if sinks > 0:
        offset = place * sq_token + head * sq_head
        q = tl.load(sink_query + offset[:, None] + dim[None, :], mask=inside, other=0.0)
        for begin in range(0, sinks, N_SINKS):
            position = begin + tl.arange(0, N_SINKS)
            held = position < sinks
            at = base + position.to(tl.int64) * kv_row
            k = tl.load(keys + at[None, :] + dim[:, None], mask=held[None, :] & (dim < D)[:, None], other=0.0)
            v = tl.load(values + at[:, None] + dim[None, :], mask=held[:, None] & (dim < D)[None, :], other=0.0)
            seen = held[None, :] & (position[None, :] <= query[:, None])
            score = _score(q, k, scale, softcap, CAPPED, PRECISION)
            total, weight, top = _accumulate(total, weight, top, score, seen, v, PRECISION)

    offset = place * wq_token + head * wq_head
    q = tl.load(window_query + offset[:, None] + dim[None, :], mask=inside, other=0.0)
    oldest = tl.maximum(sinks, start - recent)
    end = start + count
    for begin in range(oldest, end, N):
        position = begin + tl.arange(0, N)
        held = position < end
        at = base + (sinks + (position - sinks) % capacity).to(tl.int64) * kv_row
        k = tl.load(keys + at[None, :] + dim[:, None], mask=held[None, :] & (dim < D)[:, None], other=0.0)
        v = tl.load(values + at[:, None] + dim[None, :], mask=held[:, None] & (dim < D)[None, :], other=0.0)
        score = _score(q, k, scale, softcap, CAPPED, PRECISION)
        seen = held[None, :] & _visible(position[None, :], query[:, None], sinks, recent, line, HOLES)
        total, weight, top = _accumulate(total, weight, top, score, seen, v, PRECISION)

    total = total / tl.maximum(weight, 1e-30)[:, None]
    offset = place * out_token + head * out_head
    tl.store(output + offset[:, None] + dim[None, :], total.to(output.dtype.element_ty), mask=inside)
