"""From a byte budget to resident layers and streams: deterministic, never over, with the arithmetic when it fails."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamllm_core import AutoModel, BudgetError, EngineConfig, StreamingModel
from streamllm_core.memory.arena import ALIGNMENT, ArenaLayout
from streamllm_core.memory.budget import (
    CACHE_SHARE,
    KVCacheSizingManager,
    fit_streams,
    free_bytes,
    parse_bytes,
)

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


# --- layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_never_exceeds_its_budget_and_uses_it(seed: int) -> None:
    chance = random.Random(seed)
    layers = [chance.randint(50, 150) for _ in range(chance.randint(1, 40))]
    fixed, budget = chance.randint(0, 500), chance.randint(400, 8000)
    manager = KVCacheSizingManager(budget)
    try:
        plan = manager.place_layers(layers, fixed, None)
    except BudgetError:
        assert fixed + 2 * max(layers) >= budget
        return
    assert plan == manager.place_layers(layers, fixed, None)
    assert plan.fixed + plan.scratchpads + plan.resident_bytes + plan.left == budget
    assert plan.left > 0
    assert plan.resident_bytes == sum(layers[index] for index in plan.resident)
    assert plan.resident == tuple(sorted(set(plan.resident)))
    if len(plan.resident) == len(layers):
        assert plan.scratchpads == 0
        assert plan.left >= int(budget * CACHE_SHARE)
    else:
        assert plan.scratchpads == 2 * max(layers)
        room = int(budget * (1 - CACHE_SHARE)) - fixed - plan.scratchpads
        assert len(plan.resident) * max(layers) <= max(room, 0)
        assert (len(plan.resident) + 1) * max(layers) > room  # one more might not fit


@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_so_many_layers_stay_as_asked_and_spread_evenly(count: int) -> None:
    for wanted in range(count + 3):
        plan = KVCacheSizingManager(10**6).place_layers([100] * count, 50, wanted)
        assert len(plan.resident) == min(wanted, count)
        assert all(0 <= index < count for index in plan.resident)
        streamed = [index for index in range(count) if index not in plan.resident]
        gaps = [later - earlier for earlier, later in zip(plan.resident, plan.resident[1:], strict=False)]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
        assert plan.scratchpads == (200 if streamed else 0)


def test_a_budget_for_nothing_is_refused_with_the_arithmetic() -> None:
    giga = 10**9
    with pytest.raises(BudgetError, match=r"2\.00 GB.*head take 1\.00 GB, two scratchpads 1\.00 GB, 0 resident"):
        KVCacheSizingManager(2 * giga).place_layers([giga // 2] * 8, giga, None)
    with pytest.raises(BudgetError, match=r"4 resident layers 2\.00 GB"):
        KVCacheSizingManager(4 * giga).place_layers([giga // 2] * 8, giga, 4)


@pytest.mark.parametrize("seed", range(20))
def test_streams_fit_beside_the_activations(seed: int) -> None:
    chance = random.Random(seed)
    available, stream, activation = chance.randint(1, 10_000), chance.randint(1, 900), chance.randint(0, 3000)
    most = chance.randint(1, 20)
    if activation + stream > available:
        with pytest.raises(BudgetError, match="smaller window, or a larger budget"):
            fit_streams(available, stream, activation, most)
        return
    streams = fit_streams(available, stream, activation, most)
    assert 1 <= streams <= most
    assert streams * stream + activation <= available
    assert streams == most or (streams + 1) * stream + activation > available


# --- a model within a budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 4])  # with 2 the scratchpads would be as large as the other two layers
def test_a_model_keeps_as_many_layers_as_fit(
    folders: Callable[[int], Path], load: Callable[..., StreamingModel], kept: int
) -> None:
    slots = 2 if kept < 4 else 0
    vram = int((FIXED_BYTES + (slots + kept) * LAYER_BYTES) / (1 - CACHE_SHARE)) + 1
    model = AutoModel.from_pretrained(folders(4), device="cpu", dtype="float32", vram=vram)
    assert len(model.plan.resident) == kept
    assert model.plan.fixed == FIXED_BYTES
    assert model.plan.scratchpads == slots * LAYER_BYTES
    text = torch.arange(50)[None]
    assert torch.equal(model.logits(text), load(4).logits(text))


def test_an_engine_has_as_many_streams_as_fit(folders: Callable[[int], Path]) -> None:
    model = AutoModel.from_pretrained(folders(4), device="cpu", dtype="float32", vram="1.2MB")
    config = EngineConfig(window=100, streams=1000, pass_tokens=16, excursion=20)
    engine = model.engine(config)
    cache = sum(tensor.nbytes for layer in engine.cache.layers for tensor in (layer.keys, layer.values))
    assert 1 <= engine.streams < 1000
    assert cache == engine.streams * engine.stream_bytes
    assert cache <= model.plan.left < cache + engine.stream_bytes + 1_000_000
    with pytest.raises(BudgetError, match="one stream takes"):
        model.engine(EngineConfig(window=4000, streams=1))


@pytest.mark.parametrize("vram", [1, "50kB"])
def test_a_model_that_does_not_fit_is_refused(folders: Callable[[int], Path], vram: Any) -> None:
    with pytest.raises(BudgetError, match="does not suffice"):
        AutoModel.from_pretrained(folders(4), device="cpu", vram=vram)


@pytest.mark.parametrize(
    "options",
    [{"resident_layers": -1}, {"resident_layers": "all"}, {"device": "tpu"}, {"dtype": "int8"}, {"vram": "much"}],
)
def test_senseless_options_are_refused(folders: Callable[[int], Path], options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
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
