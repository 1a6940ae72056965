"""Tokenizers built from GGUF vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_models import CONFIGS, add_tokenizer, random_model, write_gguf
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streamllm_core.weights import open_source, tokenizer_note

TEXT = "In 1987, 12345 men's  thé the\n\n  in 123\t½ ٣٤ 日本 I'LL  "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "cache"))


def folder_with(tmp_path: Path, pre: str, **options: object) -> Path:
    path = tmp_path / f"{pre}.gguf"
    write_gguf(random_model(CONFIGS["llama"]()), path, extra=lambda w: add_tokenizer(w, pre, **options))
    return open_source(path).config_dir


def tokenizer(tmp_path: Path, pre: str, **options: object) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder_with(tmp_path, pre, **options))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["Ġthe", "Ġ", "1", "2", "3", "4", "Ġin"]),
        ("gpt-2", ["Ġthe", "Ġ", "123", "4", "Ġin"]),
        ("qwen2", ["Ġthe", "Ġ", "1", "2", "3", "4", "Ġin"]),
        ("llama-bpe", ["<turn>", "Ġthe", "Ġ", "123", "4", "Ġin"]),
    ],
)
def test_pieces_around_digits(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, pre)
    assert tok.convert_ids_to_tokens(tok(" the 1234 in")["input_ids"]) == pieces
    ids = tok(TEXT, add_special_tokens=False)["input_ids"]
    assert tok.decode(ids) == TEXT


def test_special_tokens_and_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "smollm")
    assert tokenizer_note(folder) is None
    tok = AutoTokenizer.from_pretrained(folder)
    assert (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id) == (1, 0, 0)
    assert tok("in<end><keep me>")["input_ids"] == [259, 0, 2]
    assert tok.decode([0, 2, 1], skip_special_tokens=True) == "<keep me>"
    messages = [{"role": "user", "content": "the"}]
    assert tok.apply_chat_template(messages, tokenize=False) == "<turn>the<end>"
    assert tok.model_max_length == 512
    assert '"eos_token_id": [\n' in (folder / "generation_config.json").read_text()


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_begin_of_text_as_the_file_says(pre: str, add_bos: bool | None, begins: bool, tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, pre, add_bos=add_bos)
    assert (tok("in")["input_ids"][0] == 1) is begins


@pytest.mark.parametrize(
    ("pre", "options", "said"),
    [("tekken", {}, "pre-tokenizer 'tekken'"), ("default", {"kind": "llama"}, "tokenizer type 'llama'")],
)
def test_unknown_kinds_leave_a_note(pre: str, options: dict[str, str], said: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, pre, **options)
    assert not list(folder.glob("tokenizer*"))
    assert said in (tokenizer_note(folder) or "")


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    write_gguf(random_model(CONFIGS["llama"]()), tmp_path / "bare.gguf")
    source = open_source(tmp_path / "bare.gguf")
    assert source.tensor("model.norm.weight").shape == (64,)
    assert "tokenizer type None" in (tokenizer_note(source.config_dir) or "")
