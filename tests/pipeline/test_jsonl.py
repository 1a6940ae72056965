import gzip
import io
import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.documents import read_rows
from pipeline.inputs import InputFile, resolve_inputs
from pipeline.jsonl import parse_json
from pipeline.output import record_line
from pipeline.rows import BAD_LINE, BAD_TEXT, DAMAGED_FILE, Place, Row


def written(path: Path, data: bytes) -> InputFile:
    path.write_bytes(data)
    return resolve_inputs([str(path)]).files[0]


def rows_of(tmp_path: Path, data: bytes, **options: object) -> list[Row]:
    return list(read_rows(written(tmp_path / "in.jsonl", data), **options))  # type: ignore[arg-type]


GOOD = b'{"text": "good"}'


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"", []),
        (b"\n\n  \n\t\r\n", []),
        (GOOD, ["good"]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", ["good", "good"]),
        (b"\xef\xbb\xbf" + GOOD + b"\n", ["good"]),
        (GOOD + b"\n\xef\xbb\xbf" + GOOD + b"\n\xef\xbb\xbf\n", ["good", "good"]),
        ('{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
        (b'{"text": "half \\ud83d and \\udc80"}\n', ["half \\ud83d and \\x80"]),
        (b'{"text": "\\ud83d\\ude00"}\n', ["\U0001f600"]),
        (b'{"text": "x", "other": NaN}\n{"text": "y", "other": -Infinity}\n', ["x", "y"]),
        (b'{"text": "x", "other": 1' + b"0" * 400 + b"}\n", ["x"]),
        ('{"text": "\ufeffx"}\n'.encode(), ["\ufeffx"]),
        (b'{"text": "\\u0000\\u001b[31m"}\n', ["\x00\x1b[31m"]),
    ],
)
def test_good_lines(tmp_path: Path, data: bytes, texts: list[str]) -> None:
    for buffer_size in (1, 5, 1 << 20):
        rows = rows_of(tmp_path, data, buffer_size=buffer_size)
        assert [row.text for row in rows] == texts
        assert [row.ordinal for row in rows] == list(range(len(texts)))
        assert all(row.error is None and row.skip_reason is None for row in rows)


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b"not json", BAD_LINE, "not JSON"),
        (b'{"text": "x"} {"text": "y"}', BAD_LINE, "not JSON"),
        (b"[1, 2]", BAD_LINE, "a list, not an object"),
        (b'"text"', BAD_LINE, "a string, not an object"),
        (b"null", BAD_LINE, "null, not an object"),
        (b'{"text": "caf\xe9"}', BAD_LINE, r"byte 31 \(0xe9\) is not UTF-8"),
        (b'{"text": "\xed\xa0\x80"}', BAD_LINE, "is not UTF-8"),
        (b'{"text": "x", "deep": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", BAD_LINE, "nested too deeply"),
        (b'{"txet": "x", "n": {"text": 1}}', BAD_TEXT, "no field 'text'; there are: txet, n, n.text; did you mean"),
        (b"{}", BAD_TEXT, "there are: none"),
        (b'{"text": 3}', BAD_TEXT, "a number, not a string"),
        (b'{"text": ["a"]}', BAD_TEXT, "a list, not a string"),
        (b'{"text": {"a": 1}}', BAD_TEXT, "an object, not a string"),
        (b'{"text": true}', BAD_TEXT, "a boolean, not a string"),
    ],
)
def test_a_bad_line_is_an_error_row_and_the_rest_goes_on(tmp_path: Path, line: bytes, kind: str, message: str) -> None:
    first, bad, last = rows_of(tmp_path, GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    assert (first.text, last.text, last.ordinal) == ("good", "good", 2)
    assert bad.error is not None
    assert bad.error.type == kind
    assert f"{tmp_path / 'in.jsonl'}, line 3: " in bad.error.message
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad.error.message)


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b'{"text": null}', "null text"), (b'{"text": ""}', "empty text"), (b'{"text": " \\n\\t"}', "empty text")],
)
def test_empty_text_is_skipped_with_a_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    (row,) = rows_of(tmp_path, line)
    assert (row.text, row.error, row.skip_reason) == (None, None, reason)


def test_a_torn_last_line_is_an_error_row(tmp_path: Path) -> None:
    good, torn = rows_of(tmp_path, GOOD + b"\n" + GOOD[:-4])
    assert good.text == "good"
    assert torn.error is not None
    assert "without a newline" in torn.error.message


