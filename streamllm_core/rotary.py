"""Rotary positions from float64 angles, applied by the model file's own function or by one kernel.

The model itself is called with positions of zero, where its rotary embedding is the identity (times the YaRN/LongRoPE
attention factor); queries and keys reach the attention function un-rotated and are rotated here. ``fusion`` leaves
that identity out, too.
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
class Frequencies:
    """Inverse frequencies (float64 [pairs]), whether the model's tables repeat each angle for both halves of a pair
    (``width`` = 2 pairs) or leave that to its own function (``width`` = pairs), and the attention factor."""

    inverse: Tensor
    width: int
    factor: float

    @staticmethod
    def of(module: nn.Module, longest: int, layer_type: str | None) -> Frequencies:
        """Those of a model's rotary embedding for texts of ``longest`` tokens; the module may change."""
        probe = torch.tensor([[0, 1, longest - 1]])
        arguments = () if layer_type is None else (layer_type,)
        cos, _ = module(torch.zeros(1, 1, 1), probe, *arguments)  # length-dependent modules update inv_freq here
        inverse = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
        return Frequencies(inverse.double().clone(), cos.shape[-1], float(cos[0, 0, 0]))

    def angles(self, positions: Tensor) -> Tensor:
        """[tokens, pairs] float64. float32 angles lose 3e-2 in the logits at 4M tokens."""
        return positions.double()[:, None] * self.inverse.to(positions.device)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines as the model's own function takes them, [1, tokens, width]."""
        angles = self.angles(positions)[None]
        if self.width > self.inverse.numel():
            angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Rotary:
    """Rotation for every layer of a model whose cache never shows more than ``longest`` positions.

    Frequencies that depend on the length (dynamic NTK, LongRoPE) are frozen at ``longest``: otherwise results
    would depend on how a text is cut into chunks.
    """

    def __init__(self, module: nn.Module, longest: int, layer_types: list[str | None]) -> None:
        module = copy.deepcopy(module).to("cpu")
        self._keys = layer_types if by_layer_type(module) else [None] * len(layer_types)
        self._frequencies = {key: Frequencies.of(module, longest, key) for key in set(self._keys)}

    def rotate(
        self, attention: Any, batch: MicroBatch, query: Tensor, key: Tensor, recent: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate query and key [1, heads, tokens, head_dim] to the true positions t of ``batch``, and the query to
        min(t, S + recent) as well, from where it sees the sinks; without ``recent`` both are the same.

        Returns window query, sink query and key. ``query`` and ``key`` are overwritten where a kernel rotates.
        """
        if not getattr(attention, "use_rope", True):  # a layer without positions (SmolLM3)
            return query, query, key
        layer_type = self._keys[attention.layer_idx]
        fused = getattr(attention, "fused_rotation", None)  # set by ``fusion``
        if fused is not None:
            window = self._plain_tables(batch, layer_type, None)
            sinks = None if recent is None else self._plain_tables(batch, layer_type, recent)
            return fused(query, key, window, sinks)  # type: ignore[no-any-return]
        window_query, key_turned = self._apply(attention, batch, query, key, layer_type, None)
        if recent is None:
            return window_query, window_query, key_turned
        sink_query, _ = self._apply(attention, batch, query, key[:, :0], layer_type, recent)
        return window_query, sink_query, key_turned

    def _apply(
        self, attention: Any, batch: MicroBatch, query: Tensor, key: Tensor, layer_type: str | None, recent: int | None
    ) -> tuple[Tensor, Tensor]:
        """As the model file does it."""
        cos, sin = batch.memo(
            ("rotary", layer_type, recent, query.dtype),
            lambda: self._frequencies[layer_type].tables(_positions(batch, recent), query.dtype),
        )
        apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        part = getattr(attention, "rotary_ndims", None) or query.shape[-1]
        if part == query.shape[-1]:
            return apply(query, key, cos, sin)  # type: ignore[no-any-return]
        turned = apply(query[..., :part], key[..., :part], cos, sin)
        return torch.cat([turned[0], query[..., part:]], -1), torch.cat([turned[1], key[..., part:]], -1)

    def _plain_tables(self, batch: MicroBatch, layer_type: str | None, recent: int | None) -> tuple[Tensor, Tensor]:
        """[tokens, pairs] float32, times the factor that the model has not applied."""
        frequencies = self._frequencies[layer_type]

        def build() -> tuple[Tensor, Tensor]:
            angles = frequencies.angles(_positions(batch, recent))
            return (angles.cos() * frequencies.factor).float(), (angles.sin() * frequencies.factor).float()

        return batch.memo(("angles", layer_type, recent), build)


def by_layer_type(module: nn.Module) -> bool:
    """Whether a rotary embedding has a table for each type of layer."""
    return "layer_type" in inspect.signature(module.forward).parameters


def _positions(batch: MicroBatch, recent: int | None) -> Tensor:
    return batch.positions if recent is None else torch.minimum(batch.positions, batch.sinks + recent)
