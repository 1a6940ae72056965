"""Memory does not grow with a log: a whole job on a large one beside a small one, and segmenting a very large one.

    python -m tests.benchmarks.log_memory [--only job,segments] [--job-mb 20] [--segments-mb 500] [--tokenizer]

job       peak resident memory of `streamllm-batch summarize` on a log of --job-mb and on one of 1 MB, tiny random model
segments  how far reading and segmenting a log of --segments-mb, without an engine, rises above the memory at its start

A token is four characters while segmenting, unless --tokenizer asks for a real (and slow) one. The log's messages are
real ones, each line with a time and a number of its own. This process imports nothing large: the peak that Linux
reports for a child begins with what its parent held when it was started.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MESSAGES = ROOT / "samples" / "packages.log.gz"
MB = 1_000_000
VOCABULARY = 4000


def log_lines() -> Iterator[str]:
    """Endless: the messages of a real log again and again, no line twice."""
    with gzip.open(MESSAGES, "rt", encoding="utf-8") as file:
        messages = [line.rstrip("\n").split(" ", 2)[-1] for line in file]
    for number, message in enumerate(itertools.cycle(messages)):
        second, minute, hour = number % 60, number // 60 % 60, number // 3600 % 24
        day, mark = number // 86400 % 28 + 1, number * 2654435761 % 2**32  # a word that differs from line to line
        yield f"2026-11-{day:02} {hour:02}:{minute:02}:{second:02} {message} [{mark:08x}]\n"


def write_log(path: Path, size: int) -> Path:
    written = 0
    lines = log_lines()
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            block = "".join(itertools.islice(lines, 10_000))
            written += file.write(block[: size - written])
    return path


def write_model(folder: str) -> None:
    """One narrow layer, and a tokenizer that was trained on such a log. For a process of its own: it loads torch."""
    from tests.conftest import CHAT_TEMPLATE, build_tokenizer
    from tests.streamllm_core.tiny_llama import write_llama

    lines = list(itertools.islice(log_lines(), 20_000))
    tokenizer = build_tokenizer().train_new_from_iterator(lines, VOCABULARY, show_progress=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    write_llama(
        Path(folder), layers=1, hidden=16, heads=2, kv_heads=1, vocabulary=len(tokenizer), context=2048, eos_token_id=0
    )


def job_peak(model: Path, log: Path, style: str) -> dict[str, float]:
    """Peak resident megabytes, seconds and input tokens of a whole job, in a process of its own."""
    output = log.with_suffix(".jsonl")
    command = [sys.executable, "-m", "pipeline.cli", "summarize", str(log), str(output), "--model", str(model)]
    command += ["--device", "cpu", "--dtype", "float32", "--window", "512", "--quiet", "--style", style]
    command += ["--prompt", "Sum up.", "--note-prompt", "Note.", "--max-new-tokens", "8"] if style == "notes" else []
    began = time.perf_counter()
    process = os.posix_spawn(sys.executable, command, {**os.environ, "PYTHONPATH": str(ROOT)})
    _, status, used = os.wait4(process, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"the job ended with exit code {os.waitstatus_to_exitcode(status)}")
    [record] = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    tokens = record["usage"]["input_tokens"]
    return {"peak_mb": used.ru_maxrss * 1024 / MB, "seconds": seconds, "tokens": tokens}


def resident(name: str) -> float:
    """VmRSS or VmHWM (its peak) of this process, in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / MB
    raise ValueError(f"/proc/self/status has no {name}")


def segment(log: str, tokenizer: str | None, results: multiprocessing.Queue[dict[str, float]]) -> None:
    """Read and segment a log. For a process of its own: what is measured is its peak."""
    from pipeline.documents import Document, read_rows
    from pipeline.inputs import resolve_inputs
    from pipeline.prompts import DataEncoder

    if tokenizer is not None:
        encoder = DataEncoder(Path(tokenizer, "tokenizer.json").read_text(encoding="utf-8"))

    def encode(text: str) -> list[int]:
        return list(encoder.encode(text).ids) if tokenizer is not None else [0] * -(-len(text) // 4)

    [file] = resolve_inputs((log,), "text", "unused.jsonl").files
    [row] = read_rows(file)
    start, began = resident("VmRSS"), time.perf_counter()
    segments = tokens = size = 0
    for each in Document(row, encode).segments(1000):
        segments, tokens, size = segments + 1, tokens + len(each.ids), each.end
    results.put(
        {
            "bytes": size,
            "segments": segments,
            "tokens": tokens,
            "start_mb": start,
            "peak_mb": resident("VmHWM"),
            "seconds": time.perf_counter() - began,
        }
    )


def segment_peak(log: Path, tokenizer: Path | None) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=segment, args=(str(log), str(tokenizer) if tokenizer else None, results))
    process.start()
    found: dict[str, float] = results.get()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="job,segments")
    parser.add_argument("--job-mb", type=int, default=20)
    parser.add_argument("--segments-mb", type=int, default=500)
    parser.add_argument("--style", choices=("highlights", "notes"), default="highlights")
    parser.add_argument("--tokenizer", action="store_true", help="segment with the tiny model's tokenizer")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}

    def show(name: str, found: dict[str, float]) -> None:
        results[name] = {key: round(value, 1) for key, value in found.items()}
        print(f"{name:18}", *(f"{key} {value:,}" for key, value in results[name].items()), sep="  ", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "model", Path(folder) / "large.log"
        if "job" in options.only or options.tokenizer:
            process = multiprocessing.get_context("spawn").Process(target=write_model, args=(str(model),))
            process.start()
            process.join()
        if "job" in options.only:
            for size in (1, options.job_mb):
                log = write_log(Path(folder) / f"{size}mb.log", size * MB)
                show(f"job {size} MB", job_peak(model, log, options.style))
            small, large = results.values()
            print(f"{'job':18}  above the small one: {large['peak_mb'] - small['peak_mb']:.1f} MB")
        if "segments" in options.only:
            log = write_log(Path(folder) / "segments.log", options.segments_mb * MB)
            found = segment_peak(log, model if options.tokenizer else None)
            show(f"segments {options.segments_mb} MB", found)
            print(f"{'segments':18}  above the start: {found['peak_mb'] - found['start_mb']:.1f} MB")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
