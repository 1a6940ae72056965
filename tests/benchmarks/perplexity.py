"""What quantized weights cost: perplexity of a model on a book, in each format.

    python -m tests.benchmarks.perplexity [--model smollm2] [--tokens 4000] [--window 1024]

The text is read through the rolling cache (4 pinned tokens, the window as given), computed in float32 on the CPU but
for bfloat16, which is computed as the engine does on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from streamllm_core import AutoModel, Engine, EngineConfig, StreamingModel
from streamllm_core.weights.quantized import QUANTIZERS

BOOK = Path(__file__).parents[2] / "samples" / "book.txt"
SINKS, CHUNK, ROWS = 4, 512, 64
FORMATS = ("float32", "bfloat16", *QUANTIZERS)


def load(name: str, format_name: str) -> StreamingModel:
    """The model on the CPU, whole; quantized ones compute in float32."""
    if format_name in QUANTIZERS:
        return AutoModel.from_pretrained(name, device="cpu", dtype="float32", quantize=format_name)
    return AutoModel.from_pretrained(name, device="cpu", dtype=format_name)


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
