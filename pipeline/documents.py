"""Reading inputs as rows, and a row as the document that a task works on."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserError
from pipeline.inputs import InputFile
from pipeline.jsonl import jsonl_rows
from pipeline.parquet import check_parquet, parquet_rows
from pipeline.rows import Place, Row
from pipeline.segments import Segment, segment_document
from pipeline.text import text_rows

MAX_DOCUMENT_BYTES = 256 << 20
BUFFER_SIZE = 1 << 20
_START = Place()
_CHECKS_AT_ONCE = 16  # footers on object storage: waiting, not work


def read_rows(
    file: InputFile,
    text_field: str = "text",
    id_field: str | None = None,
    keep: Sequence[str] = (),
    *,
    start: Place = _START,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    buffer_size: int = BUFFER_SIZE,
) -> Iterator[Row]:
    """Yield the rows of one input file from `start` on, reading no further than it must.

    `text_field`, `id_field` and `keep` name columns, or dotted paths into nested ones. What is wrong with one row is
    that row's `error`; a damaged file ends with an error row. Raises UserError for a Parquet column that is missing
    or holds no text; OSError passes through when storage fails.
    """
    if file.format == "text":
        if start.ordinal == 0:
            yield from text_rows(file)
    elif file.format == "parquet":
        yield from parquet_rows(file, text_field, id_field, keep, start, max_document_bytes)
    else:
        yield from jsonl_rows(file, text_field, id_field, keep, start, max_document_bytes, buffer_size)


def check_inputs(files: Sequence[InputFile], text_field: str, id_field: str | None, keep: Sequence[str]) -> None:
    """Refuse what can be known to fail before any row is read: missing Parquet columns, fields of text files.

    Raises UserError.
    """
    fields = [option for option, given in (("--id-field", id_field), ("--keep", keep)) if given]
    if fields and files and all(file.format == "text" for file in files):
        raise UserError(f"{files[0].path}: a text file has no fields, so {' and '.join(fields)} cannot be used")

    def check(file: InputFile) -> None:
        check_parquet(file, text_field, id_field, keep)

    tables = [file for file in files if file.format == "parquet"]
    with ThreadPoolExecutor(_CHECKS_AT_ONCE) as pool:
        for _ in pool.map(check, tables):
            pass


@dataclass(frozen=True)
class Document:
    """A row that has text, with the tokenizer that its segments are measured with.

    `encode` gets strings without lone surrogates and must match no added tokens: text is data.
    """

    row_: Row
    encode: Callable[[str], list[int]]

    @property
    def id(self) -> str | int | None:
        return self.row_.id

    @property
    def source(self) -> str:
        return self.row_.source

    @property
    def row(self) -> int:
        return self.row_.ordinal

    @property
    def fields(self) -> dict[str, Any]:
        return self.row_.fields

    @property
    def unit(self) -> str:
        """What offsets count: "code points" of a row's text, uncompressed "bytes" of a text file."""
        return "bytes" if self.row_.is_file else "code points"

    def read(self) -> Iterator[str]:
        return self.row_.read()

    def segments(self, segment_tokens: int, start: int = 0) -> Iterator[Segment]:
        """Yield the segments from the offset `start`, an earlier segment's end, on; those of white space are left out.

        Raises DocumentError when a text file turns out to be damaged.
        """
        pieces = self.row_.read(start)
        for segment in segment_document(pieces, self.encode, segment_tokens, start=start, unit=self.unit):
            if not segment.text.isspace() and segment.text:
                yield segment
