"""RollingCache: for each stream and layer, S pinned tokens (attention sinks) and a ring of the most recent ones.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). Keys are stored rotated to
their true position, once. A stream's token j lives in row j of its slot while j < S, else in row
S + (j - S) mod C, with C = R + H: R tokens are visible, and the headroom H keeps what an excursion or a chunk must
not overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamllm_core.architectures import LayerGeometry
from streamllm_core.errors import NoFreeStream, StreamLLMError, WindowError
from streamllm_core.history import History
from streamllm_core.kv_storage import KVDtype, row_bytes
from streamllm_core.ring import RingLayer, ring_rows

MAX_HOLES = 8
CLOSED = -1  # the slot of a stream that has none any more


@dataclass(frozen=True)
class Mark:
    """A place in a stream to come back to. Holds no keys: the ring's headroom keeps them."""

    length: int
    holes: tuple[tuple[int, int], ...]
    last_hidden: Tensor | None


@dataclass(eq=False)
class Stream:
    """One text being read: ``length`` tokens so far, the first ``sinks`` of them pinned.

    ``reach``: up to which position it has ever been written. Beyond ``length`` lie forgotten excursions, drafted tokens
    that were not kept, and passes that broke off.
    ``history``: the ids of its recent tokens.
    """

    slot: int
    sinks: int
    length: int = 0
    holes: tuple[tuple[int, int], ...] = ()
    last_hidden: Tensor | None = field(default=None, repr=False)
    marked: int | None = None
    reach: int = 0
    history: History = field(default_factory=History, repr=False)

    def keep(self, tokens: int, last_hidden: Tensor) -> None:
        """Of what was written behind it, the next ``tokens`` belong to the stream now; ``last_hidden`` [hidden] is the
        last one's."""
        self.length += tokens
        self.last_hidden = last_hidden.clone()

    def cut(self, length: int) -> None:
        """Forget the tokens from position ``length`` on, at most as many as the headroom; others must be read next."""
        if length < self.length:
            self.length, self.last_hidden = length, None

    def mark(self) -> Mark:
        """Begin an excursion; ``rewind`` ends it. Excursions do not nest."""
        if self.marked is not None:
            raise ValueError("this stream is on an excursion already")
        self.marked = self.length
        return Mark(self.length, self.holes, self.last_hidden)

    def rewind(self, mark: Mark) -> None:
        """Forget all tokens since ``mark``; the stream is bit-identical to one that never saw them.

        Raises ValueError for a mark of no open excursion: what it would need may be overwritten.
        """
        if self.marked is None or self.marked != mark.length:
            raise ValueError("this mark belongs to no open excursion of the stream")
        self.length, self.holes, self.last_hidden = mark.length, mark.holes, mark.last_hidden
        self.marked = None


