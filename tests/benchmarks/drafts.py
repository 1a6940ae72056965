"""Tokens per pass per stream when an answer copies from what was read: looking up n-grams against decoding one by one.

    python -m tests.benchmarks.drafts [--model smollm2] [--rows 4] [--answer 160] [--threads N] [--json FILE]

Each row is a passage of a real speech in the model's own chat form, with the request to repeat it word for word. Both
engines answer all rows greedily, in float32; their answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet
import torch

from pipeline.prompts import Prompter
from streamllm_core import AutoModel, EngineConfig, Request, StreamingModel

SPEECHES = Path(__file__).parents[2] / "samples" / "speeches.parquet"
INSTRUCTION = "Extract the passage below word for word. Change nothing, add nothing."
QUESTION = "Repeat the passage word for word."
PASSAGE = 900  # characters


@dataclass(frozen=True)
class Outcome:
    """``per_turn``: tokens that a stream gained in a pass in which it generated; ``copied``: share of the answers'
    words that stand in the passage."""

    draft_tokens: int
    passes: int
    generated: int
    drafted: int
    accepted: int
    per_turn: float
    copied: float
    seconds: float


def passages(rows: int) -> list[str]:
    """Whole sentences from the beginnings of as many speeches."""
    texts = pyarrow.parquet.read_table(SPEECHES, columns=["text"])["text"].to_pylist()
    return [re.match(r"(?s).*[.!?](?=\s)", text[: PASSAGE + 1])[0].strip() for text in texts[:rows]]  # type: ignore[index]


def measure(model: StreamingModel, rows: list[str], answer: int, draft_tokens: int) -> tuple[Outcome, list[list[int]]]:
    prompter = Prompter(model.tokenizer)
    pin, question = prompter.pin(INSTRUCTION), prompter.question(QUESTION, INSTRUCTION)
    engine = model.engine(
        EngineConfig(window=1024, sinks=len(pin), excursion=0, streams=len(rows), draft_tokens=draft_tokens)
    )
    requests = []
    for text in rows:
        tokens = (*prompter.data(text).ids, *question)
        requests.append(
            Request(engine.open(pin), tokens, max_new_tokens=answer, stop=prompter.stop | model.stop_tokens)
        )
        engine.submit(requests[-1])
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - began
    words = [
        (set(text.split()), prompter.text(each.generated).split()) for text, each in zip(rows, requests, strict=True)
    ]
    outcome = Outcome(
        draft_tokens,
        engine.passes,
        engine.tokens_generated,
        engine.tokens_drafted,
        engine.tokens_accepted,
        round(engine.tokens_per_turn, 2),
        round(sum(word in there for there, said in words for word in said) / max(1, sum(len(w) for _, w in words)), 2),
        round(seconds, 1),
    )
    return outcome, [request.generated for request in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--answer", type=int, default=160)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModel.from_pretrained(options.model, device=options.device, dtype="float32")
    rows = passages(options.rows)
    results, answers = zip(*(measure(model, rows, options.answer, drafts) for drafts in (0, 4, 8)), strict=True)
    print(*(f"{name:>12}" for name in asdict(results[0])))
    for outcome in results:
        print(*(f"{value:>12}" for value in asdict(outcome).values()))
    print("answers are the same:", all(answer == answers[0] for answer in answers))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
