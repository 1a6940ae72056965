"""How much memory there is, and how people write sizes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

UNLIMITED = 2**62  # bytes; a budget that nothing exceeds
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int) -> int:
    """'4GB' → 4·10⁹, '6GiB' → 6·2³⁰, 1234 → 1234. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", str(text).lower())
    if not match:
        raise ValueError(f"'{text}' is not a size; write for example 4GB or 512MB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def format_bytes(count: int) -> str:
    """1_234_000_000 → '1.234 GB', 5_000 → '0.005 MB': rounded up, so that what is shown suffices."""
    unit, name = (10**9, "GB") if count >= 10**8 else (10**6, "MB")
    return f"{-(-count * 1000 // unit) / 1000:.3f} {name}"


def free_bytes(device: torch.device) -> int:
    """What is free on the device now; for the CPU, the RAM available to this process (control groups included)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    available = int(fields["MemAvailable"]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
