"""From words to token ids, so that text stays data: only the chat template's own literals become control tokens.

A prompt is read in the order *pin, document, question*: the pin opens the user's turn with the instruction, the
document follows as data segment by segment, and a question at any boundary closes the user's turn and opens the
assistant's. So the template is rendered once around a slot, split there, and the pieces are tokenised apart from
whatever fills the slot.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from pipeline.errors import UserError

_SLOT = "\ue000slot\ue000"
_SURROGATES = re.compile("[\ud800-\udfff]")
# Templates that print today's date would give another pin, and so other results, on another day.
_FIXED_CLOCK = "{%- macro strftime_now(format) -%}2025-01-01{%- endmacro -%}"


@dataclass(frozen=True)
class Encoded:
    """Token ids of a piece of data, and for each the code points `[start, stop)` of the piece that it stands for."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]

    def spans(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Token spans of ranges of code points, which must be in order and apart; a token belongs where it starts."""
        spans, token = [], 0
        for start, stop in ranges:
            while token < len(self.ids) and self.offsets[token][0] < start:
                token += 1
            first = token
            while token < len(self.ids) and self.offsets[token][0] < stop:
                token += 1
            spans.append((first, token))
        return spans


class DataEncoder:
    """Tokenises data with the model's vocabulary but without any of its added tokens: no text can forge a control
    token.

    `tokenizer` is the serialised form of a `tokenizers.Tokenizer`. Emptying its added tokens stops the matching;
    vocabularies whose pieces spell an added token (Unigram, whole words) are caught by looking at the ids and
    encoding such a place in parts.
    """

    def __init__(self, tokenizer: str) -> None:
        spec = json.loads(tokenizer)
        added = {int(token["id"]): str(token["content"]) for token in spec["added_tokens"]}
        # Runs of blanks are added tokens in some vocabularies (GPT-NeoX) and merges in others; they control nothing.
        self._control = frozenset(token for token, content in added.items() if content.strip())
        unknown = spec["model"].get("unk_token")
        by_content = next((token for token, content in added.items() if content == unknown), None)
        self._unknown = spec["model"].get("unk_id", by_content)  # Unigram names it by its id
        self._tokenizer = Tokenizer.from_str(
            json.dumps({**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None})
        )

    def encode(self, text: str) -> Encoded:
        """Ids and offsets of `text`; a lone surrogate counts as the replacement character."""
        text = _SURROGATES.sub("\ufffd", text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        parts = [(0, len(text))]
        while parts:
            start, stop = parts.pop()
            encoding = self._tokenizer.encode(text[start:stop], add_special_tokens=False)
            if self._control.isdisjoint(encoding.ids):
                ids += encoding.ids
                offsets += [(start + a, start + b) for a, b in encoding.offsets]
            elif stop - start > 1:
                parts += reversed(self._apart(encoding.ids, encoding.offsets, start, stop))
            else:
                # One character cannot be parted: what the vocabulary does not know stays unknown, a control token goes.
                kept = [token for token in encoding.ids if token not in self._control or token == self._unknown]
                ids += kept
                offsets += [(start, stop)] * len(kept)
        return Encoded(tuple(ids), tuple(offsets))

    def _apart(self, ids: list[int], offsets: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
        """Ranges that cover `[start, stop)`, cut round and through each place that gave a control token."""
        cuts = {start, stop}
        for token, (a, b) in zip(ids, offsets, strict=True):
            if token in self._control:
                cuts |= {start + a, start + b, start + (a + b + 1) // 2}
        if len(cuts) == 2:  # the tokenizer names no place inside: halve, so that every round gets shorter
            cuts.add((start + stop) // 2)
        edges = sorted(cuts)
        return list(pairwise(edges))


class Prompter:
    """Builds a model's prompts. `pins=False`: the model cannot keep a pin, so each question repeats the instruction."""

    def __init__(self, tokenizer: Any, *, pins: bool = True) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("the model's tokenizer has no tokenizer.json; convert it with transformers first")
        self._tokenizer = tokenizer
        self._pins = pins
        self._data = DataEncoder(backend.to_str())
        self._before, self._after, self._completion = self._frame()
        self.stop = self._stop_tokens()

    def pin(self, instruction: str) -> tuple[int, ...]:
        """The template and the instruction, up to the document; the same ids whatever document follows."""
        return self._before + (self.data(f"{instruction}\n\n").ids if self._pins else ())

    def data(self, text: str) -> Encoded:
        """Document text, fields, and the model's own earlier answers."""
        return self._data.encode(text)

    def question(self, text: str, instruction: str) -> tuple[int, ...]:
        """What follows the document: the question, the end of the user's turn, the opening of the assistant's."""
        asked = f"\n\n{text}" if self._pins else f"\n\n{instruction}\n\n{text}"
        return self.data(asked + ("\n\nAnswer:" if self._completion else "")).ids + self._after

    def text(self, ids: Iterable[int]) -> str:
        """An answer as text, without control tokens and blank edges."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Ids before and after the user's words, and whether this is a plain completion for want of a template."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            with_special = self._tokenizer("").input_ids
            bos = self._tokenizer.bos_token_id
            return ((bos,) if bos is not None and with_special[:1] == [bos] else ()), (), True
        try:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": _SLOT}],
                chat_template=_FIXED_CLOCK + template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
        except TemplateError as error:
            raise UserError(f"the model's chat template cannot render a user's message: {error}") from error
        pieces = rendered.split(_SLOT)
        if len(pieces) != 2:
            raise UserError(f"the model's chat template prints a user's message {len(pieces) - 1} times, not once")
        before, after = (self._tokenizer(piece, add_special_tokens=False).input_ids for piece in pieces)
        return tuple(before), tuple(after), False

    def _stop_tokens(self) -> frozenset[int]:
        """End of text, and the token that ends a turn: the first control token after the user's words."""
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        ends = [token for token in self._after if token in special][:1]
        eos = self._tokenizer.eos_token_id
        return frozenset(ends if eos is None else [eos, *ends])
