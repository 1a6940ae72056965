"""The CUDA expansion kernels against the torch reference, bit for bit.

Without a card the kernels run through Triton's interpreter (TRITON_INTERPRET=1), where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from streamllm_core.quantization import FORMATS, Format, expand_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs CUDA, or Triton with TRITON_INTERPRET=1"
)


# The interpreter works on numpy arrays, which have no bf16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16], ids=str)
@pytest.mark.parametrize("format", [format for format in FORMATS.values() if format.block > 1], ids=lambda f: f.name)
def test_equals_the_reference(format: Format, dtype: torch.dtype) -> None:
    from streamllm_core.quantization import expand_triton

    for seed, shape in enumerate([(3, 2, 5 * max(64, format.block)), (1, max(96, format.block)), (4, 4096)]):
        torch.manual_seed(seed)
        packed = torch.randint(0, 256, (format.nbytes(shape),), dtype=torch.uint8)
        expected = torch.empty(shape, dtype=dtype)
        expand_torch.expand(format, packed, expected)
        out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        expand_triton.expand(format, packed.to(DEVICE), out)
        assert torch.equal(out.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["int4", "Q6_K"])
def test_more_than_32_bits_of_values(name: str) -> None:
    from streamllm_core.quantization import expand_triton

    format = FORMATS[name]
    shape = (9, 1 << 14, 1 << 14)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB on the device")
    packed = torch.zeros(format.nbytes(shape), dtype=torch.uint8, device=DEVICE)
    out = torch.full(shape, torch.nan, dtype=torch.float16, device=DEVICE)
    expand_triton.expand(format, packed, out)
    assert torch.count_nonzero(out[-1]) == 0
    assert not out[-1].isnan().any()
