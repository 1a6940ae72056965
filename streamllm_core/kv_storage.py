"""How keys and values lie in the cache: as computed, or quantised to one byte each.

int8: each row of a head has a scale of its own, kept as its largest magnitude (``peak``, float32: values below 0.008
would make a float16 scale subnormal); a value is stored · peak / 127, the error at most peak / 254.
fp8: float8_e4m3fn without a scale, relative error at most 1/16. Magnitudes beyond 448 are clamped to it: such a key
still dominates the products that it dominated, and the plain cast would make NaN of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KVDtype = Literal["auto", "int8", "fp8"]

LARGEST_FP8 = 448.0
PEAK_BYTES = 4
_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def stored_dtype(kv_dtype: KVDtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a cache that is computed with in ``dtype``.

    Raises ValueError for an unknown name, and for fp8 on a card that has no such units.
    """
    if kv_dtype == "auto":
        return dtype
    if kv_dtype not in _STORED:
        raise ValueError(f"kv_dtype must be 'auto', 'int8' or 'fp8', not '{kv_dtype}'")
    if kv_dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("an fp8 cache needs a card of compute capability 8.9 or newer (Ada, Hopper); use int8")
    return _STORED[kv_dtype]


def row_bytes(kv_dtype: KVDtype, head_dim: int, dtype: torch.dtype) -> int:
    """What one key (or one value) of one head takes."""
    if kv_dtype == "auto":
        return head_dim * dtype.itemsize
    return head_dim + (PEAK_BYTES if kv_dtype == "int8" else 0)


def store(values: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """[..., head_dim] as stored, and for int8 the peaks, float32 [...]."""
    if stored == torch.int8:
        exact = values.float()
        peaks = exact.abs().amax(-1)
        return (exact * (127 / peaks.clamp_min(1e-30))[..., None]).round_().to(torch.int8), peaks
    if stored == torch.float8_e4m3fn:
        values = values.clamp(-LARGEST_FP8, LARGEST_FP8)
    return values.to(stored), None


def load(values: Tensor, peaks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What ``store`` stored, in ``dtype``; the tensor itself when it was not quantised."""
    if peaks is not None:
        return (values.float() * (peaks / 127)[..., None]).to(dtype)
    return values.to(dtype)
