"""Fused layers against stock ones: what is matched, what is left alone, and the logits of every architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from streamllm_core import AutoModel, EngineConfig, StreamingModel
from streamllm_core.fusion import fuse, kernels_for
from streamllm_core.kernels import elementwise_torch
from streamllm_core.skeleton import Skeleton
from tests.streamllm_core.tiny_models import TINY, random_text, save_tiny, tiny_config

WINDOW = 16
TWO_NORMS = {"input_layernorm", "post_attention_layernorm"}
FOUR_NORMS = {*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}
HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
# What changes in the first layer; "self_attn" with neither norms nor MLP where those are of other kinds.
FUSED = {
    "llama-yarn-biases": {"self_attn", "mlp", *TWO_NORMS},
    "qwen3": {"self_attn", "mlp", *TWO_NORMS, *HEAD_NORMS},
    "gemma2": {"self_attn", "mlp", *FOUR_NORMS},
    "gemma3": {"self_attn", "mlp", *FOUR_NORMS, *HEAD_NORMS},
    "phi3": {"self_attn", "mlp", *TWO_NORMS},
    "glm": {"self_attn", "mlp", *TWO_NORMS},
    "olmo2": {"self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm", *HEAD_NORMS},
    "gpt_oss": {"self_attn", *TWO_NORMS},
    "gpt_neox": {"attention"},
    "stablelm": {"self_attn", "mlp"},
    "starcoder2": {"self_attn"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


def load(folder: Path, device: str, **options: Any) -> StreamingModel:
    return AutoModel.from_pretrained(folder, device=device, dtype="float32", vram="2GB", **options)


def skeleton(name: str) -> Any:
    return Skeleton(tiny_config(name), torch.float32).base


# --- what is matched -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
def test_what_changes_in_a_layer(name: str) -> None:
    changed = fuse(skeleton(name), elementwise_torch)
    first = "layers.0."
    assert {path.removeprefix(first) for path in changed if path.startswith(first)} == FUSED[name]
    assert ("norm" in changed) == bool(TWO_NORMS & FUSED[name])


def test_layers_of_experts_keep_them() -> None:
    changed = fuse(skeleton("qwen3_moe"), elementwise_torch)  # its first layer is dense
    assert "layers.0.mlp" in changed
    assert not any(path.startswith("layers.1.mlp") for path in changed)


class _Norm(LlamaRMSNorm):
    """Looks like an RMS norm, but is not quite one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class _RoundedLast(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.float()).to(hidden_states.dtype)


class _Mlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # type: ignore[no-any-return]


def _llama_mlp(kind: type[LlamaMLP], activation: str) -> nn.Module:
    return kind(LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_act=activation))


LOOK_ALIKES = {
    "centred norm": _Norm(16),
    "layer norm": nn.LayerNorm(16, bias=False),
    "gate and up exchanged": _llama_mlp(_Mlp, "silu"),
    "exact gelu": _llama_mlp(LlamaMLP, "gelu"),
}


@pytest.mark.parametrize("module", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_what_only_looks_alike_stays_stock(module: nn.Module) -> None:
    assert fuse(module, elementwise_torch) == []
    assert "forward" not in module.__dict__


def test_the_order_of_rounding_is_that_of_the_module() -> None:
    x = torch.randn(1, 50, 64, dtype=torch.bfloat16)
    outputs = []
    for kind in (LlamaRMSNorm, _RoundedLast):
        module = kind(64)
        module.weight.data.copy_(torch.randn(64).bfloat16())
        expected = module(x) if kind is _RoundedLast else module.bfloat16()(x)
        assert fuse(module, elementwise_torch) == [""]
        assert torch.equal(module(x), expected)
        outputs.append(expected)
    assert not torch.equal(*outputs)


def test_weights_are_read_when_a_layer_runs() -> None:
    module = _llama_mlp(LlamaMLP, "silu")
    fuse(module, elementwise_torch)
    for scale in (1.0, 2.0):
        weights = {name: scale * torch.randn_like(value) for name, value in module.named_parameters()}
        for name, value in weights.items():
            owner, leaf = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        x = torch.randn(1, 3, 16)
        before = x.clone()
        torch.testing.assert_close(module(x), LlamaMLP.forward(module, x))
        assert torch.equal(x, before)


def test_a_model_file_stays_as_it_is() -> None:
    base = skeleton("qwen2")
    attention = base.layers[0].self_attn
    before = type(attention).forward
    fuse(base, elementwise_torch)
    assert type(attention).forward is before
    assert attention.forward.__func__ is not before


def test_float64_runs_stock() -> None:
    assert kernels_for(torch.device("cuda"), torch.float64) is None
    assert kernels_for(torch.device("cpu"), torch.float64) is None
    assert kernels_for(torch.device("cpu"), torch.bfloat16) is elementwise_torch


# --- the logits of every architecture ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_those_of_stock_layers(name: str, device: str, folders: Callable[[str], Path]) -> None:
    """``test_architectures`` compares the default, fused, with stock transformers as a whole."""
    stock = load(folders(name), "cpu", fused=False)
    inside = list(stock._skeleton.layers[0].modules())[1:]
    assert not any("forward" in module.__dict__ for module in inside)
    ids = random_text(1, 56)
    fused = load(folders(name), device, resident_layers=0)
    torch.testing.assert_close(fused.logits(ids), stock.logits(ids), atol=5e-4, rtol=0)
    expected = stock.logits(ids, sinks=4, window=WINDOW)
    for chunk in (1, 7, None):
        logits = fused.logits(ids, sinks=4, window=WINDOW, chunk_tokens=chunk)
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["phi3", "gemma3", "glm"])
def test_ragged_micro_batches(name: str, device: str, folders: Callable[[str], Path]) -> None:
    """Nothing is overwritten that a layer, or its next piece, still needs."""
    texts = [random_text(seed, length)[0].tolist() for seed, length in ((6, 56), (7, 23), (8, 1))]
    config = EngineConfig(window=WINDOW, sinks=4, excursion=0, streams=3, pass_tokens=128, micro_tokens=9)
    hidden = []
    for place, on in ((device, True), ("cpu", False)):
        engine = load(folders(name), place, fused=on).engine(config)
        hidden.append(engine.forward([(engine.open(sinks=4), text) for text in texts]).cpu())
    torch.testing.assert_close(*hidden, atol=5e-4, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "olmo2", "phi3"])
def test_half_precision_moves_by_rounding_only(name: str, folders: Callable[[str], Path]) -> None:
    exact = load(folders(name), "cpu", fused=False).logits(random_text(2, 80))
    errors = []
    for on in (True, False):
        model = AutoModel.from_pretrained(folders(name), device="cuda", dtype="bfloat16", fused=on)
        errors.append(float((model.logits(random_text(2, 80)) - exact).norm() / exact.norm()))
    assert errors[0] < 1.3 * errors[1]
