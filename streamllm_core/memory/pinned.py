"""PinnedHostWeightRegistry: one exactly sized page-locked arena a layer."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from streamllm_core.errors import BudgetError


class PinnedHostWeightRegistry:
    """Page-locked host copies of the streamed layers.

    PyTorch's own ``pin_memory`` rounds sizes up to powers of two and may take twice the RAM, so each arena is an
    anonymous mapping of exactly its size, registered with CUDA. Only page-locked memory is copied asynchronously; an
    unpinned copy would silently break the order of events.
    """

    def __init__(self) -> None:
        self._arenas: list[tuple[Tensor, mmap.mmap]] = []

    def allocate(self, nbytes: int) -> Tensor:
        """A page-locked block, uint8 [nbytes]. Raises BudgetError when the system refuses to lock that much."""
        pages = mmap.mmap(-1, nbytes)
        block = torch.frombuffer(pages, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0)
        if int(status) != 0 or not block.is_pinned():
            raise BudgetError(
                f"the system refused to page-lock {nbytes / 1e6:.0f} MB more ({self.nbytes / 1e9:.1f} GB are locked). "
                "Raise the limit of locked memory (ulimit -l, or the container's), or use a smaller model."
            )
        self._arenas.append((block, pages))
        return block

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block, _ in self._arenas)

    def release(self) -> None:
        """Unlock and forget all arenas."""
        for block, _ in self._arenas:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self._arenas.clear()
