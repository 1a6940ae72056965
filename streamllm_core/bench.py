"""Pass times of a model of given shape with random weights, against limits measured in the same run.

The limit of a pass is max(transfer, compute): the bytes of all streamed layers over the link's measured bandwidth, and
the plain matmuls of the same shapes plus PyTorch's own attention, timed apart. Neither uses this package's code.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Config

from streamllm_core.engine import UNLIMITED, EngineConfig
from streamllm_core.hardware import link_rates, median_seconds
from streamllm_core.memory.budget import KVCacheSizingManager
from streamllm_core.model import StreamingModel, resolve_device, resolve_dtype
from streamllm_core.skeleton import Skeleton

LONG_AGO = 10_000  # streams are benchmarked this many tokens in: the window is full


@dataclass(frozen=True)
class Shape:
    """A Qwen2-like decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 32_000

    @staticmethod
    def of_width(layers: int, hidden: int) -> Shape:
        """A shape with heads of 64 and the usual proportions."""
        if hidden % 256:
            raise ValueError(f"the hidden dimension must be a multiple of 256, not {hidden}")
        return Shape(layers, hidden, hidden * 11 // 4, hidden // 64, hidden // 256)

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            max_position_embeddings=32_768,
        )


SHAPES = {
    "qwen2.5-7b": Shape(28, 3584, 18_944, 28, 4, 152_064),
    "llama3-8b": Shape(32, 4096, 14_336, 32, 8, 128_256),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 49_152),
}


class RandomSource:
    """A weight source of random values, made on the device: no file is read. On a CPU they are made once and kept, as
    they stand for what is read again and again."""

    def __init__(self, config: Any, config_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        config.save_pretrained(config_dir)
        self.name = "random weights"
        self.config_dir = config_dir
        self.fingerprint: dict[str, object] = {}
        self.module_names = True
        self._dtype = dtype
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._shapes = {name: tuple(value.shape) for name, value in Skeleton(config, dtype).causal.state_dict().items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._dtype, self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        value = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device).normal_(0, 0.02)
        if self._device.type == "cpu":
            self._kept[name] = value
        return value.cpu()

    def format(self, name: str) -> None:
        """Nothing is packed."""

    def release(self, name: str) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class PassTime:
    """Milliseconds of one pass of ``tokens`` tokens over ``streams`` streams, and its limits."""

    tokens: int
    streams: int
    transfer: float
    compute: float
    sequential: float
    prefetched: float

    @property
    def limit(self) -> float:
        return max(self.transfer, self.compute)


def bench(
    shape: Shape,
    tokens: list[int],
    *,
    window: int,
    device: str = "auto",
    dtype: str = "auto",
    micro_tokens: int | None = None,
) -> Iterator[PassTime]:
    """Measure passes of each number of tokens: up to 64 as decoding streams, more as chunks of about 1,024."""
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    with tempfile.TemporaryDirectory() as folder:
        source = RandomSource(shape.config(), Path(folder), number, place)
        manager = KVCacheSizingManager(UNLIMITED, link_rates(place, number))
        model = StreamingModel(source, place, number, manager, resident=0)
    moved = sum(layout.nbytes for layout in model.streamer.layouts.values())
    bandwidth = _link_bandwidth(model)
    for count in tokens:
        streams = count if count <= 64 else max(1, count // 1024)
        compute = _compute_seconds(model, shape, streams, count // streams, window)
        times = {}
        for prefetching in (False, True):
            model.streamer.set_prefetching(prefetching)
            times[prefetching] = _pass_seconds(model, streams, count // streams, window, micro_tokens)
        milliseconds = [1e3 * t for t in (moved / bandwidth, compute, times[False], times[True])]
        yield PassTime(count, streams, *milliseconds)


def _pass_seconds(model: StreamingModel, streams: int, chunk: int, window: int, micro_tokens: int | None) -> float:
    config = EngineConfig(window, sinks=4, excursion=0, streams=streams, micro_tokens=micro_tokens or streams * chunk)
    engine = model.engine(config)
    texts = [engine.open(sinks=4) for _ in range(streams)]
    for layer in engine.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    ids = torch.randint(model.config.vocab_size, (streams, chunk)).tolist()

    def run() -> None:
        for text in texts:
            text.length = LONG_AGO
        engine.forward(list(zip(texts, ids, strict=True)))

    return median_seconds(run, model.device)


def _link_bandwidth(model: StreamingModel) -> float:
    """Bytes a second of copying one layer after another into the scratchpads, nothing else running."""
    link, layouts = model.streamer.link, model.streamer.layouts
    assert link is not None

    def run() -> None:
        for turn, layer in enumerate(sorted(layouts)):
            link.free(turn % 2)
            link.start(layer, turn % 2)
            if model.device.type == "cpu":
                link.wait(turn % 2)

    return sum(layout.nbytes for layout in layouts.values()) / median_seconds(run, model.device)


def _compute_seconds(model: StreamingModel, shape: Shape, streams: int, chunk: int, window: int) -> float:
    """Plain matmuls of all layers for streams × chunk tokens, plus attention with the same window."""
    dim = shape.hidden // shape.heads
    sides = [(shape.hidden, shape.hidden)] * 2 + [(shape.hidden, shape.kv_heads * dim)] * 2
    sides += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    place: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    inputs = {wide: torch.randn(streams * chunk, wide, **place) for wide in {side[0] for side in sides}}
    weights = [torch.randn(out, into, **place) for into, out in sides]

    def matmuls() -> None:
        for _ in range(shape.layers):
            for weight in weights:
                functional.linear(inputs[weight.shape[1]], weight)

    attention = _flash(streams, chunk, window, shape.heads, shape.kv_heads, dim, place)
    repeats = range(shape.layers)
    return median_seconds(matmuls, model.device) + median_seconds(lambda: [attention() for _ in repeats], model.device)


def _flash(streams: int, chunk: int, window: int, heads: int, kv_heads: int, dim: int, place: dict[str, Any]) -> Any:
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


def table(rows: list[PassTime]) -> str:
    """The measurements for people."""
    head = f"{'tokens':>7} {'streams':>8} {'transfer':>9} {'compute':>9} {'sequential':>11} {'prefetched':>11}"
    lines = [head + f" {'limit/seq':>10} {'limit/pre':>10}   (milliseconds a pass)"]
    lines += [
        f"{row.tokens:>7} {row.streams:>8} {row.transfer:>9.1f} {row.compute:>9.1f} {row.sequential:>11.1f} "
        f"{row.prefetched:>11.1f} {row.limit / row.sequential:>10.3f} {row.limit / row.prefetched:>10.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def as_json(rows: list[PassTime]) -> str:
    return json.dumps([asdict(row) | {"limit": row.limit} for row in rows])
