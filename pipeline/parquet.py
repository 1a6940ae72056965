"""Parquet: the schema is checked first, then small batches of only the columns that are needed."""

import base64
import datetime
import decimal
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.compression import open_raw
from pipeline.errors import UserError
from pipeline.inputs import InputFile
from pipeline.jsonl import nearest, row_id
from pipeline.rows import BAD_TEXT, DAMAGED_FILE, UNREADABLE_FILE, DocumentError, Place, Row, RowError

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1024
_BUFFER = 1 << 20


def parquet_rows(
    file: InputFile, text_field: str, id_field: str | None, keep: Sequence[str], start: Place, max_document_bytes: int
) -> Iterator[Row]:
    """Yield a row for every table row from `start.ordinal` on; row groups before it are not read.

    Raises UserError when a column is missing or the text column holds no text. A file that is damaged ends with an
    error row.
    """
    ordinal = start.ordinal
    try:
        with _open(file) as table:
            columns = _columns(file, table.schema_arrow, text_field, id_field, keep)
            for ordinal, values in _values(file, table, columns, start.ordinal):
                text, identity, kept = values[0], (values[1] if id_field else None), values[len(columns) - len(keep) :]
                fields = {name: _json_value(value) for name, value in zip(keep, kept, strict=True)}
                yield _row(file, Place(ordinal), text, row_id(_json_value(identity)), fields, max_document_bytes)
                ordinal += 1
    except DocumentError as error:
        yield Row(file, Place(ordinal), error=RowError(error.type, str(error)))


def check_parquet(file: InputFile, text_field: str, id_field: str | None, keep: Sequence[str]) -> None:
    """Raise UserError unless the file's footer can be read and the columns are there."""
    try:
        with _open(file) as table:
            _columns(file, table.schema_arrow, text_field, id_field, keep)
    except DocumentError as error:
        raise UserError(str(error)) from error


def _open(file: InputFile) -> pq.ParquetFile:
    try:
        # Without pre-buffering and with a bounded buffer a row group's text is read page by page.
        return pq.ParquetFile(open_raw(file.path), pre_buffer=False, buffer_size=_BUFFER)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DocumentError(UNREADABLE_FILE, f"{file.path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise DocumentError(DAMAGED_FILE, f"{file.path}: not a whole Parquet file: {error}") from error


def _columns(
    file: InputFile, schema: pa.Schema, text_field: str, id_field: str | None, keep: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the paths of the text, id and kept columns, in this order."""
    existing = _paths(schema)
    names = [text_field, *([id_field] if id_field else []), *keep]
    for name in names:
        if name not in existing:
            raise UserError(f"{file.path}: no column {name!r}; {nearest(name, list(existing))}")
    kind = existing[text_field][1]
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text_types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary)
    if not any(check(kind) for check in (*text_types, pa.types.is_large_binary, pa.types.is_null)):
        hint = "; join its parts into one string first" if pa.types.is_list(kind) else ""
        raise UserError(f"{file.path}: column {text_field!r} holds {kind}, not text{hint}")
    return [existing[name][0] for name in names]


def _paths(schema: pa.Schema) -> dict[str, tuple[tuple[str, ...], pa.DataType]]:
    """List the columns and, as dotted names, the fields of structs; a column's own name comes before a path."""
    listed: dict[str, tuple[tuple[str, ...], pa.DataType]] = {}

    def add(fields: Sequence[pa.Field], path: tuple[str, ...]) -> None:
        for inner in fields:
            listed.setdefault(".".join((*path, inner.name)), ((*path, inner.name), inner.type))
        for inner in fields:
            if pa.types.is_struct(inner.type):
                add([inner.type.field(i) for i in range(inner.type.num_fields)], (*path, inner.name))

    add(list(schema), ())
    return listed


def _values(
    file: InputFile, table: pq.ParquetFile, columns: Sequence[tuple[str, ...]], start: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yield (ordinal, values of `columns`) from row `start` on."""
    metadata = table.metadata
    projection = list(dict.fromkeys(".".join(path) for path in columns))
    first = 0
    for group in range(metadata.num_row_groups):
        info = metadata.row_group(group)
        ordinal, first = first, first + info.num_rows
        if first <= start:
            continue
        size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * info.num_rows // max(1, info.total_byte_size)))
        batches = table.iter_batches(batch_size=size, row_groups=[group], columns=projection, use_threads=False)
        while batch := _next(file, batches):
            if ordinal + len(batch) > start:
                taken = [_column(batch, path) for path in columns]
                for row in range(max(0, start - ordinal), len(batch)):
                    yield ordinal + row, [_scalar(column[row]) for column in taken]
            ordinal += len(batch)


def _next(file: InputFile, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # storage failed, not the data
        message = f"{file.path}: damaged Parquet data: {error}; what follows is lost"
        raise DocumentError(DAMAGED_FILE, message) from error


def _column(batch: pa.RecordBatch, path: tuple[str, ...]) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(path[0]))
    for name in path[1:]:
        column = pc.struct_field(column, name)
    kind = _in_microseconds(column.type)
    return column if kind == column.type else column.cast(kind, safe=False)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Replace times in nanoseconds, which Python's own types do not hold."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if pa.types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in fields])
    return kind


def _scalar(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:  # Arrow does not check that its strings are UTF-8
        if isinstance(value, pa.StructScalar):
            return {name: _scalar(inner) for name, inner in value.items()}
        if isinstance(value, pa.ListScalar):
            return [_scalar(inner) for inner in value]
        return bytes(value.as_buffer())


def _row(
    file: InputFile, place: Place, text: Any, identity: str | int | None, fields: dict[str, Any], max_bytes: int
) -> Row:
    where = f"{file.path}, row {place.ordinal}"
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"{where}: byte {error.start} of the text is not UTF-8"
            return Row(file, place, identity, fields, len(text), error=RowError(BAD_TEXT, message))
    if text is None:
        return Row(file, place, identity, fields, skip_reason="null text")
    if len(text) > max_bytes:
        message = f"{where}: {len(text)} characters, more than the {max_bytes} of --max-document-bytes"
        return Row(file, place, identity, fields, len(text), error=RowError(BAD_TEXT, message))
    if not text or text.isspace():
        return Row(file, place, identity, fields, len(text), skip_reason="empty text")
    return Row(file, place, identity, fields, len(text), text=text)


def _json_value(value: Any) -> Any:
    """Turn a value into one that JSON has: times as ISO 8601, decimals as strings, bytes as text or base64."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, dict):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    return str(value) if not isinstance(value, decimal.Decimal) else format(value, "f")
