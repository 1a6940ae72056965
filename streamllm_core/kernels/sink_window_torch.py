"""Sink + window attention in torch, on the CPU or any device: reads the ring by the positions its rows hold.

Reading runs go one by one through PyTorch's fused attention, decoding ones several to a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamllm_core.kernels.scoring import Scoring
from streamllm_core.layout import MicroBatch, Run
from streamllm_core.ring import RingLayer

# One product over several decoding streams reads their slots as one block; it may read this much more than needed.
DECODE_WASTE = 1.3


def attend(ring: RingLayer, batch: MicroBatch, window_query: Tensor, sink_query: Tensor, scoring: Scoring) -> Tensor:
    """Queries [heads, tokens, head_dim] (rotated both ways) against the ring: [tokens, heads, head_dim].

    Single tokens are folded, several streams to a product; longer runs go one by one.
    """
    groups = batch.memo(("decode", ring.pins, ring.capacity), lambda: _decode_groups(ring, batch))
    if len(groups) == 1 and len(batch.runs) == batch.tokens and isinstance(groups[0].rows, slice):
        return _decode(ring, groups[0], window_query, sink_query, scoring)
    output = torch.empty_like(window_query.transpose(0, 1), memory_format=torch.contiguous_format)
    for group in groups:
        output[group.rows] = _decode(ring, group, window_query, sink_query, scoring)
    for run in batch.runs:
        if run.count > 1:
            rows = slice(run.offset, run.offset + run.count)
            part = _prefill(ring, batch, run, window_query[:, rows], sink_query[:, rows], scoring)
            output[rows] = part.transpose(0, 1)
    return output


def visible(ring: RingLayer, runs: list[Run], rows: int) -> Tensor:
    """Which of the first ``rows`` rows of its slot each query sees, for runs of the same count: bool
    [runs, count, rows] (CPU)."""
    stops = torch.tensor([run.stop for run in runs])[:, None]
    sinks = torch.tensor([ring.sinks(run.sinks) for run in runs])[:, None]
    held = ring.labels(sinks, stops - 1, rows)[:, None]
    query = (torch.arange(-runs[0].count, 0) + stops)[:, :, None]
    seen = (held >= 0) & (held <= query) & ((held < sinks[:, None]) | (query - held <= ring.recent))
    for index, run in enumerate(runs):
        for start, stop in run.holes:
            seen[index] &= (held[index] < start) | (held[index] >= stop)
    return seen


def _bias(seen: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")).to(device)


# --- prefill: one stream, many queries -------------------------------------------------------------------------


def _prefill(
    ring: RingLayer,
    batch: MicroBatch,
    run: Run,
    window_query: Tensor,
    sink_query: Tensor,
    scoring: Scoring,
) -> Tensor:
    """[heads, count, head_dim] for one run."""
    rows = ring.used(run.sinks, run.stop)
    keys, values = ring.read(run.slot, rows)
    sinks = ring.sinks(run.sinks) if ring.evicts(run) else 0

    def biases() -> tuple[Tensor, Tensor]:
        seen = visible(ring, [run], rows)[0]
        pinned = _bias(seen[:, :sinks], keys.dtype, keys.device)
        seen[:, :sinks] = False
        return _bias(seen, keys.dtype, keys.device), pinned

    window_bias, sink_bias = batch.memo(("bias", run, ring.pins, ring.capacity), biases)
    output, weight = _softmax_group(window_query, keys, values, window_bias, scoring)
    if sinks:
        pinned = _softmax_group(sink_query, keys[:, :sinks], values[:, :sinks], sink_bias, scoring)
        output, weight = _merge(output, weight, *pinned)
    if scoring.s_aux is not None:
        output = output * torch.sigmoid(weight - scoring.s_aux[:, None].to(weight.dtype))[..., None].to(output.dtype)
    return output


def _softmax_group(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention output [heads, n, head_dim] and its log-sum-exp [heads, n] over one group of keys."""
    if query.device.type == "cpu" and scoring.softcap is None:
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None], values[None], 0.0, False, attn_mask=bias[None, None], scale=scoring.scale
        )
        return output[0], weight[0]
    heads, count, _ = query.shape
    scores = torch.matmul(query.reshape(len(keys), -1, query.shape[-1]) * scoring.scale, keys.mT)
    scores = _capped(_exact(scores), scoring.softcap).unflatten(1, (-1, count)) + bias
    weight = torch.logsumexp(scores, -1)
    shares = torch.exp(scores - weight[..., None]).to(values.dtype).flatten(1, 2)
    return (shares @ values).view(heads, count, -1), weight.view(heads, count)


