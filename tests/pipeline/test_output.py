import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.documents import read_rows
from pipeline.errors import UserError
from pipeline.inputs import resolve_inputs
from pipeline.output import output_format, record_line, record_schema, write_records

RECORD: dict[str, Any] = {
    "id": "a",
    "source": "in.jsonl",
    "row": 0,
    "status": "ok",
    "reason": None,
    "summary": "Short \U0001f600.",
    "notes": [{"start": 0, "end": 5, "text": "Short"}],
    "fields": {"year": 1963, "tags": ["x", None]},
    "usage": {"input_tokens": 10, "output_tokens": 2, "segments": 1},
    "model": "m",
    "error": None,
    "schema_version": 1,
}
ERROR = {"id": 7, "source": "in.jsonl", "row": 1, "status": "error", "error": {"type": "BadLine", "message": "line 2"}}
ENDINGS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]


def test_the_name_says_the_format() -> None:
    for ending in ENDINGS:
        assert output_format(f"s3://bucket/out.{ending}") == ending
        assert output_format(f"OUT.{ending.upper()}") == ending
    for name in ("out.csv", "out", "out.json", "jsonl", "out.parquet.gz", "out.jsonl.bz2"):
        with pytest.raises(UserError, match=r"\.jsonl, \.jsonl\.gz, \.jsonl\.zst, \.parquet"):
            output_format(name)


def test_a_line_leaves_absent_keys_out_and_keeps_the_order() -> None:
    line = record_line(RECORD)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert list(json.loads(line)) == [key for key, value in RECORD.items() if value is not None]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("lone \ud800 and \udcff", '"lone \\\\ud800 and \\\\xff"'),
        ({"\ud800": 2**70}, '{"\\\\ud800":1180591620717411303424}'),
        (2**64, "18446744073709551616"),
        (-(2**63) - 1, "-9223372036854775809"),
        (float("nan"), "null"),
        ([float("inf"), 2**64], "[null,18446744073709551616]"),
        ("\u2028\x85 \x1b[31m</script>\x00", '"\u2028\x85 \\u001b[31m</script>\\u0000"'),
        ("שלום 文字 e\u0301", '"שלום 文字 e\u0301"'),
    ],
)
def test_any_value_can_be_written(value: object, written: str) -> None:
    line = record_line({"value": value})
    assert line.decode() == f'{{"value":{written}}}\n'
    assert b"\xef\xbf\xbd" not in line
    json.loads(line)


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_written_can_be_read_and_the_same_records_give_the_same_bytes(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out.{ending}"
    assert write_records(str(path), iter([RECORD, ERROR]), ending) == 2
    first = path.read_bytes()
    buffer = io.BytesIO()
    write_records(buffer, [RECORD, ERROR], ending)
    assert buffer.getvalue() == first  # an open file is left open
    (file,) = resolve_inputs([str(path)]).files
    rows = list(read_rows(file, text_field="summary", id_field="id", keep=("status", "usage")))
    assert rows[0].text == "Short \U0001f600."
    assert rows[0].fields == {"status": "ok", "usage": RECORD["usage"]}
    assert str(rows[1].id) == "7"


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_records_at_all(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out.{ending}"
    assert write_records(str(path), [], ending) == 0
    assert list(read_rows(resolve_inputs([str(path)]).files[0], text_field="summary")) == []


def test_urls() -> None:
    write_records("memory://written/out.jsonl.gz", [RECORD], "jsonl.gz")
    assert gzip.decompress(fsspec.filesystem("memory").cat("/written/out.jsonl.gz")) == record_line(RECORD)


def test_parquet_has_one_schema_whatever_the_rows(tmp_path: Path) -> None:
    for name, records in (("a", [RECORD]), ("b", [ERROR]), ("c", [])):
        write_records(str(tmp_path / name), records, "parquet")
        table = pq.read_table(tmp_path / name)
        assert table.schema.equals(record_schema())
    table = pq.read_table(tmp_path / "a").to_pylist()[0]
    assert json.loads(table["fields"]) == RECORD["fields"]
    assert table["notes"] == RECORD["notes"]
    error = pq.read_table(tmp_path / "b").to_pylist()[0]
    assert (error["id"], error["summary"], error["notes"], error["usage"]) == ("7", None, None, None)


def test_parquet_survives_odd_strings(tmp_path: Path) -> None:
    record = {"id": 2**70, "summary": "\ud800", "fields": {"n": 2**70, "x": float("nan"), "s": "\udc80"}}
    write_records(str(tmp_path / "t"), [record], "parquet")
    (row,) = pq.read_table(tmp_path / "t").to_pylist()
    assert (row["id"], row["summary"]) == (str(2**70), "\\ud800")
    assert row["fields"] == '{"n":1180591620717411303424,"x":null,"s":"\\\\x80"}'


def test_a_task_declares_its_own_columns(tmp_path: Path) -> None:
    schema = record_schema([pa.field("answer", pa.string())])
    write_records(str(tmp_path / "t"), [{"row": 1, "answer": "yes"}], "parquet", schema)
    assert pq.read_table(tmp_path / "t").to_pylist()[0]["answer"] == "yes"
    with pytest.raises(ValueError, match="no column answer"):
        write_records(str(tmp_path / "t"), [{"answer": "yes"}], "parquet")
    with pytest.raises(ValueError, match="unknown format"):
        write_records(str(tmp_path / "t"), [], "csv")


@pytest.mark.parametrize("ending", ENDINGS)
def test_writing_streams(tmp_path: Path, ending: str) -> None:
    def records() -> Iterator[dict[str, Any]]:
        for row in range(600):
            yield {"row": row, "summary": f"{row} " * 20_000}

    tracemalloc.start()
    write_records(str(tmp_path / f"out.{ending}"), records(), ending)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000
