"""How the parameters and buffers of a decoder layer lie in one flat block of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256  # bytes; what cudaMalloc guarantees and vector loads like


@dataclass(frozen=True)
class Entry:
    """One tensor of a layer: dotted ``name`` inside the layer, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_parameter: bool

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ArenaLayout:
    """Everything of a layer that comes from the checkpoint: parameters and persistent buffers."""

    entries: tuple[Entry, ...]
    nbytes: int

    @staticmethod
    def of(layer: nn.Module) -> ArenaLayout:
        parameters = dict(layer.named_parameters())
        entries: list[Entry] = []
        offset = 0
        for name, tensor in layer.state_dict(keep_vars=True).items():
            entry = Entry(name, tuple(tensor.shape), tensor.dtype, offset, name in parameters)
            entries.append(entry)
            offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        return ArenaLayout(tuple(entries), offset)

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The layer's tensors as views into ``block`` (uint8, at least ``nbytes`` long); parameters as nn.Parameter."""
        views: dict[str, Tensor] = {}
        for entry in self.entries:
            view = block[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
            views[entry.name] = nn.Parameter(view, requires_grad=False) if entry.is_parameter else view
        return views

    def bind(self, layer: nn.Module, views: dict[str, Tensor]) -> None:
        """Make ``views`` the layer's parameters and buffers."""
        for entry in self.entries:
            path, _, leaf = entry.name.rpartition(".")
            owner = layer.get_submodule(path)
            place: dict[str, Any] = owner._parameters if entry.is_parameter else owner._buffers
            place[leaf] = views[entry.name]
