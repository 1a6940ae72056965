"""Checkpoint: a weight source under the names and shapes that the model's modules use.

Files may name tensors differently from modules (single experts against one 3-D tensor, old prefixes); transformers
keeps that knowledge as conversion mappings, and those are applied here, layer by layer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from streamllm_core.errors import ModelError
from streamllm_core.memory.budget import free_bytes
from streamllm_core.skeleton import Skeleton
from streamllm_core.weights import WeightSource
from streamllm_core.weights.reading import FileRange, RangeReader
from streamllm_core.weights.source import FileSource


@dataclass
class _Recipe:
    """How one module tensor (or several) comes from stored ones."""

    converter: WeightConverter | None
    parts: list[tuple[str, str]] = field(default_factory=list)  # (stored name, pattern of the converter)


class Checkpoint:
    """Tensors by module name, read when asked for."""

    def __init__(self, source: WeightSource, skeleton: Skeleton, rounded_to: torch.dtype) -> None:
        """Weights are rounded to ``rounded_to``, whatever they are computed with. Raises ModelError when the checkpoint
        lacks tensors of the model."""
        self._rounded_to = rounded_to
        self.source = source
        self._model = skeleton.causal
        self._wanted: dict[str, Tensor] = dict(skeleton.causal.state_dict())
        self._recipes = self._plan()
        head = {f"{name}.weight" for name, module in self._model.named_modules() if module is skeleton.output}
        have = {name for first, recipe in self._recipes.items() for name in self._targets(first, recipe)}
        if head <= have:
            skeleton.untie()
        missing = sorted(set(self._wanted) - have - (head if skeleton.tied else set()))
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{source.name}: the checkpoint lacks {shown}; it is incomplete or of another model.")
        for first, recipe in self._recipes.items():
            self._check_sizes(first, recipe)
        self.reader = RangeReader(drop_behind=_stored_bytes(source) > free_bytes(torch.device("cpu")))

    def tensors(self, prefix: str, besides: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """(module name, rounded tensor on the CPU) of everything under ``prefix``. Raises ModelError."""
        for first, recipe in self._recipes.items():
            if not first.startswith(prefix) or first in besides:
                continue
            for name, tensor in self._cook(first, recipe):
                wanted = self._wanted[name]
                if tensor.shape != wanted.shape:
                    raise ModelError(
                        f"{self.source.name}: {name} has shape {list(tensor.shape)}, expected {list(wanted.shape)}."
                    )
                yield name, tensor.to(self._rounded_to) if tensor.is_floating_point() else tensor
            for stored, _ in recipe.parts:
                self.source.release(stored)

    def fill(self, prefix: str, views: dict[str, Tensor]) -> None:
        """Copy everything under ``prefix`` into ``views`` (named without the prefix), casting to their dtypes."""
        stored = self._read_as_stored(prefix, views)
        for name, tensor in self.tensors(prefix, besides=stored):
            views[name.removeprefix(prefix)].data.copy_(tensor)

    def range(self, name: str) -> FileRange | None:
        """Where the stored bytes of a module's tensor lie; None when it is made of several, or of none on disk."""
        recipe = self._recipes[name]
        if recipe.converter is not None or not isinstance(self.source, FileSource):
            return None
        return self.source.range(recipe.parts[0][0])

    def _read_as_stored(self, prefix: str, views: dict[str, Tensor]) -> set[str]:
        """Read from disk, past the mapping, the tensors that need no conversion; their names."""
        wanted: dict[str, tuple[FileRange, Tensor]] = {}
        for name in self._recipes:
            span = self.range(name) if name.startswith(prefix) else None
            if span is not None and self._is_stored_as(name, span, view := views[name.removeprefix(prefix)].data):
                wanted[name] = span, view if view.device.type == "cpu" else torch.empty_like(view, device="cpu")
        self.reader.read(wanted.values())
        for name, (_, value) in wanted.items():
            if (view := views[name.removeprefix(prefix)].data).device != value.device:
                view.copy_(value)
        return set(wanted)

    def _is_stored_as(self, name: str, span: FileRange, view: Tensor) -> bool:
        stored = self.source.header(self._recipes[name].parts[0][0])[0]
        rounded = stored != self._rounded_to and stored.is_floating_point
        return stored == view.dtype and not rounded and span.nbytes == view.nbytes

    def names(self) -> list[str]:
        """Module names that have a recipe."""
        return list(self._recipes)

    def _plan(self) -> dict[str, _Recipe]:
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        base = self._model.base_model_prefix
        recipes: dict[str, _Recipe] = {}
        for stored in sorted(self.source.names(), key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, base, self._wanted)
            if name not in self._wanted and stored in self._wanted:
                name, pattern = stored, None
            if name in self._wanted:
                recipe = recipes.setdefault(name, _Recipe(by_pattern[pattern] if pattern else None))
                recipe.parts.append((stored, pattern or stored))
        return recipes

    def _check_sizes(self, first: str, recipe: _Recipe) -> None:
        """From headers alone, so that a model is refused when it is loaded and not in the middle of a pass."""
        shapes = [torch.Size(self.source.header(stored)[1]) for stored, _ in recipe.parts]
        if recipe.converter is None:
            self._check_shape(first, shapes[0])
            return
        held = sum(shape.numel() for shape in shapes)
        wanted = sum(self._wanted[name].numel() for name in self._targets(first, recipe))
        if held != wanted:
            raise ModelError(
                f"{self.source.name}: {first} needs {wanted:,} values, but the {len(shapes)} stored tensors that it is "
                f"made of ({recipe.parts[0][0]}, …) hold {held:,}; the checkpoint is incomplete or of another model."
            )

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        wanted = self._wanted[name].shape
        if shape != wanted:
            raise ModelError(f"{self.source.name}: {name} has shape {list(shape)}, expected {list(wanted)}.")

    def _targets(self, first: str, recipe: _Recipe) -> list[str]:
        if recipe.converter is None:
            return [first]
        targets: list[str] = recipe.converter.target_patterns
        return [first.replace(targets[0], target) for target in targets]

    def _cook(self, first: str, recipe: _Recipe) -> Iterator[tuple[str, Tensor]]:
        if recipe.converter is None:
            yield first, self.source.tensor(recipe.parts[0][0])
            return
        converter: Any = copy.deepcopy(recipe.converter)
        for stored, pattern in recipe.parts:
            converter.add_tensor(first, stored, pattern, self.source.tensor(stored))
        for name, tensor in converter.convert(first, model=self._model, config=self._model.config).items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


def parameter_count(source: WeightSource) -> int:
    """Number of stored weights."""
    return sum(torch.Size(source.header(name)[1]).numel() for name in source.names())


def _stored_bytes(source: WeightSource) -> int:
    """Size on disk; 0 when the source is not on disk."""
    return sum(source.range(name).nbytes for name in source.names()) if isinstance(source, FileSource) else 0
