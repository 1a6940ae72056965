"""Bringing the weights of a blueprint to where its plan puts them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from streamllm_core.attention import PassState
from streamllm_core.blueprint import Blueprint
from streamllm_core.head import Head, ResidentTiles, StreamedTiles
from streamllm_core.links import CudaLink, Link, ReaderLink, link_from_host
from streamllm_core.memory.bus import CudaBus
from streamllm_core.memory.pinned import PinnedHostWeightRegistry
from streamllm_core.memory.plan import Placement
from streamllm_core.memory.scratchpad import GPUScratchpadPool
from streamllm_core.quantization import expand
from streamllm_core.streamer import LayerStreamer


class Loader:
    """Loads fixed weights, layers and head, in this order. ``workspace``: where packed weights are expanded."""

    def __init__(self, blueprint: Blueprint, placement: Placement, ram: int | None = None) -> None:
        """``ram``: bytes of RAM for streamed weights; None takes most of what is free. What has no place there is read
        from disk in every pass."""
        self.blueprint = blueprint
        self.placement = placement
        self._device = blueprint.device
        self.registry = PinnedHostWeightRegistry(CudaBus(self._device), ram) if self._device.type == "cuda" else None
        self.workspace = self._bytes(placement.workspace) if placement.workspace else None

    def fixed(self) -> None:
        """Embedding (in RAM), norms (on the device), and the head where it stays whole."""
        blueprint, skeleton = self.blueprint, self.blueprint.skeleton
        for name in blueprint.checkpoint.names():
            if name.startswith(skeleton.layers_prefix) or (name == blueprint.head.name and not skeleton.tied):
                continue
            for full, tensor in blueprint.checkpoint.tensors(name):
                path, _, leaf = full.rpartition(".")
                owner = skeleton.causal.get_submodule(path)
                place = torch.device("cpu") if owner is skeleton.embedding else self._device
                value = torch.empty_like(tensor, dtype=blueprint.dtype, device=place).copy_(tensor)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    owner._buffers[leaf] = value
        for module in skeleton.causal.modules():
            if module is not skeleton.embedding:
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer.to(self._device) if buffer is not None else None

    # --- layers ----------------------------------------------------------------------------------------------

    def layers(self, state: PassState, *, prefetching: bool) -> LayerStreamer:
        """Resident layers on the device, the others behind a link."""
        blueprint, streamed = self.blueprint, self.placement.streamed
        resident = {index: self._resident(index) for index in self.placement.resident}
        pool = link = None
        if streamed:
            pool = GPUScratchpadPool(max(blueprint.sizes.layers[index] for index in streamed), self._device)
            link = self._link(pool)
        return LayerStreamer(
            blueprint.skeleton.layers,
            dict(enumerate(blueprint.layouts)),
            streamed,
            pool,
            link,
            state,
            packed={index: block for index, block in resident.items() if block is not None},
            workspace=self.workspace,
            prefetching=prefetching,
        )

    def _resident(self, index: int) -> Tensor | None:
        """A layer that stays: bound for good if it is plain (or on a CPU, where it is expanded now), else its packed
        block."""
        blueprint, layout = self.blueprint, self.blueprint.layouts[index]
        if layout.packed and self._device.type == "cuda":
            block = self._bytes(layout.nbytes)
            blueprint.checkpoint.fill(blueprint.prefix(index), layout, block)
            return block
        plain = layout.expanded
        block = self._bytes(plain.nbytes)
        blueprint.checkpoint.fill(blueprint.prefix(index), plain, block)
        plain.bind(blueprint.skeleton.layers[index], plain.views(block))
        return None

    def _link(self, pool: GPUScratchpadPool) -> Link:
        blueprint = self.blueprint

        def fill(index: int, block: Tensor) -> None:
            blueprint.checkpoint.fill(blueprint.prefix(index), blueprint.layouts[index], block)

        if self.registry is None:
            return ReaderLink(lambda index, slot: fill(index, pool.slots[slot]))
        sizes = {index: blueprint.layouts[index].nbytes for index in self.placement.streamed}
        return link_from_host(pool, sizes, self.registry, fill)

    # --- head ------------------------------------------------------------------------------------------------

    def head(self) -> Head:
        """The head, whole where it is plain and stays (or is in RAM anyway), else in tiles."""
        skeleton, layout, most_rows = self.blueprint.skeleton, self.blueprint.head, self.blueprint.sizes.logit_rows
        if self._device.type == "cpu" or (self.placement.head_stays and layout.format is None):
            shared = skeleton.embedding._parameters["weight"]
            weight = shared if skeleton.tied else self._read_head()
            assert weight is not None
            skeleton.output._parameters["weight"] = nn.Parameter(weight.to(self._device), requires_grad=False)
            return Head(skeleton, None, most_rows)
        if self.placement.head_stays:
            blocks = [block.to(self._device) for block in self._stored_tiles()]
            tiles = ResidentTiles(layout.tiles, lambda number: self._expanded(number, blocks[number]))
            return Head(skeleton, tiles, most_rows)
        return Head(skeleton, self._streamed_tiles(), most_rows)

    def _streamed_tiles(self) -> StreamedTiles:
        layout = self.blueprint.head
        pool = GPUScratchpadPool(self.blueprint.sizes.head_tile, self._device)
        # A stream of transfers of its own: the first layers of the next pass are under way on the other one.
        registry = PinnedHostWeightRegistry(CudaBus(self._device))
        for number, block in enumerate(self._stored_tiles()):
            registry.arenas[number] = registry.allocate(block.numel()).copy_(block)
        link = CudaLink(pool, registry)

        def ready(number: int, slot: int) -> Tensor:
            return self._expanded(number, pool.slots[slot][: registry.arenas[number].numel()])

        return StreamedTiles(layout.tiles, self.blueprint.sizes.head, link, ready)

    def _read_head(self) -> Tensor:
        """[vocabulary, hidden] in RAM, expanded, in the type that is computed in."""
        checkpoint = self.blueprint.checkpoint
        ((_, tensor),) = checkpoint.tensors(self.blueprint.head.name)
        return torch.empty_like(tensor, dtype=self.blueprint.dtype).copy_(tensor)

    def _stored_tiles(self) -> list[Tensor]:
        """The tiles as they are stored: flat uint8 in RAM."""
        layout, skeleton = self.blueprint.head, self.blueprint.skeleton
        if layout.format is not None:
            packed = self.blueprint.checkpoint.raw(layout.name)
            return [layout.format.rows(packed, layout.shape, rows) for rows in layout.tiles]
        shared = skeleton.embedding._parameters["weight"]
        weight = shared if skeleton.tied and shared is not None else self._read_head()
        return [weight[rows.start : rows.stop].reshape(-1).view(torch.uint8) for rows in layout.tiles]

    def _expanded(self, number: int, block: Tensor) -> Tensor:
        """A tile on the device as the product takes it."""
        layout, dtype = self.blueprint.head, self.blueprint.dtype
        shape = (len(layout.tiles[number]), layout.shape[1])
        if layout.format is None:
            return block.view(dtype).view(shape)
        assert self.workspace is not None
        target = self.workspace[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
        expand(layout.format, block, target)
        return target

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)
