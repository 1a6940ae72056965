"""Shapes of models, and weights of such a shape that come from nowhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen3MoeConfig

from streamllm_core.devices import resolve_device, resolve_dtype
from streamllm_core.engine_config import EngineConfig
from streamllm_core.memory.machine import sizing_manager
from streamllm_core.model import StreamingModel
from streamllm_core.quantization import Format
from streamllm_core.quantization.formats import Int4, Int8
from streamllm_core.skeleton import Skeleton
from streamllm_core.weights.quantized import check_quantizer, format_for

CONTEXT = 32_768
SPREAD = 0.02  # of the weights, as models are initialised


@dataclass(frozen=True)
class Shape:
    """A decoder of Qwen's make: dense, or with ``experts`` of which ``chosen`` see a token (``intermediate`` is then
    one expert's width)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 32_000
    head_dim: int = 0  # 0: hidden / heads
    experts: int = 0
    chosen: int = 0

    @staticmethod
    def of_width(layers: int, hidden: int) -> Shape:
        """A shape with heads of 64 and the usual proportions. Raises ValueError."""
        if hidden % 256:
            raise ValueError(f"the hidden dimension must be a multiple of 256, not {hidden}")
        return Shape(layers, hidden, hidden * 11 // 4, hidden // 64, hidden // 256)

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def products(self) -> list[tuple[int, int, int]]:
        """(rows a token, inputs, outputs) of each matrix product of a layer."""
        queries, keys = self.heads * self.dim, self.kv_heads * self.dim
        rows = self.chosen or 1
        return [
            *[(1, self.hidden, width) for width in (queries, keys, keys)],
            (1, queries, self.hidden),
            *[(rows, self.hidden, self.intermediate)] * 2,
            (rows, self.intermediate, self.hidden),
        ]

    def config(self) -> Any:
        """As transformers wants it."""
        common: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "max_position_embeddings": CONTEXT,
        }
        if not self.experts:
            return Qwen2Config(**common)
        return Qwen3MoeConfig(
            **common,
            head_dim=self.dim,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            moe_intermediate_size=self.intermediate,
        )


SHAPES = {
    "qwen2.5-7b": Shape(28, 3584, 18_944, 28, 4, 152_064),
    "llama3-8b": Shape(32, 4096, 14_336, 32, 8, 128_256),
    "llama3-70b": Shape(80, 8192, 28_672, 64, 8, 128_256),
    "qwen3-30b-a3b": Shape(48, 2048, 768, 32, 4, 151_936, head_dim=128, experts=128, chosen=8),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 49_152),
}


class RandomSource:
    """A weight source of random values, made on the device: no file is read. On a CPU they are made once and kept, as
    they stand for what is read again and again.

    Where ``format`` is given, the matrices of the decoder layers (and the head) are packed; their bytes are random,
    their scales are not.
    """

    def __init__(
        self, config: Any, config_dir: Path, dtype: torch.dtype, device: torch.device, quantize: str | None = None
    ) -> None:
        """Raises ModelError for an unknown format."""
        config.save_pretrained(config_dir)
        self.name = "random weights"
        self.module_names = True
        self.config_dir = config_dir
        self.fingerprint: dict[str, object] = {}
        self._dtype = dtype
        self._device = device
        self._kept: dict[str, Tensor] = {}
        skeleton = Skeleton(config, dtype)
        self._shapes = {name: tuple(value.shape) for name, value in skeleton.causal.state_dict().items()}
        self._formats = _packed(self._shapes, quantize, skeleton)

    def names(self) -> list[str]:
        return list(self._shapes)

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._dtype, self._shapes[name]

    def format(self, name: str) -> Format | None:
        return self._formats.get(name)

    def raw(self, name: str) -> Tensor:
        if name not in self._kept:
            packed = _random_packed(self._formats[name], self._shapes[name], self._device)
            return self._keep(name, packed)
        return self._kept[name]

    def tensor(self, name: str) -> Tensor:
        if name not in self._kept:
            value = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device).normal_(0, SPREAD)
            return self._keep(name, value)
        return self._kept[name]

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def _keep(self, name: str, value: Tensor) -> Tensor:
        if self._device.type == "cpu":
            self._kept[name] = value
        return value


def _packed(shapes: dict[str, tuple[int, ...]], quantize: str | None, skeleton: Skeleton) -> dict[str, Format]:
    if quantize is None:
        return {}
    check_quantizer(quantize)
    formats = {name: format_for(name, shape, skeleton, quantize) for name, shape in shapes.items()}
    return {name: format for name, format in formats.items() if format is not None}


def _random_packed(format: Format, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Any quants; scales that make values of about ``SPREAD``."""
    packed = torch.randint(0, 256, (format.nbytes(shape),), dtype=torch.uint8, device=device)
    if isinstance(format, Int8):
        format.planes(packed, shape).scales.fill_(SPREAD / 74)  # the deviation of -128 … 127
    elif isinstance(format, Int4):
        planes = format.planes(packed, shape)
        planes.scales.fill_(100)
        planes.row_scales.fill_(SPREAD / 4.6 / 100)  # the deviation of 0 … 15
        planes.minima.fill_(-100)
        planes.row_minima.fill_(7.5 * SPREAD / 4.6 / 100)
    return packed


@contextmanager
def random_model(
    shape: Shape,
    *,
    device: str,
    dtype: str,
    quantize: str | None,
    vram: int | str | None,
    resident: int | None = None,
    expected: EngineConfig | None = None,
    fused: bool = True,
) -> Iterator[StreamingModel]:
    """A model of random weights, loaded within ``vram``. Raises ModelError, BudgetError, ValueError."""
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    with tempfile.TemporaryDirectory() as folder:
        source = RandomSource(shape.config(), Path(folder), number, place, quantize)
        manager = sizing_manager(place, number, vram)
        yield StreamingModel(source, place, number, manager, resident=resident, expected=expected, fused=fused)
