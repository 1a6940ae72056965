"""Cutting text into units, the smallest parts that a segment keeps whole, and naming the sentences among them.

Flowing text (prose, also hard-wrapped, and verse) is cut where its sentences end; records (logs, tables, listings) line
by line; headings stand alone. Everything is decided from the text between the start and a bounded way ahead.
"""

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from pipeline.boundaries import ends_as_sentence, sentence_ends

_SAMPLE_LINES, _SAMPLE_WIDTH = 24, 400
_FEW_LINES = 4
_WRAPPED_WIDTH = 120  # wider lines are paragraphs, not wrapped ones
_HEADING_WIDTH = 90
_LINE_PART = 300
_BOM = "\ufeff"  # also in the middle, where files were joined

# The literal newline in front makes the search fast; old Mac files have carriage returns alone.
_PARAGRAPH_GAP = re.compile(r"\n[^\S\n\r]*+(?:\r?\n|\r)(?:[^\S\n\r]*+(?:\r?\n|\r))*+")
_MAC_PARAGRAPH_GAP = re.compile(r"\r[^\S\n\r]*+(?:\r[^\S\n\r]*+)++")
_LINE = re.compile(r"[^\n\r]*+(?:\r\n|[\n\r]|\Z)")
_BULLET = re.compile(r"\s*(?:[-–—]{2}\s*|(?:[-–—*•‣▪+]|\(?(?:\d{1,2}|[a-z])[.)])\s+)(?=\w)")
_RECORD_START = re.compile(
    r"""\s*(?:[<\[({"]{0,2}(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d?[-/.]\w{2,3}[-/.]\d\d|\d\d?:\d\d|\d{9,}\b)"""
    r"""|[A-Z][a-z]{2}\s+\d{1,2}\s+\d\d:|\[?\b(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL)\b"""
    r"""|\[\s*\d+\.\d+\]|[{\[].*[}\]],?\s*$|\d+\.\d+\.\d+\.\d+\s|[\w.-]+=\S+\s+[\w.-]+=|\S+:\d+[:\s]|at\s\S+\()"""
)
_SIGNS = re.compile(r"[\d_/\\=<>|{}\[\]()@#$%^&*+~]")
_WORD = re.compile(r"\w+")
_TWO_WORDS = re.compile(r"\W*+\w++\W++\w")


class Break(IntEnum):
    """How good a place the end of a unit is for a cut."""

    HEADING = 0  # worst: a heading belongs to what follows
    SENTENCE = 1
    LINE = 2
    PARAGRAPH = 3


class Unit(NamedTuple):
    """`start` to `end` with the white space after it; `sentence` is the stripped range of a sentence or record."""

    start: int
    end: int
    after: Break
    sentence: tuple[int, int] | None


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the ranges of the sentences in `text`, stripped, in order, as code-point offsets.

    Headings, salutations, verse lines and other fragments are none; of records each line is one. Text without
    any punctuated sentence (a raw transcript) is given by its lines.
    """
    found = [unit.sentence for unit in units(text) if unit.sentence is not None]
    return found or lines(text)


def lines(text: str) -> list[tuple[int, int]]:
    """Return the ranges of the lines of three words and more, stripped; long ones in parts, cut between words."""
    found = []
    for match in _LINE.finditer(text):
        start, end = _stripped(text, match.start(), match.end())
        while start < end:
            stop = end if end - start <= _LINE_PART else text.rfind(" ", start, start + _LINE_PART)
            stop = stop if stop > start else min(end, start + _LINE_PART)
            if len(_WORD.findall(text, start, stop)) >= 3:
                found.append((start, stop))
            start, _ = _stripped(text, stop, end)
    return found


def units(text: str, complete: bool = True) -> Iterator[Unit]:
    """Yield the units of `text`: contiguous, from 0 to its end.

    Unless `complete`, the text goes on: the last unit, whose end is not known, is left out.
    """
    start, size = 0, len(text)
    held: Unit | None = None
    gaps = _PARAGRAPH_GAP if "\n" in text else _MAC_PARAGRAPH_GAP
    while start < size:
        gap = gaps.search(text, start)
        stop, start_of_next = (gap.start(), gap.end()) if gap else (size, size)
        for unit in _block(text, start, stop, start_of_next):
            if held is not None:
                yield held
            held = unit
        start = start_of_next
    if held is not None and (complete or held.end < size):
        yield held


def _block(text: str, start: int, stop: int, end: int) -> Iterator[Unit]:
    """Yield the units of one paragraph text[start:stop]; the gap up to `end` goes to the last."""
    if start == stop:
        yield Unit(start, end, Break.PARAGRAPH, None)
    elif _is_records(text, start, stop):
        yield from _record_lines(text, start, stop, end)
    else:
        for run_start, run_stop, last in _runs(text, start, stop):
            yield from _flow(text, run_start, run_stop, end if last else run_stop, last)


def _is_records(text: str, start: int, stop: int) -> bool:
    """Tell records from flowing text by the paragraph's first lines; few lines must all begin as records do."""
    total = records = certain = 0
    for match in _LINE.finditer(text, start, stop):
        line = match[0][:_SAMPLE_WIDTH].strip()
        if line:
            total += 1
            certain += _RECORD_START.match(line) is not None
            records += _looks_like_record(line)
        if total == _SAMPLE_LINES:
            break
    return 2 * records >= total if total >= _FEW_LINES else certain == total > 0


