"""Blueprint: a model as its configuration and its checkpoint's headers describe it, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from streamllm_core.architectures import check_range
from streamllm_core.checkpoint import Checkpoint
from streamllm_core.head import tile_rows
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.memory.sizes import ModelSizes
from streamllm_core.quantization import Format
from streamllm_core.skeleton import Skeleton
from streamllm_core.weights import WeightSource
from streamllm_core.weights.quantized import planned_formats


@dataclass(frozen=True)
class HeadLayout:
    """The output projection [vocabulary, hidden]: its module ``name``, how it is packed, and its tiles of rows."""

    name: str
    shape: tuple[int, int]
    format: Format | None
    itemsize: int
    tiles: list[range]

    def nbytes(self, rows: int) -> int:
        """Of so many rows as they are stored."""
        shape = (rows, self.shape[1])
        return self.format.nbytes(shape) if self.format is not None else shape[0] * shape[1] * self.itemsize


class Blueprint:
    """What is to be loaded, and how large each part is.

    Attributes: ``config`` (transformers), ``skeleton``, ``checkpoint``, ``device``, ``dtype`` (of the computation),
    ``layouts`` (one for each decoder layer), ``head`` (HeadLayout), ``sizes`` (ModelSizes).
    """

    def __init__(
        self,
        source: WeightSource,
        config: Any,
        device: torch.device,
        dtype: torch.dtype,
        rounded_to: torch.dtype,
        planned: str | None = None,
    ) -> None:
        """``rounded_to``: the type whose values the weights take. ``planned``: a format ("int8", "int4") that the
        weights are to be thought packed in, though the source has not packed them. Raises ModelError."""
        check_range(config, dtype)
        self.source = source
        self.config = config
        self.device = device
        self.dtype = dtype
        self.skeleton = Skeleton(config, dtype)
        self.checkpoint = Checkpoint(source, self.skeleton, rounded_to=rounded_to)
        self._planned = planned_formats(self.checkpoint, self.skeleton, planned) if planned else {}
        self.layouts = [
            ArenaLayout.of(layer, self._formats(self.prefix(index))) for index, layer in enumerate(self.skeleton.layers)
        ]
        self.head = self._head()
        self.sizes = self._sizes()

    def prefix(self, layer: int) -> str:
        """What the names of a decoder layer's tensors begin with."""
        return f"{self.skeleton.layers_prefix}{layer}."

    def _formats(self, prefix: str) -> dict[str, Format]:
        planned = {name: format for name, format in self._planned.items() if name.startswith(prefix)}
        return self.checkpoint.formats(prefix) | {name.removeprefix(prefix): f for name, f in planned.items()}

    def _head(self) -> HeadLayout:
        skeleton = self.skeleton
        vocabulary, hidden = skeleton.output._parameters["weight"].shape  # type: ignore[union-attr]
        name = f"{skeleton.name_of(skeleton.embedding if skeleton.tied else skeleton.output)}.weight"
        # A tied head is cut out of the embedding, which is expanded in RAM.
        packed = None if skeleton.tied else self._planned.get(name) or self.checkpoint.format(name)
        tiles = tile_rows(vocabulary, hidden * self.dtype.itemsize)
        return HeadLayout(name, (vocabulary, hidden), packed, self.dtype.itemsize, tiles)

    def _sizes(self) -> ModelSizes:
        skeleton, itemsize = self.skeleton, self.dtype.itemsize
        on_cpu = self.device.type == "cpu"
        apart = {f"{skeleton.name_of(module)}.weight" for module in (skeleton.embedding, skeleton.output)}
        fixed = sum(
            tensor.numel() * itemsize
            for name, tensor in skeleton.causal.state_dict().items()
            if not name.startswith(skeleton.layers_prefix) and name not in apart
        )
        vocabulary, hidden = self.head.shape
        tile = self.head.nbytes(len(self.head.tiles[0]))
        expanded = len(self.head.tiles[0]) * hidden * itemsize if self.head.format is not None and not on_cpu else 0
        head = self.head.nbytes(vocabulary)
        if on_cpu:  # everything is in RAM, expanded; a tied head is the embedding itself
            fixed += vocabulary * hidden * itemsize
            head, tile = (0 if skeleton.tied else vocabulary * hidden * itemsize), 0
        return ModelSizes.of(
            self.config,
            self.layouts,
            kept_expanded=on_cpu,
            fixed=fixed,
            head=head,
            head_tile=tile,
            head_workspace=expanded,
            itemsize=itemsize,
        )
