"""What this machine can do: memory, link bandwidths and matmul rates, measured now."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from streamllm_core.memory.bus import Bus, CudaBus
from streamllm_core.memory.limits import free_bytes
from streamllm_core.weights.conversion_cache import cache_root
from streamllm_core.weights.reading import FileRange, RangeReader, drop_from_page_cache

COPY_BYTES = 256 * 2**20
PROBE_BYTES = 64 * 2**20
REPEATS = 5
DISK_BYTES = 2**30
LOCK_BYTES = 16 * 10**9
LOCK_SECONDS = 0.7
COMMON_DISK = 2e9  # bytes/s that a common solid-state disk reads
CPU = torch.device("cpu")


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median wall time of ``run`` after one warm-up, with the device synchronised around each call."""

    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    return statistics.median(timed() for _ in range(repeats))


def copy_rate(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Bytes a second of copying ``source`` to ``target``."""
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), device)


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of a square product on random data."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: left @ right, device)


def memory_rate(device: torch.device, nbytes: int = COPY_BYTES) -> float:
    """Bytes a second that the device's memory moves, reads and writes counted both, in a copy inside it."""
    block = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    return 2 * copy_rate(torch.empty_like(block), block, device)


def file_rate(path: Path, nbytes: int) -> float:
    """Bytes a second of reading the beginning of a file as layers are read, after it was dropped from the page cache.
    Raises OSError, ModelError."""
    size = min(nbytes, path.stat().st_size)
    drop_from_page_cache(path, size)
    block = torch.empty(min(size, COPY_BYTES), dtype=torch.uint8).fill_(1)
    reader = RangeReader()
    begin = time.perf_counter()
    for start in range(0, size, block.nbytes):
        part = block[: size - start]
        reader.read([(FileRange(path, start, part.nbytes), part)])
    return size / (time.perf_counter() - begin)


def disk_rate(folder: Path) -> float | None:
    """Bytes a second of reading a file of DISK_BYTES made in ``folder``; None when that would take more than half of
    the free space. Raises ValueError when the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < 2 * DISK_BYTES:
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix="streamllm-hardware-") as file:
            for _ in range(0, DISK_BYTES, 2**26):
                file.write(random.randbytes(2**26))
            file.flush()
            return file_rate(Path(file.name), DISK_BYTES)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror}); name a folder on the disk") from error


def lockable_bytes(bus: Bus) -> tuple[int, bool]:
    """How many bytes were page-locked, in growing blocks, and whether the system refused more. Half of the available
    RAM, LOCK_BYTES and LOCK_SECONDS end the trial as well. Everything is given back."""
    most = min(free_bytes(CPU) // 2, LOCK_BYTES)
    blocks: list[torch.Tensor] = []
    locked, size, refused, start = 0, 2**26, False, time.perf_counter()
    while not refused and locked + size <= most and time.perf_counter() - start < LOCK_SECONDS:
        block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        refused = not bus.lock(block)
        if not refused:
            blocks.append(block)
            locked, size = locked + size, min(2 * size, 2**30)
    for block in blocks:
        bus.unlock(block)
    return locked, refused


@dataclass(frozen=True)
class LinkRates:
    """What plans are made with, to two significant digits, so that a plan does not change with the noise.

    ``host_to_device``, ``disk`` and ``memory`` in bytes/s, ``matmul`` in FLOP/s. On a CPU ``host_to_device`` is the
    rate of a copy in RAM.
    """

    host_to_device: float
    disk: float
    matmul: float
    memory: float

    @staticmethod
    def measure(device: torch.device, dtype: torch.dtype, file: Path | None = None) -> LinkRates:
        """A quick probe, below half a second on a GPU. ``file``: one of the model's, whose beginning is read to
        measure its disk; without it COMMON_DISK is assumed. Raises OSError, ModelError when it cannot be read."""
        host = torch.empty(PROBE_BYTES, dtype=torch.uint8).fill_(1)
        card = torch.empty_like(host, device=device)
        locked = host.pin_memory() if device.type == "cuda" else host
        rates = (
            copy_rate(card, locked, device),
            COMMON_DISK if file is None else file_rate(file, 2 * PROBE_BYTES),
            matmul_rate(dtype, device, 4096 if device.type == "cuda" else 1024),
            memory_rate(device, PROBE_BYTES),
        )
        return LinkRates(*(float(f"{rate:.1e}") for rate in rates))


def measure(device: torch.device, disk: Path | None = None) -> dict[str, object]:
    """A flat report: names, bytes, GB/s, TFLOP/s. Links that do not exist on this machine are absent.

    ``disk`` is the folder whose disk is measured, by default the one that converted models are kept in. Raises
    ValueError when it cannot be written.
    """
    folder = disk or cache_root()
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).fill_(1)
    report: dict[str, object] = {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "ram_available_bytes": free_bytes(CPU),
        "torch": torch.__version__,
        "ram_copy_gb_s": copy_rate(torch.empty_like(host), host, CPU) / 1e9,
        "cpu_float32_tflops": matmul_rate(torch.float32, CPU, 1024) / 1e12,
        "disk": str(folder),
    }
    if (rate := disk_rate(folder)) is not None:
        report["disk_read_gb_s"] = rate / 1e9
    if device.type == "cuda":
        report |= _measure_card(device, host)
    limit = Path("/proc/self/limits")
    if limit.exists():
        line = next(row for row in limit.read_text().splitlines() if row.startswith("Max locked memory"))
        report["locked_memory_limit"] = line.split()[3]
    return report


def _measure_card(device: torch.device, host: torch.Tensor) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    locked = host.pin_memory()
    card = torch.empty_like(host, device=device)
    lockable, refused = lockable_bytes(CudaBus(device))
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "vram_bytes": properties.total_memory,
        "vram_free_bytes": free_bytes(device),
        "host_to_device_page_locked_gb_s": copy_rate(card, locked, device) / 1e9,
        "host_to_device_pageable_gb_s": copy_rate(card, host, device) / 1e9,
        "device_to_host_page_locked_gb_s": copy_rate(locked, card, device) / 1e9,
        "gpu_memory_gb_s": memory_rate(device) / 1e9,
        "gpu_float16_tflops": matmul_rate(torch.float16, device, 8192) / 1e12,
        "gpu_bfloat16_tflops": matmul_rate(torch.bfloat16, device, 8192) / 1e12,
        "page_locked_in_trial_bytes": lockable,
        "page_lock_refused_beyond": refused,
    }


def not_measured(report: dict[str, object]) -> list[str]:
    """One line for each thing that the report lacks."""
    lines = []
    if "gpu" not in report:
        lines.append("No CUDA device: page-locked transfers, their limit, and GPU rates were not measured.")
    if "disk_read_gb_s" not in report:
        lines.append(f"Too little free space in {report['disk']}: the disk was not measured; see --disk.")
    return lines


def table(report: dict[str, object]) -> str:
    """The report for people: one line an item, sizes in GB."""
    lines = []
    for name, value in report.items():
        if name.endswith("_bytes") and isinstance(value, int):
            name, value = name.removesuffix("_bytes") + "_gb", value / 1e9
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name.replace('_', ' '):<36}{shown}")
    return "\n".join(lines)
