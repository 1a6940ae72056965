"""StreamingLLM token by token on top of stock transformers, as the original code does it: the oracle under eviction.

The cache keeps un-rotated keys. At each token they are rotated to their places in the cache, the query to the last
place, and the token attends to everything the cache holds; then the oldest token behind the sinks goes. Nothing is
shared with the engine: no ring, no band, no merge of two groups, float32 angles made by the model's own embedding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from tests.streamllm_core.tiny_models import load_stock

NAME = "streaming_reference"


class StreamingReference:
    """A stock model that reads one token at a time with ``sinks`` pinned tokens and ``window`` recent ones."""

    def __init__(self, folder: Path, sinks: int, window: int) -> None:
        AttentionInterface.register(NAME, self._attend)
        self._model = load_stock(folder, NAME)
        self._base = getattr(self._model, self._model.base_model_prefix)
        self._file = sys.modules[type(self._base).__module__]
        self._apply = self._file.apply_rotary_pos_emb
        self._sinks = sinks
        self._window = window
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._place = 0  # of the token being read, in the cache of a layer that sees everything
        self._turned: int | None = None  # how many dimensions the layer at work rotates; None: it has no positions

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """float32 [1, T, vocabulary] for ids [1, T]."""
        self._cache.clear()
        rows = []
        with self._keys_left_alone():
            for token in range(ids.shape[1]):
                self._place = min(token, self._sinks + self._window)
                place = torch.tensor([[self._place]])
                output = self._model(ids[:, token : token + 1], position_ids=place, use_cache=False)
                rows.append(output.logits)
        return torch.cat(rows, 1)

    @contextmanager
    def _keys_left_alone(self) -> Iterator[None]:
        def apply(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            self._turned = key.shape[-1]
            return self._apply(query, key, cos, sin, **options)[0], key

        self._file.apply_rotary_pos_emb = apply
        try:
            yield
        finally:
            self._file.apply_rotary_pos_emb = self._apply

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        if module.layer_idx in self._cache:
            keys, values = self._cache[module.layer_idx]
            key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        sinks, recent = self._sinks, self._window
        if sliding_window is not None:  # it has no use for sinks; a token sees itself and width - 1 before it
            sinks, recent = 0, min(sliding_window - 1, recent)
        keep = [*range(min(sinks, key.shape[2])), *range(max(sinks, key.shape[2] - recent), key.shape[2])]
        self._cache[module.layer_idx] = key[:, :, keep], value[:, :, keep]

        count = key.shape[2]
        rotated = self._rotate(module, key, torch.arange(self._place - count + 1, self._place + 1)[None])
        groups = query.shape[1] // key.shape[1]
        scores = query @ rotated.repeat_interleave(groups, 1).mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.view(1, -1, 1, 1)], -1)
        shares = scores.softmax(-1)[..., :count]
        return (shares @ value.repeat_interleave(groups, 1)).transpose(1, 2), None

    def _rotate(self, module: Any, key: Tensor, positions: Tensor) -> Tensor:
        width, self._turned = self._turned, None
        if width is None:
            return key
        kind = (
            [self._model.config.layer_types[module.layer_idx]]
            if isinstance(self._base.rotary_emb.rope_type, dict)
            else []
        )
        cos, sin = self._base.rotary_emb(key, positions, *kind)
        part = key[..., :width]
        return torch.cat([self._apply(part, part, cos, sin)[1], key[..., width:]], -1)
