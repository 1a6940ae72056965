"""Quantization to int8 and int4: within half a step, better than rounding to the extremes, at every size of weight."""

from __future__ import annotations

import pytest
import torch

from streamllm_core.quantization import FORMATS, expand, quantize, quantizer


def there_and_back(name: str, weights: torch.Tensor) -> torch.Tensor:
    out = torch.full(weights.shape, torch.nan)
    expand(FORMATS[name], quantize(FORMATS[name], weights), out)
    return out


def relative_error(name: str, weights: torch.Tensor) -> float:
    error = there_and_back(name, weights).double() - weights.double()
    return float(error.norm() / weights.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40, 256), (3, 20, 96)], ids=str)
def test_int8_is_within_half_a_step(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer, "PIECE", 1000)
    weights = (torch.randn(shape) * 0.2).to(dtype)
    group = 64 if shape[-1] % 64 == 0 else 32
    steps = weights.double().view(-1, group).abs().amax(-1, keepdim=True) / 127
    error = (there_and_back("int8", weights).double() - weights.double()).view(-1, group).abs()
    assert (error <= 0.501 * steps).all()


def test_int4_beats_rounding_between_the_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "PIECE", 1000)
    weights = torch.randn(64, 512) * 0.02
    groups = weights.double().view(-1, 64)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low - groups
    error = (there_and_back("int4", weights).double() - weights.double()).view(-1, 64)
    assert error.norm() < 0.95 * plain.norm()
    assert (error.norm(dim=-1) <= 1.001 * plain.norm(dim=-1)).float().mean() > 0.95


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
def test_weights_of_every_size(size: float) -> None:
    weights = torch.randn(32, 128).clamp(-4, 4) * size
    assert relative_error("int8", weights) < 0.01
    assert relative_error("int4", weights) < 0.1


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_tiny_and_constant_weights_stay_finite(name: str) -> None:
    for weights in (torch.randn(8, 64) * 1e-8, torch.zeros(8, 64)):
        assert (there_and_back(name, weights) - weights).abs().amax() < 1e-7
    for size in (1e-4, 0.37, 1e4):
        constant = torch.full((4, 64), size)
        assert torch.allclose(there_and_back(name, constant), constant, rtol=5e-3)


def test_a_shifted_group_keeps_its_resolution() -> None:
    weights = torch.randn(16, 64) * 0.01 + 5  # int4 has a minimum of its own
    assert (there_and_back("int4", weights) - weights).abs().amax() < 0.01


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_rest_of_the_tensor_does_not_matter(name: str) -> None:
    format = FORMATS[name]
    weights = torch.randn(6, 128)
    whole = format.planes(quantize(format, weights), (6, 128))
    part = format.planes(quantize(format, weights[2:4].T.contiguous().T), (2, 128))
    for all_of_it, some in zip(whole, part, strict=True):
        if some is not None:
            assert torch.equal(all_of_it[4:8], some)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="int8 or int4, not to Q4_K"):
        quantize(FORMATS["Q4_K"], torch.zeros(2, 256))
    with pytest.raises(ValueError, match=r"does not hold a tensor of shape \[2, 80\]"):
        quantize(FORMATS["int8"], torch.zeros(2, 80))
    for bad in (torch.inf, torch.nan, 1e5):
        weights = torch.ones(2, 64)
        weights[1, 5] = bad
        with pytest.raises(ValueError, match="weights are infinite"):
            quantize(FORMATS["int4"], weights)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_arithmetic_on_the_card(name: str) -> None:
    weights = torch.randn(100, 4096) * 0.02
    packed = quantize(FORMATS[name], weights, torch.device("cuda"))
    assert packed.device.type == "cpu"
    out = torch.empty_like(weights)
    expand(FORMATS[name], packed, out)
    error = (out - weights).norm() / weights.norm()
    assert error < relative_error(name, weights) * 1.001
