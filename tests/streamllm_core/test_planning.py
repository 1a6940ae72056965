"""``streamllm plan``: from headers alone, the same plan that loading arrives at, also for models that are elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamllm_core import AutoModel, BudgetError, EngineConfig
from streamllm_core.bench.shapes import RandomSource, Shape
from streamllm_core.blueprint import Blueprint
from streamllm_core.errors import ModelError
from streamllm_core.hardware import LinkRates
from streamllm_core.planning import ASSUMED, plan_model, with_rates
from streamllm_core.weights.folder import FolderSource
from tests.streamllm_core.test_commands import streamllm
from tests.streamllm_core.tiny_models import save_tiny

CONFIG = EngineConfig(window=60, sinks=4, excursion=20, streams=3)


@pytest.fixture
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a weight fails."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(FolderSource, "tensor", refuse)
    monkeypatch.setattr(FolderSource, "raw", refuse)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_plan_is_what_loading_arrives_at(
    folders: Callable[[int], Path], quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path))
    planned, assumed = plan_model(
        folders(4), CONFIG, device="cpu", dtype="float32", quantize=quantize, vram="3MB", resident=1
    )
    model = AutoModel.from_pretrained(
        folders(4), device="cpu", dtype="float32", quantize=quantize, vram="3MB", resident_layers=1, expected=CONFIG
    )
    assert not assumed
    assert model.plan == planned
    assert model.engine(CONFIG).plan.batching == planned.batching


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_no_weight_is_read(folders: Callable[[int], Path], quantize: str | None) -> None:
    plan, _ = plan_model(folders(3), CONFIG, device="cpu", quantize=quantize, vram="5MB")
    assert plan.total <= 5_000_000


def test_packed_layers_travel_in_fewer_bytes(folders: Callable[[int], Path]) -> None:
    def moved(quantize: str | None) -> int:
        plan, _ = plan_model(
            folders(4), CONFIG, device="cpu", dtype="float32", quantize=quantize, vram="9MB", resident=0
        )
        assert (plan.placement.workspace > 0) == (quantize is not None)
        return plan.placement.layer_bytes_per_pass

    assert moved("int4") < moved("int8") < moved(None) / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card to measure")
def test_a_card_that_is_not_here_can_be_planned_for(folders: Callable[[int], Path]) -> None:
    plan, assumed = plan_model(folders(4), CONFIG, device="cuda", vram="400MB")
    assert assumed
    assert plan.slack > 0
    with pytest.raises(ValueError, match="--vram 8GB"):
        plan_model(folders(4), CONFIG, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card to measure")
def test_a_faster_bus_is_a_faster_plan(folders: Callable[[int], Path]) -> None:
    def speed(bus: float) -> float:
        rates = with_rates(bus, None, None)
        plan, _ = plan_model(folders(4), CONFIG, device="cuda", vram="400MB", resident=0, rates=rates)
        return plan.prediction.decode_transfer

    assert speed(10.0) == pytest.approx(2 * speed(20.0))


def test_rates_that_are_given_replace_those_measured() -> None:
    assert with_rates(1.0, None, 3.0)(ASSUMED) == LinkRates(1e9, ASSUMED.disk, ASSUMED.matmul, 3e9)
    assert with_rates(None, None, None)(ASSUMED) == ASSUMED


def test_the_command_shows_every_byte_and_what_limits(folders: Callable[[int], Path]) -> None:
    arguments = ("plan", str(folders(4)), "--device", "cpu", "--vram", "60MB", "--window", "64", "--documents", "3")
    done = streamllm(*arguments)
    assert done.returncode == 0, done.stderr
    assert "cache of 3 streams" in done.stdout
    assert done.stdout.count("is the limit") == 2
    found = json.loads(streamllm(*arguments, "--json").stdout)
    assert sum(found["bytes"].values()) == found["plan_bytes"] <= found["budget_bytes"] == 60_000_000
    assert found["streams"] == 3


def test_what_cannot_fit_is_refused_with_the_least_that_would(folders: Callable[[int], Path]) -> None:
    done = streamllm("plan", str(folders(4)), "--device", "cpu", "--vram", "100kB", "--window", "64")
    assert done.returncode == 3
    assert "is the least" in done.stderr
    with pytest.raises(BudgetError):
        plan_model(folders(4), CONFIG, device="cpu", vram=1000)


def test_the_workspace_holds_a_tile_of_a_packed_head_larger_than_any_layer(tmp_path: Path) -> None:
    shape = Shape.of_width(2, 256)
    cpu, card = torch.device("cpu"), torch.device("cuda", 0)
    for quantize in (None, "int8"):
        source = RandomSource(shape.config(), tmp_path, torch.bfloat16, cpu, quantize)
        blueprint = Blueprint(source, shape.config(), card, torch.bfloat16, torch.bfloat16)
        tile = len(blueprint.head.tiles[0]) * shape.hidden * 2
        assert tile > max(blueprint.sizes.expanded)
        assert blueprint.sizes.workspace == (tile if quantize else 0)


@pytest.mark.parametrize(("kind", "dtype"), [("gemma2", "bfloat16"), ("gemma3", "float32"), ("qwen2", "float16")])
def test_models_that_overflow_in_float16_are_refused_there(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = save_tiny(kind, tmp_path)
    card = {"device": "cuda", "vram": "600MB"} if not torch.cuda.is_available() else {"vram": "600MB"}
    plan_model(folder, EngineConfig(window=20, streams=1), dtype=dtype, **card)  # type: ignore[arg-type]
    if kind.startswith("gemma"):
        with pytest.raises(ModelError, match=r"overflow in float16; use --dtype bfloat16"):
            plan_model(folder, EngineConfig(window=20, streams=1), dtype="float16", **card)  # type: ignore[arg-type]
