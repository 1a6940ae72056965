"""Packed weights become numbers: in one launch on CUDA, in pieces that stay in the processor's cache elsewhere."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from streamllm_core.quantization import expand_torch
from streamllm_core.quantization.formats import Format


def expand(format: Format, packed: Tensor, out: Tensor) -> None:
    """Write the values of ``packed`` (uint8 [format.nbytes(out.shape)], at an even address) into ``out``.

    ``out`` is contiguous, of a floating type, on the same device. Values are computed in float32 and rounded once, so
    every device gives the same bits. Raises ValueError when the sizes do not fit.
    """
    if not format.holds(out.shape) or packed.numel() != format.nbytes(out.shape) or not out.is_contiguous():
        raise ValueError(
            f"{packed.numel():,} bytes of {format.name} cannot be expanded into a tensor of shape {list(out.shape)} "
            f"and strides {list(out.stride())}"
        )
    if out.numel() == 0:
        return
    if format.block == 1 or packed.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        expand_torch.expand(format, packed, out)
        return
    from streamllm_core.quantization.expand_triton import expand as launch

    launch(format, packed, out)
