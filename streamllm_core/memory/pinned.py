"""PinnedHostWeightRegistry: one exactly sized page-locked arena a layer."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from streamllm_core.errors import BudgetError


class PinnedHostWeightRegistry:
    """Page-locked host copies of the streamed layers.

    PyTorch's own ``pin_memory`` rounds sizes up to powers of two and may take twice the RAM, so each arena is an
    anonymous mapping of exactly its size, registered with CUDA. Only page-locked memory is copied asynchronously; an
    unpinned copy would silently break the order of events.

    The arenas live as long as the registry. They are unlocked before they are unmapped, when no transfer is under way:
    otherwise the card would read from pages that are gone, and the next mapping there could not be locked.
    """

    def __init__(self) -> None:
        self._arenas: list[tuple[Tensor, mmap.mmap]] = []
        weakref.finalize(self, _unlock, self._arenas).atexit = False  # at its end the process gives everything back

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


def _unlock(arenas: list[tuple[Tensor, mmap.mmap]]) -> None:
    if arenas:
        torch.cuda.synchronize()
    for block, _ in arenas:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
    arenas.clear()