def test_a_line_over_the_limit_costs_one_row_and_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "in.jsonl").open("wb") as file:
        file.write(GOOD + b"\n" + b'{"text": "')
        for _ in range(40):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + GOOD + b"\n")
    (file,) = resolve_inputs([str(tmp_path / "in.jsonl")]).files
    tracemalloc.start()
    first, long, last = read_rows(file, max_document_bytes=5_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first.text, last.text) == ("good", "good")
    assert long.error is not None
    assert "line 2: 40000013 bytes, more than the 5000000 of --max-document-bytes" in long.error.message
    assert peak < 15_000_000


def test_a_5_mb_line_is_a_row(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, b'{"text": "' + b"word " * 1_000_000 + b'"}')
    assert row.text is not None
    assert len(row.text) == 5_000_000


@pytest.mark.parametrize(
    ("value", "identity"),
    [
        ('"a"', "a"),
        ("7", 7),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("null", None),
        ("1.5", "1.5"),
        ("true", "true"),
        ('"../../x"', "../../x"),
        ('["a", 1]', '["a", 1]'),
    ],
)
def test_ids_are_echoed(tmp_path: Path, value: str, identity: object) -> None:
    rows = rows_of(tmp_path, (f'{{"text": "x", "key": {value}}}\n' * 2).encode(), id_field="key")
    assert [row.id for row in rows] == [identity, identity]
    (row,) = rows_of(tmp_path, GOOD, id_field="key")
    assert row.id is None


def test_dotted_fields_and_kept_fields(tmp_path: Path) -> None:
    data = b'{"doc": {"body": {"text": "x"}, "id": 3}, "a.b": "own name", "a": {"b": "path"}, "n": NaN, "s": "\\ud800"}'
    keep = ("a.b", "doc.id", "no", "n", "s")
    (row,) = rows_of(tmp_path, data, text_field="doc.body.text", id_field="doc.id", keep=keep)
    assert (row.text, row.id) == ("x", 3)
    assert set(row.fields) == {"a.b", "doc.id", "n", "s"}
    line = record_line({"fields": row.fields})
    assert json.loads(line) == {"fields": {"a.b": "own name", "doc.id": 3, "n": None, "s": "\\ud800"}}


def test_numbers_over_64_bits_keep_their_digits() -> None:
    assert parse_json(b'{"a": 123456789012345678901234567890}') == {"a": 123456789012345678901234567890}


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("exact", [True, False])
def test_reading_starts_again_anywhere(tmp_path: Path, ending: str, exact: bool) -> None:
    lines = [b'\xef\xbb\xbf{"text": "%d"}\r\n' % n if n % 3 else b"bad %d\n\n" % n for n in range(40)]
    data = b"".join(lines)
    file = written(tmp_path / f"in.{ending}", gzip.compress(data) if ending.endswith("gz") else data)
    rows = list(read_rows(file))
    assert len(rows) == 40
    for n in (0, 1, 17, 39):
        start = rows[n].place if exact else Place(ordinal=n)
        assert list(read_rows(file, start=start, buffer_size=7)) == rows[n:]
    assert list(read_rows(file, start=Place(ordinal=40))) == []


def test_a_truncated_file_gives_its_rows_and_then_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b'{"text": "row %d"}\n' % (n * 7919) for n in range(5000)))
    file = written(tmp_path / "in.jsonl.gz", packed[: len(packed) // 2])
    rows = list(read_rows(file))
    assert list(read_rows(file, buffer_size=100)) == rows
    assert 2000 < len(rows) < 3000
    assert all(row.error is None for row in rows[:-1])
    assert [row.ordinal for row in rows] == list(range(len(rows)))
    last = rows[-1].error
    assert last is not None
    assert last.type == DAMAGED_FILE
    assert "what follows is lost" in last.message


def test_reading_is_lazy(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD + b"\n") + b"damaged"
    rows = read_rows(written(tmp_path / "in.jsonl.gz", packed))
    assert next(rows).text == "good"
    error = next(rows).error
    assert error is not None
    assert error.type == DAMAGED_FILE


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BufferedReader(io.BytesIO(GOOD + b"\n" + GOOD))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=buffer))
    (file,) = resolve_inputs(["-"]).files
    assert [row.text for row in read_rows(file)] == ["good", "good"]
    assert not buffer.closed


def test_a_file_that_is_gone_is_an_error_row(tmp_path: Path) -> None:
    file = replace(written(tmp_path / "in.jsonl", GOOD), path=str(tmp_path / "gone.jsonl"))
    (row,) = read_rows(file)
    assert row.error is not None
    assert row.error.type == "UnreadableFile"
