"""Cutting a text of any length into segments of a bounded number of tokens, in bounded memory.

Where a segment ends depends on the text from the segment's start on and on nothing else: not on how the text arrives,
nor on the segments before. So reading can start again at any segment's end.
"""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.sentences import Break, Unit, lines, units
from pipeline.text import printable

Encode = Callable[[str], list[int]]

# Text seen ahead, in characters a token: prose has 4 to 5. Text with longer tokens makes segments that are less full.
_CHARACTERS_PER_TOKEN = 8
_LEAST_TOKENS = 16
# A better break wins over a fuller segment, down to this share of the limit.
_LEAST_FILL = ((Break.PARAGRAPH, 0.6), (Break.LINE, 0.8), (Break.SENTENCE, 0.0))
# A rest of up to this many segments is halved, rather than leaving a last segment of a few words.
_HALVED_REST = 1.5
# Units' tokens add up to a little more than the tokens of the text that they make.
_MEASURING_ERROR = 1.1
_HIDDEN = re.compile("[\ud800-\udfff\ufeff]")
_JOINERS = frozenset("\u200c\u200d")
_FLAG_LETTERS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))  # two make a flag


@dataclass(frozen=True)
class Segment:
    """A part of a document that is read in one go.

    `start` and `end` are offsets in the source: code points of a row's text, uncompressed bytes of a text file. `ids`
    is `text` tokenised by itself. `sentences` are stripped code-point ranges inside `text`.
    """

    text: str
    start: int
    end: int
    ids: list[int]
    sentences: tuple[tuple[int, int], ...]
    raw: str = field(repr=False)
    unit: str = "code points"

    def locate(self, index: int) -> int:
        """Return the source offset of the code point `index` of `text`; `len(text)` gives `end`."""
        before = self.raw[: self._shown.to_raw(index)]
        return self.start + _length(before, self.unit)

    @cached_property
    def _shown(self) -> "_Shown":
        return _Shown(self.raw)


class _Shown:
    """A raw text as it is shown: byte order marks left out, lone surrogates as escapes; with the way back."""

    def __init__(self, raw: str) -> None:
        self._edges = [(0, 0)]  # (offset shown, offset raw) after each character that changes its length
        shown = 0
        last = 0
        for match in _HIDDEN.finditer(raw) if not raw.isascii() else ():
            shown += match.start() - last + len(_show(match[0]))
            last = match.end()
            self._edges.append((shown, last))

    def to_raw(self, index: int) -> int:
        place = bisect_left(self._edges, (index + 1,)) - 1
        shown, raw = self._edges[place]
        following = self._edges[place + 1][1] - 1 if place + 1 < len(self._edges) else None
        inside = raw + index - shown
        return inside if following is None else min(inside, following)  # inside an escape: its character's start

    def from_raw(self, index: int) -> int:
        shown, raw = next(edge for edge in reversed(self._edges) if edge[1] <= index)
        return shown + index - raw


def _show(raw: str) -> str:
    return raw if raw.isascii() else printable(raw.replace("\ufeff", ""))


def _length(raw: str, unit: str) -> int:
    return len(raw) if unit == "code points" or raw.isascii() else len(raw.encode("utf-8", "surrogateescape"))


def segment_document(
    pieces: Iterable[str], encode: Encode, segment_tokens: int, *, start: int = 0, unit: str = "code points"
) -> Iterator[Segment]:
    """Cut the text that `pieces` make together into segments of at most `segment_tokens` tokens.

    Cuts fall between paragraphs, lines or sentences, in this order; only a sentence longer than a segment is cut
    between words, and only a word longer than one inside, never before a combining mark. Joined, the segments' texts
    are the whole text as `printable` shows it, byte order marks left out. `start` is the source offset of the first
    piece. Raises ValueError for fewer than 16 tokens.
    """
    if segment_tokens < _LEAST_TOKENS:
        raise ValueError(f"segment_tokens is {segment_tokens}, less than {_LEAST_TOKENS}")
    ahead = _Ahead(pieces, _CHARACTERS_PER_TOKEN * segment_tokens)
    cutter = _Cutter(encode, segment_tokens)
    while window := ahead.fill():
        raw, ids, inner = cutter.cut(window, ahead.ended)
        end = start + _length(raw, unit)
        shown = _show(raw)
        if shown != raw:
            places = _Shown(raw)
            inner = [(places.from_raw(first), places.from_raw(last)) for first, last in inner]
        yield Segment(shown, start, end, ids, tuple(inner or lines(shown)), raw, unit)
        start = end
        ahead.drop(len(raw))