def _looks_like_record(line: str) -> bool:
    if _RECORD_START.match(line) or (line.endswith("...") and len(line) < _HEADING_WIDTH):
        return True
    if _BULLET.match(line) or ends_as_sentence(line, 0, len(line)):
        return False
    return len(_SIGNS.findall(line)) > 0.12 * len(line)


def _record_lines(text: str, start: int, stop: int, end: int) -> Iterator[Unit]:
    while start < stop:
        match = _LINE.match(text, start, stop)
        line_end = match.end() if match else stop
        last = line_end >= stop
        inner = _stripped(text, start, line_end) if _TWO_WORDS.match(text, start, line_end) else None
        yield Unit(start, end if last else line_end, Break.PARAGRAPH if last else Break.LINE, inner)
        start = line_end


def _runs(text: str, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Cut a paragraph of flowing text where a line break ends more than a line: headings, list items, wide lines."""
    line = _LINE.match(text, start, stop)
    run = start
    first = True
    while line is not None and line.end() < stop:
        following = _LINE.match(text, line.end(), stop)
        if following is None or _breaks(text, line, following, first):
            yield run, line.end(), False
            run = line.end()
        line, first = following, False
    yield run, stop, True


def _breaks(text: str, line: re.Match[str], following: re.Match[str], first: bool) -> bool:
    here, there = line[0].strip(), following[0].strip()
    if len(here) > _WRAPPED_WIDTH or len(there) > _WRAPPED_WIDTH or _BULLET.match(there):
        return True
    if _is_heading(here) or _is_heading(there):
        return True
    return first and len(here) < 0.6 * len(there) and _is_title(here) and there[:1].isupper()


def _is_heading(line: str) -> bool:
    """Tell whether a line is a heading by itself: Markdown's mark, or capitals only."""
    if line.startswith("#"):
        return True
    return len(line) <= _HEADING_WIDTH and line.isupper() and sum(map(str.isalpha, line[:12])) >= 3


def _is_title(line: str) -> bool:
    long_words = [word for word in _WORD.findall(line) if len(word) > 3]
    closed = line.endswith((".", "!", "?", ",", ";", ":"))
    return bool(long_words) and not closed and all(word[0].isupper() for word in long_words)


def _flow(text: str, start: int, stop: int, end: int, last: bool) -> Iterator[Unit]:
    """Yield the sentences of one run of flowing text, white space with the sentence before it."""
    inner_start, inner_stop = _stripped(text, start, stop)
    line = text[inner_start : min(inner_stop, inner_start + _HEADING_WIDTH + 1)]
    if inner_start == inner_stop or _is_heading(line) or _is_bare_line(text, inner_start, inner_stop):
        yield Unit(start, end, Break.HEADING if inner_start < inner_stop else Break.PARAGRAPH, None)
        return
    bullet = _BULLET.match(text, start, stop)
    begin = start
    for sentence_end in sentence_ends(text, inner_start, inner_stop):
        if sentence_end >= inner_stop:
            break
        unit_end = sentence_end
        while unit_end < inner_stop and text[unit_end].isspace():
            unit_end += 1
        yield Unit(begin, unit_end, Break.SENTENCE, _sentence(text, begin, sentence_end, bullet))
        begin = unit_end
    after = Break.PARAGRAPH if last else Break.LINE
    yield Unit(begin, end, after, _sentence(text, begin, inner_stop, bullet))


def _is_bare_line(text: str, start: int, stop: int) -> bool:
    """Tell whether this is a short line without a sentence in it: a title, a page number, a name."""
    return (
        stop - start <= _HEADING_WIDTH
        and not text.endswith((",", ";"), start, stop)
        and "\n" not in text[start:stop]
        and _BULLET.match(text, start, stop) is None
        and (next(sentence_ends(text, start, stop), None) is None or _is_title(text[start:stop].rstrip(".")))
    )


def _sentence(text: str, start: int, stop: int, bullet: re.Match[str] | None) -> tuple[int, int] | None:
    """Return the stripped range when it is a whole sentence, None for fragments."""
    if bullet is not None and bullet.start() == start:
        start = bullet.end()
    start, stop = _stripped(text, start, stop)
    words = len(_WORD.findall(text, start, min(stop, start + 400)))
    if not ends_as_sentence(text, start, stop) and (bullet is None or words < 5):
        return None
    first = next((char for char in text[start : start + 8] if char.isalnum()), "")
    spaced = first.upper() != first.lower()  # scripts without capitals often write no spaces either
    if not first or first.islower() or (spaced and words < 2):
        return None
    return start, stop


def _stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    while start < stop and (text[start].isspace() or text[start] == _BOM):
        start += 1
    while stop > start and (text[stop - 1].isspace() or text[stop - 1] == _BOM):
        stop -= 1
    return start, stop
