"""From parts to the output: merged, verified, put in place, declared finished, cleaned up. In that order.

Killed after any step, the same steps run again: until _SUCCESS exists the parts do, and merging them again gives the
same output; once it exists only cleaning is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs import journal, local, parts
from jobs.encoding import decode, encode
from jobs.errors import CorruptJobError, TemporaryError, storage_errors
from jobs.parts import Envelope, MissingPartError, Parts
from jobs.plan import RowKey
from jobs.store import Store

SUCCESS = "_SUCCESS"

Write = Callable[[str, Iterator[Envelope]], int]
"""Writes a whole output file to a path from the envelopes of all rows, in input order; returns the rows written."""


@dataclass(frozen=True, slots=True)
class Success:
    """What _SUCCESS holds: when the job finished (UTC, ISO 8601), its rows, the caller's summary, and what was kept."""

    finished: str
    rows: int
    summary: dict[str, Any]
    keep_parts: bool


def read_success(store: Store) -> Success | None:
    """None while the job is not finished. Raises CorruptJobError."""
    data = store.read(SUCCESS)
    if data is None:
        return None
    try:
        return Success(**decode(data))
    except (ValueError, TypeError) as error:
        raise CorruptJobError(f"{SUCCESS} of the job cannot be read; --restart begins anew") from error


@dataclass(frozen=True, slots=True)
class Merge:
    """All that is to be merged: every unit below `units`, which together have `rows` rows."""

    store: Store
    parts: Parts
    output: Path
    units: int
    rows: int

    def run(self, write: Write, summary: Mapping[str, Any], keep_parts: bool) -> Success:
        """Raises CorruptJobError when rows are missing, and what `write` raises (its OSErrors as job errors)."""
        success = read_success(self.store) or self._finish(write, summary, keep_parts)
        clean(self.store, success)
        return success

    def _finish(self, write: Write, summary: Mapping[str, Any], keep_parts: bool) -> Success:
        try:
            temporary = self._write(write)
        except MissingPartError as error:
            return self._finished_elsewhere(str(error))
        try:
            local.publish(temporary, self.output)
        finally:
            temporary.unlink(missing_ok=True)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        success = Success(finished, self.rows, dict(summary), keep_parts)
        fields = {name: getattr(success, name) for name in Success.__slots__}
        if self.store.put_new(SUCCESS, encode(fields)):
            return success
        return self._finished_elsewhere(f"{SUCCESS} vanished")

    def _write(self, write: Write) -> Path:
        temporary = local.temporary_name(self.output)
        try:
            with storage_errors(self.output):
                written = write(str(temporary), self._envelopes())
                if written != self.rows:
                    raise CorruptJobError(f"{self.output}: {written} of {self.rows} rows were written")
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _envelopes(self) -> Iterator[Envelope]:
        generations = self.parts.committed()
        last, rows = RowKey(-1, -1), 0
        for unit in range(self.units):
            for envelope in self.parts.read(unit, generations.get(unit, 0)):
                if envelope.key <= last:
                    raise CorruptJobError(f"row {envelope.key} comes after row {last} in the parts")
                last, rows = envelope.key, rows + 1
                yield envelope
        if rows != self.rows:
            raise CorruptJobError(f"the parts hold {rows} rows, not the {self.rows} that were read")

    def _finished_elsewhere(self, otherwise: str) -> Success:
        """A run that ought to have been locked out may have finished the job and taken the parts away."""
        success = read_success(self.store)
        if success is None:
            raise TemporaryError(f"{otherwise}; run the same command again to have it done anew")
        return success


def clean(store: Store, success: Success) -> None:
    """Remove what a finished job no longer needs."""
    store.remove(journal.FOLDER)
    if not success.keep_parts:
        store.remove(parts.FOLDER)