class _Ahead:
    """The next `size` characters of the text, filled from pieces of any length without copying long ones again."""

    def __init__(self, pieces: Iterable[str], size: int) -> None:
        self._pieces = iter(pieces)
        self._size = size
        self._piece, self._used = "", 0
        self._window = ""
        self.ended = False

    def fill(self) -> str:
        parts = [self._window]
        missing = self._size - len(self._window)
        while missing > 0:
            if self._used == len(self._piece):
                following = next(self._pieces, None)
                if following is None:
                    break
                self._piece, self._used = following, 0
            part = self._piece[self._used : self._used + missing]
            self._used += len(part)
            missing -= len(part)
            parts.append(part)
        self._window = "".join(parts)
        # A text that ends exactly with the window must look the same however its pieces arrive.
        while missing <= 0 and self._used == len(self._piece):
            following = next(self._pieces, None)
            if following is None:
                break
            self._piece, self._used = following, 0
        self.ended = self._used == len(self._piece)
        return self._window

    def drop(self, count: int) -> None:
        self._window = self._window[count:]


class _Cutter:
    """Chooses where the next segment ends. Units are measured once, though a window shows them more than once."""

    def __init__(self, encode: Encode, limit: int) -> None:
        self._encode = encode
        self._limit = limit
        self._measured: dict[tuple[int, int], int] = {}

    def cut(self, window: str, ended: bool) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Return the next segment's raw text, its ids and its sentences."""
        taken, totals, target = self._take(window, ended)
        while taken:
            whole = ended and taken[-1].end == len(window)
            chosen = len(taken) if whole else _choose(taken, totals, target)
            raw = window[: taken[chosen - 1].end]
            ids = self._encode(_show(raw))
            if len(ids) <= self._limit:
                self._forget(len(raw))
                return raw, ids, [unit.sentence for unit in taken[:chosen] if unit.sentence is not None]
            # Parts can have fewer tokens than the whole that they make; rare, so one unit less is tried each time.
            taken, totals = taken[: chosen - 1], totals[: chosen - 1]
        self._measured.clear()
        return *self._force(window), []

    def _take(self, window: str, ended: bool) -> tuple[list[Unit], list[int], float]:
        """Return the units that fit, the running totals of their tokens, and how many tokens are wanted."""
        taken: list[Unit] = []
        totals: list[int] = []
        total = 0
        for unit in units(window, complete=ended):
            total += self._measure(window, unit)
            if total > self._limit * (_HALVED_REST if ended else 1):
                break
            taken.append(unit)
            totals.append(total)
        target: float = self._limit
        if total > self._limit and ended and taken and taken[-1].end == len(window):
            if total < _MEASURING_ERROR * self._limit and len(self._encode(_show(window))) <= self._limit:
                target = total
            elif totals[0] <= 0.55 * total:
                target = 0.55 * total
        fitting = sum(total <= target for total in totals)
        return taken[:fitting], totals[:fitting], target

    def _measure(self, window: str, unit: Unit) -> int:
        place = (unit.start, unit.end)
        if place not in self._measured:
            # The space between two sentences is mostly part of the second's first token, and would count twice.
            self._measured[place] = len(self._encode(_show(window[unit.start : unit.end].rstrip(" "))))
        return self._measured[place]

    def _forget(self, cut: int) -> None:
        self._measured = {
            (start - cut, end - cut): count for (start, end), count in self._measured.items() if start >= cut
        }

    def _force(self, window: str) -> tuple[str, list[int]]:
        """Cut inside a sentence that is longer than a segment: after a word, else anywhere between two characters."""
        end = len(window)
        ids = self._encode(_show(window))
        while len(ids) > self._limit and end > 1:
            end = _word_end(window, max(1, min(end - 1, int(end * 0.97 * self._limit / len(ids)))))
            ids = self._encode(_show(window[:end]))
        return window[:end], ids


def _choose(taken: list[Unit], totals: list[int], limit: float) -> int:
    """Return how many units to take: up to the last break of the best kind that fills the segment enough."""
    for kind, share in _LEAST_FILL:
        for count in range(len(taken), 0, -1):
            if totals[count - 1] < share * limit:
                break
            if taken[count - 1].after >= kind:
                return count
    return len(taken)


def _word_end(text: str, end: int) -> int:
    """Return the last good place for a cut at or before `end`, at least 1."""
    for place in range(end, end // 2, -1):
        if text[place - 1].isspace() and not text[place : place + 1].isspace():
            return place
    for place in range(end, max(0, end - 32), -1):
        if not _joined(text, place):
            return place
    return end


def _joined(text: str, place: int) -> bool:
    """Tell whether the characters before and after `place` are one sign to a reader."""
    before, after = text[place - 1], text[place : place + 1]
    if not after:
        return False
    return (
        (before == "\r" and after == "\n")
        or unicodedata.category(after)[0] == "M"
        or before in _JOINERS
        or after in _JOINERS
        or "\U0001f3fb" <= after <= "\U0001f3ff"
        or (after in _FLAG_LETTERS and _flag_letters_before(text, place) % 2 == 1)
    )


def _flag_letters_before(text: str, place: int) -> int:
    first = place
    while first > 0 and text[first - 1] in _FLAG_LETTERS:
        first -= 1
    return place - first
