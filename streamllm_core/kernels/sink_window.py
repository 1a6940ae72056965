"""Sink + window attention on CUDA: packed ragged queries straight against the ring, one launch for reading runs and
one for decoding ones, no window copied. ``sink_window_torch`` is its reference.

A program handles M rows (queries × the query heads of one KV head) and walks over the pinned keys with the query
rotated for the sinks, then over the window with the query at its true position, under one online softmax
(Milakov & Gimelshein 2018; Dao et al. 2022). Where that makes too few programs for the card, each walks over a part
of the window, and a second kernel merges the parts by their log-sum-exp.

Quantised keys and values are expanded in registers: the peaks of int8 rows multiply scores and shares.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from math import log2

import torch
from torch import Tensor

from streamllm_core.cache import MAX_HOLES
from streamllm_core.kernels.scoring import Scoring
from streamllm_core.kernels.sink_window_tiles import (
    MOST_SPLITS,
    Card,
    Tiles,
    choose_splits,
    choose_tiles,
    power_of_2,
)
from streamllm_core.layout import MicroBatch, Run
from streamllm_core.ring import RingLayer

BLOCK_FIELDS = 5 + 2 * MAX_HOLES  # first row, rows, position of the first row, slot, sinks, holes
FAR = 2**31 - 1
LOG2E = log2(2.718281828459045)


def available(device: torch.device) -> bool:
    """Triton is there (it is not on Windows) and the tensors are on a CUDA device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class _Launch:
    """The programs for some runs of a micro-batch. ``table``: int32 [programs / KV head, BLOCK_FIELDS]."""

    table: Tensor
    tiles: Tiles
    splits: int
    holes: bool


def attend(ring: RingLayer, batch: MicroBatch, window_query: Tensor, sink_query: Tensor, scoring: Scoring) -> Tensor:
    """Same contract as ``sink_window_torch``: queries [heads, tokens, head_dim] → [tokens, heads, head_dim]."""
    heads, tokens, head_dim = window_query.shape
    output = torch.empty(tokens, heads, head_dim, dtype=window_query.dtype, device=window_query.device)
    for launch in batch.memo(("kernel", ring.pins, ring.capacity), lambda: _launches(ring, batch, window_query)):
        _run(ring, launch, window_query, sink_query, output, scoring)
    return output


def _launches(ring: RingLayer, batch: MicroBatch, query: Tensor) -> list[_Launch]:
    """One for the decoding runs, one for the others, if there are any."""
    card = Card.of(query.device)
    kv_heads = ring.keys.shape[1]
    group = query.shape[0] // kv_heads
    launches = []
    for runs in ([run for run in batch.runs if run.count == 1], [run for run in batch.runs if run.count > 1]):
        if runs:
            longest = max(run.count for run in runs)
            tiles = choose_tiles(card, longest, group, query.shape[2], query.dtype, ring.keys.dtype)
            lines = [line for run in runs for line in _lines(ring, run, tiles.rows // group)]
            window = max(min(run.stop - ring.sinks(run.sinks), ring.recent + 1) for run in runs)
            splits = choose_splits(card, len(lines) * kv_heads, window, tiles)
            table = torch.tensor(lines, dtype=torch.int32).to(batch.device)
            launches.append(_Launch(table, tiles, splits, any(run.holes for run in runs)))
    return launches


def _lines(ring: RingLayer, run: Run, queries: int) -> list[list[int]]:
    """BLOCK_FIELDS numbers for each ``queries`` queries of a run."""
    sinks = ring.sinks(run.sinks)
    # Whole turns of the ring change nothing and keep positions in 32 bits, however long the text.
    turns = max(0, run.start - sinks - ring.recent) // ring.capacity * ring.capacity
    holes = [edge - turns for hole in run.holes for edge in hole] + [FAR] * (2 * (MAX_HOLES - len(run.holes)))
    return [
        [run.offset + first, min(queries, run.count - first), run.start + first - turns, run.slot, sinks, *holes]
        for first in range(0, run.count, queries)
    ]


def _run(
    ring: RingLayer, launch: _Launch, window_query: Tensor, sink_query: Tensor, output: Tensor, scoring: Scoring
) -> None:
    from streamllm_core.kernels import sink_window_triton as kernels

    heads, _, head_dim = window_query.shape
    kv_heads, rows = ring.keys.shape[1:3]
    table, tiles, splits = launch.table, launch.tiles, launch.splits
    queries = tiles.rows // (heads // kv_heads)
    target, logsum = output, output
    if splits > 1:
        logsum = torch.empty(splits, len(table) * queries, heads, device=output.device)
        target = torch.empty(*logsum.shape, head_dim, device=output.device)
    unit = 1.0 if ring.key_peaks is None else 1 / 127
    dims = {"D": head_dim, "D_PADDED": power_of_2(head_dim), "FIELDS": BLOCK_FIELDS}
    kernels.attention[(len(table), kv_heads, splits)](
        window_query,
        sink_query,
        ring.keys,
        ring.values,
        ring.keys if ring.key_peaks is None else ring.key_peaks,
        ring.values if ring.value_peaks is None else ring.value_peaks,
        target,
        logsum,
        table,
        output if scoring.s_aux is None else scoring.s_aux,
        ring.recent,
        ring.capacity,
        rows,
        *window_query.stride()[:2],
        *sink_query.stride()[:2],
        LOG2E * (scoring.softcap or scoring.scale * unit),
        2 * scoring.scale * unit / (scoring.softcap or 1.0),
        unit,
        GROUP=heads // kv_heads,
        M=tiles.rows,
        N=tiles.keys,
        N_SINKS=tiles.sinks,
        HOLES=MAX_HOLES if launch.holes else 0,
        CAPPED=scoring.softcap is not None,
        AUX=scoring.s_aux is not None,
        SCALED=ring.key_peaks is not None,
        SPLIT=splits > 1,
        PRECISION="ieee" if window_query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **dims,
    )
    if splits > 1:
        kernels.merge[(len(table) * queries, heads)](
            target, logsum, output, table, splits, QUERIES=queries, MOST=MOST_SPLITS, **dims
        )
