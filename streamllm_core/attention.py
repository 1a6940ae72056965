"""Attention over pinned tokens and a recent window, at any chunk size, registered with transformers.

Token t attends to {j <= t : j < S or t - j <= R}. A recent key is seen at its true distance t - j, a sink at
min(t, S + R) - i. This equals StreamingLLM token by token (Xiao et al. 2023, keys at their place in the cache), but
needs no key to be rotated twice: window scores use the query rotated to t, sink scores the query rotated to
min(t, S + R), under one softmax.

This module is the torch implementation (CPU, and the reference for the CUDA kernel in ``kernels``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from streamllm_core.cache import RingLayer, RollingCache
from streamllm_core.kernels import sink_window
from streamllm_core.layout import MicroBatch, Run
from streamllm_core.rotary import Rotary

# transformers builds no attention mask for a name that its mask registry does not know.
NAME = "streamllm_rolling"

# One product over several decoding streams reads their slots as one block; it may read this much more than needed.
DECODE_WASTE = 1.3


@dataclass
class PassState:
    """What the attention modules of a model need to know of the pass being run; one object, shared by all of them."""

    cache: RollingCache | None = None
    rotary: Rotary | None = None
    batches: list[MicroBatch] = field(default_factory=list)
    batch: MicroBatch | None = None  # the one that is going through a layer
    tap_layer: int | None = None  # hidden states of ``tap_rows`` behind this layer are kept in ``tapped``
    tap_rows: Tensor | None = None
    tapped: Tensor | None = None


def rolling_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a decoder layer.

    Args:
        module: the attention module; ``module.rolling`` is the PassState, ``module.layer_idx`` its layer.
        query: [1, heads, tokens, head_dim], not rotated; key, value: [1, kv_heads, tokens, head_dim].
        scaling: factor on the scores; None means head_dim ** -0.5.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        s_aux: [heads] learned logits that take part in the softmax without a value (GPT-OSS).

    Returns:
        ([1, tokens, heads, head_dim], None).
    """
    state: PassState = module.rolling
    assert state.cache is not None and state.rotary is not None and state.batch is not None
    batch, ring = state.batch, state.cache.layers[module.layer_idx]
    window_query, key = state.rotary.rotate(module, batch, query, key)
    ring.write(batch, key[0].transpose(0, 1), value[0].transpose(0, 1))
    sink_query = window_query
    if batch.memo(("evicting", ring.pins, ring.recent), lambda: any(evicting(ring, run) for run in batch.runs)):
        sink_query, _ = state.rotary.rotate(module, batch, query, key[:, :0], recent=ring.recent)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attend = sink_window.attend if sink_window.available(query.device) else attend_torch
    attended = attend(ring, batch, window_query[0], sink_query[0], scale, softcap, s_aux)
    return attended[None], None


AttentionInterface.register(NAME, rolling_attention)


def evicting(ring: RingLayer, run: Run) -> bool:
    """True when some query of ``run`` no longer sees its sinks at their true distance."""
    return 0 < ring.sinks(run.sinks) < run.stop - ring.recent


def attend_torch(
    ring: RingLayer,
    batch: MicroBatch,
    window_query: Tensor,
    sink_query: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Queries [heads, tokens, head_dim] (rotated both ways) against the ring: [tokens, heads, head_dim].

    Single tokens are folded, several streams to a product; longer runs go one by one.
    """
    output = torch.empty_like(window_query.transpose(0, 1), memory_format=torch.contiguous_format)
    groups = batch.memo(("decode", ring.pins, ring.capacity), lambda: _decode_groups(ring, batch))
    for group in groups:
        output[group.rows] = _decode(ring, group, window_query, sink_query, scale, softcap, s_aux)
    for run in batch.runs:
        if run.count > 1:
            rows = slice(run.offset, run.offset + run.count)
            output[rows] = _prefill(
                ring, batch, run, window_query[:, rows], sink_query[:, rows], scale, softcap, s_aux
            ).transpose(0, 1)
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


def _bias(seen: Tensor, like: Tensor) -> Tensor:
    """0 where seen, -inf elsewhere, in the dtype and on the device of ``like``."""
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf")).to(like.device)


# --- prefill: one stream, many queries -------------------------------------------------------------------------


def _prefill(
    ring: RingLayer,
    batch: MicroBatch,
    run: Run,
    window_query: Tensor,
    sink_query: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """[heads, count, head_dim] for one run."""
    rows = ring.used(run.sinks, run.stop)
    keys, values = ring.keys[run.slot, :, :rows], ring.values[run.slot, :, :rows]
    sinks = ring.sinks(run.sinks) if evicting(ring, run) else 0

    def biases() -> tuple[Tensor, Tensor]:
        seen = visible(ring, [run], rows)[0]
        pinned = _bias(seen[:, :sinks], keys)
        seen[:, :sinks] = False
        return _bias(seen, keys), pinned

    window_bias, sink_bias = batch.memo(("bias", run, ring.pins, ring.capacity), biases)
    output, weight = _softmax_group(window_query, keys, values, window_bias, scale, softcap)
    if sinks:
        pinned = _softmax_group(sink_query, keys[:, :sinks], values[:, :sinks], sink_bias, scale, softcap)
        output, weight = _merge(output, weight, *pinned)
    if s_aux is not None:
        output = output * torch.sigmoid(weight - s_aux[:, None].to(weight.dtype))[..., None].to(output.dtype)
    return output


def _softmax_group(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention output [heads, n, head_dim] and its log-sum-exp [heads, n] over one group of keys."""
    if query.device.type == "cpu" and softcap is None:
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None], values[None], 0.0, False, attn_mask=bias[None, None], scale=scale
        )
        return output[0], weight[0]
    heads, count, _ = query.shape
    folded = query.reshape(keys.shape[0], -1, query.shape[-1])
    scores = _scores(folded, keys, scale, softcap).unflatten(1, (-1, count)) + bias
    weight = torch.logsumexp(scores, -1)
    shares = torch.exp(scores - weight[..., None]).to(values.dtype).flatten(1, 2)
    return (shares @ values).view(heads, count, -1), weight.view(heads, count)


