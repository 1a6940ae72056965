"""Devices and number types by the names that users give."""

from __future__ import annotations

import re

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_device(device: str | torch.device) -> torch.device:
    """Raises ValueError when CUDA is asked for and absent, or the device is of another kind."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:n]', not '{device}'")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no CUDA device; use --device cpu")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Raises ValueError for a name that is not a supported dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if computes_in(torch.bfloat16, device) else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be 'auto', {', '.join(DTYPES)}; not '{dtype}'")
    return DTYPES[dtype]


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of ``dtype`` faster than float32 ones."""
    if device.type == "cuda" or dtype.itemsize >= 4:
        return True
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported()
