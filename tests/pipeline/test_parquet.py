import datetime
import decimal
import random
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.documents import check_inputs, read_rows
from pipeline.errors import UserError
from pipeline.inputs import InputFile, resolve_inputs
from pipeline.output import record_line
from pipeline.rows import BAD_TEXT, DAMAGED_FILE, Place


def written(path: Path, table: pa.Table | dict[str, Any], **options: Any) -> InputFile:
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return resolve_inputs([str(path)]).files[0]


TEXTS = ["one", None, "", " \n", "two"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(TEXTS),
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS).dictionary_encode(),
        pa.array([text and text.encode() for text in TEXTS], pa.binary()),
        pa.array([text and text.encode() for text in TEXTS], pa.large_binary()),
    ],
    ids=lambda column: str(column.type).split("<")[0],
)
def test_columns_that_hold_text(tmp_path: Path, column: pa.Array) -> None:
    file = written(tmp_path / "t.parquet", {"text": column})
    rows = list(read_rows(file))
    assert [row.text for row in rows] == ["one", None, None, None, "two"]
    assert [row.skip_reason for row in rows] == [None, "null text", "empty text", "empty text", None]
    assert [row.ordinal for row in rows] == [0, 1, 2, 3, 4]


def test_a_null_column_is_skipped_row_by_row(tmp_path: Path) -> None:
    file = written(tmp_path / "t.parquet", {"text": pa.nulls(3)})
    assert [row.skip_reason for row in read_rows(file)] == ["null text"] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_field": "Text"}, "no column 'Text'; there are: text, id, meta, tags, meta.lang; did you mean 'text'"),
        ({"text_field": "meta.lnag"}, "did you mean 'meta.lang'"),
        ({"id_field": "key"}, "no column 'key'"),
        ({"keep": ("id", "colour")}, "no column 'colour'"),
        ({"text_field": "tags"}, "list<.*>, not text; join its parts"),
        ({"text_field": "id"}, "holds int64, not text"),
        ({"text_field": "meta"}, "not text"),
    ],
)
def test_columns_are_checked_before_anything_is_read(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    table = {"text": ["x"], "id": [1], "meta": [{"lang": "en"}], "tags": [["a"]]}
    file = written(tmp_path / "t.parquet", table)
    for reading in (
        lambda: list(read_rows(file, **fields)),
        lambda: check_inputs([file], fields.get("text_field", "text"), fields.get("id_field"), fields.get("keep", ())),
    ):
        with pytest.raises(UserError, match=message):
            reading()


def test_dotted_names_reach_into_structs_and_a_columns_own_name_comes_first(tmp_path: Path) -> None:
    documents = [{"body": {"text": "x"}, "id": "k"}, None]
    file = written(tmp_path / "t.parquet", {"doc": documents, "a.b": ["own", "own"], "a": [{"b": "path"}] * 2})
    rows = list(read_rows(file, text_field="doc.body.text", id_field="doc.id", keep=("a.b", "doc.body")))
    assert (rows[0].text, rows[0].id, rows[0].fields) == ("x", "k", {"a.b": "own", "doc.body": {"text": "x"}})
    assert (rows[1].skip_reason, rows[1].id) == ("null text", None)


def test_the_same_column_may_be_asked_for_twice(tmp_path: Path) -> None:
    file = written(tmp_path / "t.parquet", {"text": ["x"]})
    (row,) = read_rows(file, id_field="text", keep=("text",))
    assert (row.text, row.id, row.fields) == ("x", "x", {"text": "x"})


def test_kept_values_become_json(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 1, 31, 12, 30)
    values = {
        "text": ["x"],
        "time": [moment],
        "nanos": pa.array([1_700_000_000_000_000_001], pa.timestamp("ns")),
        "day": [moment.date()],
        "price": [decimal.Decimal("1.10")],
        "blob": [b"\xff\x00"],
        "bytes": [b"ok"],
        "nan": [float("nan")],
        "big": pa.array([2**64 - 1], pa.uint64()),
        "nested": [{"list": [None, {"t": moment}]}],
        "nested_nanos": pa.array([[{"t": 1_000_000_001}]], pa.list_(pa.struct([("t", pa.timestamp("ns", "UTC"))]))),
        "span": [datetime.timedelta(seconds=1)],
    }
    (row,) = read_rows(written(tmp_path / "t.parquet", values), keep=tuple(values)[1:])
    assert record_line(row.fields)
    assert row.fields == {
        "nanos": "2023-11-14T22:13:20",
        "nested_nanos": [{"t": "1970-01-01T00:00:01+00:00"}],
        "span": "0:00:01",
        "time": "2024-01-31T12:30:00",
        "day": "2024-01-31",
        "price": "1.10",
        "blob": "/wA=",
        "bytes": "ok",
        "nan": None,
        "big": 2**64 - 1,
        "nested": {"list": [None, {"t": "2024-01-31T12:30:00"}]},
    }


def test_bytes_that_are_no_text_cost_one_row(tmp_path: Path) -> None:
    not_utf8 = pa.array([b"ok", b"caf\xe9", b"ok"]).view(pa.string())
    for column in (pa.array([b"ok", b"caf\xe9", b"ok"]), not_utf8):
        rows = list(read_rows(written(tmp_path / "t.parquet", {"text": column})))
        assert [row.text for row in rows] == ["ok", None, "ok"]
        assert rows[1].error is not None
        assert rows[1].error.type == BAD_TEXT
        assert "row 1: byte 3 of the text is not UTF-8" in rows[1].error.message
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3], not_utf8)], ["names"])
    rows = list(read_rows(written(tmp_path / "t.parquet", {"text": ["x"] * 3, "n": nested}), keep=("n",)))
    assert [row.fields["n"]["names"] for row in rows] == [["ok"], ["Y2Fm6Q=="], ["ok"]]


