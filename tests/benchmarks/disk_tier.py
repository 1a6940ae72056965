"""Passes whose layers all come from disk, against the disk's own rate in the same run.

    python -m tests.benchmarks.disk_tier [--folder DISK]

A random model of twelve layers of Qwen2-7B's shape (bf16, 5.6 GB) is written to a folder and dropped from the page
cache before every pass; no layer stays in VRAM or RAM. The limit of a pass is the layers' bytes over the rate at which
eight threads read the same files in 4 MB pieces and do nothing else, before and after. Wanted: at most 1.10 times it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from streamllm_core import AutoModel, EngineConfig
from streamllm_core.skeleton import Skeleton

THREADS, PIECE = 8, 4 * 2**20
SECONDS = 40  # for the passes


def write_model(folder: Path, layers: int, hidden: int, device: torch.device) -> None:
    """config.json, an index, and one file a layer."""
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=hidden * 37 // 7,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128 // 7,
        vocab_size=1024,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    shapes = {name: value.shape for name, value in Skeleton(config, torch.bfloat16).causal.state_dict().items()}
    located: dict[str, str] = {}
    for prefix in (*(f"model.layers.{index}." for index in range(layers)), ""):
        names = [name for name in shapes if name.startswith(prefix) and name not in located]
        file = f"part-{prefix or 'rest.'}safetensors"
        options = {"dtype": torch.bfloat16, "device": device}
        save_file({name: torch.empty(shapes[name], **options).normal_(0, 0.02).cpu() for name in names}, folder / file)
        located |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": located}))


def drop(files: list[Path]) -> None:
    """Out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_rate(files: list[Path]) -> float:
    """Bytes a second of reading the files one after the other, nothing else."""
    drop(files)
    buffers = [bytearray(PIECE) for _ in range(THREADS)]
    descriptors = [[os.open(path, os.O_RDONLY) for path in files] for _ in range(THREADS)]
    pieces = [(index, start) for index, path in enumerate(files) for start in range(0, path.stat().st_size, PIECE)]
    following = iter(pieces)

    def work(thread: int) -> int:
        done = 0
        while (piece := next(following, None)) is not None:
            done += os.preadv(descriptors[thread][piece[0]], [buffers[thread]], piece[1])
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        total = sum(threads.map(work, range(THREADS)))
    seconds = time.perf_counter() - begin
    for descriptor in (descriptor for mine in descriptors for descriptor in mine):
        os.close(descriptor)
    return total / seconds


def pass_seconds(folder: Path, files: list[Path], device: torch.device) -> tuple[list[float], int]:
    """Seconds of consecutive passes of one token, the first left out, and the bytes of a pass.

    Passes follow each other at once: what one has read ahead for the next is paid back by what it found read ahead.
    """
    model = AutoModel.from_pretrained(folder, device=device, dtype="bfloat16", resident_layers=0, ram="0GB")
    engine = model.engine(EngineConfig(window=64, sinks=4, streams=1, excursion=0))
    stream = engine.open(sinks=4)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 6 and sum(times) < SECONDS:
        drop(files)
        engine.forward([(stream, [1])])
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(-begin + (begin := time.perf_counter()))
    return times[1:], sum(layout.nbytes for layout in model.streamer.layouts.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=3584, help="a multiple of 896")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        write_model(folder, options.layers, options.hidden, device)
        files = sorted(folder.glob("part-model*.safetensors"))
        before = plain_rate(files)
        times, nbytes = pass_seconds(folder, files, device)
        after = plain_rate(files)
    rate, seconds = (before + after) / 2, statistics.mean(times)
    print(f"{device}, {options.layers} layers, {nbytes / 1e9:.2f} GB a pass, {len(times)} passes")
    print(f"disk     {before / 1e9:6.2f} GB/s before, {after / 1e9:6.2f} GB/s after")
    print(f"limit    {nbytes / rate:6.2f} s")
    print(f"pass     {seconds:6.2f} s   {nbytes / seconds / 1e9:6.2f} GB/s   " + " ".join(f"{t:.2f}" for t in times))
    print(f"pass / limit {seconds / (nbytes / rate):.3f}")


if __name__ == "__main__":
    main()
