"""What reading an input yields: one row per line, table row or text file, good or bad."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.inputs import InputFile

BAD_LINE = "BadLine"
BAD_TEXT = "BadText"
DAMAGED_FILE = "DamagedFile"
UNREADABLE_FILE = "UnreadableFile"


class DocumentError(Exception):
    """One document cannot be read; the others can. `type` is one of the four names above."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


@dataclass(frozen=True)
class RowError:
    type: str
    message: str


@dataclass(frozen=True)
class Place:
    """Where a row begins, so that reading can start there again.

    `offset` counts bytes of the uncompressed data and `line` lines from 1; both stay at their defaults for Parquet
    and text files. A place that has only an ordinal is found by counting.
    """

    ordinal: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Row:
    """One input row. Exactly one of `text`, `skip_reason`, `error` and `is_file` says what can be done with it.

    `id` is echoed as it was found and never used as a key: rows are keyed by (`input`, `ordinal`).
    `size` is an estimate in bytes, for planning only.
    """

    file: InputFile
    place: Place
    id: str | int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    text: str | None = None
    skip_reason: str | None = None
    error: RowError | None = None
    pieces: Callable[[int, int], Iterator[str]] | None = None

    @property
    def input(self) -> int:
        return self.file.index

    @property
    def ordinal(self) -> int:
        return self.place.ordinal

    @property
    def source(self) -> str:
        return self.file.path

    @property
    def is_file(self) -> bool:
        """True for a whole text file, which is read in pieces and whose offsets are bytes."""
        return self.pieces is not None

    def read(self, start: int = 0, buffer_size: int = 1 << 20) -> Iterator[str]:
        """Yield the text from `start` on, in pieces of bounded size.

        `start` is in code points for a row's text and in uncompressed bytes for a text file. Bytes of a text file
        that are no UTF-8 come as lone surrogates (PEP 383), one a byte, so that offsets stay exact;
        `pipeline.text.printable` shows them. Raises DocumentError for a file that cannot be read.
        """
        if self.pieces is not None:
            yield from self.pieces(start, buffer_size)
        elif self.text is not None:
            yield self.text[start:] if start else self.text
        else:
            raise ValueError(f"row {self.ordinal} of {self.source} has no text")
