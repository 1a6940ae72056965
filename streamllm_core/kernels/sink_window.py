"""Sink + window attention on CUDA: packed ragged queries straight against the ring, one launch for reading runs and
one for decoding ones, no window copied. ``sink_window_torch`` is its reference.

A program handles M rows (queries × the query heads of one KV head) and walks over the pinned keys with the query
rotated for the sinks, then over the window with the query at its true position, under one online softmax
(Milakov & Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamllm_core.cache import MAX_HOLES, RingLayer
from streamllm_core.layout import MicroBatch, Run

BLOCK_FIELDS = 5 + 2 * MAX_HOLES  # first row, rows, position of the first row, slot, sinks, holes
FAR = 2**31 - 1


def available(device: torch.device) -> bool:
    """Triton is there (it is not on Windows) and the tensors are on a CUDA device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attend(
    ring: RingLayer,
    batch: MicroBatch,
    window_query: Tensor,
    sink_query: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Same contract as ``sink_window_torch``: queries [heads, tokens, head_dim] → [tokens, heads, head_dim]."""
    heads, tokens, head_dim = window_query.shape
    group = heads // ring.keys.shape[1]
    output = torch.empty(tokens, heads, head_dim, dtype=window_query.dtype, device=window_query.device)
    narrow = max(16, 1 << (group - 1).bit_length())
    wide = max(narrow, 128 if _shared_memory(window_query.device) > 160_000 and head_dim <= 128 else 64)
    for name, rows, runs in (
        ("decode", narrow, [run for run in batch.runs if run.count == 1]),
        ("prefill", wide, [run for run in batch.runs if run.count > 1]),
    ):
        if runs:
            build = partial(_table, ring, runs, rows // group, batch.device)
            table, holes = batch.memo((name, ring.pins, ring.capacity), build)
            _launch(ring, table, holes, rows, window_query, sink_query, output, scale, softcap, s_aux)
    return output


def _table(ring: RingLayer, runs: list[Run], queries: int, device: torch.device) -> tuple[Tensor, bool]:
    """One line of BLOCK_FIELDS int32 for each program of ``queries`` queries, and whether there are holes."""
    lines = []
    for run in runs:
        sinks = ring.sinks(run.sinks)
        # Whole turns of the ring change nothing and keep positions in 32 bits, however long the text.
        turns = max(0, run.start - sinks - ring.recent) // ring.capacity * ring.capacity
        holes = [edge - turns for hole in run.holes for edge in hole] + [FAR] * (2 * (MAX_HOLES - len(run.holes)))
        for first in range(0, run.count, queries):
            count = min(queries, run.count - first)
            lines.append([run.offset + first, count, run.start + first - turns, run.slot, sinks, *holes])
    return torch.tensor(lines, dtype=torch.int32).to(device), any(run.holes for run in runs)


def _shared_memory(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _launch(
    ring: RingLayer,
    table: Tensor,
    holes: bool,
    rows: int,
    window_query: Tensor,
    sink_query: Tensor,
    output: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> None:
    import triton

    from streamllm_core.kernels.sink_window_triton import kernel

    heads, _, head_dim = window_query.shape
    kv_heads = ring.keys.shape[1]
    roomy = _shared_memory(window_query.device) > 160_000
    exact = window_query.dtype == torch.float32
    options: dict[str, Any] = {"num_warps": 8 if rows >= 128 else 4, "num_stages": 3 if roomy and not exact else 1}
    kernel[(len(table), kv_heads)](
        window_query,
        sink_query,
        ring.keys,
        ring.values,
        output,
        table,
        s_aux if s_aux is not None else output,
        ring.recent,
        ring.capacity,
        *window_query.stride()[:2],
        *sink_query.stride()[:2],
        *ring.keys.stride()[:3],
        *output.stride()[:2],
        scale,
        softcap or 0.0,
        GROUP=heads // kv_heads,
        D=head_dim,
        D_PADDED=max(16, triton.next_power_of_2(head_dim)),  # the least that tl.dot takes
        M=rows,
        N=32 if exact else 64,
        N_SINKS=16,
        FIELDS=BLOCK_FIELDS,
        HOLES=MAX_HOLES if holes else 0,
        CAPPED=softcap is not None,
        AUX=s_aux is not None,
        PRECISION="ieee" if exact else "tf32",
        **options,
    )
