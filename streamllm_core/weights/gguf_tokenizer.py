"""tokenizer.json and its companions from the vocabulary in a GGUF file.

A GGUF names its pre-tokenizer but does not contain it, so each one supported is spelled out here, as the model's own
tokenizer has it. One that is not known is refused: nearly the right pieces give nearly the right tokens, which no
error would ever show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from streamllm_core.errors import ModelError

NOTE_FILE = "TOKENIZER_NOTE.txt"

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _WORDS + r"\p{N}" + _REST
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Any:
    pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
}
_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3")


def tokenizer_note(folder: Path) -> str | None:
    """Why a converted folder has no tokenizer, or None when nothing is recorded."""
    note = folder / NOTE_FILE
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None


def write_tokenizer(metadata: dict[str, Any], folder: Path, context: int) -> None:
    """Write the tokenizer of a GGUF, or, when it cannot be built faithfully, a note that says why.

    The weights are of use without it (token ids in, token ids out), so this is no error here.
    """
    try:
        tokenizer = build_tokenizer(metadata)
    except ModelError as error:
        (folder / NOTE_FILE).write_text(f"{error}\n", encoding="utf-8")
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "padding_side": "left",
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{role}_token"] = tokens[token]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from GGUF metadata; ModelError, by name, for any other kind."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(f"the GGUF's tokenizer type {kind!r} is not supported (byte-level BPE, 'gpt2', is)")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"the GGUF's pre-tokenizer {pre!r} is not supported ({known} are)")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens) or not tokens:
        raise ModelError(f"the GGUF's vocabulary of {len(tokens)} tokens has duplicates or lacks token types")
    merges = _merges(metadata.get("tokenizer.ggml.merges") or [], vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    if "qwen" in pre:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _add_ends(tokenizer, metadata, tokens, add_bos=pre in _LLAMA3_NAMES)
    return tokenizer


def _merges(stored: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in stored:
        left, separator, right = merge.partition(" ")
        if not separator or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"the GGUF's merge {merge!r} does not fit its vocabulary")
        merges.append((left, right))
    return merges


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], *, add_bos: bool) -> None:
    # llama.cpp's defaults: only Llama 3's vocabulary begins texts with a token unless the file says otherwise.
    special = {}
    for role, default in (("bos", add_bos), ("eos", False)):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None and metadata.get(f"tokenizer.ggml.add_{role}_token", default):
            special[role] = (tokens[token], token)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not special:
        tokenizer.post_processor = byte_level
        return
    before, after = ([special[role][0]] if role in special else [] for role in ("bos", "eos"))
    template = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *[f"{token}:1" for token in before], "$B:1", *[f"{token}:1" for token in after]],
        special_tokens=list(dict.fromkeys(special.values())),
    )
    tokenizer.post_processor = processors.Sequence([byte_level, template])
