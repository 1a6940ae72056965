"""LayerStreamer: runs decoder layers out of two scratchpads while the next ones are on their way.

Transfers are numbered m = 0, 1, 2 … over all passes; transfer m brings streamed layer m mod n into slot m mod 2, and
starts as soon as transfer m - 2's layer has left that slot. So the end of one pass already fetches the first layers
of the next, and n may be odd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from streamllm_core.attention import PassState
from streamllm_core.links import Link
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.memory.scratchpad import SLOTS, GPUScratchpadPool


class LayerStreamer:
    """Wraps the decoder layers of a model: streamed ones lease their slot, packed ones are expanded into the workspace
    first, and all of them run in micro-batches."""

    def __init__(
        self,
        layers: nn.ModuleList,
        layouts: Mapping[int, ArenaLayout],
        streamed: Sequence[int],
        pool: GPUScratchpadPool | None,
        link: Link | None,
        state: PassState,
        *,
        packed: Mapping[int, Tensor] | None = None,
        workspace: Tensor | None = None,
        prefetching: bool = True,
    ) -> None:
        """``layouts`` has an entry for each layer that is streamed or packed; ``pool`` and ``link`` are None when none
        is streamed. ``packed``: the blocks of packed layers that stay on the device. ``workspace``: uint8, room for the
        largest packed layer, expanded. Without ``prefetching`` a transfer starts only when its layer is wanted."""
        self.order = sorted(streamed)
        self.prefetching = prefetching
        self.transfers = 0
        self.bytes_moved = 0
        self.layouts = layouts
        self.link = link
        self._pool = pool
        self._packed = packed or {}
        self._turn = 0
        self._under_way = False
        self._bindings = {
            index: _Binding(layers[index], layouts[index], pool, workspace)
            for index in sorted({*streamed, *self._packed})
        }
        for index, layer in enumerate(layers):
            layer.forward = self._wrap(index, layer.forward, state)
        self._prefetch_first()

    @property
    def bytes_per_pass(self) -> int:
        return sum(self.layouts[index].nbytes for index in self.order)

    def set_prefetching(self, prefetching: bool) -> None:
        """Switch between prefetched and sequential transfers, between two passes."""
        self.prefetching = prefetching
        self._turn += -self._turn % max(1, SLOTS * len(self.order))
        self._prefetch_first()

    def begin_pass(self) -> None:
        """Be ready for layer 0, also after a pass that broke off: what its slots hold is not relied upon."""
        if self._under_way:
            self.set_prefetching(self.prefetching)
        self._under_way = bool(self.order)

    def _prefetch_first(self) -> None:
        if self.order and self.prefetching:
            self._start(self._turn)
            self._start(self._turn + 1)

    def _start(self, turn: int) -> None:
        assert self.link is not None
        layer = self.order[turn % len(self.order)]
        self.link.start(layer, turn % SLOTS)
        self.transfers += 1
        self.bytes_moved += self.layouts[layer].nbytes

    @contextmanager
    def _lease(self, index: int) -> Iterator[None]:
        """The layer's weights are in place inside the block."""
        binding = self._bindings.get(index)
        if binding is None:
            yield
        elif index in self._packed:
            binding.expand(self._packed[index])
            yield
        else:
            slot = self._arrive()
            if binding.expands:  # the slot is free for the next transfer before the layer computes
                assert self._pool is not None
                binding.expand(self._pool.slots[slot])
                self._leave(slot)
                yield
            else:
                binding.bind(slot)
                yield
                self._leave(slot)

    def _arrive(self) -> int:
        """Wait for the layer whose turn it is; the slot that holds it."""
        assert self.link is not None
        slot = self._turn % SLOTS
        if not self.prefetching:
            self.link.free(slot)  # the transfer comes after everything computed so far
            self._start(self._turn)
        self.link.wait(slot)
        return slot

    def _leave(self, slot: int) -> None:
        assert self.link is not None
        self.link.free(slot)
        self._turn += 1
        self._under_way = self._turn % len(self.order) != 0
        if self.prefetching:
            self._start(self._turn + 1)

    def _wrap(self, index: int, layer: Callable[..., Any], state: PassState) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            with self._lease(index):
                output = _in_micro_batches(layer, state, hidden, args, kwargs)
            if index == state.tap_layer and state.tap_rows is not None:
                state.tapped = _first(output)[0, state.tap_rows]
            return output

        return forward


class _Binding:
    """The views that take the place of a layer's parameters: into each slot, or into the workspace."""

    def __init__(
        self, layer: nn.Module, layout: ArenaLayout, pool: GPUScratchpadPool | None, workspace: Tensor | None
    ) -> None:
        self.expands = layout.packed
        self._layout = layout
        self._places = layout.places(layer)
        blocks = [workspace] if self.expands else pool.slots if pool is not None else []
        self._views = [layout.expanded.views(block) for block in blocks if block is not None]

    def bind(self, block: int) -> None:
        """The layer computes with what is in this slot."""
        views = self._views[block]
        for place, leaf, name in self._places:
            place[leaf] = views[name]

    def expand(self, stored: Tensor) -> None:
        """Expand ``stored`` into the workspace; the layer computes with what is there."""
        self._layout.expand(stored, self._views[0])
        self.bind(0)


def _in_micro_batches(
    layer: Callable[..., Any], state: PassState, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One upload of a layer serves any number of tokens, whatever the activation memory: hidden [1, tokens, size] is
    replaced in place, piece by piece. Pieces run in stream order, so keys are written before they are attended to."""
    output: Any = hidden
    for batch in state.batches:
        state.batch = batch
        if len(state.batches) == 1:
            return layer(hidden, *args, **kwargs)
        rows = slice(batch.first, batch.first + batch.tokens)
        output = layer(hidden[:, rows], *_cut(args, rows, hidden.shape[1]), **_cut(kwargs, rows, hidden.shape[1]))
        hidden[:, rows] = _first(output)
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def _cut(value: Any, rows: slice, tokens: int) -> Any:
    """Cut every tensor [1, tokens, …] in a structure of arguments to ``rows``."""
    if isinstance(value, Tensor):
        return value[:, rows] if value.ndim > 1 and value.shape[1] == tokens else value
    if isinstance(value, tuple | list):
        return type(value)(_cut(item, rows, tokens) for item in value)
    if isinstance(value, dict):
        return {key: _cut(item, rows, tokens) for key, item in value.items()}
    return value