class RollingCache:
    """The rings of all layers for a fixed number of stream slots.

    Memory is constant: slots × ``stream_bytes``.
    """

    def __init__(
        self,
        geometries: list[LayerGeometry],
        *,
        slots: int,
        max_sinks: int,
        headroom: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        self.dtype = dtype
        self.max_sinks = max_sinks
        self.headroom = headroom
        self.slots = slots
        self.layers = [
            RingLayer(geometry, slots, max_sinks, headroom, kv_heads, head_dim, dtype, device, kv_dtype)
            for geometry in geometries
        ]
        self.recent = max(layer.recent for layer in self.layers)
        self._free = list(range(slots))

    @staticmethod
    def stream_bytes(
        geometries: Sequence[LayerGeometry],
        max_sinks: int,
        headroom: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: KVDtype = "auto",
    ) -> int:
        """What one slot takes: Σ over layers of 2 × kv_heads × rows × bytes of a row."""
        rows = sum(ring_rows(geometry, max_sinks, headroom) for geometry in geometries)
        return 2 * rows * kv_heads * row_bytes(kv_dtype, head_dim, dtype)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def open(self, sinks: int) -> Stream:
        """A new stream whose first ``sinks`` tokens will be pinned. Raises NoFreeStream, WindowError."""
        if sinks > self.max_sinks:
            raise WindowError(f"the pinned prefix has {sinks} tokens, but only {self.max_sinks} were planned for.")
        if not self._free:
            raise NoFreeStream(f"all {self.slots} stream slots are in use.")
        stream = Stream(self._free.pop(0), sinks, history=History(self.recent, self.headroom))
        for layer in self.layers:  # no leftover may reach a product with a zero weight: 0 × NaN is NaN
            for part in layer.parts.values():
                part[stream.slot].zero_()
        return stream

    def close(self, stream: Stream) -> None:
        """Give the slot back. The stream can do nothing more: every use of it raises ValueError."""
        if stream.slot == CLOSED:
            raise ValueError("this stream is closed")
        self._free.append(stream.slot)
        self._free.sort()  # low slots first keeps decode batches dense
        stream.slot = CLOSED

    def fork(self, stream: Stream) -> Stream:
        """A copy of ``stream`` in a slot of its own: constant size, whatever was read. Raises NoFreeStream."""
        self._check_usable(stream)
        if not self._free:
            raise NoFreeStream(f"all {self.slots} stream slots are in use.")
        copy = Stream(self._free.pop(0), stream.sinks, stream.length, stream.holes, stream.last_hidden)
        copy.history = stream.history.copy()
        for layer in self.layers:
            for part in layer.parts.values():
                part[copy.slot].copy_(part[stream.slot])
        return copy

    def evict(self, stream: Stream, start: int, stop: int) -> None:
        """Hide the tokens [start, stop) from now on. Survivors keep their distances. Raises ValueError.

        At most ``MAX_HOLES`` spans can be hidden at a time; one that has left the window does not count.
        """
        self._check_usable(stream)
        if not stream.sinks <= start < stop <= stream.length:
            raise ValueError(
                f"cannot evict [{start}, {stop}): the stream holds [{stream.sinks}, {stream.length}) beside its sinks"
            )
        holes: list[tuple[int, int]] = []
        for begin, end in sorted([*stream.holes, (start, stop)]):
            if end <= stream.length - self.recent:
                continue
            if holes and begin <= holes[-1][1]:
                holes[-1] = (holes[-1][0], max(end, holes[-1][1]))
            else:
                holes.append((begin, end))
        if len(holes) > MAX_HOLES:
            raise ValueError(f"more than {MAX_HOLES} evicted spans in one window")
        stream.holes = tuple(holes)

    def room(self, stream: Stream) -> int:
        """How many tokens can be appended so that they, or a pass that breaks off, can still be forgotten."""
        begun = stream.length if stream.marked is None else stream.marked
        return self.headroom - (stream.length - begun)

    def reserve(self, pieces: Sequence[tuple[Stream, Sequence[int]]]) -> None:
        """Note that these tokens are about to be appended to these streams.

        Raises WindowError when they would overwrite what a rewind needs, ValueError for a closed stream,
        StreamLLMError for a lost one.
        """
        for stream, tokens in pieces:
            self._check_usable(stream)
            if stream.marked is not None and (away := stream.length + len(tokens) - stream.marked) > self.headroom:
                raise WindowError(
                    f"an excursion of {away} tokens exceeds the {self.headroom} planned for; "
                    "raise EngineConfig.excursion."
                )
        for stream, tokens in pieces:
            stream.reach = max(stream.reach, stream.length + len(tokens))

    def snapshot(self, stream: Stream) -> dict[str, Tensor]:
        """The stream in logical order: at most S + R tokens a layer, whatever was read. Tensors are copies on the CPU.

        Keys: ``state`` int64 [length, sinks, holes…], ``tokens`` int32 [at most R], ``last_hidden`` [hidden],
        ``keys.i`` and ``values.i``
        [kv_heads, tokens, head_dim] for layer i as they are stored, ``key_peaks.i`` and ``value_peaks.i``
        [kv_heads, tokens] if they are int8. Raises ValueError.
        """
        self._check_usable(stream)
        if stream.marked is not None:
            raise ValueError("a stream on an excursion cannot be saved; rewind it first")
        flat = [edge for hole in stream.holes for edge in hole]
        tensors = {
            "state": torch.tensor([stream.length, stream.sinks, *flat]),
            "tokens": torch.from_numpy(stream.history.last(stream.length).copy()),
        }
        if stream.last_hidden is not None:
            tensors["last_hidden"] = stream.last_hidden.cpu().clone()
        for index, layer in enumerate(self.layers):
            rows = layer.logical_rows(stream.sinks, stream.length).to(layer.keys.device)
            for name, part in layer.parts.items():
                tensors[f"{name}.{index}"] = part[stream.slot].index_select(1, rows).cpu()
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> Stream:
        """The stream that ``snapshot`` saved, in a free slot. Raises NoFreeStream, WindowError, ValueError."""
        length, sinks, *flat = tensors["state"].tolist()
        rows = [layer.logical_rows(sinks, length) for layer in self.layers]
        self._check_layers(tensors, [len(held) for held in rows])
        stream = self.open(sinks)
        stream.length = length
        stream.holes = tuple(zip(flat[::2], flat[1::2], strict=True))
        stream.history.write(length - len(tensors["tokens"]), tensors["tokens"].tolist())
        if "last_hidden" in tensors:
            # A copy: where a file's bytes lie in memory may change the last bits of the products with them.
            stream.last_hidden = tensors["last_hidden"].to(self.layers[0].keys.device, self.dtype, copy=True)
        for index, (layer, held) in enumerate(zip(self.layers, rows, strict=True)):
            held = held.to(layer.keys.device)
            for name, part in layer.parts.items():
                part[stream.slot][:, held] = tensors[f"{name}.{index}"].to(part.device)
        return stream

    def _check_layers(self, tensors: dict[str, Tensor], tokens: list[int]) -> None:
        """Raise ValueError unless a snapshot has these layers, with so many tokens each, and their dtype."""
        saved = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items() if "." in name}
        expected = {
            f"{name}.{index}": ((part.shape[1], count, *part.shape[3:]), part.dtype)
            for index, (layer, count) in enumerate(zip(self.layers, tokens, strict=True))
            for name, part in layer.parts.items()
        }
        if saved != expected:
            raise ValueError("this snapshot was taken with another window, model or dtype")

    def _check_usable(self, stream: Stream) -> None:
        if stream.slot == CLOSED:  # as an index it would mean the last slot, which may be somebody else's
            raise ValueError("this stream is closed")
        if stream.reach - stream.length > self.headroom:
            raise StreamLLMError(
                "this stream is lost: a pass broke off after it had overwritten part of the window. "
                "Close it and begin again, or from its last snapshot."
            )
