"""The CUDA attention kernel beside torch's varlen_attn with the same window, and beside the memory bandwidth.

    python -m tests.benchmarks.attention_kernel [--sweep]

28 query and 4 key heads of 128, bf16, window 2,048, streams 10,000 tokens long. ``varlen_attn`` gets its window as a
copy of its own, made outside the timing; the sinks it cannot do. --sweep tries other tiles, and prints the best ones.

x varlen    time of varlen_attn ÷ ours (for grouped heads, where it takes them; else with repeated keys)
bandwidth   bytes of the window ÷ our time ÷ the rate of a device copy in the same run (read + written bytes)
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from streamllm_core.architectures import LayerGeometry
from streamllm_core.kernels import sink_window
from streamllm_core.kernels.scoring import Scoring
from streamllm_core.kernels.sink_window_tiles import Tiles
from streamllm_core.kv_storage import KVDtype, row_bytes
from streamllm_core.layout import MicroBatch, Run
from streamllm_core.ring import RingLayer

HEADS, KV_HEADS, HEAD_DIM, WINDOW, LENGTH = 28, 4, 128, 2048, 10_000
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda", 0)
PREFILL = ((1, 4096), (4, 1024), (16, 256))  # streams, queries of each
DECODE = ((1, 1), (8, 1), (64, 1), (256, 1))
SINKS = (0, 4, 64)
# For --sweep: rows, keys, warps, stages.
PREFILL_TILES = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3))
DECODE_TILES = ((16, 64, 4, 3), (16, 64, 4, 2), (16, 64, 4, 4), (16, 128, 4, 3), (16, 32, 4, 4), (16, 64, 2, 3))


def milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=40, return_mode="median"))


def copy_rate() -> float:
    """Bytes per millisecond of a copy on the device, read and written ones."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def varlen(streams: int, queries: int) -> Callable[[], object]:
    from torch.nn.attention.varlen import varlen_attn

    span = queries + WINDOW
    query = torch.randn(streams * queries, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    keys, values = torch.randn(2, streams * span, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    starts = torch.arange(streams + 1, dtype=torch.int32, device=DEVICE)
    offsets = starts * queries, starts * span

    def run(keys: Tensor, values: Tensor) -> object:
        return varlen_attn(query, keys, values, *offsets, queries, span, window_size=(WINDOW, 0))

    try:
        run(keys, values)
    except (RuntimeError, ValueError):  # some versions of torch want as many key heads as query heads
        keys, values = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (keys, values))
    return lambda: run(keys, values)


def ours(streams: int, queries: int, sinks: int, kv_dtype: KVDtype = "auto") -> Callable[[], object]:
    geometry = LayerGeometry(True, WINDOW)
    headroom = max(queries, 64)
    ring = RingLayer(geometry, streams, sinks, headroom, KV_HEADS, HEAD_DIM, DTYPE, DEVICE, kv_dtype)
    for part, peaks in ((ring.keys, ring.key_peaks), (ring.values, ring.value_peaks)):
        part.copy_(torch.randn(part.shape[1:], device=DEVICE).mul_(1 if peaks is None else 30))
        if peaks is not None:
            peaks.fill_(4.0)
    runs = [Run(stream, stream * queries, queries, LENGTH, sinks) for stream in range(streams)]
    batch = MicroBatch(runs, 0, DEVICE)
    query = torch.randn(2, HEADS, batch.tokens, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    scoring = Scoring(HEAD_DIM**-0.5)
    return lambda: sink_window.attend(ring, batch, query[0], query[1], scoring)


def window_bytes(streams: int, queries: int, sinks: int, kv_dtype: KVDtype) -> int:
    """What must be read of the cache at least, and of queries and output."""
    cached = 2 * streams * (WINDOW + queries + sinks) * KV_HEADS * row_bytes(kv_dtype, HEAD_DIM, DTYPE)
    return cached + (3 if sinks else 2) * streams * queries * HEADS * HEAD_DIM * DTYPE.itemsize


def compare(rate: float) -> None:
    print("streams queries sinks kv      ours µs  varlen µs  x varlen  bandwidth  cost of sinks")
    for streams, queries in PREFILL + DECODE:
        other = attempt(lambda shape=(streams, queries): varlen(*shape))
        bare = float("nan")
        for sinks, kv_dtype in [*((sinks, "auto") for sinks in SINKS), (4, "int8"), (4, "fp8")]:
            time = attempt(lambda case=(streams, queries, sinks, kv_dtype): ours(*case))
            bare = time if sinks == 0 else bare
            share = window_bytes(streams, queries, sinks, kv_dtype) / time / rate
            cost = f"{time / bare - 1:+.1%}" if kv_dtype == "auto" and sinks else ""
            print(
                f"{streams:7} {queries:7} {sinks:5} {kv_dtype:5} {time * 1e3:9.1f} {other * 1e3:10.1f}"
                f" {other / time:9.2f} {share:10.2f}  {cost}",
                flush=True,
            )
        torch.cuda.empty_cache()


def sweep() -> None:
    """The three best tiles of each shape, with 4 sinks."""
    print("\nstreams queries kv      best tiles: µs (rows, keys, warps, stages)")
    for (streams, queries), kv_dtype in itertools.product(((1, 4096), (1, 1), (64, 1), (256, 1)), ("auto", "int8")):
        candidates = DECODE_TILES if queries == 1 else PREFILL_TILES
        found = []
        for tiles in candidates:
            with patch.object(sink_window, "choose_tiles", lambda *_, tiles=tiles: Tiles(*tiles)):
                time = attempt(lambda case=(streams, queries, 4, kv_dtype): ours(*case), quiet=True)
            found.append((time, tiles))
        best = sorted(item for item in found if not math.isnan(item[0]))[:3]
        shown = "; ".join(f"{time * 1e3:.1f} {tiles}" for time, tiles in best)
        failed = len(candidates) - sum(not math.isnan(time) for time, _ in found)
        print(f"{streams:7} {queries:7} {kv_dtype:5} {shown}" + (f"; {failed} failed" if failed else ""), flush=True)
        torch.cuda.empty_cache()


def attempt(prepare: Callable[[], Callable[[], object]], *, quiet: bool = False) -> float:
    """Milliseconds of what ``prepare`` makes; NaN, and the reason, when it does not run."""
    try:
        return milliseconds(prepare())
    except Exception as error:  # noqa: BLE001 - one configuration may not fit a card; the others shall be measured
        if not quiet:
            print(f"  failed: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
        return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles (each one is compiled)")
    wanted = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; device copy {rate / 1e6:.0f} GB/s")
    compare(rate)
    if wanted.sweep:
        sweep()


if __name__ == "__main__":
    main()
