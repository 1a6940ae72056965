"""Rolling attention by its definition: a float64 Llama over all pairs of tokens, what is not seen masked.

Shares no code with the engine and no idea either: no cache, no ring, no chunks, no softmax groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Eviction = tuple[int, int, int]  # (when, start, stop): tokens [start, stop) are hidden from tokens when, when + 1 …


class DenseLlama:
    """Weights of a folder made by ``write_llama`` or of the golden Llama, in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def logits(self, tokens: Sequence[int], *, sinks: int, window: int, evictions: Sequence[Eviction] = ()) -> Tensor:
        """float64 [tokens, vocabulary]."""
        query, key = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None]
        seen = (key <= query) & ((key < sinks) | (query - key <= window))
        for when, start, stop in evictions:
            seen &= ~((query >= when) & (key >= start) & (key < stop))
        distance = torch.where(key < sinks, query.clamp(max=sinks + window), query) - key

        hidden = self.weights["model.embed_tokens.weight"][list(tokens)]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}."
            hidden = hidden + self._attention(layer, self._norm(hidden, f"{layer}input_layernorm"), seen, distance)
            normed = self._norm(hidden, f"{layer}post_attention_layernorm")
            gate = self._product(normed, f"{layer}mlp.gate_proj")
            inner = gate * torch.sigmoid(gate) * self._product(normed, f"{layer}mlp.up_proj")
            hidden = hidden + self._product(inner, f"{layer}mlp.down_proj")
        return self._product(self._norm(hidden, "model.norm"), "lm_head")

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        mean = hidden.square().mean(-1, keepdim=True)
        return hidden * (mean + self.config["rms_norm_eps"]).rsqrt() * self.weights[f"{name}.weight"]

    def _product(self, hidden: Tensor, name: str) -> Tensor:
        return hidden @ self.weights[f"{name}.weight"].T

    def _attention(self, layer: str, hidden: Tensor, seen: Tensor, distance: Tensor) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["hidden_size"] // heads
        query = self._product(hidden, f"{layer}self_attn.q_proj").unflatten(-1, (heads, size))
        key, value = (
            self._product(hidden, f"{layer}self_attn.{name}_proj")
            .unflatten(-1, (kv_heads, size))
            .repeat_interleave(heads // kv_heads, 1)
            for name in "kv"
        )
        # The query turned by the distance, times the key as it is: pair by pair of dimensions, (x, y)·e^(i·distance·f).
        # The frequencies f are float32, as every Llama has them.
        frequency = (1.0 / self.config["rope_theta"] ** (torch.arange(0, size, 2).float() / size)).double()
        angle = distance[:, :, None] * frequency
        (x, y), (u, v) = query.chunk(2, -1), key.chunk(2, -1)
        along = torch.einsum("qhf,khf->hqkf", x, u) + torch.einsum("qhf,khf->hqkf", y, v)
        across = torch.einsum("qhf,khf->hqkf", x, v) - torch.einsum("qhf,khf->hqkf", y, u)
        scores = (along * angle.cos() + across * angle.sin()).sum(-1) * size**-0.5
        shares = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return self._product(torch.einsum("hqk,khd->qhd", shares, value).flatten(1), f"{layer}self_attn.o_proj")
