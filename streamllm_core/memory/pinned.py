"""PinnedHostWeightRegistry: one exactly sized page-locked arena a layer, as far as RAM and the system allow."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from streamllm_core.errors import BudgetError
from streamllm_core.memory.bus import Bus
from streamllm_core.memory.limits import free_bytes

STAGING_BYTES = 2 * 2**30  # a few layers ahead of the bus: more hides no more of the disk
RAM_SHARE = 0.9  # of what is available, when no limit is given
_ADVICE = "Raise the limit of locked memory (ulimit -l, the container's, or WSL's), or use a smaller model."
_log = logging.getLogger(__name__)


class PinnedHostWeightRegistry:
    """Page-locked host copies of streamed layers, and staging buffers for layers that have no place among them.

    PyTorch's own ``pin_memory`` rounds sizes up to powers of two and may take twice the RAM, so each arena is an
    anonymous mapping of exactly its size, registered with CUDA. Only page-locked memory is copied asynchronously; an
    unpinned copy would silently break the order of events.

    The arenas live as long as the registry. They are unlocked before they are unmapped, when no transfer is under way:
    otherwise the card would read from pages that are gone, and the next mapping there could not be locked.

    Attributes: ``arenas`` (layer → uint8 [size]), ``staging`` (buffers of one size), ``note`` (one line for the user
    when not every layer has an arena, else empty).
    """

    def __init__(self, bus: Bus, limit_bytes: int | None = None) -> None:
        """``limit_bytes``: RAM for arenas and staging buffers; None takes RAM_SHARE of what is available. Two staging
        buffers are taken whatever the limit: without them nothing can run."""
        self.arenas: dict[int, Tensor] = {}
        self.staging: list[Tensor] = []
        self.note = ""
        self.bus = bus
        self._limit = int(free_bytes(torch.device("cpu")) * RAM_SHARE) if limit_bytes is None else limit_bytes
        self._blocks: list[Tensor] = []
        weakref.finalize(self, _unlock, bus, self._blocks).atexit = False  # at its end the process gives all back

    def allocate(self, nbytes: int) -> Tensor:
        """A page-locked block, uint8 [nbytes]. Raises BudgetError when the system refuses to lock that much."""
        block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if not self.bus.lock(block):
            raise BudgetError(
                f"the system refused to page-lock {nbytes / 1e6:.0f} MB more ({self.nbytes / 1e9:.1f} GB are locked). "
                + _ADVICE
            )
        self._blocks.append(block)
        return block

    def place(self, sizes: Mapping[int, int], staging_bytes: int = STAGING_BYTES) -> None:
        """Give layers of ``sizes`` (layer → bytes) their arenas: all of them, or as many as the limit and the system
        allow, spread evenly so that the disk reads of the others hide between them. These get staging buffers as large
        as the largest layer, at least two and as many as ``staging_bytes`` holds.

        Raises BudgetError when not even two staging buffers can be locked.
        """
        largest = max(sizes.values())
        buffers = max(2, min(staging_bytes // largest, len(sizes)))
        room = self._limit - (buffers * largest if sum(sizes.values()) > self._limit else 0)
        refused = False
        for layer in _spread(sorted(sizes)):
            if sizes[layer] > room or refused:
                break
            refused = not self._try(layer, sizes[layer])
            room -= sizes[layer]
        if len(self.arenas) < len(sizes):
            refused = self._stage(buffers, largest) or refused
            self._report(sizes, refused)

    def _try(self, layer: int, nbytes: int) -> bool:
        try:
            self.arenas[layer] = self.allocate(nbytes)
        except BudgetError:
            return False
        return True

    def _stage(self, buffers: int, nbytes: int) -> bool:
        """Lock staging buffers, in place of arenas where need be; whether the system refused on the way."""
        refused = False
        while len(self.staging) < buffers:
            try:
                self.staging.append(self.allocate(nbytes))
            except BudgetError as error:
                refused = True
                if self.arenas:
                    self._release(self.arenas.popitem()[1])
                elif len(self.staging) >= 2:
                    break
                else:
                    raise BudgetError(f"layers read from disk need two page-locked buffers, but {error}") from error
        return refused

    def _release(self, block: Tensor) -> None:
        self.bus.unlock(block)
        self._blocks[:] = [kept for kept in self._blocks if kept is not block]

    def _report(self, sizes: Mapping[int, int], refused: bool) -> None:
        held, total = sum(arena.numel() for arena in self.arenas.values()), sum(sizes.values())
        cause = "the system refused to page-lock more" if refused else f"the limit is {self._limit / 1e9:.1f} GB of RAM"
        self.note = (
            f"{len(self.arenas)} of {len(sizes)} streamed layers ({held / 1e9:.1f} of {total / 1e9:.1f} GB) are "
            f"page-locked in RAM, the others are read from disk in every pass: {cause}. "
            + (_ADVICE if refused else "Give more RAM, or use a smaller model or fewer bits a weight.")
        )
        _log.warning(self.note)

    @property
    def nbytes(self) -> int:
        """Bytes that are locked."""
        return sum(block.numel() for block in self._blocks)


def _spread(layers: list[int]) -> list[int]:
    """An order whose every beginning is spread evenly: positions with their bits reversed (van der Corput)."""
    width = len(layers).bit_length()
    positions = sorted(range(len(layers)), key=lambda position: f"{position:0{width}b}"[::-1])
    return [layers[position] for position in positions]


def _unlock(bus: Bus, blocks: list[Tensor]) -> None:
    if blocks:
        bus.synchronize()
    for block in blocks:
        bus.unlock(block)
    blocks.clear()
