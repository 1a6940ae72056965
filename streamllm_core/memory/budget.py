"""Turning a byte budget into a plan: which layers stay on the device, and how many streams fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from streamllm_core.errors import BudgetError

# Share of the budget kept for caches and activations when the layers alone would take all of it.
CACHE_SHARE = 0.3
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int) -> int:
    """'4GB' → 4·10⁹, '6GiB' → 6·2³⁰, 1234 → 1234. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", str(text).lower())
    if not match:
        raise ValueError(f"'{text}' is not a size; write for example 4GB or 512MB")
    return int(float(match[1]) * UNITS[match[2] or ""])


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


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes of a budget go."""

    budget: int
    fixed: int  # embedding, norms, head
    scratchpads: int  # both slots
    resident: tuple[int, ...]  # indices of the layers that stay
    resident_bytes: int

    @property
    def left(self) -> int:
        """Bytes for caches and activations."""
        return self.budget - self.fixed - self.scratchpads - self.resident_bytes


class KVCacheSizingManager:
    """Answers deterministically from sizes alone."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def place_layers(self, layer_bytes: list[int], fixed: int, resident: int | None) -> MemoryPlan:
        """Choose the resident layers: ``resident`` of them, or (None) as many as leave CACHE_SHARE of the budget.

        Streamed layers are spread evenly between resident ones, so that their transfers hide behind more work.
        Raises BudgetError, with the arithmetic, when two scratchpads do not fit.
        """
        count = len(layer_bytes)
        slots = 2 * max(layer_bytes)
        if resident is None:
            room = int(self.budget * (1 - CACHE_SHARE)) - fixed
            all_fit = sum(layer_bytes) <= room
            resident = count if all_fit else max(0, (room - slots) // max(layer_bytes))
        resident = min(resident, count)
        slots = slots if resident < count else 0
        chosen = tuple(sorted({index * count // resident for index in range(resident)})) if resident else ()
        plan = MemoryPlan(self.budget, fixed, slots, chosen, sum(layer_bytes[index] for index in chosen))
        if plan.left <= 0:
            raise BudgetError(
                f"a budget of {self.budget / 1e9:.2f} GB does not suffice: embedding, norms and head take "
                f"{fixed / 1e9:.2f} GB, two scratchpads {slots / 1e9:.2f} GB, {len(chosen)} resident layers "
                f"{plan.resident_bytes / 1e9:.2f} GB, and nothing is left for the cache."
            )
        return plan


def fit_streams(available: int, stream_bytes: int, activation_bytes: int, most: int) -> int:
    """How many streams fit beside the activations, at most ``most``. Raises BudgetError when none does."""
    streams = min(most, (available - activation_bytes) // stream_bytes)
    if streams < 1:
        raise BudgetError(
            f"{available / 1e9:.2f} GB are left for the cache, but one stream takes {stream_bytes / 1e9:.3f} GB and a "
            f"pass {activation_bytes / 1e9:.3f} GB. Use a smaller window, or a larger budget."
        )
    return int(streams)
