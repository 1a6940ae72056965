"""What quantized weights cost: perplexity of a model on a book, in each format.

    python -m tests.benchmarks.perplexity [--model smollm2] [--tokens 4000] [--window 1024]

The text is read through the rolling cache (4 pinned tokens, the window as given), computed in float32 on the CPU but
for bfloat16, which is computed as the engine does on this machine.

The default model's own weights are Q4_1, in groups of 32, and int4 holds those nearly as they are: its figure flatters.
"int4-off" quantizes with the columns moved by half a group, across the stored groups, as it meets any other model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from streamllm_core import Engine, EngineConfig, StreamingModel
from streamllm_core.memory.budget import free_bytes
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.weights import open_source
from streamllm_core.weights.quantized import QUANTIZERS, quantize_source

BOOK = Path(__file__).parents[2] / "samples" / "book.txt"
SINKS, CHUNK, ROWS = 4, 512, 64
FORMATS = ("float32", "bfloat16", *QUANTIZERS, "int4-off")
HALF_A_GROUP = 16
CPU = torch.device("cpu")


class Moved:
    """A weight source with the columns of its layers' matrices moved to the right, plain."""

    def __init__(self, source: Any, columns: int) -> None:
        self._source, self._columns = source, columns
        self.fingerprint = {**source.fingerprint, "moved": columns}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def format(self, name: str) -> None:
        """Nothing is packed."""

    def tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._source.tensor(name)
        return value.roll(self._columns, -1) if value.ndim == 2 and ".layers." in name else value


def load(name: str, format_name: str) -> StreamingModel:
    """The model on the CPU, whole; quantized ones compute in float32."""
    source: Any = open_source(name)
    skeleton = Skeleton(read_config(source), torch.float32)
    dtype = torch.float32
    if format_name in QUANTIZERS:
        source = quantize_source(source, skeleton, format_name, dtype)
    elif format_name == "int4-off":
        moved = Moved(source, HALF_A_GROUP)
        source = Moved(quantize_source(moved, skeleton, "int4", dtype), -HALF_A_GROUP)
    else:
        dtype = getattr(torch, format_name)
    return StreamingModel(source, CPU, dtype, free_bytes(CPU), None)


@torch.inference_mode()
def perplexity(model: StreamingModel, ids: list[int], window: int) -> float:
    """exp of the mean negative log-likelihood of every token but the first."""
    engine = Engine(model, EngineConfig(window=window, sinks=SINKS, streams=1, pass_tokens=CHUNK, excursion=0))
    stream = engine.open(sinks=SINKS)
    targets = torch.tensor(ids[1:])
    total = 0.0
    for start in range(0, len(targets), CHUNK):
        wanted = targets[start : start + CHUNK]
        hidden = engine.forward([(stream, ids[start : start + len(wanted)])])
        for rows, answers in zip(hidden.split(ROWS), wanted.split(ROWS), strict=True):
            total += float(cross_entropy(model.head(rows), answers, reduction="sum"))
    return math.exp(total / len(targets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, float] = {}
    for format_name in options.formats.split(","):
        began = time.perf_counter()
        model = load(options.model, format_name)
        ids = model.tokenizer(BOOK.read_text(encoding="utf-8"))["input_ids"][: options.tokens]
        results[format_name] = perplexity(model, ids, options.window)
        loss = results[format_name] / next(iter(results.values())) - 1
        print(
            f"{format_name:>10} {results[format_name]:>9.3f} {loss:>+8.2%} {time.perf_counter() - began:>6.0f} s",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
