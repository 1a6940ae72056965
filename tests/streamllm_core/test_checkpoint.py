"""Checkpoints over packed tensors: what is passed through, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamllm_core.checkpoint import Checkpoint
from streamllm_core.errors import ModelError
from streamllm_core.quantization import FORMATS
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.weights import open_source
from tests.streamllm_core.tiny_models import save_tiny


def test_experts_are_not_merged_from_packed_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(save_tiny("qwen3_moe", tmp_path / "moe"))
    skeleton = Skeleton(read_config(source), torch.float32)
    checkpoint = Checkpoint(source, skeleton, torch.float32)
    merged = "model.layers.1.mlp.experts.gate_up_proj"
    assert merged in checkpoint.headers() and checkpoint.format(merged) is None
    experts = [name for name in source.names() if ".experts." in name]
    assert len(experts) > 3
    monkeypatch.setattr(source, "format", lambda name: FORMATS["Q8_0"] if name == experts[0] else None)
    with pytest.raises(ModelError, match=r"mlp\.experts\.\S+ is made of \d+ tensors .* packed ones"):
        Checkpoint(source, skeleton, torch.float32)


def test_headers_are_those_of_the_tensors(tmp_path: Path) -> None:
    source = open_source(save_tiny("gpt_oss", tmp_path / "oss"))
    checkpoint = Checkpoint(source, Skeleton(read_config(source), torch.float32), torch.bfloat16)
    given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in checkpoint.tensors("")}
    assert given == checkpoint.headers()
