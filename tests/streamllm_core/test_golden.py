"""Logits against vectors made by the original StreamingLLM code, one token at a time (tests/data/vectors)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamllm_core import AutoModel, StreamingModel

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
MODELS = ("llama", "gpt_neox")
CHUNKS = (1, 7, 33, None)  # None: the whole text at once


@cache
def vectors(name: str) -> dict[str, Tensor]:
    return load_file(VECTORS / name / "vectors.safetensors")


@cache
def load(name: str, device: str, resident_layers: int | str) -> StreamingModel:
    return AutoModel.from_pretrained(
        VECTORS / name, device=device, dtype="float32", resident_layers=resident_layers, vram="2GB"
    )


def sizes(key: str) -> tuple[int, int | None]:
    """'logits.S4.R28' → sinks 4, window 28; 'logits.full' → everything is visible."""
    found = re.fullmatch(r"logits\.S(\d+)\.R(\d+)", key)
    return (int(found[1]), int(found[2])) if found else (4, None)


KEYS = sorted(key for key in vectors("llama") if key.startswith("logits"))


def check(model: StreamingModel, name: str, key: str, chunk: int | None, tolerance: float) -> None:
    sinks, window = sizes(key)
    logits = model.logits(vectors(name)["input_ids"], sinks=sinks, window=window, chunk_tokens=chunk)
    torch.testing.assert_close(logits, vectors(name)[key], atol=tolerance, rtol=0)


def test_both_models_have_the_same_settings() -> None:
    assert len(KEYS) == 7
    assert sorted(key for key in vectors("gpt_neox") if key.startswith("logits")) == KEYS


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("resident_layers", ["auto", 0])
@pytest.mark.parametrize("name", MODELS)
def test_cpu(name: str, resident_layers: int | str, key: str, chunk: int | None) -> None:
    model = load(name, "cpu", resident_layers)
    transfers = model.streamer.transfers
    check(model, name, key, chunk, 2e-4)
    assert (model.streamer.transfers > transfers) == (resident_layers == 0)


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Without it, CUDA may round the factors of float32 products to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("resident_layers", ["auto", 0])
@pytest.mark.parametrize("name", MODELS)
def test_cuda(name: str, resident_layers: int | str, key: str, chunk: int | None) -> None:
    check(load(name, "cuda", resident_layers), name, key, chunk, 1e-3)
