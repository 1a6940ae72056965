"""``generate`` and ``stream_generate``: what users of transformers expect, and text in whole characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from streamllm_core import AutoModel, ModelError, StreamingModel, WindowError
from streamllm_core.memory.budget import KVCacheSizingManager
from tests.streamllm_core.tiny_engines import random_tokens
from tests.streamllm_core.tiny_llama import write_llama
from tests.streamllm_core.tiny_models import load_stock

EOS, PAD, CONTEXT = 256, 257, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 64 tokens whose tokens are bytes."""
    folder = write_llama(
        tmp_path_factory.mktemp("bytes"), layers=2, vocabulary=258, context=CONTEXT, eos_token_id=EOS, pad_token_id=PAD
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    in_order = {letter: byte for byte, letter in sorted((_byte(letter), letter) for letter in letters)}
    tokenizer = Tokenizer(models.BPE({**in_order, "<eos>": EOS, "<pad>": PAD}, []))
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _byte(letter: str) -> int:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from 256 on, in their order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) < 256 else others[ord(letter) - 256]


@pytest.fixture(scope="module")
def _model(folder: Path) -> Callable[[str], StreamingModel]:
    loaded: dict[str, StreamingModel] = {}

    def load(device: str) -> StreamingModel:
        if device not in loaded:
            loaded[device] = AutoModel.from_pretrained(folder, device=device, dtype="float32")
        return loaded[device]

    return load


@pytest.fixture
def model(_model: Callable[[str], StreamingModel], device: str) -> StreamingModel:
    return _model(device)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def text(count: int, seed: int = 0) -> list[int]:
    return random_tokens(count, seed, 256)


