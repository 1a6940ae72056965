"""RingLayer: keys and values of one layer, for a fixed number of stream slots."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm_core.architectures import LayerGeometry
from streamllm_core.kv_storage import KVDtype, load, store, stored_dtype
from streamllm_core.layout import MicroBatch, Run


def ring_rows(geometry: LayerGeometry, max_sinks: int, headroom: int) -> int:
    """Rows of one slot in a layer: S_max + R + H, or R + H where nothing is pinned."""
    return geometry.recent + headroom + (max_sinks if geometry.pins else 0)


def _parts(keys: Tensor, values: Tensor, key_peaks: Tensor | None, value_peaks: Tensor | None) -> dict[str, Tensor]:
    if keys.dtype == torch.float8_e4m3fn:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    parts = {"keys": keys, "values": values, "key_peaks": key_peaks, "value_peaks": value_peaks}
    return {name: part for name, part in parts.items() if part is not None}


class RingLayer:
    """Keys and values of one layer, [slots, kv_heads, rows, head_dim], rows = S_max + C.

    ``dtype`` is what they are computed with, ``kv_dtype`` how they lie here; ``key_peaks`` and ``value_peaks``
    [slots, kv_heads, rows] belong to int8 ones. Raises ValueError where ``kv_dtype`` is impossible.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
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
        self.pins = geometry.pins
        self.recent = geometry.recent
        self.capacity = geometry.recent + headroom
        rows = ring_rows(geometry, max_sinks, headroom)
        stored = stored_dtype(kv_dtype, dtype, device)
        self.keys = torch.zeros(slots, kv_heads, rows, head_dim, dtype=stored, device=device)
        self.values = torch.zeros_like(self.keys)
        self.key_peaks = self.value_peaks = None
        if stored == torch.int8:
            self.key_peaks = torch.zeros(slots, kv_heads, rows, device=device)
            self.value_peaks = torch.zeros_like(self.key_peaks)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Everything that slots hold, [slots, kv_heads, rows, …] each, to be copied but not computed with: fp8 is shown
        as uint8, because not all indexing knows it."""
        return _parts(self.keys, self.values, self.key_peaks, self.value_peaks)

    def sinks(self, sinks: int) -> int:
        """How many of a stream's pinned tokens this layer pins."""
        return sinks if self.pins else 0

    def used(self, sinks: int, length: int) -> int:
        """Number of leading rows that a stream of ``length`` tokens has written."""
        return min(length, self.sinks(sinks) + self.capacity)

    def evicts(self, run: Run) -> bool:
        """Whether some query of ``run`` no longer sees its sinks at their true distance."""
        return 0 < self.sinks(run.sinks) < run.stop - self.recent

    def write(self, batch: MicroBatch, keys: Tensor, values: Tensor) -> None:
        """Store a micro-batch: keys, values [kv_heads, tokens, head_dim]."""
        rows = batch.memo(("rows", self.pins, self.capacity), lambda: self._rows(batch))
        new_keys, key_peaks = store(keys, self.keys.dtype)
        new_values, value_peaks = store(values, self.keys.dtype)
        new = _parts(new_keys, new_values, key_peaks, value_peaks)
        for name, part in self.parts.items():
            if isinstance(rows, slice):
                part[batch.runs[0].slot, :, rows] = new[name]
            else:
                part[batch.slots, :, rows] = new[name].transpose(0, 1)

    def read(self, slots: int | slice, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``rows`` rows of these slots in ``dtype``; no copies unless quantised."""
        where = (slots, slice(None), slice(rows))
        key_peaks = None if self.key_peaks is None else self.key_peaks[where]
        value_peaks = None if self.value_peaks is None else self.value_peaks[where]
        return load(self.keys[where], key_peaks, self.dtype), load(self.values[where], value_peaks, self.dtype)

    def _rows(self, batch: MicroBatch) -> Tensor | slice:
        """The row of each token of a micro-batch; a slice when they are consecutive ones of a single slot."""
        run = batch.runs[0]
        first = self.sinks(run.sinks)
        if len(batch.runs) == 1 and run.start >= first:
            row = first + (run.start - first) % self.capacity
            if row + run.count <= first + self.capacity:
                return slice(row, row + run.count)
        sinks = batch.sinks if self.pins else torch.zeros_like(batch.sinks)
        ring = sinks + (batch.positions - sinks) % self.capacity
        return torch.where(batch.positions < sinks, batch.positions, ring)

    def labels(self, sinks: Tensor, last: Tensor, rows: int) -> Tensor:
        """Stream position held by each of the first ``rows`` rows of slots that pin ``sinks`` tokens each and whose
        token ``last`` was just written (both int64 [n, 1]); -1 where no token of the stream is. int64 [n, rows]."""
        row = torch.arange(rows)
        ring = last - (last - row) % self.capacity
        held = torch.where(row < sinks, row, torch.where(ring >= sinks, ring, -1))
        # Slots have room for the longest prefix: behind a shorter one the last rows are not part of the ring.
        return torch.where((held <= last) & (row < sinks + self.capacity), held, -1)

    def logical_rows(self, sinks: int, length: int) -> Tensor:
        """Rows of the tokens still visible, oldest first: the pinned ones, then at most R (int64, CPU)."""
        first = self.sinks(sinks)
        pinned = torch.arange(min(first, length))
        recent = torch.arange(max(first, length - self.recent), max(length, first))
        return torch.cat([pinned, first + (recent - first) % self.capacity])
