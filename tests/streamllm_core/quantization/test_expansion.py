"""Expansion: every format as the gguf package reads it, and as the definition of our own says, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from streamllm_core.quantization import FORMATS, Format, expand, expand_torch
from streamllm_core.quantization.formats import GroupFormat

GGUF = [format for format in FORMATS.values() if not isinstance(format, GroupFormat)]
OURS = [format for format in FORMATS.values() if isinstance(format, GroupFormat)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_packed(format: Format, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes: scales of every size, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (format.nbytes(shape),), dtype=torch.uint8, generator=generator)


def definition(format: GroupFormat, packed: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Value by value, in plain Python and numpy."""
    raw = packed.numpy().tobytes()
    group = 64 if shape[-1] % 64 == 0 else 32
    groups = int(np.prod(shape)) // group
    size = group * format.bits // 8
    scales = np.frombuffer(raw, np.float16, groups, groups * size).astype(np.float32)
    values = np.empty((groups, group), np.float32)
    for index in range(groups):
        part = raw[index * size : (index + 1) * size]
        if format.name == "int8":
            values[index] = np.frombuffer(part, np.int8).astype(np.float32) * scales[index]
        else:
            minimum = np.frombuffer(raw, np.float16, groups, groups * (size + 2))[index].astype(np.float32)
            quants = [byte & 15 for byte in part] + [byte >> 4 for byte in part]
            values[index] = np.array(quants, np.float32) * scales[index] + minimum
    return values.reshape(shape)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return np.array_equal(actual.float().numpy(), expected.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", GGUF, ids=lambda format: format.name)
def test_blocks_as_the_package_reads_them(format: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_torch, "PIECE", 7 * 256)  # several pieces, the last one short
    shape = (3, 13, 2 * max(32, format.block))
    assert format.nbytes((1, format.block)) == GGML_QUANT_SIZES[GGMLQuantizationType[format.name]][1]
    packed = random_packed(format, shape, seed=1)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(packed.numpy().reshape(39, -1), GGMLQuantizationType[format.name]))
    out = torch.full(shape, torch.nan, dtype=dtype)
    expand(format, packed, out)
    assert same(out, expected.view(shape).to(dtype))
    assert out.isfinite().float().mean() > 0.3  # the comparison is about something


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 96, 320])
@pytest.mark.parametrize("format", OURS, ids=lambda format: format.name)
def test_groups_as_defined(
    format: GroupFormat, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expand_torch, "PIECE", 7 * 64)
    with np.errstate(all="ignore"):
        for shape in ((5, columns), (2, 3, columns)):
            packed = random_packed(format, shape, seed=columns)
            out = torch.full(shape, torch.nan, dtype=dtype)
            expand(format, packed, out)
            assert same(out, torch.from_numpy(definition(format, packed, shape)).to(dtype))


def test_sizes() -> None:
    int8, int4 = FORMATS["int8"], FORMATS["int4"]
    values = 128 * 256
    assert int8.nbytes((128, 256)) * 8 == values * 8.25
    assert int4.nbytes((2, 64, 256)) * 8 == values * 4.5
    assert int8.nbytes((4, 96)) == 4 * 96 + 2 * 12  # groups of 32
    assert int4.nbytes((4, 96)) == 4 * 48 + 4 * 12
    assert int4.holds((4, 96)) and not int4.holds((4, 80)) and not int4.holds((64,))
    assert FORMATS["Q4_K"].holds((1, 256)) and not FORMATS["Q4_K"].holds((8, 128))


def test_what_does_not_fit_is_refused() -> None:
    format = FORMATS["int4"]
    packed = torch.zeros(format.nbytes((4, 64)), dtype=torch.uint8)
    for out in (torch.empty(4, 128), torch.empty(8, 32), torch.empty(64, 4).T, torch.empty(256)):
        with pytest.raises(ValueError, match="cannot be expanded"):
            expand(format, packed, out)
