"""The bus between host and device: everything that links and page-locked arenas ask of CUDA."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any  # torch.cuda.Event, or whatever a test's bus hands out


class Bus(Protocol):
    """Page locks, one transfer stream, and the events that order it with the computation."""

    def lock(self, block: Tensor) -> bool:
        """Page-lock ``block`` where it lies; False when the system refuses, which leaves no trace."""

    def unlock(self, block: Tensor) -> None:
        """Undo ``lock``; no transfer of the block may be under way."""

    def synchronize(self) -> None:
        """Block the host until nothing is under way."""

    def copy(self, target: Tensor, source: Tensor, after: Event | None) -> Event:
        """Queue a copy of the page-locked ``source`` behind the copies before it and behind the event ``after``, and
        return the event of its end. Never blocks the host; may be called from any thread."""

    def mark(self) -> Event:
        """An event behind everything computed so far."""

    def wait(self, event: Event) -> None:
        """The computation queued from now on waits for ``event``; the host does not."""

    def finish(self, event: Event) -> None:
        """Block the host until ``event`` has happened."""


class CudaBus:
    """The bus of one card; the computation is what the calling thread's current stream does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.transfers = torch.cuda.Stream(device)

    def lock(self, block: Tensor) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)) == 0:
            return True
        # The refusal stays behind as CUDA's last error, and the next kernel launch would raise it: this one does.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0)
        return False

    def unlock(self, block: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def copy(self, target: Tensor, source: Tensor, after: Event | None) -> Event:
        if source.device.type == "cpu" and not source.is_pinned():
            raise ValueError("the source is not page-locked: its copy would not be ordered")
        done = torch.cuda.Event()
        with torch.cuda.stream(self.transfers):
            if after is not None:
                self.transfers.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self.transfers)
        return done

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, event: Event) -> None:
        event.synchronize()
