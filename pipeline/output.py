"""Writing records: JSONL, plain or compressed, and Parquet; the name of the output says which."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, cast

import fsspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import UserError
from pipeline.text import printable

FORMATS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".parquet": "parquet",
}
_CODECS = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}
_BATCH_ROWS = 1024
_BATCH_BYTES = 8 << 20

# What every task's record has, before and after the task's own columns.
_FIRST = (
    pa.field("id", pa.string()),
    pa.field("source", pa.string()),
    pa.field("row", pa.int64()),
    pa.field("status", pa.string()),
    pa.field("reason", pa.string()),
)
_LAST = (
    pa.field("fields", pa.string()),  # JSON: rows of one job may keep values of different types under one name
    pa.field("usage", pa.struct([(name, pa.int64()) for name in ("input_tokens", "output_tokens", "segments")])),
    pa.field("model", pa.string()),
    pa.field("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
    pa.field("schema_version", pa.int64()),
)
SUMMARY_COLUMNS = (
    pa.field("summary", pa.string()),
    pa.field("notes", pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64()), ("text", pa.string())]))),
)
_AS_TEXT = ("id",)
_AS_JSON = ("fields",)


def output_format(path: str) -> str:
    """Return the format that the name of the output stands for. Raises UserError for other endings."""
    name = path.lower()
    for ending, kind in FORMATS.items():
        if name.endswith(ending):
            return kind
    raise UserError(f"{path}: the output's name must end in {', '.join(FORMATS)}")


def record_schema(task_columns: Sequence[pa.Field] = SUMMARY_COLUMNS) -> pa.Schema:
    """Return the one schema of a task's Parquet output. `id` is a string there and `fields` a JSON string."""
    return pa.schema([*_FIRST, *task_columns, *_LAST])


def record_line(record: dict[str, Any]) -> bytes:
    """Return the record as one line of JSON, keys in their order, those that are None left out.

    Integers of any size are kept, NaN and infinities become null, lone surrogates are written as `printable` does.
    """
    present = {key: value for key, value in record.items() if value is not None}
    return _json(present) + b"\n"


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson's limits: lone surrogates, integers over 64 bits
        return json.dumps(_clean(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {printable(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(inner) for inner in value]
    return value


def write_records(
    target: str | BinaryIO, records: Iterable[dict[str, Any]], format: str, schema: pa.Schema | None = None
) -> int:
    """Write the records to a path, a URL or an open file, and return how many there were.

    Streams: memory does not grow with the number of records. The same records give the same bytes. `schema` is for
    Parquet and defaults to `record_schema()`. A path is written in place: writing elsewhere and renaming is the
    caller's part. Raises ValueError for a key that the schema lacks.
    """
    with ExitStack() as stack:
        sink = stack.enter_context(_opened(target)) if isinstance(target, str) else target
        if format == "parquet":
            return _write_parquet(sink, records, schema if schema is not None else record_schema())
        if format in _CODECS:
            sink = stack.enter_context(_compressed(sink, _CODECS[format]))
        elif format != "jsonl":
            raise ValueError(f"unknown format {format!r}")
        count = 0
        for record in records:
            sink.write(record_line(record))
            count += 1
    return count


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if "://" in path:
        with fsspec.open(path, "wb") as file:
            yield file
    else:
        with open(path, "wb") as file:  # noqa: PTH123 - the user's own string
            yield file


@contextmanager
def _compressed(sink: BinaryIO, codec: str) -> Iterator[BinaryIO]:
    # Arrow closes what it writes to; the caller's file must stay open, and be synced, by the caller.
    stream = pa.CompressedOutputStream(pa.PythonFile(_Unclosed(sink), mode="w"), codec)
    yield cast(BinaryIO, stream)
    stream.close()


class _Unclosed:
    closed = False

    def __init__(self, sink: BinaryIO) -> None:
        self.write = sink.write
        self.flush = sink.flush

    def close(self) -> None:
        self.flush()


def _write_parquet(sink: BinaryIO, records: Iterable[dict[str, Any]], schema: pa.Schema) -> int:
    count = 0
    with pq.ParquetWriter(pa.PythonFile(_Unclosed(sink), mode="w"), schema, compression="zstd") as writer:
        for batch in _batches(records):
            rows = [_table_row(record, schema) for record in batch]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
            count += len(batch)
    return count


def _batches(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record_line(record))
        if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _table_row(record: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    unknown = [key for key in record if schema.get_field_index(key) < 0]
    if unknown:
        raise ValueError(f"the schema has no column {', '.join(unknown)}")
    row = {key: _clean(value) for key, value in record.items()}
    for key in _AS_TEXT:
        if row.get(key) is not None:
            row[key] = str(row[key])
    for key in _AS_JSON:
        if row.get(key) is not None:
            row[key] = _json(row[key]).decode("utf-8")
    return row
