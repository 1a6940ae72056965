"""Links."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from streamllm_core.memory.scratchpad import SLOTS, GPUScratchpadPool


class Link(Protocol):
    """Brings layers into slots, in the order asked, beside the computation."""

    def start(self, layer: int, slot: int) -> None:
        """Begin to fill ``slot`` with ``layer`` once the computation has freed it."""

    def wait(self, slot: int) -> None:
        """The computation goes on only when ``slot`` is filled."""

    def free(self, slot: int) -> None:
        """The computation issued so far is the last to read ``slot``."""


class CudaLink:
    """One asynchronous copy a layer, from its page-locked arena, on a transfer stream. Never blocks the host."""

    def __init__(self, pool: GPUScratchpadPool, arenas: dict[int, Tensor]) -> None:
        unpinned = [layer for layer, arena in arenas.items() if not arena.is_pinned()]
        if unpinned:
            raise ValueError(f"arenas of layers {unpinned} are not page-locked: their copies would not be ordered")
        self._pool = pool
        self._arenas = arenas
        self._transfer = torch.cuda.Stream(pool.slots[0].device)
        self._filled = [torch.cuda.Event() for _ in range(SLOTS)]
        self._freed = [torch.cuda.Event() for _ in range(SLOTS)]

    def start(self, layer: int, slot: int) -> None:
        arena = self._arenas[layer]
        self._transfer.wait_event(self._freed[slot])
        with torch.cuda.stream(self._transfer):
            self._pool.slots[slot][: arena.numel()].copy_(arena, non_blocking=True)
        self._filled[slot].record(self._transfer)

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream().wait_event(self._filled[slot])

    def free(self, slot: int) -> None:
        self._freed[slot].record(torch.cuda.current_stream())


class ReaderLink:
    """A reader thread fills slots in RAM, for models larger than memory on the CPU."""

    def __init__(self, read: Callable[[int, int], None]) -> None:
        """``read(layer, slot)`` fills a slot."""
        self._read = read
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="layer-reader")
        self._filled: list[Future[None] | None] = [None] * SLOTS

    def start(self, layer: int, slot: int) -> None:
        self._filled[slot] = self._reader.submit(self._read, layer, slot)

    def wait(self, slot: int) -> None:
        future = self._filled[slot]
        assert future is not None
        future.result()

    def free(self, slot: int) -> None:
        """Nothing to do: the computation is synchronous, and ``start`` comes after it."""