def _merge(output: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmax groups as if they had been one (log-sum-exp merge, exact)."""
    share = torch.sigmoid(weight - other_weight)[..., None].to(output.dtype)
    return output * share + other * (1 - share), torch.logaddexp(weight, other_weight)


def _exact(scores: Tensor) -> Tensor:
    """At least float32: where softmax is taken."""
    return scores.float() if scores.dtype.itemsize < 4 else scores


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


# --- decode: many streams, one query each ----------------------------------------------------------------------


@dataclass(frozen=True)
class _DecodeGroup:
    """n decoding streams whose slots lie in [first, stop); ``reach`` leading rows of each slot are read."""

    first: int
    stop: int
    reach: int
    rows: Tensor | slice  # [n]: row of each stream in the micro-batch
    slots: Tensor | slice  # [n]: slot of each stream, relative to ``first``
    bias: Tensor | None  # [(stop - first) * kv_heads, 1, reach], 0 or -inf; None when everything is seen
    pinned: Tensor | None  # bool, the same shape but for its last columns: those scored with the sink query


def _decode_groups(ring: RingLayer, batch: MicroBatch) -> list[_DecodeGroup]:
    """Neighbouring slots in one product, as long as that reads little more than the streams need."""
    runs = sorted((run for run in batch.runs if run.count == 1), key=lambda run: run.slot)
    groups: list[list[Run]] = []
    needed = longest = 0
    for run in runs:
        used = ring.used(run.sinks, run.stop)
        block = (run.slot + 1 - groups[-1][0].slot) * max(longest, used) if groups else 0
        apart = groups and run.slot > groups[-1][-1].slot  # a stream's last pinned token and its next may both be here
        if apart and block <= DECODE_WASTE * (needed + used):
            groups[-1].append(run)
            needed, longest = needed + used, max(longest, used)
        else:
            groups.append([run])
            needed = longest = used
    return [_decode_group(ring, group) for group in groups]


def _decode_group(ring: RingLayer, runs: list[Run]) -> _DecodeGroup:
    device, kv_heads = ring.keys.device, ring.keys.shape[1]
    first, stop = runs[0].slot, runs[-1].slot + 1
    reach = max(ring.used(run.sinks, run.stop) for run in runs)
    slots = torch.tensor([run.slot - first for run in runs])
    seen = torch.ones(stop - first, 1, reach, dtype=torch.bool)
    seen[slots] = visible(ring, runs, reach)
    pinned = None
    if any(ring.evicts(run) for run in runs):
        counts = torch.zeros(stop - first, dtype=torch.long)
        counts[slots] = torch.tensor([ring.sinks(run.sinks) for run in runs])
        pinned = (torch.arange(int(counts.max())) < counts[:, None])[:, None].repeat_interleave(kv_heads, 0).to(device)
    return _DecodeGroup(
        first,
        stop,
        reach,
        _as_slice([run.offset for run in runs], device),
        _as_slice(slots.tolist(), device),
        None if bool(seen.all()) else _bias(seen, ring.dtype, device).repeat_interleave(kv_heads, 0),
        pinned,
    )


def _as_slice(indices: list[int], device: torch.device) -> Tensor | slice:
    """Consecutive indices as a slice, which needs no copy."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, device=device)


def _decode(
    ring: RingLayer,
    group: _DecodeGroup,
    window_query: Tensor,
    sink_query: Tensor,
    scoring: Scoring,
) -> Tensor:
    """[n, heads, head_dim]. The query heads of one KV head are the rows of one product: K and V are read once."""
    streams, kv_heads = group.stop - group.first, ring.keys.shape[1]
    keys, values = (part.flatten(0, 1) for part in ring.read(slice(group.first, group.stop), group.reach))

    def fold(query: Tensor) -> Tensor:  # [heads, tokens, d] -> [streams * kv_heads, group, d]
        rows = query[:, group.rows].transpose(0, 1)
        if len(rows) < streams:
            spread = rows.new_zeros(streams, *rows.shape[1:])
            spread[group.slots] = rows
            rows = spread
        return rows.reshape(streams * kv_heads, -1, rows.shape[-1])

    def score(query: Tensor, keys: Tensor) -> Tensor:
        # With the keys as the left factor no library copies them: two to three times as fast on CPUs.
        return _capped(torch.bmm(keys, (fold(query) * scoring.scale).mT).mT, scoring.softcap)

    scores = score(window_query, keys)
    if group.pinned is not None:
        most = group.pinned.shape[-1]
        scores[..., :most] = torch.where(group.pinned, score(sink_query, keys[:, :most]), scores[..., :most])
    if group.bias is not None:
        scores += group.bias
    if scoring.s_aux is not None:
        extra = scoring.s_aux.to(scores.dtype).view(kv_heads, -1, 1).repeat(streams, 1, 1)
        shares = torch.softmax(_exact(torch.cat([scores, extra], -1)), -1)[..., :-1]
    else:
        shares = torch.softmax(_exact(scores), -1)
    output = torch.bmm(shares.to(values.dtype), values).view(streams, -1, values.shape[-1])
    return output[group.slots] if isinstance(group.slots, Tensor) else output
