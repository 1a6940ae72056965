"""LayerStreamer: runs decoder layers out of two scratchpads while the next ones are on their way.

Transfers are numbered m = 0, 1, 2 … over all passes; transfer m brings streamed layer m mod n into slot m mod 2, and
starts as soon as transfer m - 2's layer has left that slot. So the end of one pass already fetches the first layers
of the next, and n may be odd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from streamllm_core.attention import PassState
from streamllm_core.links import Link
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.memory.scratchpad import SLOTS, GPUScratchpadPool


class LayerStreamer:
    """Wraps the decoder layers of a model: streamed ones lease their slot, all of them run in micro-batches."""

    def __init__(
        self,
        layers: nn.ModuleList,
        layouts: dict[int, ArenaLayout],
        pool: GPUScratchpadPool | None,
        link: Link | None,
        state: PassState,
        *,
        prefetching: bool = True,
    ) -> None:
        """``layouts`` has an entry for each streamed layer; ``pool`` and ``link`` are None when there is none.
        Without ``prefetching`` a transfer starts only when its layer is wanted."""
        self.order = sorted(layouts)
        self.prefetching = prefetching
        self.transfers = 0
        self.bytes_moved = 0
        self._layers = layers
        self.layouts = layouts
        self.link = link
        self._turn = 0
        self._under_way = False
        self._views = {
            layer: [layout.views(slot) for slot in pool.slots] if pool else [] for layer, layout in layouts.items()
        }
        for index, layer in enumerate(layers):
            layer.forward = self._wrap(index, layer.forward, state)
        self._prefetch_first()

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
        if index not in self.layouts:
            yield
            return
        assert self.link is not None
        slot = self._turn % SLOTS
        if not self.prefetching:
            self.link.free(slot)  # the transfer comes after everything computed so far
            self._start(self._turn)
        self.link.wait(slot)
        self.layouts[index].bind(self._layers[index], self._views[index][slot])
        yield
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
