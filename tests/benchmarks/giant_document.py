"""One giant document: how many passes over the weights its notes cost, beside reading and then writing token by token.

    python -m tests.benchmarks.giant_document [--tokens 20000] [--note-tokens 64] [--streams 16]

A document of its own cannot share a pass with others, so without forks every token of every note would cost a pass of
its own. The run is the product's: the `notes` style, its planner, its runner. Only the model is tiny and random, and
cannot end a note early: how many passes there are depends on the lengths alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pipeline.config import InputConfig, JobConfig, ModelConfig, RunConfig, SummaryConfig
from pipeline.documents import Document
from pipeline.inputs import InputFile
from pipeline.loading import load
from pipeline.report import Reporter
from pipeline.rows import Place, Row
from pipeline.tasks import TASKS
from tests.conftest import build_tokenizer
from tests.streamllm_core.tiny_llama import write_llama

BOOK = Path(__file__).parents[2] / "samples" / "book.txt"


@dataclass(frozen=True)
class Cost:
    """``reading_passes``: what reading alone takes. ``asks``: notes and merges, each of the full length."""

    document_tokens: int
    segments: int
    asks: int
    generated: int
    reading_passes: int
    passes: int
    seconds: float

    @property
    def one_at_a_time(self) -> int:
        """Passes when a note is written before reading goes on, token by token."""
        return self.reading_passes + self.generated

    @property
    def ratio(self) -> float:
        return self.passes / self.one_at_a_time


def write_endless_model(folder: Path, context: int = 4096) -> Path:
    """A tiny random model whose control tokens never have the highest logit: every answer is as long as allowed."""
    tokenizer = build_tokenizer()
    hidden = 32
    head = torch.randn(len(tokenizer), hidden, generator=torch.Generator().manual_seed(7))
    head[tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder)] = 0
    write_llama(
        folder, layers=1, hidden=hidden, vocabulary=len(tokenizer), context=context, extra={"lm_head.weight": head}
    )
    tokenizer.save_pretrained(folder)
    return folder


def measure(model: Path, tokens: int, note_tokens: int, streams: int | None = None) -> Cost:
    """Summarize the beginning of a book, ``tokens`` long, with the `notes` style."""
    config = RunConfig(
        TASKS["summarize"],
        ModelConfig(str(model), dtype="float32", device="cpu", streams=streams),
        InputConfig(("book",)),
        SummaryConfig("notes", notes="all", max_new_tokens=note_tokens),
        JobConfig("unused.jsonl"),
    )
    loaded = load(config, Reporter(quiet=True))
    book = BOOK.read_text(encoding="utf-8")
    ids = loaded.encode(book)
    if len(ids) < tokens:
        raise SystemExit(f"the book has {len(ids)} tokens only")
    text = loaded.model.tokenizer.decode(ids[:tokens])
    document = Document(Row(InputFile(0, "book", "jsonl", None, 0, ""), Place(), text=text), loaded.encode)
    lengths = [len(segment.ids) for segment in document.segments(loaded.options.segment_tokens)]

    began = time.perf_counter()
    loaded.runner.start(document, config.task.run(document, loaded.options))
    finished = []
    while loaded.runner.busy:
        finished += loaded.runner.step()
    [done] = finished
    if done.error is not None:
        raise done.error
    assert done.result is not None
    return Cost(
        document_tokens=sum(lengths),
        segments=len(lengths),
        asks=len(done.result.notes or ()) + 1,
        generated=loaded.engine.tokens_generated,
        reading_passes=sum(-(-length // loaded.engine.pass_tokens) for length in lengths),
        passes=loaded.engine.passes,
        seconds=round(time.perf_counter() - began, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--note-tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, help="default: the engine's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cost = measure(write_endless_model(Path(folder)), options.tokens, options.note_tokens, options.streams)
    results = {**asdict(cost), "one_at_a_time": cost.one_at_a_time, "ratio": round(cost.ratio, 3)}
    for name, value in results.items():
        print(f"{name:16} {value:>8}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
