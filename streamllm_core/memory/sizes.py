"""ModelSizes: how many bytes and operations a model takes, from its configuration and its checkpoint's headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from streamllm_core.architectures import head_shape
from streamllm_core.memory.arena import ArenaLayout

LOGIT_BYTES = 64 * 10**6  # what the logits of one group of rows may take
MOST_LOGIT_ROWS = 512


@dataclass(frozen=True)
class ModelSizes:
    """Bytes unless said otherwise.

    layers: each decoder layer as it is stored and travels.
    expanded: each decoder layer as it is computed with; differs from ``layers`` where weights are packed.
    kept: each decoder layer when it stays on the device: packed on a card, expanded in RAM.
    workspace: room for the largest packed layer, or tile of the head, expanded; 0 when none is packed.
    fixed: what always stays on the device: norms, on a CPU the embedding, too.
    head: the output projection as it is stored; 0 where it shares the embedding's bytes.
    head_tile: one of the two blocks through which a head is streamed that does not stay; 0 where it must stay.
    mlp_width: the widest activation between the projections of a layer, values a token.
    layer_operations: multiplications and additions of one layer's matrix products, a token.
    itemsize: of the type that is computed in.
    """

    layers: tuple[int, ...]
    expanded: tuple[int, ...]
    kept: tuple[int, ...]
    workspace: int
    fixed: int
    head: int
    head_tile: int
    hidden: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layer_operations: int
    itemsize: int

    @staticmethod
    def of(
        config: Any,
        layouts: Sequence[ArenaLayout],
        *,
        kept_expanded: bool,
        fixed: int,
        head: int,
        head_tile: int,
        head_workspace: int,
        itemsize: int,
    ) -> ModelSizes:
        """Sizes of a model whose decoder layers lie as ``layouts`` say. ``head_workspace``: bytes of a tile of a packed
        head when it is expanded; 0 when none is."""
        layers = tuple(layout.nbytes for layout in layouts)
        expanded = tuple(layout.expanded.nbytes for layout in layouts)
        heads, kv_heads, head_dim = head_shape(config)
        return ModelSizes(
            layers=layers,
            expanded=expanded,
            kept=expanded if kept_expanded else layers,
            workspace=max([head_workspace, *(layout.expanded.nbytes for layout in layouts if layout.packed)]),
            fixed=fixed,
            head=head,
            head_tile=head_tile,
            hidden=config.hidden_size,
            mlp_width=_mlp_width(config),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=config.vocab_size,
            layer_operations=max(_operations(config, layout) for layout in layouts),
            itemsize=itemsize,
        )

    @property
    def logit_rows(self) -> int:
        """Positions that go through the head together."""
        return max(16, min(MOST_LOGIT_ROWS, LOGIT_BYTES // (self.vocabulary * self._logit_itemsize)))

    @property
    def _logit_itemsize(self) -> int:
        return self.itemsize + 4  # as the head makes them, and in float32

    def activation_bytes(self, micro_tokens: int, pass_tokens: int) -> int:
        """What a pass needs at its peak beside weights and cache, for ``micro_tokens`` in a layer together.

        Inside the attention the normed input, the projections, queries rotated both ways and the output live at the
        same time; inside the MLP gate and up beside input, residual and output.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden + 4 * queries + 4 * keys
        mlp = 3 * self.hidden + 2 * self.mlp_width
        in_layer = min(micro_tokens, pass_tokens) * max(attention, mlp) * self.itemsize
        across_layers = 2 * pass_tokens * self.hidden * self.itemsize
        return across_layers + max(in_layer, self.logit_rows * self.vocabulary * self._logit_itemsize)

    def pass_operations(self, tokens: int, seen: int) -> int:
        """Multiplications and additions of the layers for ``tokens`` tokens that see ``seen`` keys each."""
        attention = 4 * self.heads * self.head_dim * seen
        return tokens * len(self.layers) * (self.layer_operations + attention)

    def weight_traffic(self, tokens: int, micro_tokens: int) -> int:
        """Bytes that a pass moves between the device's memory and its units for the weights alone: each micro-batch
        reads every layer, and a packed layer is read and written expanded once."""
        read = ceil(tokens / micro_tokens) * sum(self.expanded)
        return read + (sum(self.layers) + sum(self.expanded) if self.workspace else 0)


def _mlp_width(config: Any) -> int:
    """Values a token between the MLP's projections; for a mixture of experts those of all experts chosen, with the
    copies of the token that are sent to them."""
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    width = getattr(config, "moe_intermediate_size", 0) or config.intermediate_size
    return int(chosen * (width + config.hidden_size)) if chosen else int(width)


def _operations(config: Any, layout: ArenaLayout) -> int:
    """Two for each weight that a token meets; of stacked experts only those chosen."""
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    total = 0
    for entry in layout.entries:
        values = 1
        for extent in entry.shape:
            values *= extent
        if len(entry.shape) == 2:
            total += 2 * values
        elif len(entry.shape) == 3:
            total += 2 * values * chosen // entry.shape[0]
    return total
