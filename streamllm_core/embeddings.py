"""Embedding rows, gathered in RAM: the table stays there, and a pass moves only the rows of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Embeddings:
    """The model's own embedding module (some scale their rows), and the way of its rows to the device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._staging = torch.empty(0)
        self._left: torch.cuda.Event | None = None  # the last copy out of the staging block

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [tokens] on the CPU → [tokens, hidden] on the device; the host does not wait for the copy."""
        if self._device.type == "cpu":
            return self._module(ids)  # type: ignore[no-any-return]
        if self._left is not None:
            self._left.synchronize()
        staged = self._gathered(ids)
        rows = staged.to(self._device, non_blocking=True)
        self._left = torch.cuda.Event()
        self._left.record()
        return rows

    def _gathered(self, ids: Tensor) -> Tensor:
        """The rows in page-locked memory, from which alone a copy is asynchronous."""
        if type(self._module) is not nn.Embedding:
            rows: Tensor = self._module(ids)
            return self._block(len(rows), rows).copy_(rows)
        weight = self._module.weight.detach()
        return torch.index_select(weight, 0, ids, out=self._block(len(ids), weight))

    def _block(self, rows: int, like: Tensor) -> Tensor:
        """[rows, hidden] of the staging block, which grows as needed, in the dtype of ``like`` [any, hidden]."""
        if len(self._staging) < rows:
            self._staging = torch.empty(rows, like.shape[1], dtype=like.dtype, pin_memory=True)
        return self._staging[:rows]
