"""Links: how the bytes of a layer come into a slot, beside the computation.

CudaLink    page-locked RAM → VRAM
StagedLink  page-locked RAM and, for layers that have no place there, disk → staging buffers → VRAM
ReaderLink  disk → slots in RAM, for the CPU
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from streamllm_core.memory.bus import Bus, Event
from streamllm_core.memory.pinned import PinnedHostWeightRegistry
from streamllm_core.memory.scratchpad import SLOTS, GPUScratchpadPool


class Link(Protocol):
    """Brings layers into slots, in the order asked, beside the computation."""

    def start(self, layer: int, slot: int) -> None:
        """Begin to fill ``slot`` with ``layer`` once the computation has freed it. Never blocks."""

    def wait(self, slot: int) -> None:
        """The computation goes on only when ``slot`` is filled. Raises what went wrong on the way."""

    def free(self, slot: int) -> None:
        """The computation issued so far is the last to read ``slot``."""


def link_from_host(
    pool: GPUScratchpadPool,
    sizes: Mapping[int, int],
    registry: PinnedHostWeightRegistry,
    read: Callable[[int, Tensor], None],
) -> CudaLink | StagedLink:
    """Place layers of ``sizes`` (layer → bytes) in page-locked RAM and fill them; what finds no place there is read
    from disk in every pass. ``read(layer, block)`` fills a block, uint8 [size]. Raises BudgetError, ModelError."""
    registry.place(sizes)
    for layer, arena in registry.arenas.items():
        read(layer, arena)
    if len(registry.arenas) == len(sizes):
        return CudaLink(pool, registry)
    return StagedLink(pool, sizes, registry, read)


class CudaLink:
    """One asynchronous copy a layer, from its page-locked arena. Never blocks the host."""

    def __init__(self, pool: GPUScratchpadPool, registry: PinnedHostWeightRegistry) -> None:
        """``registry`` has a filled arena for every streamed layer."""
        self.bus = registry.bus
        self.freed: list[Event | None] = [None] * SLOTS
        self._pool = pool
        self._registry = registry  # kept: its memory is unlocked when it goes
        self._filled: list[Event | None] = [None] * SLOTS

    def start(self, layer: int, slot: int) -> None:
        arena = self._registry.arenas[layer]
        self._filled[slot] = self.bus.copy(self._pool.slots[slot][: arena.numel()], arena, self.freed[slot])

    def wait(self, slot: int) -> None:
        self.bus.wait(self._filled[slot])

    def free(self, slot: int) -> None:
        self.freed[slot] = self.bus.mark()


@dataclass(frozen=True)
class _Read:
    """A layer on its way from disk into a staging buffer."""

    layer: int
    buffer: int
    block: Tensor  # the part of the buffer that the layer takes
    done: Future[None]


class StagedLink:
    """Layers without an arena pass through a ring of page-locked staging buffers, filled ahead of the slots.

    Reader threads read those layers in their cyclic order, as many ahead as there are buffers, and read into a buffer
    again when the copy out of it is done; there are two, so that the disk does not idle while the last bytes of a layer
    arrive. An issuing thread queues the copies in the order of ``start``, each as soon as its bytes are in RAM: so the
    transfer stream never holds a copy back for one that nobody needs yet. Only the computing thread changes the link's
    state; the other threads know it by futures, which carry errors, too.

    When a layer is wanted out of turn (a pass broke off), the ring starts anew at that layer.
    """

    def __init__(
        self,
        pool: GPUScratchpadPool,
        sizes: Mapping[int, int],
        registry: PinnedHostWeightRegistry,
        read: Callable[[int, Tensor], None],
    ) -> None:
        """``sizes``: bytes of each streamed layer. ``registry`` has a filled arena for some of them, and staging
        buffers for the others. ``read(layer, block)`` fills a block, uint8 [size], from disk."""
        self.bus = registry.bus
        self.freed: list[Event | None] = [None] * SLOTS
        self._pool = pool
        self._sizes = sizes
        self._registry = registry  # kept, or its memory would be unlocked under the threads
        self._from_disk = [layer for layer in sorted(sizes) if layer not in registry.arenas]
        self._read = read
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="layer-reader")
        self._issuer = ThreadPoolExecutor(1, thread_name_prefix="layer-issuer")
        self._issued: list[Future[Event] | None] = [None] * SLOTS
        self._left: list[Future[Event] | None] = [None] * len(registry.staging)  # the last copy out of each buffer
        self._stale: list[Future[None] | None] = [None] * len(registry.staging)  # the last unwanted read that had begun
        self._ahead: deque[_Read] = deque()  # one for each buffer
        self._next = 0
        weakref.finalize(self, _stop, self._readers, self._issuer)
        for buffer in range(len(registry.staging)):
            self._read_next(buffer)

    def start(self, layer: int, slot: int) -> None:
        target, after = self._pool.slots[slot][: self._sizes[layer]], self.freed[slot]
        arena = self._registry.arenas.get(layer)
        if arena is not None:
            self._issued[slot] = self._issuer.submit(_issue, self.bus, target, arena, after, None)
            return
        if self._ahead[0].layer != layer:
            self._restart(layer)
        read = self._ahead.popleft()
        issued = self._issuer.submit(_issue, self.bus, target, read.block, after, read.done)
        self._issued[slot] = self._left[read.buffer] = issued
        self._read_next(read.buffer)

    def wait(self, slot: int) -> None:
        issued = self._issued[slot]
        assert issued is not None
        self.bus.wait(issued.result())

    def free(self, slot: int) -> None:
        self.freed[slot] = self.bus.mark()

    def _read_next(self, buffer: int) -> None:
        layer = self._from_disk[self._next]
        self._next = (self._next + 1) % len(self._from_disk)
        block = self._registry.staging[buffer][: self._sizes[layer]]
        done = self._readers.submit(
            _refill, self.bus, self._stale[buffer], self._left[buffer], self._read, layer, block
        )
        self._ahead.append(_Read(layer, buffer, block, done))

    def _restart(self, layer: int) -> None:
        self._next = self._from_disk.index(layer)
        unwanted, self._ahead = self._ahead, deque()
        for read in unwanted:
            if not read.done.cancel():
                self._stale[read.buffer] = read.done
        for read in unwanted:
            self._read_next(read.buffer)


def _refill(
    bus: Bus,
    stale: Future[None] | None,
    left: Future[Event] | None,
    read: Callable[[int, Tensor], None],
    layer: int,
    block: Tensor,
) -> None:
    """Read when the buffer is at rest; whether what used it before went well is no matter here."""
    if stale is not None:
        stale.exception()
    if left is not None and left.exception() is None:
        bus.finish(left.result())
    read(layer, block)


def _issue(bus: Bus, slot: Tensor, source: Tensor, after: Event | None, read: Future[None] | None) -> Event:
    if read is not None:
        read.result()
    return bus.copy(slot, source, after)


def _stop(readers: ThreadPoolExecutor, issuer: ThreadPoolExecutor) -> None:
    """Nobody waits for what is still queued, but the memory must not go before the threads have left it."""
    readers.shutdown(wait=False, cancel_futures=True)
    issuer.shutdown(cancel_futures=True)
    readers.shutdown()


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
