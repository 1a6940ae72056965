"""Pass times of a model of given shape with random weights, against limits measured in the same run.

The limit of a pass is max(transfer, compute): the bytes of all streamed layers over the link's measured bandwidth, and
the plain matmuls of the same shapes plus PyTorch's own attention, timed apart. Neither uses this package's code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from streamllm_core.bench.limits import ComputeLimit, link_bandwidth
from streamllm_core.bench.shapes import Shape
from streamllm_core.engine_config import EngineConfig
from streamllm_core.model import StreamingModel

LONG_AGO = 10_000  # streams are benchmarked this many tokens in: the window is full
DECODING = 256  # passes of up to so many tokens have one for each stream
CHUNK = 1024  # larger ones so many
REPEATS = 5


@dataclass(frozen=True)
class PassTime:
    """Milliseconds of one pass of ``tokens`` tokens over ``streams`` streams, and its limits; ``bytes`` crossed the
    link."""

    tokens: int
    streams: int
    bytes: int
    transfer: float
    compute: float
    sequential: float
    prefetched: float

    @property
    def limit(self) -> float:
        return max(self.transfer, self.compute)


def bench(model: StreamingModel, shape: Shape, tokens: Sequence[int], *, window: int) -> Iterator[PassTime]:
    """Measure passes of each number of tokens, one after the other and prefetched."""
    bandwidth = link_bandwidth(model) if model.streamer.order else float("inf")
    for count in tokens:
        streams = count if count <= DECODING else max(1, count // CHUNK)
        compute = ComputeLimit(shape, window, model.dtype, model.device).measure(count, streams)
        run = passes(model, streams, count // streams, window)
        times = {}
        for prefetching in (False, True):
            model.streamer.set_prefetching(prefetching)
            times[prefetching] = seconds_a_pass(run, model.device)
        moved = model.streamer.bytes_per_pass
        milliseconds = [1e3 * t for t in (moved / bandwidth, compute, times[False], times[True])]
        yield PassTime(count, streams, moved, *milliseconds)


def passes(model: StreamingModel, streams: int, chunk: int, window: int) -> Callable[[], None]:
    """A function that runs one pass of ``chunk`` tokens of each stream, all windows full."""
    tokens = streams * chunk
    micro = min(tokens, 4096) if model.device.type == "cuda" else min(tokens, 512)
    config = EngineConfig(window, sinks=4, excursion=0, streams=streams, pass_tokens=tokens, micro_tokens=micro)
    engine = model.engine(config)
    texts = [engine.open(sinks=4) for _ in range(streams)]
    for layer in engine.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    ids = torch.randint(model.config.vocab_size, (streams, chunk)).tolist()

    def run() -> None:
        for text in texts:
            text.length = text.reach = LONG_AGO
        engine.forward(list(zip(texts, ids, strict=True)))

    return run


def seconds_a_pass(run: Callable[[], None], device: torch.device) -> float:
    """Of passes that follow one another as in a job: the host waits for each result, the transfers go on."""

    def one() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    for _ in range(2):
        one()
    start = time.perf_counter()
    for _ in range(REPEATS):
        one()
    return (time.perf_counter() - start) / REPEATS


def table(rows: Sequence[PassTime]) -> str:
    """The measurements for people."""
    head = f"{'tokens':>7} {'streams':>8} {'MB moved':>9} {'transfer':>9} {'compute':>9} {'sequential':>11}"
    lines = [head + f" {'prefetched':>11} {'limit/seq':>10} {'limit/pre':>10}   (milliseconds a pass)"]
    lines += [
        f"{row.tokens:>7} {row.streams:>8} {row.bytes / 1e6:>9.0f} {row.transfer:>9.1f} {row.compute:>9.1f} "
        f"{row.sequential:>11.1f} {row.prefetched:>11.1f} {row.limit / row.sequential:>10.3f} "
        f"{row.limit / row.prefetched:>10.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def as_json(rows: Sequence[PassTime]) -> str:
    return json.dumps([asdict(row) | {"limit": row.limit} for row in rows])
