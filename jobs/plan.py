"""How rows are grouped into units, the grains of commitment, while the input is being read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RowKey(NamedTuple):
    """A row's identity: which input file, and its place in it, both from 0. Never the user's id, which may repeat."""

    input: int
    ordinal: int


class Row(NamedTuple):
    """What planning needs to know of a row: its key, its size in bytes, and the byte offset where it begins."""

    key: RowKey
    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class UnitLimits:
    """The most rows, and bytes of input, that share a unit. A larger row has a unit of its own."""

    rows: int = 256
    size: int = 64_000_000


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive rows, possibly of several files, which are committed together as one part."""

    index: int
    rows: tuple[Row, ...]


class Placement(NamedTuple):
    """Where a row went, and the units that are complete now that it has come (it may complete its own)."""

    unit: int
    complete: tuple[Unit, ...]


class Planner:
    """Puts each row into a unit the moment it is read, so that work starts long before the input has been seen.

    The units depend on the order and sizes of the rows and on nothing else; every unit begins afresh, so planning may
    start at the first row of any unit and comes to the same result.
    """

    def __init__(self, limits: UnitLimits, first_unit: int = 0) -> None:
        self._limits = limits
        self._rows: list[Row] = []
        self._size = 0
        self.next_unit = first_unit

    def add(self, row: Row) -> Placement:
        complete = []
        if self._rows and self._size + row.size > self._limits.size:
            complete.append(self._complete())
        self._rows.append(row)
        self._size += row.size
        unit = self.next_unit
        if len(self._rows) >= self._limits.rows or self._size >= self._limits.size:
            complete.append(self._complete())
        return Placement(unit, tuple(complete))

    def close(self) -> Unit | None:
        """The last unit, which the end of the input completes; None when there are no rows in it."""
        return self._complete() if self._rows else None

    def _complete(self) -> Unit:
        unit = Unit(self.next_unit, tuple(self._rows))
        self.next_unit += 1
        self._rows, self._size = [], 0
        return unit
