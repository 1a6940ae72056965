"""GPUScratchpadPool: slot A and slot B, allocated once, big enough for the largest streamed layer."""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS = 2


class GPUScratchpadPool:
    """Two blocks of bytes on the device (or in RAM, when a model is streamed from disk to the CPU)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.slots: list[Tensor] = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