# --- generate --------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_stock_transformers(model: StreamingModel, folder: Path) -> None:
    row = text(20)
    found = model.generate(ids(row), max_new_tokens=30)
    stock = load_stock(folder).generate(ids(row), max_new_tokens=30, do_sample=False, pad_token_id=PAD)
    assert isinstance(found, Tensor)
    assert found.tolist() == stock.tolist()
    assert found.shape == (1, 50) or found[0, -1] == EOS


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sequences_are_input_and_answer(model: StreamingModel, dtype: torch.dtype) -> None:
    row = ids(text(5)).to(dtype)
    plain = model.generate(row, max_new_tokens=4)
    held = model.generate(row, max_new_tokens=4, return_dict_in_generate=True)
    assert not isinstance(held, Tensor)
    assert torch.equal(held.sequences, plain)
    assert torch.equal(plain[:, :5], row)
    assert plain.dtype == dtype
    assert plain.shape == (1, 9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_gives_each_row_what_it_gives_alone(model: StreamingModel, side: str) -> None:
    rows = [text(length, length) for length in (3, 17, 1, 30)]
    padded, mask = [], []
    for row in rows:
        rest = 30 - len(row)
        padded.append([PAD] * rest + row if side == "left" else row + [PAD] * rest)
        mask.append([0] * rest + [1] * len(row) if side == "left" else [1] * len(row) + [0] * rest)
    together = model.generate(ids(*padded), attention_mask=ids(*mask), max_new_tokens=12)
    assert torch.equal(together[:, :30], ids(*padded))
    for number, row in enumerate(rows):
        alone = model.generate(ids(row), max_new_tokens=12)[0, len(row) :].tolist()
        assert together[number, 30 : 30 + len(alone)].tolist() == alone


def test_more_rows_than_fit_take_turns(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for two texts at a time: the others wait for their places."""
    model = AutoModel.from_pretrained(folder, device=device, dtype="float32")
    rows = ids(*(text(9, seed) for seed in range(5)))
    wanted = model.generate(rows, max_new_tokens=8)
    batch = KVCacheSizingManager.batch
    monkeypatch.setattr(
        KVCacheSizingManager, "batch", lambda self, place, demand: batch(self, place, replace(demand, streams=2))
    )
    assert torch.equal(model.generate(rows, max_new_tokens=8), wanted)


def test_rows_that_end_early_keep_their_end_and_are_padded(
    model: StreamingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ids(text(6, 1), text(6, 2), text(6, 3))
    free = model.generate(rows, max_new_tokens=16)[:, 6:].tolist()
    stop = free[1][3]  # the second row ends here or earlier
    monkeypatch.setattr(model.config, "eos_token_id", stop)
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    found = model.generate(rows, max_new_tokens=16)[:, 6:].tolist()
    longest = max(map(len, wanted))
    assert len(wanted[1]) <= 4
    assert found == [row + [PAD] * (longest - len(row)) for row in wanted]
    monkeypatch.setattr(model.config, "pad_token_id", None)
    found = model.generate(rows, max_new_tokens=16)[:, 6:].tolist()
    assert found == [row + [stop] * (longest - len(row)) for row in wanted]
    alone = model.generate(rows[1:2], max_new_tokens=16)[:, 6:].tolist()
    assert alone == [wanted[1]]


def test_ends_of_sequence_come_from_the_generation_config(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = AutoModel.from_pretrained(tmp_path, device="cpu", dtype="float32")
    assert model.stop_tokens == {7, 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert model.stop_tokens == {EOS}


def test_a_text_rolls_past_the_models_context(model: StreamingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.config, "eos_token_id", None)
    row = text(50)
    for window, recent in ((None, CONTEXT - 5), (16, 16)):
        found = model.generate(ids(row), max_new_tokens=100, window=window)
        assert isinstance(found, Tensor)
        assert found.shape == (1, 150)
        logits = model.logits(found[:, :-1], sinks=4, window=recent)[0, 49:]
        chosen = logits.gather(1, found[0, 50:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 1e-3  # each token is the best, or equal to it but for rounding


def test_sampling_is_reproducible(model: StreamingModel) -> None:
    rows = ids(text(9), text(9))

    def sample(**options: Any) -> list[list[int]]:
        return model.generate(rows, max_new_tokens=12, do_sample=True, **options)[:, 9:].tolist()

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=1)[0] != sample(seed=1)[1]  # rows draw numbers of their own
    greedy = model.generate(rows, max_new_tokens=12)[:, 9:].tolist()
    assert sample(temperature=0.0) == sample(top_p=1e-9) == greedy
    assert model.generate(rows, max_new_tokens=12, temperature=9.0, seed=4)[:, 9:].tolist() == greedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"window": 0}, "window"),
        ({"input_ids": torch.tensor([1, 2])}, "input_ids"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "input_ids"),
        ({"attention_mask": torch.ones(1, 4)}, "does not match"),
        ({"attention_mask": torch.zeros(1, 3)}, "without tokens"),
    ],
)
def test_senseless_arguments_are_refused(
    _model: Callable[[str], StreamingModel], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _model("cpu").generate(**{"input_ids": ids([1, 2, 3]), "max_new_tokens": 2, **arguments})


@pytest.mark.parametrize("option", ["num_beams", "repetition_penalty", "top_k", "logits_processor"])
def test_options_that_would_do_nothing_are_refused(_model: Callable[[str], StreamingModel], option: str) -> None:
    model = _model("cpu")
    for call in (model.generate, lambda *a, **k: list(model.stream_generate(*a, **k))):
        with pytest.raises(TypeError, match=option):
            call(ids([1, 2, 3]), **{option: 2})


def test_a_window_beyond_the_context_is_refused(_model: Callable[[str], StreamingModel]) -> None:
    with pytest.raises(WindowError, match="trained for 64"):
        _model("cpu").generate(ids([1, 2, 3]), window=CONTEXT)


# --- stream_generate -------------------------------------------------------------------------------------------


def spoken(model: StreamingModel, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The pieces of a model that says these tokens, whatever it is asked."""
    script = iter(tokens)

    monkeypatch.setattr(model, "best", lambda hidden: torch.tensor([next(script) for _ in hidden]))
    return model.stream_generate(ids([1, 2, 3]), max_new_tokens=len(tokens))


@pytest.fixture
def say(model: StreamingModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], Iterator[str]]:
    return lambda tokens: spoken(model, tokens, monkeypatch)


@pytest.mark.parametrize(
    "wanted",
    [
        "plain",
        "Grüße, € und 😀!",
        "日本語のテキスト",
        "👩‍👩‍👧 family",
        "é",
        "\n\n  two  spaces\t",
        "e\u0301 a\ufffdb",
        "‮abc",
    ],
)
def test_pieces_are_whole_characters(say: Callable[[list[int]], Iterator[str]], wanted: str) -> None:
    pieces = list(say([*wanted.encode(), EOS]))
    assert "".join(pieces) == wanted
    assert all(pieces)
    if "\ufffd" not in wanted:
        assert all("\ufffd" not in piece for piece in pieces)
        assert len(pieces) == len(wanted)  # as early as possible: each character as its last byte is there


def test_words_keep_the_space_that_stands_in_their_token(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such tokenizers drop it at the beginning of a text, so a word decoded by itself has lost it."""
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    words = ["▁One", "▁two", ",", "▁three", "▁", "▁four"]
    vocabulary = {word: number for number, word in enumerate(words)} | {"<eos>": EOS, "<pad>": PAD}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = AutoModel.from_pretrained(tmp_path, device="cpu", dtype="float32")
    pieces = list(spoken(model, [*range(6), 1, EOS], monkeypatch))
    assert pieces == ["One", " two", ",", " three", " ", " four", " two"]


def test_pieces_come_while_the_model_still_writes(
    say: Callable[[list[int]], Iterator[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    tokens = b"abc"

    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            for token in tokens:
                asked.append(token)
                yield token

    pieces = say(Watched(tokens))
    assert asked == []
    assert next(pieces) == "a"
    assert len(asked) == 1
    assert list(pieces) == ["b", "c"]


def test_special_tokens_are_not_text(say: Callable[[list[int]], Iterator[str]]) -> None:
    assert "".join(say([*b"ab", PAD, *b"cd", EOS, *b"never"])) == "abcd"


def test_a_character_cut_off_at_the_end_is_shown_as_such(say: Callable[[list[int]], Iterator[str]]) -> None:
    assert "".join(say(list("ab😀".encode()[:-1]))) == "ab\ufffd"
    assert "".join(say([*"ab€".encode()[:-1], EOS])) == "ab\ufffd"


def test_bytes_that_are_no_text_are_not_lost(say: Callable[[list[int]], Iterator[str]]) -> None:
    tokens = [*b"a", 0xFF, 0xFE, *b"b", 0x80, *b"c", 0xE2, 0x82]
    pieces = list(say(tokens))
    assert "".join(pieces) == bytes(tokens).decode(errors="replace")


def test_the_pieces_are_the_text_of_what_generate_gives(model: StreamingModel) -> None:
    row = ids(text(12))
    for options in ({}, {"do_sample": True, "seed": 3, "temperature": 2.0}):
        whole = model.generate(row, max_new_tokens=40, **options)[0, 12:]
        pieces = model.stream_generate(row, max_new_tokens=40, **options)
        assert "".join(pieces) == model.tokenizer.decode(whole, skip_special_tokens=True)


def test_one_row_at_a_time_is_streamed(_model: Callable[[str], StreamingModel]) -> None:
    with pytest.raises(ValueError, match="one row, not 2"):
        next(_model("cpu").stream_generate(ids([1], [2])))


def test_without_a_tokenizer_ids_work_and_text_does_not(load: Callable[..., StreamingModel]) -> None:
    model = load(3)
    assert model.generate(ids([1, 2, 3]), max_new_tokens=2).shape == (1, 5)
    with pytest.raises(ModelError, match="tokenizer"):
        list(model.stream_generate(ids([1, 2, 3]), max_new_tokens=2))
