"""What earlier attempts left in a job folder: taken up, tidied, or thrown away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs import journal, local, parts
from jobs.errors import CorruptJobError, JobError, storage_errors
from jobs.finalize import SUCCESS, Success, clean, read_success
from jobs.journal import Journal
from jobs.parts import Header, Parts
from jobs.plan import Row
from jobs.record import NAME, JobRecord, job_folder, output_path
from jobs.store import LocalStore


@dataclass(frozen=True, slots=True)
class Recovered:
    """What is committed: `first_open` is the first unit that is not, `resume_after` the row before it."""

    committed: frozenset[int] = frozenset()
    first_open: int = 0
    resume_after: Row | None = None
    ahead: Mapping[int, Header] = field(default_factory=dict)  # committed units behind the first open one
    counts: Mapping[str, int] = field(default_factory=dict)  # committed rows, by status


def check_output(output: str | Path) -> None:
    """Raises JobError when no job can write this output; `Job.open` checks again. Takes no lock, changes nothing."""
    folder = job_folder(output)
    path = output_path(folder)
    with storage_errors(path):
        refuse_foreign(path, LocalStore(folder))


def refuse_foreign(output: Path, store: LocalStore) -> None:
    """Raises JobError when the output is something that no job of ours has written."""
    if output.is_dir():
        raise JobError(f"{output} is a folder; the output must be a file")
    if output.exists() and not store.exists(NAME):
        raise JobError(f"{output} exists, and no job of it does; remove it, or choose another output")


def forget(store: LocalStore, record: JobRecord) -> None:
    """Begin anew. Killed half-way, it leaves the old job with fewer results, which is a valid one."""
    for name in (SUCCESS, journal.FOLDER, parts.FOLDER):
        store.remove(name)
    store.replace(NAME, record.to_bytes())


def recover(store: LocalStore, output: Path, record: JobRecord) -> Recovered | Success:
    """Tidy up after killed runs; then what a finished job left, or what there is to go on from.

    Raises CorruptJobError when a part is damaged or of another job, or a finished job's output is gone.
    """
    for folder in ("", parts.FOLDER):
        store.sweep(folder)
    local.sweep(output.parent, output.name)
    if (success := read_success(store)) is not None:
        if not output.exists():
            raise CorruptJobError(
                f"the job finished on {success.finished} but {output} is gone; --restart does it anew"
            )
        clean(store, success)
        return success
    found = _committed(Parts(store, record.id))
    kept = Journal(store)
    for unit in kept.units():
        if unit in found.committed:
            kept.forget(unit)
        else:
            kept.sweep(unit)
    return found


def _committed(committed: Parts) -> Recovered:
    generations = committed.committed()
    first, last = 0, None
    ahead: dict[int, Header] = {}
    counts: Counter[str] = Counter()
    for unit in sorted(generations):
        header = committed.header(unit, generations[unit])
        counts.update(header.counts)
        if unit == first:
            first, last = unit + 1, header.last
        else:
            ahead[unit] = header
    return Recovered(frozenset(generations), first, last, ahead, counts)
