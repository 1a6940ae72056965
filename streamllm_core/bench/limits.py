"""What a pass could take at best, measured without this package's runtime: plain copies, plain products, and
PyTorch's own attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from streamllm_core.bench.shapes import Shape
from streamllm_core.hardware import median_seconds
from streamllm_core.model import StreamingModel


def link_bandwidth(model: StreamingModel) -> float:
    """Bytes a second of copying one streamed layer after another into the scratchpads, nothing else running."""
    streamer = model.streamer
    link = streamer.link
    assert link is not None

    def run() -> None:
        for turn, layer in enumerate(streamer.order):
            link.free(turn % 2)
            link.start(layer, turn % 2)
            link.wait(turn % 2)

    bandwidth = streamer.bytes_per_pass / median_seconds(run, model.device)
    streamer.set_prefetching(streamer.prefetching)  # the slots hold what this left there
    return bandwidth


class ComputeLimit:
    """Seconds of the matrix products of all layers and of attention over the same window, for passes of any size:
    measured at some sizes, straight lines between them."""

    def __init__(self, shape: Shape, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._window = window
        self._place: dict[str, Any] = {"dtype": dtype, "device": device}
        self._measured: dict[int, float] = {}

    def measure(self, tokens: int, streams: int) -> float:
        """Of a pass of ``tokens`` tokens, equally many of each stream."""
        if tokens not in self._measured:
            seconds = self._products(tokens) + self._attention(streams, tokens // streams)
            self._measured[tokens] = seconds * self._shape.layers
        return self._measured[tokens]

    def at(self, tokens: int, sizes: Sequence[int], chunk: int) -> float:
        """Between the neighbours among ``sizes``, which are measured when first needed."""

        def measured(size: int) -> float:
            return self.measure(size, max(1, size // chunk))

        upper = bisect_left(sizes, tokens)
        if upper == 0:
            return measured(sizes[0])
        if upper == len(sizes):
            return measured(sizes[-1]) * tokens / sizes[-1]
        low, high = sizes[upper - 1], sizes[upper]
        share = (tokens - low) / (high - low)
        return measured(low) + share * (measured(high) - measured(low))

    def _products(self, tokens: int) -> float:
        products = self._shape.products()
        widest = max(rows * inputs for rows, inputs, _ in products)
        values = torch.randn(tokens * widest, **self._place)
        weights = [torch.randn(outputs, inputs, **self._place) for _, inputs, outputs in products]
        inputs = [values[: tokens * rows * width].view(tokens * rows, width) for rows, width, _ in products]

        def run() -> None:
            for _ in range(4):
                for value, weight in zip(inputs, weights, strict=True):
                    functional.linear(value, weight)

        return median_seconds(run, self._place["device"]) / 4

    def _attention(self, streams: int, chunk: int) -> float:
        attention = flash_attention(
            streams, chunk, self._window, self._shape.heads, self._shape.kv_heads, self._shape.dim, self._place
        )
        return median_seconds(attention, self._place["device"])


def flash_attention(
    streams: int, chunk: int, window: int, heads: int, kv_heads: int, dim: int, place: dict[str, Any]
) -> Any:
    """PyTorch's attention for ``chunk`` queries a stream at the end of a full window."""
    seen = chunk + window
    if place["device"].type == "cuda" and place["dtype"] != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        query = torch.randn(streams * chunk, heads, dim, **place)
        keys = torch.randn(streams * seen, heads, dim, **place)
        edges = torch.arange(streams + 1, device=place["device"], dtype=torch.int32)
        return lambda: varlen_attn(query, keys, keys, edges * chunk, edges * seen, chunk, seen, window_size=(window, 0))
    query = torch.randn(streams, heads, chunk, dim, **place)
    keys = torch.randn(streams, kv_heads, seen, dim, **place)
    distance = torch.arange(window, seen)[:, None] - torch.arange(seen)
    mask = ((distance >= 0) & (distance <= window)).to(place["device"])
    return lambda: functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask, enable_gqa=True)
