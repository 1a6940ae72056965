"""What the engine's tests share: devices and tiny models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from streamllm_core import AutoModel, StreamingModel
from tests.streamllm_core.dense_reference import DenseLlama
from tests.streamllm_core.tiny_llama import write_llama
from tests.streamllm_core.tiny_models import save_tiny

Load = Callable[..., StreamingModel]
Folders = Callable[[int], Path]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny Llama with so many layers."""
    root = tmp_path_factory.mktemp("llamas")
    return cache(lambda layers: write_llama(root / f"llama{layers}", layers=layers, seed=layers))


@pytest.fixture(scope="session")
def load(folders: Folders) -> Load:
    """Load a tiny Llama in float32; the same arguments give the same model."""

    @cache
    def loaded(layers: int = 3, device: str = "cpu", **options: Any) -> StreamingModel:
        return AutoModel.from_pretrained(folders(layers), device=device, **{"dtype": "float32", **options})

    return loaded


@pytest.fixture
def llama(load: Load, device: str) -> StreamingModel:
    """Three layers, all of them on the device."""
    return load(3, device)


@pytest.fixture(scope="session")
def _mixed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StreamingModel]:
    folder = save_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))
    return cache(lambda device: AutoModel.from_pretrained(folder, device=device, dtype="float32"))


@pytest.fixture
def mixed(_mixed: Callable[[str], StreamingModel], device: str) -> StreamingModel:
    """Sliding layers of width 20 round one that pins and sees the whole window (Gemma 3)."""
    return _mixed(device)


@pytest.fixture(scope="session")
def dense(folders: Folders) -> DenseLlama:
    """The float64 reference of ``llama``."""
    return DenseLlama(folders(3))
