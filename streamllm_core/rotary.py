"""Rotary positions from float64 angles, applied by the model file's own function.

The model itself is called with positions of zero, where its rotary embedding is the identity (times the YaRN/LongRoPE
attention factor); queries and keys reach the attention function un-rotated and are rotated here.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamllm_core.layout import MicroBatch


@dataclass(frozen=True)
class _Frequencies:
    """Inverse frequencies (float64 [pairs]), and whether the model's tables repeat each angle for both halves of a pair
    (``width`` = 2 pairs) or leave that to its own function (``width`` = pairs)."""

    inverse: Tensor
    width: int

    def angles(self, positions: Tensor) -> Tensor:
        """[tokens, width] float64. float32 angles lose 3e-2 in the logits at 4M tokens."""
        angles = positions.double()[:, None] * self.inverse.to(positions.device)
        return angles if self.width == self.inverse.numel() else torch.cat([angles, angles], -1)


class Rotary:
    """Rotation for every layer of a model whose cache never shows more than ``longest`` positions.

    Frequencies that depend on the length (dynamic NTK, LongRoPE) are frozen at ``longest``: otherwise results
    would depend on how a text is cut into chunks.
    """

    def __init__(self, module: nn.Module, longest: int, layer_types: list[str | None]) -> None:
        module = copy.deepcopy(module).to("cpu")
        by_type = "layer_type" in inspect.signature(module.forward).parameters
        self._keys = layer_types if by_type else [None] * len(layer_types)
        probe = torch.tensor([[0, 1, longest - 1]])
        self._frequencies = {key: _freeze(module, key, probe) for key in set(self._keys)}

    def rotate(
        self, attention: Any, batch: MicroBatch, query: Tensor, key: Tensor, recent: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key [1, heads, tokens, head_dim] to the true positions t of ``batch`` or, with ``recent``,
        to min(t, S + recent), from where a query sees the sinks."""
        if not getattr(attention, "use_rope", True):  # a layer without positions (SmolLM3)
            return query, key
        table = (self._keys[attention.layer_idx], recent, query.dtype)
        cos, sin = batch.memo(("rotary", *table), lambda: self._table(batch, *table))
        apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        part = getattr(attention, "rotary_ndims", None) or query.shape[-1]
        if part == query.shape[-1]:
            return apply(query, key, cos, sin)  # type: ignore[no-any-return]
        turned = apply(query[..., :part], key[..., :part], cos, sin)
        return torch.cat([turned[0], query[..., part:]], -1), torch.cat([turned[1], key[..., part:]], -1)

    def _table(
        self, batch: MicroBatch, key: str | None, recent: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        positions = batch.positions if recent is None else torch.minimum(batch.positions, batch.sinks + recent)
        angles = self._frequencies[key].angles(positions)[None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _freeze(module: nn.Module, key: str | None, probe: Tensor) -> _Frequencies:
    arguments = () if key is None else (key,)
    cos, _ = module(torch.zeros(1, 1, 1), probe, *arguments)  # length-dependent modules update inv_freq here
    inverse = getattr(module, "inv_freq" if key is None else f"{key}_inv_freq").double().clone()
    return _Frequencies(inverse, cos.shape[-1])
