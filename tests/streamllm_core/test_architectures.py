"""Stock transformers as the oracle of every supported architecture, and the refusal of all others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from streamllm_core import AutoModel, Engine, EngineConfig, ModelError, StreamingModel
from streamllm_core.architectures import SUPPORTED
from streamllm_core.layout import MicroBatch, Run
from streamllm_core.rotary import Rotary
from tests.streamllm_core.streaming_reference import StreamingReference
from tests.streamllm_core.tiny_models import (
    EOS,
    LONGROPE_CONTEXT,
    TINY,
    VOCABULARY,
    load_stock,
    random_text,
    save_tiny,
    tiny_config,
)

WINDOW = 16  # small enough that most of a text is evicted; native sliding windows lie on both sides of it
EVICTING = 56  # tokens of a text read through that window
NEW_TOKENS = 24


@dataclass(frozen=True)
class Pair:
    """One checkpoint as stock transformers runs it and as we do."""

    folder: Path
    stock: Any
    ours: StreamingModel


def load(folder: Path, **options: Any) -> StreamingModel:
    return AutoModel.from_pretrained(folder, device="cpu", dtype="float32", vram="2GB", **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=TINY)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return Pair(folder, load_stock(folder), load(folder))


@torch.inference_mode()
def stock_logits(stock: Any, ids: Tensor) -> Tensor:
    return stock(ids).logits  # type: ignore[no-any-return]


def stock_greedy(stock: Any, prompt: Tensor, new_tokens: int = NEW_TOKENS) -> list[int]:
    """What stock transformers adds to one row [1, T]."""
    sequences = stock.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False
    )
    return sequences[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows [1, T] of different lengths as one batch: ids and attention_mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        count = prompt.shape[1]
        place = slice(0, count) if side == "right" else slice(longest - count, longest)
        ids[row, place], mask[row, place] = prompt[0], 1
    return ids, mask


def answers(sequences: Tensor, length: int) -> list[list[int]]:
    """The new tokens of each row, without the padding behind an end-of-sequence token."""
    rows = sequences[:, length:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


# --- every architecture --------------------------------------------------------------------------------------------


def test_every_supported_type_is_here() -> None:
    assert {kind for kind, _ in TINY.values()} == SUPPORTED


def test_logits_equal_stock(pair: Pair) -> None:
    ids = random_text(1)
    expected = stock_logits(pair.stock, ids)
    assert expected.std() > 0.3  # large enough for the tolerance to mean something
    assert_close(pair.ours.logits(ids), expected, 2e-4)


def test_greedy_tokens_equal_stock(pair: Pair) -> None:
    prompts = [random_text(2, 61), random_text(3, 33)]
    expected = [stock_greedy(pair.stock, prompt) for prompt in prompts]
    ids, mask = padded(prompts, "left")
    sequences = pair.ours.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    assert answers(sequences, ids.shape[1]) == expected


def test_streamed_layers_give_the_same_bits(pair: Pair) -> None:
    ids = random_text(4, batch=2)
    streamed = load(pair.folder, resident_layers=0)
    for _ in range(2):  # the second pass begins with what the first one left in the slots
        assert torch.equal(streamed.logits(ids), pair.ours.logits(ids))
    assert streamed.streamer.transfers >= 2 * streamed.config.num_hidden_layers


@pytest.mark.parametrize("sinks", [0, 4])
def test_eviction_does_not_depend_on_chunks(pair: Pair, sinks: int) -> None:
    ids = random_text(5, EVICTING)
    expected = StreamingReference(pair.folder, sinks, WINDOW).logits(ids)
    assert (expected - stock_logits(pair.stock, ids)).abs().max() > 0.1  # what was evicted is missed
    for chunk in (1, 5, None):
        logits = pair.ours.logits(ids, sinks=sinks, window=WINDOW, chunk_tokens=chunk)
        assert_close(logits, expected, 5e-4)


def test_ragged_micro_batches_equal_each_text_alone(pair: Pair) -> None:
    texts = [random_text(6, EVICTING), random_text(7, 23), random_text(8, 1)]
    config = EngineConfig(window=WINDOW, sinks=4, excursion=0, streams=3, pass_tokens=128, micro_tokens=9)
    engine = Engine(pair.ours, config)
    hidden = engine.forward([(engine.open(sinks=4), text[0].tolist()) for text in texts])
    with torch.inference_mode():
        logits = pair.ours.head(hidden).split([text.shape[1] for text in texts])
    for text, rows in zip(texts, logits, strict=True):
        assert_close(rows, pair.ours.logits(text, sinks=4, window=WINDOW)[0], 5e-4)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-yarn-biases", "gemma2", "gpt_oss"])
def test_padding_is_left_out(name: str, tmp_path: Path) -> None:
    ours = load(save_tiny(name, tmp_path, seed=1))
    prompts = [random_text(seed, length) for seed, length in ((9, 40), (10, 7), (11, 26))]
    alone = [answers(ours.generate(prompt, max_new_tokens=8), prompt.shape[1])[0] for prompt in prompts]
    for side in ("left", "right"):
        ids, mask = padded(prompts, side)
        sequences = ours.generate(ids, attention_mask=mask, max_new_tokens=8)
        assert torch.equal(sequences[:, : ids.shape[1]], ids)
        assert answers(sequences, ids.shape[1]) == alone


def test_generation_ends_where_stock_ends(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path)
    prompt = random_text(12, 30)
    free = stock_greedy(load_stock(folder), prompt)
    stop = free[9]
    written = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**written, "eos_token_id": [EOS, stop]}))
    expected = stock_greedy(load_stock(folder), prompt)
    assert expected == free[: free.index(stop) + 1]
    assert load(folder).generate(prompt, max_new_tokens=NEW_TOKENS)[0, 30:].tolist() == expected


# --- rotary frequencies that depend on the length --------------------------------------------------------------------


def freeze(rotary: Any, length: int) -> None:
    """Make stock's rotary module take the frequencies for ``length`` tokens and keep them."""
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    rotary.rope_type = "frozen"


