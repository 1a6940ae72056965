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
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.memory.limits import free_bytes
from streamllm_core.quantization import Format, expand
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

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(module name, rounded tensor on the CPU) of everything under ``prefix``. Raises ModelError.

        Packed tensors come expanded into float32 and not rounded: that is left to the one cast to their final type.
        """
        for first, recipe in self._under(prefix):
            yield from self._values(first, recipe)
            self._release(recipe)

    def fill(self, prefix: str, layout: ArenaLayout, block: Tensor) -> None:
        """Bring everything under ``prefix`` into ``block`` (uint8, on any device) as ``layout`` says: tensors that are
        packed there as they are stored, the others expanded and cast to the layout's dtypes."""
        views = layout.stored(block)
        packed = {entry.name for entry in layout.entries if entry.format is not None}
        done = self._read_as_stored(prefix, views, packed)
        for first, recipe in self._under(prefix):
            format, name = self.format(first), first.removeprefix(prefix)
            if first in done:
                continue
            if format is None:
                for full, tensor in self._values(first, recipe):
                    views[full.removeprefix(prefix)].copy_(tensor)
            elif name in packed:
                views[name].copy_(self.raw(first))
            else:
                expand(format, self.raw(first).to(block.device), views[name])
            self._release(recipe)

    def formats(self, prefix: str) -> dict[str, Format]:
        """How the tensors under ``prefix`` are packed, by their names without it; plain ones are left out."""
        formats = {first.removeprefix(prefix): self.format(first) for first, _ in self._under(prefix)}
        return {name: format for name, format in formats.items() if format is not None}

    def format(self, name: str) -> Format | None:
        """How the source packs the tensor of this module name; None: plain, or made of several stored ones."""
        recipe = self._recipes.get(name)
        return None if recipe is None or recipe.converter is not None else self.source.format(recipe.parts[0][0])

    def raw(self, name: str) -> Tensor:
        """The bytes of a packed tensor, uint8 [nbytes], to be treated as read-only."""
        return self.source.raw(self._recipes[name].parts[0][0])

    def release(self, name: str) -> None:
        """Give back the memory pages behind a tensor that has been copied elsewhere; it stays readable."""
        self._release(self._recipes[name])

    def range(self, name: str) -> FileRange | None:
        """Where the stored bytes of a module's tensor lie; None when it is made of several, or of none on disk."""
        recipe = self._recipes[name]
        if recipe.converter is not None or not isinstance(self.source, FileSource):
            return None
        return self.source.range(recipe.parts[0][0])

    def _read_as_stored(self, prefix: str, views: dict[str, Tensor], packed: Collection[str]) -> set[str]:
        """Read from disk, past the mapping, the tensors that need no conversion; their module names."""
        wanted: dict[str, tuple[FileRange, Tensor]] = {}
        for first, _ in self._under(prefix):
            span, name = self.range(first), first.removeprefix(prefix)
            if span is None:
                continue
            view = views[name]
            if span.nbytes == view.nbytes and (name in packed or self._is_stored_in(first, view.dtype)):
                wanted[first] = span, view if view.device.type == "cpu" else torch.empty_like(view, device="cpu")
        self.reader.read(wanted.values())
        for first, (_, value) in wanted.items():
            if (view := views[first.removeprefix(prefix)]).device != value.device:
                view.copy_(value)
        return set(wanted)

    def _is_stored_in(self, name: str, dtype: torch.dtype) -> bool:
        """Plain, in this type, and not to be rounded to another."""
        stored = self.source.header(self._recipes[name].parts[0][0])[0]
        rounded = stored != self._rounded_to and stored.is_floating_point
        return stored == dtype and not rounded and self.format(name) is None

    def names(self) -> list[str]:
        """Module names that have a recipe."""
        return list(self._recipes)

    def headers(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every tensor that ``tensors`` gives, by module name; of packed ones as if plain."""
        targets = (name for first, recipe in self._recipes.items() for name in self._targets(first, recipe))
        return {name: self._header(self._wanted[name]) for name in targets}

    def _header(self, wanted: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._rounded_to if wanted.is_floating_point() else wanted.dtype, tuple(wanted.shape)

    def _under(self, prefix: str) -> Iterator[tuple[str, _Recipe]]:
        return ((first, recipe) for first, recipe in self._recipes.items() if first.startswith(prefix))

    def _values(self, first: str, recipe: _Recipe) -> Iterator[tuple[str, Tensor]]:
        packed = self.format(first) is not None
        for name, tensor in self._cook(first, recipe):
            self._check_shape(name, tensor.shape)
            yield name, tensor.to(self._rounded_to) if tensor.is_floating_point() and not packed else tensor

    def _release(self, recipe: _Recipe) -> None:
        for stored, _ in recipe.parts:
            self.source.release(stored)

    def _plan(self) -> dict[str, _Recipe]:
        if self.source.module_names:
            return {name: _Recipe(None, [(name, name)]) for name in self.source.names() if name in self._wanted}
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
        if any(self.source.format(stored) is not None for stored, _ in recipe.parts):
            raise ModelError(
                f"{self.source.name}: {first} is made of {len(shapes)} tensors ({recipe.parts[0][0]}, …), which cannot "
                "be done with packed ones; use the unquantized checkpoint."
            )
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
    """Size on disk, of what is read from there without a mapping."""
    if not isinstance(source, FileSource):
        return 0
    return sum(span.nbytes for name in source.names() if (span := source.range(name)) is not None)
