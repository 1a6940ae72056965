"""How the parameters and buffers of a decoder layer lie in one flat block of bytes, as stored and expanded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from streamllm_core.quantization import Format, expand

ALIGNMENT = 256  # bytes; what cudaMalloc guarantees and vector loads like


@dataclass(frozen=True)
class Entry:
    """One tensor of a layer: dotted ``name`` inside the layer, and where its bytes are.

    ``format``: how its values are packed; None when they are stored as they are computed with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_parameter: bool
    format: Format | None = None

    @property
    def nbytes(self) -> int:
        if self.format is not None:
            return self.format.nbytes(self.shape)
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ArenaLayout:
    """Everything of a layer that comes from the checkpoint: parameters and persistent buffers."""

    entries: tuple[Entry, ...]
    nbytes: int

    @staticmethod
    def of(layer: nn.Module, formats: Mapping[str, Format] | None = None) -> ArenaLayout:
        """``formats``: how the tensors named there are packed; the others are plain."""
        parameters = dict(layer.named_parameters())
        entries = []
        for name, tensor in layer.state_dict(keep_vars=True).items():
            packed = (formats or {}).get(name)
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, 0, name in parameters, packed))
        return _placed(entries)

    @property
    def packed(self) -> bool:
        """Whether any tensor has to be expanded before the layer can compute."""
        return any(entry.format is not None for entry in self.entries)

    @cached_property
    def expanded(self) -> ArenaLayout:
        """The same tensors, none of them packed."""
        if not self.packed:
            return self
        return _placed([Entry(e.name, e.shape, e.dtype, 0, e.is_parameter) for e in self.entries])

    def stored(self, block: Tensor) -> dict[str, Tensor]:
        """The layer's tensors as views into ``block`` (uint8, at least ``nbytes`` long): plain ones in their type and
        shape, packed ones as flat uint8."""
        views: dict[str, Tensor] = {}
        for entry in self.entries:
            view = block[entry.offset : entry.offset + entry.nbytes]
            views[entry.name] = view.view(entry.dtype).view(entry.shape) if entry.format is None else view
        return views

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """``stored`` with parameters as nn.Parameter, for a layout without packed tensors."""
        return {
            entry.name: nn.Parameter(view, requires_grad=False) if entry.is_parameter else view
            for entry, view in zip(self.entries, self.stored(block).values(), strict=True)
        }

    def expand(self, block: Tensor, views: Mapping[str, Tensor]) -> None:
        """Bring the tensors stored in ``block`` into ``views`` of the expanded layout: everything, so that the block
        may be overwritten afterwards."""
        for entry, stored in zip(self.entries, self.stored(block).values(), strict=True):
            target = views[entry.name].data
            if entry.format is None:
                target.copy_(stored)
            else:
                expand(entry.format, stored, target)

    def places(self, layer: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
        """For each entry the dictionary of the module that holds it, its key there, and its name here."""
        places = []
        for entry in self.entries:
            path, _, leaf = entry.name.rpartition(".")
            owner = layer.get_submodule(path)
            places.append((owner._parameters if entry.is_parameter else owner._buffers, leaf, entry.name))
        return places

    def bind(self, layer: nn.Module, views: Mapping[str, Tensor]) -> None:
        """Make ``views`` the layer's parameters and buffers."""
        for place, leaf, name in self.places(layer):
            place[leaf] = views[name]


def _placed(entries: list[Entry]) -> ArenaLayout:
    """Entries one after the other, each aligned."""
    placed: list[Entry] = []
    offset = 0
    for entry in entries:
        placed.append(Entry(entry.name, entry.shape, entry.dtype, offset, entry.is_parameter, entry.format))
        offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return ArenaLayout(tuple(placed), offset)