def test_longrope_is_frozen_at_the_longest_length(tmp_path: Path) -> None:
    folder = save_tiny("phi3-longrope", tmp_path)
    ids = random_text(13, LONGROPE_CONTEXT + 30)
    frozen, short = load_stock(folder), load_stock(folder)
    short.model.rotary_emb.rope_type = "frozen"
    freeze(frozen.model.rotary_emb, ids.shape[1])
    expected = stock_logits(frozen, ids)
    assert (expected - stock_logits(short, ids)).abs().max() > 0.1  # the two sets of frequencies differ
    ours = load(folder)
    for chunk in (None, 50):  # the first chunks are short, yet take the long frequencies
        assert_close(ours.logits(ids, chunk_tokens=chunk), expected, 2e-4)
    generated = ours.generate(ids, max_new_tokens=NEW_TOKENS)
    assert generated[0, ids.shape[1] :].tolist() == stock_greedy(frozen, ids)


def test_a_text_as_long_as_the_original_context_takes_the_short_frequencies(tmp_path: Path) -> None:
    folder = save_tiny("phi3-longrope", tmp_path)
    ids = random_text(15, LONGROPE_CONTEXT)
    stock, ours = load_stock(folder), load(folder)
    assert_close(ours.logits(ids), stock_logits(stock, ids), 2e-4)
    prompt = ids[:, :-NEW_TOKENS]
    generated = ours.generate(prompt, max_new_tokens=NEW_TOKENS)
    assert generated[0, prompt.shape[1] :].tolist() == stock_greedy(stock, prompt)


def test_a_text_may_fill_the_whole_context(tmp_path: Path) -> None:
    folder = save_tiny("llama-dynamic", tmp_path)
    ids = random_text(16, tiny_config("llama-dynamic").max_position_embeddings)
    assert_close(load(folder).logits(ids), stock_logits(load_stock(folder), ids), 2e-4)


def test_dynamic_ntk_is_frozen_at_the_longest_length(tmp_path: Path) -> None:
    stock = load_stock(save_tiny("llama-dynamic", tmp_path))
    length = 2 * stock.config.max_position_embeddings
    attention = stock.model.layers[0].self_attn
    rotary = Rotary(stock.model.rotary_emb, length, [None] * 2)
    query, key = torch.randn(2, 1, 4, 20, 24, generator=torch.Generator().manual_seed(0))
    batch = MicroBatch([Run(slot=0, offset=0, count=20, start=5, sinks=0)], 0, torch.device("cpu"))
    turned, _, turned_key = rotary.rotate(attention, batch, query, key)

    early = stock.model.rotary_emb(query, batch.positions[None])
    late = stock.model.rotary_emb(query, torch.arange(length)[None])
    assert (early[0] - late[0][:, 5:25]).abs().max() > 0.1
    expected_pair = apply_rotary_pos_emb(query, key, *(table[:, 5:25] for table in late))
    for actual, expected in zip((turned, turned_key), expected_pair, strict=True):
        assert_close(actual, expected, 1e-4)


# --- refusals -------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "mpt", "deepseek_v3", "cohere2", "gpt2", "mamba"])
def test_other_types_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"'{kind}' are not supported: it"):
        load(write_checkpoint(tmp_path, {"model_type": kind}))


def test_a_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no_such_type"):
        load(write_checkpoint(tmp_path, {"model_type": "no_such_type"}))


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "something_new", "bits": 3}}
    with pytest.raises(ModelError, match="quantization_config"):
        load(write_checkpoint(tmp_path, config))


def test_models_that_see_later_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only causal models"):
        load(write_checkpoint(tmp_path, {"model_type": "gemma3_text", "use_bidirectional_attention": True}))


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("llama-yarn-biases", "model.layers.1.self_attn.q_proj.bias"),
        ("qwen2", "lm_head.weight"),
        ("qwen3", "model.norm.weight"),
        ("gpt_oss", "model.layers.0.self_attn.sinks"),
    ],
)
def test_missing_tensors_are_named(name: str, lost: str, tmp_path: Path) -> None:
    rewrite(save_tiny(name, tmp_path), lambda tensors: tensors.pop(lost))
    with pytest.raises(ModelError, match=f"lacks {lost}"):
        load(tmp_path)


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_experts_are_stored_one_by_one_and_none_may_be_missing(tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(save_tiny("qwen3_moe", tmp_path), lambda tensors: tensors.pop(lost))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(save_tiny("llama-yarn-biases", tmp_path), lambda tensors: tensors.update({name: torch.zeros(3, 64)}))
    with pytest.raises(ModelError, match=r"up_proj\.weight has shape \[3, 64\], expected \[96, 64\]"):
        load(tmp_path)


def test_a_stored_head_wins_over_tied_embeddings(tmp_path: Path) -> None:
    head = torch.randn(VOCABULARY, 64, generator=torch.Generator().manual_seed(3))
    rewrite(save_tiny("qwen3", tmp_path), lambda tensors: tensors.update({"lm_head.weight": head}))
    ids = random_text(14, 20)
    assert_close(load(tmp_path).logits(ids), stock_logits(load_stock(tmp_path), ids), 2e-4)
