"""Constant memory, constant time: one stream reads millions of tokens through a tiny random Llama.

    python -m tests.benchmarks.constant_memory [--tokens 4000000] [--slice 100000] [--device cpu]

The resident memory when the first slice has been read (which warms everything up) is compared with that at the end.
Time is compared pair by pair: the stream's last slice and the second slice of a young stream are read in turns, a few
thousand tokens each, so that a processor whose speed wanders slows both. On the way the stream does what documents do:
once in a while a question is asked on an excursion and another on a fork, a span is evicted, a snapshot is taken, a
stream is opened on a pinned instruction. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from streamllm_core import AutoModel, Engine, EngineConfig, Request, Stream
from tests.streamllm_core.tiny_llama import write_llama

WINDOW, VOCABULARY = 512, 97
CHUNK = 8192  # tokens of a request
PIN = tuple(range(16))


@dataclass(frozen=True)
class Slice:
    """What reading ``tokens`` cost, and the resident memory behind it."""

    tokens: int
    seconds: float
    cpu_seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class Result:
    slices: list[Slice]
    old_seconds: float  # a slice at the end of the long text
    young_seconds: float  # the second slice of a text of its own, read in turns with it

    @property
    def growth(self) -> float:
        """Resident memory at the end, as a multiple of that behind the first slice."""
        return self.slices[-1].resident_bytes / self.slices[0].resident_bytes

    @property
    def slowdown(self) -> float:
        """Time of the last slice, as a multiple of a second one's."""
        return self.old_seconds / self.young_seconds


def measure(tokens: int, slice_tokens: int, device: str) -> Result:
    """Read ``tokens`` in slices of ``slice_tokens``."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder), layers=1, vocabulary=VOCABULARY)
        model = AutoModel.from_pretrained(folder, device=device, dtype="float32")
    # Small passes: what they take and give back is then small beside the 2 % to be seen.
    engine = model.engine(
        EngineConfig(window=WINDOW, sinks=len(PIN), excursion=64, streams=3, pass_tokens=1024, micro_tokens=256)
    )
    stream = engine.open(PIN)
    slices = []
    for _ in range(tokens // slice_tokens):
        started, cpu_started = time.perf_counter(), time.process_time()
        _read(engine, stream, slice_tokens)
        _live(engine, stream)
        slices.append(
            Slice(slice_tokens, time.perf_counter() - started, time.process_time() - cpu_started, _resident_bytes())
        )
    young = engine.open(PIN)
    _read(engine, young, slice_tokens)
    old_seconds = young_seconds = 0.0
    for _ in range(-(-slice_tokens // CHUNK)):
        old_seconds += _read(engine, stream, CHUNK)
        young_seconds += _read(engine, young, CHUNK)
    return Result(slices, old_seconds, young_seconds)


def _read(engine: Engine, stream: Stream, tokens: int) -> float:
    """Read on; the seconds that it took."""
    started = time.perf_counter()
    goal = stream.length + tokens
    while stream.length < goal:
        _run(engine, Request(stream, _text(min(CHUNK, goal - stream.length)), score=True))
    return time.perf_counter() - started


def _live(engine: Engine, stream: Stream) -> None:
    """Everything else that happens in the life of a document."""
    _run(engine, Request(stream, _text(16), max_new_tokens=8, excursion=True))
    fork = engine.fork(stream)
    _run(engine, Request(fork, _text(16), max_new_tokens=8))
    engine.close(fork)
    engine.evict(stream, stream.length - 300, stream.length - 200)
    tensors = engine.snapshot(stream)
    engine.close(engine.restore(tensors))
    other = engine.open(PIN)
    _run(engine, Request(other, _text(100), spans=[(0, 50), (50, 100)]))
    engine.close(other)


def _run(engine: Engine, request: Request) -> None:
    engine.submit(request)
    while engine.busy:
        engine.step()


def _text(count: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,)).tolist()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--slice", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    result = measure(arguments.tokens, arguments.slice, arguments.device)
    every = max(1, len(result.slices) // 10)
    print(f"{'tokens read':>12} {'resident MB':>12} {'s a slice':>10}")
    for number, part in enumerate(result.slices, 1):
        if number <= 2 or number % every == 0:
            print(f"{number * part.tokens:>12,} {part.resident_bytes / 1e6:>12.1f} {part.seconds:>10.2f}")
    print(f"memory grew by {result.growth - 1:.2%}; the last slice took {result.slowdown:.2f} times a second one")
    print(json.dumps({"growth": result.growth, "slowdown": result.slowdown, **asdict(result)}))


if __name__ == "__main__":
    main()
