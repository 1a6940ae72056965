"""Quantized models give, streamed or resident, what their expanded weights give in stock transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamllm_core import AutoModel, StreamingModel
from streamllm_core.memory import arena
from streamllm_core.quantization import FORMATS, expand, quantize
from streamllm_core.quantization.formats import Format
from tests.streamllm_core.tiny_models import load_stock, random_text, save_tiny

TEXT = random_text(5, 70)
KINDS = ("llama-llama3-tied", "qwen2", "qwen3_moe")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("packed"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path_factory.getbasetemp() / "packed-cache"))


def load(folder: Path, format_name: str, kept: int | str = "auto") -> StreamingModel:
    return AutoModel.from_pretrained(folder, device="cpu", dtype="float32", quantize=format_name, resident_layers=kept)


def logits(model: StreamingModel, chunk: int | None = None) -> Tensor:
    return model.logits(TEXT, sinks=4, window=20, chunk_tokens=chunk)


@pytest.mark.parametrize("format_name", ["int8", "int4"])
def test_streamed_layers_give_what_resident_ones_give(
    folder: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(format: Format, packed: Tensor, out: Tensor) -> None:
        out.fill_(torch.nan)
        expand(format, packed, out)
        packed.fill_(0xFF)  # from here on the slot belongs to the next layer

    wanted = logits(load(folder, format_name))
    monkeypatch.setattr(arena, "expand", poisoned)
    for kept in (0, 1):
        model = load(folder, format_name, kept)
        assert model.streamer.order
        for chunk in (None, 7):
            assert (logits(model, chunk) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("format_name", ["int8", "int4"])
def test_equals_stock_transformers_with_the_expanded_weights(folder: Path, format_name: str) -> None:
    ours = load(folder, format_name, 0)
    stock = load_stock(folder)
    packed = 0
    for name, tensor in stock.state_dict().items():
        index, _, inside = name.partition("layers.")[2].partition(".")
        if index:
            entry = next(e for e in ours.streamer.layouts[int(index)].entries if e.name == inside)
            if entry.format is not None:
                expand(entry.format, quantize(entry.format, tensor), tensor)
                packed += 1
        elif name == "lm_head.weight" and not ours.config.tie_word_embeddings:
            expand(FORMATS["int8"], quantize(FORMATS["int8"], tensor), tensor)
    assert packed >= 2 * ours.config.num_hidden_layers
    with torch.no_grad():
        wanted = stock(TEXT).logits
    assert (ours.logits(TEXT) - wanted).abs().max() < 1e-4
