"""What is kept of units that are still open: finished rows, and whatever a half-done row needs to go on."""

from __future__ import annotations

import re

from jobs.errors import CorruptJobError
from jobs.parts import Envelope
from jobs.plan import RowKey
from jobs.store import Store

FOLDER = "state"
_ROW = "row"  # the suffix of a finished row's file; a state may not have this name
_FILE = re.compile(r"(\d+)-(\d+)\.(.+)")
_STATE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Journal:
    """state/<unit>/<input>-<ordinal>.row for finished rows, and .<name> for the named states of unfinished ones.

    A finished row is created once, like a part; a state is a blob of the caller's that is replaced as a whole.
    Everything of a unit lies in one folder, which goes when its part has been committed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def units(self) -> list[int]:
        """The units that have anything kept here."""
        return [int(name) for name in self._store.list(FOLDER) if name.isdecimal()]

    def save_row(self, unit: int, envelope: Envelope) -> None:
        """Keep a finished row, durable on return, and drop its states. If another run finished it first, that stays."""
        self._store.put_new(_path(unit, envelope.key, _ROW), envelope.to_line() + b"\n")
        for name in self.state_names(unit, envelope.key):
            self.drop_state(unit, envelope.key, name)

    def saved_rows(self, unit: int) -> dict[RowKey, Envelope]:
        """The finished rows of an open unit. Raises CorruptJobError, naming the file."""
        rows = {}
        for key, suffix in self._files(unit):
            if suffix != _ROW:
                continue
            name = _path(unit, key, _ROW)
            data = self._store.read(name)
            if data is None:
                continue  # its unit was committed by another run just now
            try:
                rows[key] = Envelope.from_line(data)
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptJobError(f"{name} is damaged; remove that file to have its row done again") from error
        return rows

    def save_state(self, unit: int, key: RowKey, name: str, data: bytes) -> None:
        """Keep `data` under the row and `name` ([a-z0-9._-], not "row"), in place of what was kept there."""
        if not _STATE_NAME.fullmatch(name) or name == _ROW:
            raise ValueError(f"{name!r} is no name for a state")
        self._store.replace(_path(unit, key, name), data)

    def load_state(self, unit: int, key: RowKey, name: str) -> bytes | None:
        return self._store.read(_path(unit, key, name))

    def drop_state(self, unit: int, key: RowKey, name: str) -> None:
        self._store.remove(_path(unit, key, name))

    def state_names(self, unit: int, key: RowKey) -> list[str]:
        return [suffix for found, suffix in self._files(unit) if found == key and suffix != _ROW]

    def forget(self, unit: int) -> None:
        """Drop everything of a unit whose part is committed."""
        self._store.remove(f"{FOLDER}/{unit:06d}")

    def sweep(self, unit: int) -> None:
        """Remove what killed runs left half written."""
        self._store.sweep(f"{FOLDER}/{unit:06d}")

    def _files(self, unit: int) -> list[tuple[RowKey, str]]:
        names = self._store.list(f"{FOLDER}/{unit:06d}")
        matches = [match for name in names if (match := _FILE.fullmatch(name))]
        return [(RowKey(int(match[1]), int(match[2])), match[3]) for match in matches]


def _path(unit: int, key: RowKey, suffix: str) -> str:
    return f"{FOLDER}/{unit:06d}/{key.input:04d}-{key.ordinal:09d}.{suffix}"
