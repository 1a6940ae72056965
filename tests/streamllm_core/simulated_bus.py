"""A processor in the place of CUDA: two streams whose work is done late, in any order that their events permit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor


@dataclass
class SimulatedEvent:
    happened: bool = False


@dataclass
class _Work:
    run: Callable[[], None]
    after: SimulatedEvent | None = None
    done: SimulatedEvent = field(default_factory=SimulatedEvent)


class SimulatedBus:
    """Locks at most ``lockable`` bytes. Work waits in its stream until chance, or ``finish``, has it done."""

    def __init__(self, seed: int = 0, lockable: int = 2**62) -> None:
        self.locked: dict[int, int] = {}
        self.lockable = lockable
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._transfers: deque[_Work] = deque()
        self._computation: deque[_Work] = deque()

    def lock(self, block: Tensor) -> bool:
        if sum(self.locked.values()) + block.numel() > self.lockable:
            return False
        assert block.data_ptr() not in self.locked
        self.locked[block.data_ptr()] = block.numel()
        block.fill_(0xFF)
        return True

    def unlock(self, block: Tensor) -> None:
        assert not self._transfers, "unlocked while transfers are under way"
        del self.locked[block.data_ptr()]

    def synchronize(self) -> None:
        while self._transfers or self._computation:
            with self._lock:
                self._advance(everything=True)

    def copy(self, target: Tensor, source: Tensor, after: SimulatedEvent | None) -> SimulatedEvent:
        assert self._is_locked(source), "a copy from memory that is not page-locked"

        def run() -> None:
            target.fill_(0xFF)
            target.copy_(source)

        return self._queue(self._transfers, _Work(run, after))

    def mark(self) -> SimulatedEvent:
        return self.compute(lambda: None)

    def wait(self, event: SimulatedEvent) -> None:
        self._queue(self._computation, _Work(lambda: None, event))

    def finish(self, event: SimulatedEvent) -> None:
        while not event.happened:
            with self._lock:
                self._advance()

    def compute(self, run: Callable[[], None]) -> SimulatedEvent:
        """Queue a piece of computation."""
        return self._queue(self._computation, _Work(run))

    def _queue(self, stream: deque[_Work], work: _Work) -> SimulatedEvent:
        with self._lock:
            stream.append(work)
            for _ in range(self._random.randrange(3)):
                self._advance()
        return work.done

    def _advance(self, everything: bool = False) -> None:
        """Do the first piece of one of the streams, if its event lets it."""
        for stream in self._random.sample([self._transfers, self._computation], 2):
            if stream and (stream[0].after is None or stream[0].after.happened):
                work = stream.popleft()
                work.run()
                work.done.happened = True
                if not everything:
                    return

    def _is_locked(self, block: Tensor) -> bool:
        first, last = block.data_ptr(), block.data_ptr() + block.numel()
        return any(start <= first and last <= start + size for start, size in self.locked.items())


def layer_bytes(layer: int, size: int) -> Tensor:
    """What a layer holds: uint8 [size], different for every layer and at every place."""
    return (torch.arange(size) * 7 + layer * 31).to(torch.uint8)
