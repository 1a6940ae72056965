"""The head in tiles gives what it gives whole: logits, and the likeliest token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig

from streamllm_core.attention import PassState
from streamllm_core.head import Head, StreamedTiles, tile_rows
from streamllm_core.skeleton import Skeleton

VOCABULARY, HIDDEN, ROWS = 211, 32, 9
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}


class SlotLink:
    """Fills slots with rows of a weight, and what was there before with NaN."""

    def __init__(self, weight: Tensor, tiles: list[range], slots: list[Tensor]) -> None:
        self._weight, self._tiles, self._slots = weight, tiles, slots
        self.started: list[int] = []

    def start(self, layer: int, slot: int) -> None:
        self.started.append(layer)
        rows = self._tiles[layer]
        self._slots[slot].fill_(torch.nan)
        self._slots[slot][: len(rows)] = self._weight[rows.start : rows.stop]

    def wait(self, slot: int) -> None:
        assert self.started

    def free(self, slot: int) -> None:
        pass


def build(config: Any) -> tuple[Skeleton, Tensor]:
    skeleton = Skeleton(config, torch.float32)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    skeleton.output._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
    skeleton.attach(PassState())
    return skeleton, weight


@pytest.fixture(params=["plain", "softcap"])
def whole(request: pytest.FixtureRequest) -> tuple[Skeleton, Tensor]:
    return build(LlamaConfig(**COMMON) if request.param == "plain" else Gemma2Config(**COMMON))


def tiled(skeleton: Skeleton, weight: Tensor, step: int) -> tuple[Head, SlotLink]:
    tiles = [range(start, min(start + step, VOCABULARY)) for start in range(0, VOCABULARY, step)]
    slots = [torch.full((step, HIDDEN), torch.nan) for _ in range(2)]
    link = SlotLink(weight, tiles, slots)
    ready = lambda number, slot: slots[slot][: len(tiles[number])].clone()  # noqa: E731
    return Head(skeleton, StreamedTiles(tiles, weight.nbytes, link, ready), 4), link


@pytest.mark.parametrize("step", [1, 50, 64, 210, 211, 500])
def test_tiles_give_what_the_whole_gives(whole: tuple[Skeleton, Tensor], step: int) -> None:
    skeleton, weight = whole
    hidden = torch.randn(ROWS, HIDDEN)
    wanted = Head(skeleton, None, 4).logits(hidden)
    head, link = tiled(skeleton, weight, step)
    for number in range(3):
        assert (head.logits(hidden) - wanted).abs().max() < 1e-5
        assert torch.equal(head.best(hidden), wanted.argmax(-1))
        assert head.bytes_moved == 2 * (number + 1) * weight.nbytes
    assert link.started == list(range(-(-VOCABULARY // step))) * 6  # each tile once a call, in order
    assert torch.equal(skeleton.output.weight, weight)  # and the skeleton's own head is as it was


def test_the_likeliest_token_of_a_whole_head_needs_few_rows_at_a_time(whole: tuple[Skeleton, Tensor]) -> None:
    skeleton, _ = whole
    hidden = torch.randn(23, HIDDEN)
    assert torch.equal(Head(skeleton, None, 4).best(hidden), Head(skeleton, None, 100).logits(hidden).argmax(-1))


def test_among_equals_the_first_token_is_taken() -> None:
    skeleton, weight = build(LlamaConfig(**COMMON))
    weight.zero_()
    head, _ = tiled(skeleton, weight, 50)
    assert head.best(torch.randn(3, HIDDEN)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("vocabulary", "row_bytes"), [(1, 8), (152_064, 7168), (300, 10**9), (49_152, 1152)])
def test_tiles_cover_the_vocabulary_once(vocabulary: int, row_bytes: int) -> None:
    tiles = tile_rows(vocabulary, row_bytes)
    assert [row for rows in tiles for row in rows] == list(range(vocabulary))
    assert all(len(rows) % 64 == 0 for rows in tiles[:-1])
    assert len({len(rows) for rows in tiles[:-1]}) <= 1


def test_bias_is_cut_with_its_rows() -> None:
    skeleton, weight = build(LlamaConfig(**COMMON))
    bias = torch.randn(VOCABULARY)
    skeleton.output._parameters["bias"] = torch.nn.Parameter(bias, requires_grad=False)
    hidden = torch.randn(5, HIDDEN)
    wanted = hidden @ weight.T + bias
    head, _ = tiled(skeleton, weight, 37)
    assert (head.logits(hidden) - wanted).abs().max() < 1e-4
