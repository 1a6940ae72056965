"""The whole `notes` job on a CPU beside llama.cpp, same model file, threads, prompts and numbers of output tokens.

    python -m tests.benchmarks.llama_peer [--documents 16] [--tokens 8000] [--answer 64] [--types Q4_1,Q4_0]

Needs `pip install llama-cpp-python` (it builds for some minutes; no part of the project does). Our side is the product:
planner, runner, `notes` style, merges. Answers are as long as allowed on both sides. llama.cpp gets what the job asked
for as numbers of tokens, in its best order: all documents side by side, prompts in full batches, and one token of every
answer in a batch; tokens beyond the window are taken out of its cache, so that it attends to no more than we do.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

SPEECHES = Path(__file__).parents[2] / "samples" / "speeches.parquet"
BATCH = 512


@dataclass
class Script:
    """What a job asked of the model, in tokens. ``reads[d]``: of each segment of document d; ``ask``: question and
    answer behind each; ``merges``: text and answer of each, in fresh streams."""

    pin: int
    window: int
    ask: tuple[int, int]
    reads: list[list[int]] = field(default_factory=list)
    merges: list[tuple[int, int]] = field(default_factory=list)


def ours(documents: int, tokens: int, answer: int) -> tuple[float, Script]:
    """Seconds of our job, and its script."""
    from pipeline.config import InputConfig, JobConfig, ModelConfig, RunConfig, SummaryConfig
    from pipeline.documents import Document
    from pipeline.inputs import InputFile
    from pipeline.loading import load
    from pipeline.report import Reporter
    from pipeline.rows import Place, Row
    from pipeline.tasks import TASKS

    config = RunConfig(
        TASKS["summarize"],
        ModelConfig(device="cpu", streams=documents + 1),
        InputConfig(("speeches",)),
        SummaryConfig("notes", max_new_tokens=answer),
        JobConfig("unused.jsonl"),
    )
    loaded = load(config, Reporter(quiet=True))
    loaded.runner._stop = frozenset()  # type: ignore[attr-defined]
    texts = parquet.read_table(SPEECHES)["text"].to_pylist()
    whole = " ".join(texts)
    ids = loaded.encode(whole)
    asked: list[tuple[int, int]] = []
    submit = loaded.engine.submit

    def watched(request: Any) -> None:
        asked.append((len(request.tokens), request.max_new_tokens))
        submit(request)

    loaded.engine.submit = watched  # type: ignore[method-assign]
    waiting, reads = [], []
    for number in range(documents):
        part = loaded.model.tokenizer.decode(ids[number * tokens : (number + 1) * tokens])
        document = Document(Row(InputFile(0, "speech", "jsonl", None, 0, ""), Place(), text=part), loaded.encode)
        reads.append([len(segment.ids) for segment in document.segments(loaded.options.segment_tokens)])
        waiting.append(Document(Row(InputFile(0, "speech", "jsonl", None, 0, ""), Place(), text=part), loaded.encode))
    start = time.perf_counter()
    while waiting or loaded.runner.busy:
        while waiting and loaded.runner.has_room:
            document = waiting.pop()
            loaded.runner.start(document, config.task.run(document, loaded.options))
        for finished in loaded.runner.step():
            assert finished.error is None
    seconds = time.perf_counter() - start
    answers = [(count, new) for count, new in asked if new]
    question = min(answers)
    pin = loaded.engine.config.sinks
    merges = [(count, new) for count, new in answers if count > 2 * question[0]]
    return seconds, Script(pin, loaded.engine.config.window, question, reads, merges)


class Llama:
    """llama.cpp through its own C interface, one sequence for each document."""

    def __init__(self, path: Path, sequences: int, context: int, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * context, BATCH, BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.position = [0] * sequences

    def feed(self, wanted: Sequence[tuple[int, int, bool]]) -> None:
        """Append so many tokens to sequences: (sequence, tokens, whether the last one's logits are wanted)."""
        rows = [
            (sequence, self.position[sequence] + token, last and token == count - 1)
            for sequence, count, last in wanted
            for token in range(count)
        ]
        for sequence, count, _ in wanted:
            self.position[sequence] += count
        for start in range(0, len(rows), BATCH):
            self._decode(rows[start : start + BATCH])

    def _decode(self, rows: Sequence[tuple[int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (sequence, position, last) in enumerate(rows):
            batch.token[index] = 100 + (position * 7919 + sequence) % 40_000
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = last
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for index, (_, _, last) in enumerate(rows):
            if last:
                logits = self._lib.llama_get_logits_ith(self._context, index)
                max(range(0, self._vocabulary, 4096), key=lambda token: logits[token])  # an argmax costs us more

    def forget(self, sequence: int, start: int, stop: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, stop)

    def cut(self, sequence: int, length: int) -> None:
        """Back to so many tokens."""
        self.forget(sequence, length, -1)
        self.position[sequence] = length


def theirs(path: Path, script: Script, threads: int) -> float:
    """Seconds of the same job."""
    documents = len(script.reads)
    longest = max(len(reads) for reads in script.reads)
    context = -(-(script.pin + script.window + 2 * max(map(max, script.reads))) // 256) * 256
    llama = Llama(path, documents, context, threads)
    question, answer = script.ask
    start = time.perf_counter()
    llama.feed([(sequence, script.pin, False) for sequence in range(documents)])
    for number in range(longest):
        live = [sequence for sequence in range(documents) if number < len(script.reads[sequence])]
        llama.feed([(sequence, script.reads[sequence][number], False) for sequence in live])
        before = {sequence: llama.position[sequence] for sequence in live}
        _answers(llama, live, question, answer)
        for sequence in live:
            llama.cut(sequence, before[sequence])
            llama.forget(sequence, script.pin, max(script.pin, before[sequence] - script.window))
    for first in range(0, len(script.merges), documents):
        part = script.merges[first : first + documents]
        for sequence in range(len(part)):
            llama.cut(sequence, 0)
        llama.feed([(sequence, count - 1, False) for sequence, (count, _) in enumerate(part)])
        _answers(llama, range(len(part)), 1, answer)
    return time.perf_counter() - start


def _answers(llama: Llama, live: Sequence[int], question: int, answer: int) -> None:
    llama.feed([(sequence, question, True) for sequence in live])
    for _ in range(answer - 1):
        llama.feed([(sequence, 1, True) for sequence in live])


def requantized(source: Path, kind: str, folder: Path) -> Path:
    """The same model in another of llama.cpp's types."""
    if kind == "Q4_1":
        return source
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"Q4_0": 2, "Q8_0": 7, "BF16": 32}[kind]
    params.allow_requantize = True
    target = folder / f"{kind}.gguf"
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"{kind}: llama.cpp could not requantize")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", default="Q4_1,Q4_0,Q8_0,BF16")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    from streamllm_core.weights.default_model import default_model_file

    torch.set_num_threads(options.threads)
    seconds, script = ours(options.documents, options.tokens, options.answer)
    asks = sum(map(len, script.reads))
    print(
        f"{options.documents} documents, {sum(map(sum, script.reads)):,} tokens read, {asks} notes and "
        f"{len(script.merges)} merges of {options.answer} tokens"
    )
    print(f"ours              {seconds:8.1f} s  {3600 * options.documents / seconds:7.1f} documents/hour", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types.split(","):
            theirs_seconds = theirs(requantized(default_model_file(), kind, Path(folder)), script, options.threads)
            print(
                f"llama.cpp {kind:6}  {theirs_seconds:8.1f} s  {3600 * options.documents / theirs_seconds:7.1f} "
                f"documents/hour; ours are {theirs_seconds / seconds:.2f} times as many",
                flush=True,
            )


if __name__ == "__main__":
    main()
