"""A rolling window can cover a document many times its size: planted facts, asked for at every boundary.

    python -m tests.benchmarks.recall [--seeds 0,1,2] [--window 900] [--boundary 512]

A real speech of over 6,000 tokens gets eight sentences, "The secret code of the tiger is 4821.", spread over it. At
each boundary a fork for every fact is asked in completion form. Which boundary's answer counts is chosen by query
likelihood, log P(question | what the window holds there), which needs no decoding. The question's own words count, not
the frame "Question:" before them: its likelihood says how the text stops at the boundary, not what it is about.

chosen  right at the boundary that query likelihood chooses
any     right at some boundary
end     right when asked once, at the end of the text
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from streamllm_core import AutoModel, Engine, EngineConfig, Request, Stream, StreamingModel

SPEECHES = Path(__file__).parents[2] / "samples" / "speeches.parquet"
# fmt: off
ANIMALS = (
    "tiger", "lion", "elephant", "rabbit", "horse", "eagle", "dolphin", "monkey", "wolf", "fox",
    "bear", "camel", "goat", "snake", "owl", "whale", "sheep", "duck", "frog", "deer",
)
# fmt: on
FACTS = 8
TEXT_TOKENS = 6100
SINKS, ANSWER = 4, 6
FRAME = "\nQuestion:"
QUESTION = " What is the secret code of the {animal}? Answer: the secret code of the {animal} is"
_SENTENCE_END = re.compile(r"[a-z]\.\s+(?=[A-Z])")


@dataclass
class Fact:
    """``likelihoods`` and ``answers``: one for each boundary, the last of which is the end of the text."""

    animal: str
    code: str
    likelihoods: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> int:
        return self.likelihoods.index(max(self.likelihoods))

    def right(self, boundary: int) -> bool:
        return self.code in self.answers[boundary]


@dataclass(frozen=True)
class Recall:
    seed: int
    speech: str
    tokens: int
    facts: list[Fact]
    seconds: float

    def summary(self) -> dict[str, int | float | str]:
        boundaries = range(len(self.facts[0].answers))
        return {
            "seed": self.seed,
            "speech": self.speech,
            "tokens": self.tokens,
            "boundaries": len(boundaries),
            "chosen": sum(fact.right(fact.chosen) for fact in self.facts),
            "any": sum(any(map(fact.right, boundaries)) for fact in self.facts),
            "end": sum(fact.right(boundaries[-1]) for fact in self.facts),
            "seconds": self.seconds,
        }


def encode(model: StreamingModel, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def plant(text: str, rng: random.Random) -> tuple[str, list[Fact]]:
    """The text with a fact in each of its eighths, at a random sentence end."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    codes = rng.sample(range(1000, 10_000), FACTS)
    facts = [Fact(animal, str(code)) for animal, code in zip(rng.sample(ANIMALS, FACTS), codes, strict=True)]
    parts, last = [], 0
    for index, fact in enumerate(facts):
        wanted = len(text) * (index + rng.uniform(0.1, 0.9)) / FACTS
        place = min(ends, key=lambda end: abs(end - wanted))
        parts += [text[last:place], f"The secret code of the {fact.animal} is {fact.code}. "]
        last = place
    return "".join([*parts, text[last:]]), facts


def ask(engine: Engine, model: StreamingModel, stream: Stream, facts: list[Fact]) -> None:
    """All questions at this place of the stream, each on a fork, in the same passes."""
    frame = encode(model, FRAME)
    requests = []
    for fact in facts:
        question = frame + encode(model, QUESTION.format(animal=fact.animal))
        requests.append(Request(engine.fork(stream), question, max_new_tokens=ANSWER, score=True))
        engine.submit(requests[-1])
    while engine.busy:
        engine.step()
    for fact, request in zip(facts, requests, strict=True):
        engine.close(request.stream)
        fact.likelihoods.append(sum(request.logprobs[len(frame) :]))
        fact.answers.append(model.tokenizer.decode(request.generated))


def measure(model: StreamingModel, seed: int, window: int, boundary: int) -> Recall:
    rng = random.Random(seed)
    speeches = pyarrow.parquet.read_table(SPEECHES, columns=["id", "text"]).to_pylist()
    hosts = [(each["id"], each["text"], len(encode(model, each["text"]))) for each in speeches]
    hosts = [host for host in hosts if host[2] > TEXT_TOKENS]
    name, text, length = hosts[seed % len(hosts)]
    text, facts = plant(text[: len(text) * TEXT_TOKENS // length], rng)
    ids = encode(model, text)

    began = time.perf_counter()
    engine = model.engine(EngineConfig(window=window, sinks=SINKS, streams=FACTS + 1, excursion=0))
    stream = engine.open(ids[:SINKS])
    for start in range(SINKS, len(ids), boundary):
        engine.submit(Request(stream, ids[start : start + boundary]))
        while engine.busy:
            engine.step()
        ask(engine, model, stream, facts)
    return Recall(seed, name, len(ids), facts, round(time.perf_counter() - began, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--window", type=int, default=900)
    parser.add_argument("--boundary", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModel.from_pretrained(options.model, device="cpu", dtype="float32")
    results: list[dict[str, Any]] = []
    for seed in map(int, options.seeds.split(",")):
        recall = measure(model, seed, options.window, options.boundary)
        summary = recall.summary()
        if not results:
            print(*(f"{name:>10}" if name != "speech" else f"{name:>18}" for name in summary))
        print(*(f"{value:>10}" if name != "speech" else f"{value:>18}" for name, value in summary.items()), flush=True)
        facts = [{**asdict(fact), "chosen": fact.chosen} for fact in recall.facts]
        results.append({**summary, "facts": facts})
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
