"""Parts: the committed results of a unit, one envelope per row in input order, never changed once they exist."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.encoding import decode, encode
from jobs.errors import CorruptJobError
from jobs.plan import Row, RowKey, Unit
from jobs.store import Store

FOLDER = "parts"
STATUSES = ("ok", "skipped", "error")
_NAME = re.compile(r"(\d+)\.g(\d+)\.jsonl")
_HEADER_LIMIT = 4096  # bytes; a header is some 300


class MissingPartError(CorruptJobError):
    """A part that was committed is not there any more."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A row's result: its key, "ok" | "skipped" | "error", and the caller's JSON-able record."""

    key: RowKey
    status: str
    record: dict[str, Any]

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}, not one of {STATUSES}")

    def to_line(self) -> bytes:
        return encode({"input": self.key.input, "row": self.key.ordinal, "status": self.status, "record": self.record})

    @classmethod
    def from_line(cls, line: bytes) -> Envelope:
        """Raises ValueError, KeyError or TypeError when the line is no envelope."""
        fields = decode(line)
        return cls(RowKey(fields["input"], fields["row"]), fields["status"], fields["record"])


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a part: whose it is, which rows it has, and the digest of the lines below."""

    job: str
    unit: int
    first: Row
    last: Row
    counts: dict[str, int]  # rows by status
    digest: str

    @property
    def rows(self) -> int:
        return sum(self.counts.values())

    def to_line(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return encode({**fields, "first": _row_fields(self.first), "last": _row_fields(self.last)})

    @classmethod
    def from_line(cls, line: bytes) -> Header:
        fields = decode(line)
        return cls(**{**fields, "first": _row(*fields["first"]), "last": _row(*fields["last"])})


class Parts:
    """The parts of one job. Where a unit has several generations, the highest counts."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._job = job

    def committed(self) -> dict[int, int]:
        """Unit index -> its highest generation, for every unit that has a part."""
        units: dict[int, int] = {}
        for name in self._store.list(FOLDER):
            if match := _NAME.fullmatch(name):
                unit, generation = int(match[1]), int(match[2])
                units[unit] = max(generation, units.get(unit, 0))
        return units

    def commit(self, unit: Unit, envelopes: Sequence[Envelope], generation: int = 0) -> bool:
        """Make the unit's results durable. False when the part exists already: then that one stays, unchanged."""
        if [envelope.key for envelope in envelopes] != [row.key for row in unit.rows]:
            raise ValueError(f"unit {unit.index}: the envelopes are not those of its rows, in order")
        body = b"".join(envelope.to_line() + b"\n" for envelope in envelopes)
        counts = dict(Counter(envelope.status for envelope in envelopes))
        header = Header(self._job, unit.index, unit.rows[0], unit.rows[-1], counts, _digest(body))
        return self._store.put_new(_name(unit.index, generation), header.to_line() + b"\n" + body)

    def exists(self, unit: int, generation: int = 0) -> bool:
        return self._store.exists(_name(unit, generation))

    def header(self, unit: int, generation: int = 0) -> Header:
        """Raises CorruptJobError, MissingPartError among them."""
        name = _name(unit, generation)
        return self._parse(name, self._read(name, _HEADER_LIMIT).split(b"\n", 1)[0])

    def read(self, unit: int, generation: int = 0) -> Iterator[Envelope]:
        """The envelopes, after the whole part was checked against its header.

        Raises CorruptJobError (MissingPartError) before the first envelope.
        """
        name = _name(unit, generation)
        first, _, body = self._read(name).partition(b"\n")
        header = self._parse(name, first)
        if _digest(body) != header.digest:
            raise _corrupt(name, "its rows do not match its digest")
        for line in body.split(b"\n")[:-1]:
            yield Envelope.from_line(line)

    def _read(self, name: str, stop: int | None = None) -> bytes:
        data = self._store.read(name, stop)
        if data is None:
            raise MissingPartError(f"{name} is missing; --restart begins anew")
        return data

    def _parse(self, name: str, line: bytes) -> Header:
        try:
            header = Header.from_line(line)
        except (ValueError, KeyError, TypeError) as error:
            raise _corrupt(name, "it has no readable header") from error
        if header.job != self._job:
            raise _corrupt(name, f"it belongs to another job ({header.job})")
        return header


def _corrupt(name: str, reason: str) -> CorruptJobError:
    return CorruptJobError(f"{name} is damaged: {reason}; remove that file to have its rows done again, or --restart")


def _name(unit: int, generation: int) -> str:
    return f"{FOLDER}/{unit:06d}.g{generation}.jsonl"


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _row_fields(row: Row) -> list[int]:
    return [row.key.input, row.key.ordinal, row.size, row.offset]


def _row(source: int, ordinal: int, size: int, offset: int) -> Row:
    return Row(RowKey(source, ordinal), size, offset)
