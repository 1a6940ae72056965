"""The sizing manager of this machine: its free memory, its measured rates, its cap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from streamllm_core.hardware import LinkRates
from streamllm_core.memory.budget import KVCacheSizingManager
from streamllm_core.memory.limits import free_bytes, parse_bytes

ALLOCATOR_SLACK = 64 * 10**6  # libraries' workspaces, and what lies between blocks


def sizing_manager(device: torch.device, dtype: torch.dtype, vram: int | str | None) -> KVCacheSizingManager:
    """For a budget of ``vram`` bytes, or of what is free. On a card the budget is a cap: PyTorch's allocator refuses
    to go beyond it. Raises ValueError."""
    budget = parse_bytes(vram) if vram is not None else free_bytes(device)
    rates = measured_rates(device, dtype)
    if device.type == "cpu":
        return KVCacheSizingManager(budget, rates)
    total = torch.cuda.get_device_properties(device).total_memory
    if vram is not None:  # what another model of this process holds already has a budget of its own
        capped = budget + torch.cuda.memory_allocated(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, capped / total), device)
    return KVCacheSizingManager(budget, rates, slack=allocator_slack(min(budget, total)))


def allocator_slack(budget: int) -> int:
    """Bytes of a card's budget that are left to libraries' workspaces and to gaps between blocks."""
    return ALLOCATOR_SLACK + budget // 50


@cache
def measured_rates(device: torch.device, dtype: torch.dtype) -> LinkRates:
    """Measured once a process. On a CPU layers are streamed from disk, so that is its link."""
    rates = LinkRates.measure(device, dtype)
    return replace(rates, host_to_device=rates.disk) if device.type == "cpu" else rates
