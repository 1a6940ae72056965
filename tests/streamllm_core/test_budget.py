"""From a byte budget to resident layers and streams: deterministic, never over, with the arithmetic when it fails."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamllm_core import AutoModel, BudgetError, EngineConfig, StreamingModel
from streamllm_core.errors import ModelError
from streamllm_core.hardware import LinkRates
from streamllm_core.memory.arena import ALIGNMENT, ArenaLayout
from streamllm_core.memory.budget import Demand, KVCacheSizingManager
from streamllm_core.memory.limits import free_bytes, parse_bytes
from streamllm_core.memory.sizes import ModelSizes

LAYER_BYTES = 2 * 32 * 32 * 4 + 2 * 16 * 32 * 4 + 3 * 32 * 48 * 4 + 2 * 256  # of the tiny Llama, each tensor aligned
FIXED_BYTES = 2 * 97 * 32 * 4 + 32 * 4  # embedding, head and final norm, as on the CPU


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        (" 6GiB ", 6 * 2**30),
        ("1.5G", 1_500_000_000),
        (".5k", 500),
        ("512MiB", 512 * 2**20),
        ("2t", 2 * 10**12),
        ("1234", 1234),
        ("7b", 7),
        (1234, 1234),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str | int, wanted: int) -> None:
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "GB", "4XB", "4 G B", "-1", -1, "1e9", "1,5GB", "4GBs", "inf", "٤GB", "4.GB", "0x10"]
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write for example 4GB"):
        parse_bytes(text)


def test_free_memory_is_what_the_system_has(device: str) -> None:
    free = free_bytes(torch.device(device))
    total = (
        torch.cuda.mem_get_info()[1]
        if device == "cuda"
        else int(re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    )
    assert 0 < free <= total


# --- plans -----------------------------------------------------------------------------------------------------

RATES = LinkRates(host_to_device=20e9, disk=2e9, matmul=50e12, memory=400e9)


def random_sizes(chance: random.Random) -> ModelSizes:
    layers = tuple(chance.randint(50, 150) * 10**6 for _ in range(chance.randint(1, 30)))
    packed = chance.random() < 0.5
    expanded = tuple(3 * size for size in layers) if packed else layers
    head = chance.randint(100, 900) * 10**6
    return ModelSizes(
        layers,
        expanded,
        layers,
        max(expanded) if packed else 0,
        fixed=chance.randint(0, 10**6),
        head=head,
        head_tile=chance.choice([0, 64 * 10**6]),
        hidden=2048,
        mlp_width=8192,
        heads=16,
        kv_heads=4,
        head_dim=128,
        vocabulary=50_000,
        layer_operations=2 * sum(expanded) // len(expanded) // 2,
        itemsize=2,
    )


def random_demand(chance: random.Random) -> Demand:
    row = chance.randint(1, 100) * 1000
    window = chance.randint(100, 3000)
    return Demand(
        window,
        chance.randint(0, 700),
        lambda headroom: row * (window + headroom),
        chance.choice([1, 4, 64, 300]),
        most_pass_tokens=chance.choice([1024, 32_768]),
        most_micro_tokens=chance.choice([512, 4096]),
        pass_tokens=chance.choice([None, 777]),
        micro_tokens=chance.choice([None, 300]),
        answer_tokens=chance.choice([0, 1, 100]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_never_exceeds_its_budget_and_is_the_same_every_time(seed: int) -> None:
    chance = random.Random(seed)
    sizes, wanted = random_sizes(chance), random_demand(chance)
    manager = KVCacheSizingManager(chance.randint(1, 12) * 10**9, RATES, slack=chance.randint(0, 10**8))
    try:
        plan = manager.plan(sizes, wanted)
    except BudgetError as error:
        least = parse_bytes(re.findall(r"= ([0-9.]+ [GM]B) is the least", str(error))[0])
        assert least > manager.budget
        enough = KVCacheSizingManager(least, RATES, manager.slack).plan(sizes, wanted)
        assert enough.total <= least  # what the message asks for does suffice
        return
    assert plan == manager.plan(sizes, wanted)
    assert sum(plan.items().values()) == plan.total <= plan.budget
    place, batch = plan.placement, plan.batching
    assert sorted({*place.resident, *place.streamed}) == list(range(len(sizes.layers)))
    assert batch.stream_bytes == wanted.cache_bytes(max(batch.chunk_tokens, wanted.excursion))
    assert batch.activations == sizes.activation_bytes(batch.micro_tokens, batch.pass_tokens)
    assert 1 <= batch.streams <= wanted.streams
    assert batch.chunk_tokens <= batch.micro_tokens <= batch.pass_tokens
    assert batch.pass_tokens == wanted.pass_tokens or wanted.pass_tokens is None
    if batch.streams < wanted.streams:  # the budget is used: not even one more stream fits
        assert plan.total + batch.stream_bytes > plan.budget
    assert manager.batch(place, wanted).prediction.job >= plan.prediction.job


@pytest.mark.parametrize("seed", range(10))
def test_more_memory_is_never_slower_and_in_the_end_nothing_streams(seed: int) -> None:
    chance = random.Random(seed)
    sizes, wanted = random_sizes(chance), random_demand(chance)
    speed, plan = 0.0, None
    for giga in (2, 4, 8, 16, 64, 1000):
        try:
            plan = KVCacheSizingManager(giga * 10**9, RATES).plan(sizes, wanted)
        except BudgetError:
            assert plan is None  # what fits a small budget fits a larger one
            continue
        assert plan.prediction.job >= speed * 0.98  # hundredths count as equal
        speed = plan.prediction.job
    assert plan is not None
    assert plan.placement.streamed == ()
    assert plan.placement.scratchpads == 0


@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_so_many_layers_stay_as_asked_and_spread_evenly(count: int) -> None:
    sizes = replace(random_sizes(random.Random(1)), layers=(100,) * count, expanded=(100,) * count, kept=(100,) * count)
    demand = Demand(100, 10, lambda headroom: headroom, 4, 64, 64)
    for wanted in range(count + 3):
        plan = KVCacheSizingManager(10**12, RATES).plan(sizes, demand, wanted)
        assert len(plan.resident) == min(wanted, count)
        gaps = [later - earlier for earlier, later in zip(plan.resident, plan.resident[1:], strict=False)]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
        assert plan.placement.scratchpads == (200 if wanted < count else 0)


def test_half_the_layers_halve_the_transfer_and_a_head_may_be_streamed() -> None:
    sizes = replace(random_sizes(random.Random(1)), layers=(10**8,) * 8, expanded=(10**8,) * 8, kept=(10**8,) * 8)
    sizes = replace(sizes, workspace=0, head=10**9, head_tile=5 * 10**7)
    demand = Demand(1000, 10, lambda headroom: 10**6, 4, 64, 64)
    none = KVCacheSizingManager(10**12, RATES).plan(sizes, demand, 0)
    half = KVCacheSizingManager(10**12, RATES).plan(sizes, demand, 4)
    assert half.placement.layer_bytes_per_pass * 2 == none.placement.layer_bytes_per_pass
    assert none.placement.head_stays
    small = KVCacheSizingManager(6 * 10**8, RATES).plan(sizes, demand)
    assert not small.placement.head_stays
    assert small.placement.head_bytes == 10**8
    assert small.placement.bytes_per_pass == small.placement.layer_bytes_per_pass + 10**9


def test_a_plan_is_shown_byte_for_byte() -> None:
    plan = KVCacheSizingManager(8 * 10**9, RATES, 10**7).plan(
        random_sizes(random.Random(3)), random_demand(random.Random(5))
    )
    shown = plan.table()
    for name, size in plan.items().items():
        assert (name in shown) == (size > 0)
    assert "tokens/s" in shown
    assert "is the limit" in shown


# --- a model within a budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4])
def test_a_model_keeps_as_many_layers_as_asked(
    folders: Callable[[int], Path], load: Callable[..., StreamingModel], kept: int
) -> None:
    model = AutoModel.from_pretrained(folders(4), device="cpu", dtype="float32", resident_layers=kept)
    assert len(model.plan.resident) == kept
    assert model.sizes.fixed + model.sizes.head == FIXED_BYTES
    assert model.plan.placement.scratchpads == (2 if kept < 4 else 0) * LAYER_BYTES
    text = torch.arange(50)[None]
    assert torch.equal(model.logits(text), load(4).logits(text))


def test_an_engine_has_as_many_streams_as_fit(folders: Callable[[int], Path]) -> None:
    model = AutoModel.from_pretrained(folders(4), device="cpu", dtype="float32", vram="1.8MB")
    config = EngineConfig(window=100, streams=1000, pass_tokens=16, excursion=20)
    engine = model.engine(config)
    cache = sum(tensor.nbytes for layer in engine.cache.layers for tensor in (layer.keys, layer.values))
    assert 1 <= engine.streams < 1000
    assert cache == engine.streams * engine.stream_bytes
    assert engine.plan.total <= 1_800_000 < engine.plan.total + engine.stream_bytes
    with pytest.raises(BudgetError, match=r"one stream .* is the least"):
        model.engine(EngineConfig(window=4000, streams=1))


@pytest.mark.parametrize("vram", [1, "50kB"])
def test_a_model_that_does_not_fit_is_refused(folders: Callable[[int], Path], vram: Any) -> None:
    with pytest.raises(BudgetError, match=r"does not suffice.* is the least"):
        AutoModel.from_pretrained(folders(4), device="cpu", vram=vram)


@pytest.mark.parametrize(
    "options",
    [
        {"resident_layers": -1},
        {"resident_layers": "all"},
        {"device": "tpu"},
        {"dtype": "int8"},
        {"vram": "much"},
        {"ram": "1GB"},
    ],
)
def test_senseless_options_are_refused(folders: Callable[[int], Path], options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, RuntimeError, ModelError)):
        AutoModel.from_pretrained(folders(4), **{"device": "cpu", **options})


# --- arenas ----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that no alignment divides, dtypes that differ, a buffer, an empty tensor, a module within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 5))
        self.small = nn.Parameter(torch.randn(7).half())
        self.inner = nn.Linear(5, 3)
        self.inner.register_buffer("count", torch.tensor(5))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def test_an_arena_holds_each_tensor_once_aligned_and_apart() -> None:
    layout = ArenaLayout.of(Odd())
    names = [entry.name for entry in layout.entries]
    assert names == ["first", "small", "flag", "empty", "inner.weight", "inner.bias", "inner.count"]
    ends = 0
    for entry in layout.entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= ends
        ends = entry.offset + entry.nbytes
    assert ends <= layout.nbytes < ends + ALIGNMENT


def test_a_layer_bound_to_an_arena_is_the_layer_that_was_copied_there() -> None:
    source, layer = Odd(), Odd()
    layout = ArenaLayout.of(source)
    block = torch.full((layout.nbytes + 100,), 0xFF, dtype=torch.uint8)
    views = layout.views(block)
    for name, tensor in source.state_dict().items():
        views[name].data.copy_(tensor)
    layout.bind(layer, views)
    for name, tensor in source.state_dict().items():
        found = layer.state_dict()[name]
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
        if found.numel():
            assert block.data_ptr() <= found.data_ptr() < block.data_ptr() + layout.nbytes
    assert isinstance(layer.first, nn.Parameter)
    assert dict(layer.named_parameters()).keys() == dict(source.named_parameters()).keys()
    block.zero_()
    assert not layer.first.any()  # views for good: what comes into the slot is in the layer
