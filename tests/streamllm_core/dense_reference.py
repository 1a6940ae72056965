"""Rolling attention by its definition: a float64 Llama that, for each token, lists which keys it sees and how far away.

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


def visible_keys(token: int, sinks: int, window: int, evictions: Sequence[Eviction] = ()) -> list[tuple[int, int]]:
    """(key, distance) of all that ``token`` attends to."""
    keys = []
    for key in range(token + 1):
        if any(when <= token and start <= key < stop for when, start, stop in evictions):
            continue
        if key < sinks:
            keys.append((key, min(token, sinks + window) - key))
        elif token - key <= window:
            keys.append((key, token - key))
    return keys


class DenseLlama:
    """Weights of a folder made by ``write_llama`` or of the golden Llama, in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def logits(self, tokens: Sequence[int], *, sinks: int, window: int, evictions: Sequence[Eviction] = ()) -> Tensor:
        """float64 [tokens, vocabulary]."""
        seen = [visible_keys(token, sinks, window, evictions) for token in range(len(tokens))]
        hidden = self.weights["model.embed_tokens.weight"][list(tokens)]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}."
            hidden = hidden + self._attention(layer, self._norm(hidden, f"{layer}input_layernorm"), seen)
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

    def _attention(self, layer: str, hidden: Tensor, seen: list[list[tuple[int, int]]]) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["hidden_size"] // heads
        query = self._product(hidden, f"{layer}self_attn.q_proj").unflatten(-1, (heads, size))
        key, value = (
            self._product(hidden, f"{layer}self_attn.{name}_proj")
            .unflatten(-1, (kv_heads, size))
            .repeat_interleave(heads // kv_heads, 1)
            for name in "kv"
        )
        # float32 frequencies, as every Llama has them
        frequency = (1.0 / self.config["rope_theta"] ** (torch.arange(0, size, 2).float() / size)).double()
        rows = []
        for token, visible in enumerate(seen):
            keys = [position for position, _ in visible]
            angle = torch.tensor([distance for _, distance in visible]).double()[:, None, None] * frequency
            first, second = query[token].chunk(2, -1)
            turned = torch.cat(
                [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
            )
            shares = torch.softmax((turned * key[keys]).sum(-1) * size**-0.5, 0)  # [keys, heads]
            rows.append((shares[..., None] * value[keys]).sum(0).flatten())
        return self._product(torch.stack(rows), f"{layer}self_attn.o_proj")
