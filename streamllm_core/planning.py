"""What a model would take and give within a budget, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from streamllm_core.blueprint import Blueprint
from streamllm_core.devices import DTYPES, computes_in, resolve_device, resolve_dtype
from streamllm_core.engine_config import EngineConfig, demand, within
from streamllm_core.hardware import LinkRates
from streamllm_core.memory.budget import KVCacheSizingManager
from streamllm_core.memory.limits import free_bytes, parse_bytes
from streamllm_core.memory.machine import allocator_slack, measured_rates
from streamllm_core.memory.plan import MemoryPlan
from streamllm_core.skeleton import read_config
from streamllm_core.weights import open_headers

# A mid-range card on a PCIe 4.0 x16 slot, for machines that have none to measure.
ASSUMED = LinkRates(host_to_device=24e9, disk=2e9, matmul=40e12, memory=400e9)


def plan_model(
    name: str | Path,
    config: EngineConfig,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    vram: int | str | None = None,
    resident: int | None = None,
    revision: str | None = None,
    rates: Callable[[LinkRates], LinkRates] = lambda measured: measured,
) -> tuple[MemoryPlan, bool]:
    """The plan, and whether the rates of a card are assumed because this machine has none.

    ``device`` "cuda" may be planned for without a card, when ``vram`` says how much it has. ``rates`` may replace what
    was measured or assumed. Reads the configuration and the headers of the checkpoint only (from the hub, too).
    Raises ModelError, BudgetError, WindowError, ValueError.
    """
    absent = device.startswith("cuda") and not torch.cuda.is_available()
    place = torch.device("cuda", 0) if absent else resolve_device(device)
    number = DTYPES["bfloat16"] if absent and dtype == "auto" else resolve_dtype(dtype, place)
    if vram is None and absent:
        raise ValueError("to plan for a card that is not here, say how much memory it has: --vram 8GB")
    budget = parse_bytes(vram) if vram is not None else free_bytes(place)
    slack = allocator_slack(budget) if place.type == "cuda" else 0
    known = rates(ASSUMED if absent else measured_rates(place, number))
    source = open_headers(name, revision=revision, packed=place.type == "cuda")
    computed = number if absent or computes_in(number, place) else torch.float32
    blueprint = Blueprint(source, read_config(source), place, computed, rounded_to=number, planned=quantize)
    fitting = within(config, blueprint.config.max_position_embeddings)
    wanted = demand(fitting, blueprint.config, place, computed)
    return KVCacheSizingManager(budget, known, slack).plan(blueprint.sizes, wanted, resident), absent


def with_rates(
    bus_gb_s: float | None, matmul_tflops: float | None, memory_gb_s: float | None
) -> Callable[[LinkRates], LinkRates]:
    """Replace the rates that are given."""
    given = {
        "host_to_device": None if bus_gb_s is None else bus_gb_s * 1e9,
        "matmul": None if matmul_tflops is None else matmul_tflops * 1e12,
        "memory": None if memory_gb_s is None else memory_gb_s * 1e9,
    }
    return lambda rates: replace(rates, **{name: rate for name, rate in given.items() if rate is not None})
