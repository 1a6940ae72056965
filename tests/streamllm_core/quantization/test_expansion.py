"""Expansion: every format as the gguf package reads it, and as the definition of our own says, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from streamllm_core.quantization import FORMATS, Format, expand, expand_torch
from streamllm_core.quantization.formats import INT4, INT8

GGUF = [format for format in FORMATS.values() if format not in (INT8, INT4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_packed(format: Format, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes: scales of every size, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (format.nbytes(shape),), dtype=torch.uint8, generator=generator)


def definition(format: Format, packed: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Group by group, in plain Python and numpy."""
    raw = packed.numpy().tobytes()
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    values = np.empty((rows, columns), np.float32)
    group = 64 if format is INT8 and columns % 64 == 0 else 32
    count = rows * columns // group
    for index in range(count):
        row, column = divmod(index * group, columns)
        if format is INT8:
            quants = np.frombuffer(raw, np.int8, group, index * group).astype(np.float32)
            scale = np.frombuffer(raw, np.float16, count, count * group)[index].astype(np.float32)
            values[row, column : column + group] = quants * scale
            continue
        part = raw[index * 16 : (index + 1) * 16]
        quants = np.array([byte & 15 for byte in part] + [byte >> 4 for byte in part], np.float32)
        scale, minimum = raw[16 * count + index], np.frombuffer(raw, np.int8, count, 17 * count)[index]
        numbers = np.frombuffer(raw, np.uint16, 2 * rows, 18 * count).astype(np.uint32) << 16
        row_scale, row_minimum = numbers.view(np.float32)[[row, rows + row]]
        values[row, column : column + 32] = quants * (np.float32(scale) * row_scale) + np.float32(minimum) * row_minimum
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
@pytest.mark.parametrize("format", [INT8, INT4], ids=lambda format: format.name)
def test_groups_as_defined(format: Format, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert int4.nbytes((2, 64, 256)) * 8 == values * 4.5 + 128 * 32
    assert int8.nbytes((4, 96)) == 4 * 96 + 2 * 12  # groups of 32
    assert int4.nbytes((4, 96)) == 4 * 48 + 2 * 12 + 4 * 4
    assert int4.holds((4, 96)) and not int4.holds((4, 80)) and not int4.holds((64,))
    assert FORMATS["Q4_K"].holds((1, 256)) and not FORMATS["Q4_K"].holds((8, 128))


def test_what_does_not_fit_is_refused() -> None:
    format = FORMATS["int4"]
    packed = torch.zeros(format.nbytes((4, 64)), dtype=torch.uint8)
    for out in (torch.empty(4, 128), torch.empty(8, 32), torch.empty(64, 4).T, torch.empty(256)):
        with pytest.raises(ValueError, match="cannot be expanded"):
            expand(format, packed, out)