def test_a_text_over_the_limit_costs_one_row(tmp_path: Path) -> None:
    file = written(tmp_path / "t.parquet", {"text": ["x" * 100, "y"]})
    rows = list(read_rows(file, max_document_bytes=50))
    assert rows[0].error is not None
    assert "--max-document-bytes" in rows[0].error.message
    assert rows[1].text == "y"


@pytest.mark.parametrize("groups", [0, 1])
def test_no_rows_at_all(tmp_path: Path, groups: int) -> None:
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "t.parquet", schema) as writer:
        for _ in range(groups):
            writer.write_table(schema.empty_table())
    (file,) = resolve_inputs([str(tmp_path / "t.parquet")]).files
    check_inputs([file], "text", None, ())
    assert list(read_rows(file)) == []


def test_reading_starts_again_anywhere(tmp_path: Path) -> None:
    file = written(tmp_path / "t.parquet", {"text": [f"row {n}" for n in range(100)]}, row_group_size=7)
    rows = list(read_rows(file))
    for n in (0, 1, 6, 7, 50, 99):
        assert list(read_rows(file, start=rows[n].place)) == rows[n:]
    assert list(read_rows(file, start=Place(100))) == []


def test_damaged_files(tmp_path: Path) -> None:
    file = written(tmp_path / "t.parquet", {"text": [random.Random(n).randbytes(300).hex() for n in range(500)]})
    whole = (tmp_path / "t.parquet").read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"text\n" * 100):
        (tmp_path / "t.parquet").write_bytes(data)
        (row,) = read_rows(file)
        assert row.error is not None
        assert row.error.type == DAMAGED_FILE
        with pytest.raises(UserError, match="not a whole Parquet file"):
            check_inputs([file], "text", None, ())
    middle = len(whole) // 2
    (tmp_path / "t.parquet").write_bytes(whole[:50] + bytes(middle - 50) + whole[middle:])
    last = list(read_rows(file))[-1]
    assert last.error is not None
    assert last.error.type == DAMAGED_FILE


def test_urls(tmp_path: Path) -> None:
    written(tmp_path / "t.parquet", {"text": ["x"]})
    fsspec.filesystem("memory").pipe("/tables/t.parquet", (tmp_path / "t.parquet").read_bytes())
    (file,) = resolve_inputs(["memory://tables"]).files
    assert [row.text for row in read_rows(file)] == ["x"]


def test_memory_stays_flat_in_one_large_row_group(tmp_path: Path) -> None:
    words = random.Random(0).randbytes(1 << 20).hex()
    table = pa.table({"text": [words[n : n + 200_000] for n in range(300)], "unused": [words[:200_000]] * 300})
    # Writers look at a page's size only after so many rows; a page is the least that can be read.
    file = written(tmp_path / "t.parquet", table, compression="none", use_dictionary=False, write_batch_size=1)
    assert pq.ParquetFile(file.path).num_row_groups == 1
    del table
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    arrow = 0
    for row in read_rows(file):
        assert row.text is not None
        arrow = max(arrow, pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.size > 60_000_000
    assert peak < 8_000_000
    assert arrow < 25_000_000
