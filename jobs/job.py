"""A job: rows in, in order; results in, in any order; one output file, exactly once, whatever is killed when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jobs import local
from jobs.encoding import encode
from jobs.errors import CorruptJobError, storage_errors
from jobs.finalize import SUCCESS, Merge, Success, Write
from jobs.journal import Journal
from jobs.lock import RunLock
from jobs.parts import Envelope, Parts
from jobs.plan import Planner, Row, RowKey, Unit, UnitLimits
from jobs.progress import OpenUnit, Progress
from jobs.record import JobRecord, agree, job_folder, output_path
from jobs.recovery import Recovered, forget, recover, refuse_foreign
from jobs.store import LocalStore


class Job:
    """One run of the job of an output file, holding the job's lock. Not thread-safe.

    Call `admit` for every row read, in input order; `save_row` for every admitted row when it is finished, in any
    order; then `end_of_input` and `finalize`. Whatever writes raises TemporaryError when storage fails: nothing
    committed is lost, and the same calls in a new process go on from there.
    """

    def __init__(
        self, store: LocalStore, output: Path, lock: RunLock, record: JobRecord, found: Recovered | Success
    ) -> None:
        """Use `open`, which takes the lock and recovers what earlier attempts have done."""
        earlier = found if isinstance(found, Recovered) else Recovered()
        self.record = record
        self.resume_after = earlier.resume_after
        self._store = store
        self._output = output
        self._lock = lock
        self._parts = Parts(store, record.id)
        self._journal = Journal(store)
        self._success = found if isinstance(found, Success) else None
        self._planner = Planner(record.limits, earlier.first_open)
        self._committed = set(earlier.committed)
        self._ahead = dict(earlier.ahead)
        self._counts = Counter(earlier.counts)  # rows of committed units, by status
        self._open: dict[int, OpenUnit] = {}
        self._unit: dict[RowKey, int] = {}  # of every row admitted and not finished
        self._last: RowKey | None = None
        self._ended = False

    @classmethod
    def open(
        cls,
        output: str | Path,
        *,
        config: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        restart: bool = False,
        limits: UnitLimits = UnitLimits(),  # noqa: B008 (frozen)
    ) -> Job:
        """Begin the job of `output`, resume it, or find it `finished`.

        `config` is recorded; `fingerprint`, all that the results depend on, must be what it was. `restart` throws the
        job's results away; its output stays until the new one is complete.

        Raises LockedError at once when another process runs the job, FingerprintError with the difference, and
        JobError when `output` is not the job's to write.
        """
        folder = job_folder(output)
        path = output_path(folder)
        store = LocalStore(folder)
        with storage_errors(path):
            refuse_foreign(path, store)
            local.make_folder(folder)
        lock = RunLock(folder)
        lock.acquire()
        try:
            wanted = JobRecord.new(config, fingerprint, limits)
            if restart:
                forget(store, wanted)
            record = agree(store, wanted)
            return cls(store, path, lock, record, recover(store, path, record))
        except BaseException:
            lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another run have the job. Nothing needs saving: whatever was promised is on disk."""
        self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether the output is complete; then `summary` is all there is left to report."""
        return self._success is not None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of the attempt that finished the job, with its "exit_code"; None before that."""
        return None if self._success is None else self._success.summary

    @property
    def progress(self) -> Progress:
        """Saved rows of an earlier attempt count from when they are admitted again."""
        counts = sum((unit.counts for unit in self._open.values()), self._counts.copy())
        return Progress.of(counts, len(self._committed))

    def admit(self, row: Row) -> bool:
        """Plan the next row of the input. True when it has to be worked on, False when it is finished already."""
        if self._ended or (self._last is not None and row.key <= self._last):
            raise ValueError(f"row {row.key} comes after row {self._last}" + " and the end" * self._ended)
        self._last = row.key
        if self.resume_after is not None and row.key <= self.resume_after.key:
            return False
        index, complete = self._planner.add(row)
        needed = index not in self._ahead and self._await(index, row.key)
        for unit in complete:
            self._complete(unit)
        return needed

    def save_row(self, envelope: Envelope, durable: bool = True) -> None:
        """Keep the result of an admitted row: on disk on return, and in a part once its unit has no row left.

        With `durable=False` it waits in memory for that part: for results that cost nothing to have again.
        """
        index = self._unit_of(envelope.key)
        unit = self._open[index]
        last = unit.complete is not None and unit.waiting == {envelope.key}
        if durable and not last:
            self._journal.save_row(index, envelope)
        else:
            unit.held[envelope.key] = envelope
        unit.waiting.remove(envelope.key)
        unit.counts[envelope.status] += 1
        del self._unit[envelope.key]
        if last:
            self._commit(index)

    def end_of_input(self) -> None:
        """There are no more rows; the last unit is complete."""
        self._ended = True
        if (unit := self._planner.close()) is not None:
            self._complete(unit)
        if surplus := sorted(index for index in self._committed if index >= self._planner.next_unit):
            raise CorruptJobError(f"the input ended before unit {surplus[0]}, which is committed; did it shrink?")

    def finalize(self, write: Write, summary: Mapping[str, Any], keep_parts: bool = False) -> None:
        """Merge all rows into the output and declare the job finished with `summary`, which holds its "exit_code".

        `write(path, envelopes) -> rows` writes the whole file to a temporary path beside the output that ends in the
        output's name. Killed at any moment, the same calls in a new process complete it (`write` may run again).
        """
        if not self._ended or self._open:
            raise ValueError("rows are unfinished" if self._ended else "the end of the input was not reported")
        if not isinstance(summary.get("exit_code"), int):
            raise ValueError('the summary has no "exit_code"')
        merge = Merge(self._store, self._parts, self._output, self._planner.next_unit, self._counts.total())
        self._success = merge.run(write, summary, keep_parts)

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Keep the report of this attempt as runs/<time in UTC>.json."""
        data = encode(dict(report))
        while not self._store.put_new(f"runs/{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.json", data):
            pass  # another attempt's, of the same microsecond

    def save_state(self, key: RowKey, name: str, data: bytes) -> None:
        """Keep `data` for an unfinished row, durably, in place of what `name` held; it goes when the row is saved."""
        self._journal.save_state(self._unit_of(key), key, name, data)

    def load_state(self, key: RowKey, name: str) -> bytes | None:
        return self._journal.load_state(self._unit_of(key), key, name)

    def drop_state(self, key: RowKey, name: str) -> None:
        self._journal.drop_state(self._unit_of(key), key, name)

    def state_names(self, key: RowKey) -> list[str]:
        return self._journal.state_names(self._unit_of(key), key)

    def committed_units(self) -> frozenset[int]:
        return frozenset(self._committed)

    def saved_rows(self, unit: int) -> dict[RowKey, Envelope]:
        """The finished rows of a unit that is not committed."""
        held = self._open[unit].held if unit in self._open else {}
        return {**held, **self._journal.saved_rows(unit)}

    def commit_unit(self, unit: Unit, envelopes: Sequence[Envelope]) -> bool:
        """Commit all rows of a unit at once. False when it was committed before; then that result stays."""
        created = self._parts.commit(unit, envelopes)
        self._settle(unit, Counter(envelope.status for envelope in envelopes))
        return created

    def _await(self, index: int, key: RowKey) -> bool:
        if index not in self._open:
            self._open[index] = OpenUnit.of(self._journal.saved_rows(index).values())
        unit = self._open[index]
        if key in unit.finished:
            return False
        unit.waiting.add(key)
        self._unit[key] = index
        return True

    def _complete(self, unit: Unit) -> None:
        header = self._ahead.pop(unit.index, None)
        if header is None:
            self._open[unit.index].complete = unit
            if not self._open[unit.index].waiting:
                self._commit(unit.index)
        elif (header.first, header.last, header.rows) != (unit.rows[0], unit.rows[-1], len(unit.rows)):
            raise CorruptJobError(f"the input no longer has the rows that unit {unit.index} was committed with")

    def _commit(self, index: int) -> None:
        unit = self._open[index].complete
        assert unit is not None
        envelopes = self.saved_rows(index)
        missing = [row.key for row in unit.rows if row.key not in envelopes]
        if not missing:
            self.commit_unit(unit, [envelopes[row.key] for row in unit.rows])
        elif self._parts.exists(index) or self._store.exists(SUCCESS):
            # A run that ought to have been locked out was faster, and has tidied up: its results stand.
            self._settle(unit, self._open[index].counts)
        else:
            raise CorruptJobError(f"the saved row {missing[0]} has vanished from the job folder")

    def _settle(self, unit: Unit, counts: Counter[str]) -> None:
        if unit.index not in self._committed:
            self._committed.add(unit.index)
            self._counts.update(counts)
        self._open.pop(unit.index, None)
        for row in unit.rows:
            self._unit.pop(row.key, None)
        self._journal.forget(unit.index)

    def _unit_of(self, key: RowKey) -> int:
        if key not in self._unit:
            raise ValueError(f"row {key} is not admitted, or is finished")
        return self._unit[key]
