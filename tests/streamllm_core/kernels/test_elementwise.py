"""The CUDA kernels for elementwise work against their torch reference, on random shapes.

Without a card they run through Triton's interpreter (TRITON_INTERPRET=1), where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from streamllm_core.kernels import elementwise, elementwise_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# The interpreter works on numpy arrays, which have no bf16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCES = {torch.float32: (1e-6, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (1e-3, 2e-2)}
NAN = float("nan")

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs CUDA, or Triton with TRITON_INTERPRET=1"
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within two rounding steps of the dtype: some values are rounded twice."""
    atol, rtol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def spaced(shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> Tensor:
    """Random values whose rows lie ``gap`` NaNs apart."""
    block = torch.full((*shape[:-1], shape[-1] + gap), NAN, dtype=dtype, device=DEVICE)
    view = block[..., : shape[-1]]
    view.copy_(torch.randn(shape))
    return view


# --- norms ---------------------------------------------------------------------------------------------------------


@needs_triton
@dtypes
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (0.0, False), (1.0, False)])
@pytest.mark.parametrize("shape", [(1, 5, 576), (1, 1, 3584), (1, 37, 3, 24), (2, 3, 4, 128), (7, 33)], ids=str)
def test_rms_norm(shape: tuple[int, ...], offset: float, round_first: bool, dtype: torch.dtype) -> None:
    x = 3 * torch.randn(shape, device=DEVICE).to(dtype)
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    expected = elementwise_torch.rms_norm(x, weight, 1e-5, offset, round_first)
    assert_close(elementwise.rms_norm(x, weight, 1e-5, offset, round_first), expected)


@needs_triton
def test_rms_norm_of_rows_that_lie_apart() -> None:
    """Heads before tokens, as a view of tokens before heads (Gemma 3), and a slice of a fused product (Phi-3)."""
    weight = torch.randn(24, device=DEVICE)
    for x in (torch.randn(1, 37, 3, 24, device=DEVICE).transpose(1, 2), spaced((1, 9, 24), torch.float32, 8)):
        expected = elementwise_torch.rms_norm(x, weight, 1e-5, 0.0, True)
        assert_close(elementwise.rms_norm(x, weight, 1e-5, 0.0, True), expected)


@pytest.mark.parametrize("round_first", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_reference_of_rms_norm(offset: float, round_first: bool) -> None:
    x, weight = torch.randn(6, 40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * (weight + offset)
    actual = elementwise_torch.rms_norm(x.float(), weight.float(), 0.1, offset, round_first)
    assert_close(actual, expected.float())


# --- gated activations ---------------------------------------------------------------------------------------------


@needs_triton
@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 2048), (3, 4500)])
def test_gate(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    gate, up = spaced((1, rows, width), dtype, 5).mul_(4), spaced((1, rows, width), dtype, 9)
    expected = gate.clone()
    elementwise_torch.gate_(expected, up, activation)
    elementwise.gate_(gate, up, activation)
    assert_close(gate, expected)


@needs_triton
def test_both_halves_of_one_product() -> None:
    joined = torch.randn(1, 6, 2 * 100, device=DEVICE)
    gate, up = joined.chunk(2, -1)
    before, expected = up.clone(), gate.clone()
    elementwise_torch.gate_(expected, up, "silu")
    elementwise.gate_(gate, up, "silu")
    assert_close(gate, expected)
    assert torch.equal(up, before)


# --- rotation ------------------------------------------------------------------------------------------------------

ROTATIONS = [
    # heads, kv heads, head dim, pairs, tokens
    (28, 4, 128, 64, 5),
    (3, 3, 24, 12, 7),
    (4, 1, 80, 10, 1),
    (4, 2, 16, 4, 9),
]


@needs_triton
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", ROTATIONS, ids=str)
def test_rotate(case: tuple[int, ...], sinks: bool, interleaved: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, pairs, tokens = case
    joined = spaced((1, tokens, heads + kv_heads, head_dim), dtype, 3).transpose(1, 2)
    query, key = joined.split([heads, kv_heads], 1)  # two views of one product
    window, pinned = (turns(tokens, pairs) for _ in range(2))
    expected = elementwise_torch.rotate(query.clone(), key.clone(), window, pinned if sinks else None, interleaved)
    actual = elementwise.rotate(query, key, window, pinned if sinks else None, interleaved)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)


def turns(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = 6 * torch.rand(tokens, pairs, device=DEVICE)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_of_rotate(interleaved: bool) -> None:
    """A pair of dimensions is a complex number times e^(i angle)."""
    query = torch.randn(1, 3, 5, 20)
    key = torch.randn(1, 1, 5, 20)
    cos, sin = (table.cpu() for table in turns(5, 8))

    def turned(x: Tensor, sin: Tensor) -> Tensor:
        pairs = x[..., :16].unflatten(-1, (8, 2) if interleaved else (2, 8))
        pairs = pairs if interleaved else pairs.mT
        product = torch.view_as_complex(pairs.contiguous().double()) * torch.complex(cos.double(), sin.double())
        product = torch.view_as_real(product)
        return torch.cat([(product if interleaved else product.mT).flatten(-2).float(), x[..., 16:]], -1)

    expected = turned(query, sin), turned(query, -sin), turned(key, sin)
    actual = elementwise_torch.rotate(query, key, (cos, sin), (cos, -sin), interleaved)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
