"""JSON lines: bytes are split on newlines only, and each line is parsed by itself, so that a bad one costs one row."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from pipeline.compression import ByteStream
from pipeline.inputs import InputFile
from pipeline.rows import BAD_LINE, BAD_TEXT, DocumentError, Place, Row, RowError
from pipeline.text import printable

_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")
MISSING = object()


def jsonl_rows(
    file: InputFile,
    text_field: str,
    id_field: str | None,
    keep: Sequence[str],
    start: Place,
    max_document_bytes: int,
    buffer_size: int,
) -> Iterator[Row]:
    """Yield a row for every line that is not blank. Bad lines and a damaged end of the file are rows with an error."""
    place = start
    try:
        with ByteStream(file) as stream:
            for place, line, length, newline in _numbered(stream, start, max_document_bytes, buffer_size):
                if line is None:
                    message = f"{length} bytes, more than the {max_document_bytes} of --max-document-bytes"
                    yield _bad(file, place, length, BAD_LINE, message)
                else:
                    yield _parsed(file, place, line, length, newline, text_field, id_field, keep)
                place = Place(place.ordinal + 1, place.offset + length, place.line + 1)
    except DocumentError as error:
        yield Row(file, place, error=RowError(error.type, str(error)))


def parse_json(line: bytes, exact: bool = True) -> Any:
    """Parse one JSON value; `exact` keeps integers of more than 64 bits. Raises ValueError.

    Lone surrogates, NaN and Infinity, which orjson refuses, are read by `json`.
    """
    if exact and _LONG_NUMBER.search(line):
        return _parse_slowly(line)
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line)


def _parse_slowly(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _numbered(
    stream: ByteStream, start: Place, max_bytes: int, buffer_size: int
) -> Iterator[tuple[Place, bytes | None, int, bool]]:
    """Yield (place, line or None when too long, bytes with the newline, ends in a newline) from `start` on."""
    stream.skip_to(start.offset)
    ordinal, offset, number = (start.ordinal if start.offset else 0), start.offset, start.line if start.offset else 1
    for line, length, newline in split_lines(stream, max_bytes, buffer_size):
        if line is not None:
            line = line.removeprefix(_BOM).strip(b" \t\r")
        if line != b"":
            if ordinal >= start.ordinal:
                yield Place(ordinal, offset, number), line, length, newline
            ordinal += 1
        offset += length
        number += 1


def split_lines(stream: ByteStream, max_bytes: int, buffer_size: int) -> Iterator[tuple[bytes | None, int, bool]]:
    r"""Split on b"\n" alone: yield (line, length with the newline, whether it had one), with None for lines over
    `max_bytes`, which are never held."""
    parts: list[bytes] = []
    length = 0

    def finish(more: bytes, newline: bool) -> tuple[bytes | None, int, bool]:
        nonlocal parts, length
        total = length + len(more)
        line = b"".join((*parts, more)) if total <= max_bytes else None
        parts, length = [], 0
        return line, total + newline, newline

    while data := stream.read(buffer_size):
        begin = 0
        while (end := data.find(b"\n", begin)) >= 0:
            yield finish(data[begin:end], True)
            begin = end + 1
        length += len(data) - begin
        if length > max_bytes:
            parts = []
        elif begin < len(data):
            parts.append(data[begin:])
    if length:
        yield finish(b"", False)


def _parsed(
    file: InputFile,
    place: Place,
    line: bytes,
    length: int,
    newline: bool,
    text_field: str,
    id_field: str | None,
    keep: Sequence[str],
) -> Row:
    try:
        value = parse_json(line, exact=id_field is not None or bool(keep))
    except ValueError as error:
        torn = "" if newline else "; the last line, without a newline: the file may have been cut off"
        return _bad(file, place, length, BAD_LINE, f"{_explain(error, line, place)}{torn}")
    if not isinstance(value, dict):
        return _bad(file, place, length, BAD_LINE, f"{_kind(value)}, not an object")
    identity = row_id(look_up(value, id_field)) if id_field is not None else None
    fields = {name: found for name in keep if (found := look_up(value, name)) is not MISSING}
    text = look_up(value, text_field)
    if text is None:
        return Row(file, place, identity, fields, length, skip_reason="null text")
    if text is MISSING:
        message = f"no field {text_field!r}; {nearest(text_field, paths(value))}"
        return _bad(file, place, length, BAD_TEXT, message, identity, fields)
    if not isinstance(text, str):
        message = f"field {text_field!r} is {_kind(text)}, not a string"
        return _bad(file, place, length, BAD_TEXT, message, identity, fields)
    if not text or text.isspace():
        return Row(file, place, identity, fields, length, skip_reason="empty text")
    return Row(file, place, identity, fields, length, text=printable(text))


def _bad(
    file: InputFile,
    place: Place,
    length: int,
    kind: str,
    message: str,
    identity: str | int | None = None,
    fields: dict[str, Any] | None = None,
) -> Row:
    error = RowError(kind, f"{file.path}, line {place.line}: {message}")
    return Row(file, place, identity, fields or {}, length, error=error)


def _explain(error: ValueError, line: bytes, place: Place) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {place.offset + error.start} (0x{line[error.start]:02x}) is not UTF-8"
    return f"not JSON: {error}"


def look_up(value: Mapping[str, Any], name: str) -> Any:
    """Return the field of that very name, else the one at the dotted path, else a marker for a missing one."""
    if name in value:
        return value[name]
    head, dot, rest = name.partition(".")
    inner = value.get(head)
    return look_up(inner, rest) if dot and isinstance(inner, dict) else MISSING


def row_id(value: Any) -> str | int | None:
    """Strings and integers are echoed as they are, other values as their JSON text; a missing or null id is None."""
    if value is MISSING or value is None:
        return None
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return value
    return json.dumps(value, ensure_ascii=False)


def paths(value: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the fields, those of nested objects as dotted paths."""
    listed = []
    for name, inner in value.items():
        listed.append(prefix + name)
        if isinstance(inner, dict):
            listed += paths(inner, f"{prefix}{name}.")
    return listed


def nearest(name: str, existing: Sequence[str]) -> str:
    """Say which fields there are and which comes closest to `name`."""
    close = difflib.get_close_matches(name, existing, n=1, cutoff=0.5)
    listed = ", ".join(existing[:20]) + (", …" if len(existing) > 20 else "")
    return f"there are: {listed or 'none'}" + (f"; did you mean {close[0]!r}?" if close else "")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
