"""What this machine can do: memory, link bandwidths and matmul rates, measured now."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from streamllm_core.memory.limits import free_bytes

COPY_BYTES = 256 * 2**20
REPEATS = 5


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
    """GB/s of copying ``source`` to ``target``."""
    seconds = median_seconds(lambda: target.copy_(source, non_blocking=True), device)
    return source.nbytes / seconds / 1e9


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of a square product on random data (8,192 on a GPU, 1,024 on a CPU)."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return float(2 * size**3 / median_seconds(lambda: left @ right, device) / 1e12)


def measure(device: torch.device) -> dict[str, object]:
    """A flat report: names, bytes, GB/s, TFLOP/s. Links that do not exist on this machine are absent."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    report: dict[str, object] = {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": pages,
        "ram_available_bytes": free_bytes(torch.device("cpu")),
        "torch": torch.__version__,
    }
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).fill_(1)
    report["ram_copy_gb_s"] = copy_rate(torch.empty_like(host), host, torch.device("cpu"))
    report["cpu_float32_tflops"] = matmul_rate(torch.float32, torch.device("cpu"))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        pinned = host.pin_memory()
        card = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        report |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "vram_bytes": properties.total_memory,
            "vram_free_bytes": free_bytes(device),
            "host_to_device_page_locked_gb_s": copy_rate(card, pinned, device),
            "host_to_device_pageable_gb_s": copy_rate(card, host, device),
            "device_to_host_page_locked_gb_s": copy_rate(pinned, card, device),
            "gpu_float16_tflops": matmul_rate(torch.float16, device),
            "gpu_bfloat16_tflops": matmul_rate(torch.bfloat16, device),
        }
    limit = Path("/proc/self/limits")
    if limit.exists():
        line = next(row for row in limit.read_text().splitlines() if row.startswith("Max locked memory"))
        report["locked_memory_limit"] = line.split()[3]
    return report


def table(report: dict[str, object]) -> str:
    """The report for people: one line an item, sizes in GB."""
    lines = []
    for name, value in report.items():
        if name.endswith("_bytes") and isinstance(value, int):
            name, value = name.removesuffix("_bytes") + "_gb", value / 1e9
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name.replace('_', ' '):<36}{shown}")
    return "\n".join(lines)


@dataclass(frozen=True)
class LinkRates:
    """Bytes and operations a second."""

    host_to_device: float
    disk: float
    matmul: float
    memory: float


def link_rates(device: torch.device, dtype: torch.dtype) -> LinkRates:
    return LinkRates(1e9, 1e9, 8e10, 1e10) if device.type == "cpu" else LinkRates(55e9, 1e9, 7e14, 4e12)