def _merge(output: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmax groups as if they had been one (log-sum-exp merge, exact)."""
    share = torch.sigmoid(weight - other_weight)[..., None].to(output.dtype)
    return output * share + other * (1 - share), torch.logaddexp(weight, other_weight)


def _scores(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled scores [..., queries, keys] in at least float32; the scale goes to the smaller factor."""
    scores = (query * scale) @ keys.mT
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    return softcap * torch.tanh(scores / softcap) if softcap is not None else scores


# --- decode: many streams, one query each ----------------------------------------------------------------------


@dataclass(frozen=True)
class _DecodeGroup:
    """n decoding streams whose slots lie in [first, stop); ``reach`` leading rows of each slot are read."""

    first: int
    stop: int
    reach: int
    rows: Tensor | slice  # [n]: row of each stream in the micro-batch
    slots: Tensor | slice  # [n]: slot of each stream, relative to ``first``
    bias: Tensor | None  # [stop - first, 1, 1, reach], 0 or -inf; None when everything is seen
    pinned: Tensor | None  # bool [stop - first, 1, 1, most sinks]: columns scored with the sink query


def _decode_groups(ring: RingLayer, batch: MicroBatch) -> list[_DecodeGroup]:
    """Neighbouring slots in one product, as long as that reads little more than the streams need."""
    runs = sorted((run for run in batch.runs if run.count == 1), key=lambda run: run.slot)
    groups: list[list[Run]] = []
    needed = longest = 0
    for run in runs:
        used = ring.used(run.sinks, run.stop)
        block = (run.slot + 1 - groups[-1][0].slot) * max(longest, used) if groups else 0
        if groups and block <= DECODE_WASTE * (needed + used):
            groups[-1].append(run)
            needed, longest = needed + used, max(longest, used)
        else:
            groups.append([run])
            needed = longest = used
    return [_decode_group(ring, group) for group in groups]


def _decode_group(ring: RingLayer, runs: list[Run]) -> _DecodeGroup:
    device = ring.keys.device
    first, stop = runs[0].slot, runs[-1].slot + 1
    reach = max(ring.used(run.sinks, run.stop) for run in runs)
    slots = torch.tensor([run.slot - first for run in runs])
    seen = torch.ones(stop - first, 1, 1, reach, dtype=torch.bool)
    seen[slots] = visible(ring, runs, reach)[:, None]
    pinned = None
    if any(evicting(ring, run) for run in runs):
        counts = torch.zeros(stop - first, dtype=torch.long)
        counts[slots] = torch.tensor([ring.sinks(run.sinks) for run in runs])
        pinned = (torch.arange(int(counts.max())) < counts[:, None])[:, None, None].to(device)
    return _DecodeGroup(
        first,
        stop,
        reach,
        _as_slice([run.offset for run in runs], device),
        _as_slice(slots.tolist(), device),
        None if bool(seen.all()) else _bias(seen, ring.keys),
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
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """[n, heads, head_dim]. The query heads of one KV head are the rows of one product: K and V are read once."""
    keys = ring.keys[group.first : group.stop, :, : group.reach]
    values = ring.values[group.first : group.stop, :, : group.reach]
    streams, kv_heads = keys.shape[:2]

    def fold(query: Tensor) -> Tensor:  # [heads, tokens, d] -> [streams, kv_heads, group, d]
        rows = query[:, group.rows].transpose(0, 1)
        if len(rows) < streams:
            spread = rows.new_zeros(streams, *rows.shape[1:])
            spread[group.slots] = rows
            rows = spread
        return rows.view(*rows.shape[:1], kv_heads, -1, rows.shape[-1])

    scores = _scores(fold(window_query), keys, scale, softcap)
    if group.pinned is not None:
        most = group.pinned.shape[-1]
        pinned = _scores(fold(sink_query), keys[:, :, :most], scale, softcap)
        scores[..., :most] = torch.where(group.pinned, pinned, scores[..., :most])
    if group.bias is not None:
        scores += group.bias
    if s_aux is not None:
        extra = s_aux.to(scores.dtype).view(kv_heads, -1, 1).expand(streams, -1, -1, -1)
        shares = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    else:
        shares = torch.softmax(scores, -1)
    output = (shares.to(values.dtype) @ values).flatten(1, 2)
    return output[group.slots]
