"""The merge: verified before it is put in place, and right after a crash anywhere in the whole life of a job."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import CorruptJobError, Envelope, Job, Row, RowKey, TemporaryError, UnitLimits
from jobs.encoding import encode
from jobs.lock import RunLock

ROWS = [Row(RowKey(0, number), 10) for number in range(5)]  # units of 2, 2 and 1 rows
EXPECTED = b"".join(b'{"row":%d}\n' % number for number in range(5))


def write(path: str, envelopes: Iterator[Envelope]) -> int:
    count = 0
    with Path(path).open("wb", buffering=0) as out:
        for envelope in envelopes:
            out.write(encode(envelope.record) + b"\n")
            count += 1
    return count


def open_job(output: Path) -> Job:
    return Job.open(output, config={}, fingerprint={}, limits=UnitLimits(rows=2))


def prepare(job: Job, saved: set[RowKey]) -> None:
    for row in ROWS:
        if job.admit(row):
            assert row.key not in saved, "a row that was saved is asked for again"
            job.save_state(row.key, "snapshot", b"half")
            job.save_row(Envelope(row.key, "ok", {"row": row.key.ordinal}))
            saved.add(row.key)
    job.end_of_input()


def run(output: Path, saved: set[RowKey]) -> None:
    """Run the whole job; `saved` are the rows whose save_row has returned, in this attempt and earlier ones."""
    with open_job(output) as job:
        if not job.finished:
            prepare(job, saved)
            job.finalize(write, {"exit_code": 0})
        assert job.summary == {"exit_code": 0}


def leftovers(output: Path) -> set[str]:
    job = output.with_name(output.name + ".job")
    found = set(output.parent.rglob("*")) - {output, job}
    return {str(path.relative_to(output.parent)) for path in found} - {
        f"{job.name}/{name}" for name in ("lock", "lock.json", "job.json", "_SUCCESS")
    }


class Killed(BaseException):
    """Stands for kill -9: nothing of the process touches the disk any more, clean-up included."""


class Disk:
    """Counts the calls that change the disk or make it durable; from call `fails_at` on, each of them raises."""

    CALLS: tuple[tuple[Any, str], ...] = (
        (os, "fsync"),
        (os, "link"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (os, "rmdir"),
        (os, "unlink"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int, failure: Callable[[], BaseException]) -> None:
        self.calls = 0
        self.fails_at = fails_at
        self.failure = failure
        for owner, name in self.CALLS:
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls > self.fails_at:
                raise self.failure()
            return call(*args, **kwargs)

        return counted


def free(output: Path, locks: list[RunLock]) -> None:
    """The operating system's part of a kill: the dead process's lock."""
    for lock in locks:
        lock._lock.release(force=True)
    locks.clear()


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> list[RunLock]:
    """The locks taken by runs. Syncing is left out: the process is killed here, not the machine, and it is slow."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    taken: list[RunLock] = []
    acquire = RunLock.acquire

    def remember(self: RunLock) -> None:
        taken.append(self)
        acquire(self)

    monkeypatch.setattr(RunLock, "acquire", remember)
    return taken


def test_a_kill_before_any_change_of_the_disk_is_survived(tmp_path: Path, locks: list[RunLock]) -> None:
    for point in itertools.count():
        output = tmp_path / str(point) / "out.jsonl"
        output.parent.mkdir()
        saved: set[RowKey] = set()
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, point, Killed)
            try:
                run(output, saved)
                survived = True
            except Killed:
                survived = False
        free(output, locks)
        if output.exists():
            assert output.read_bytes() == EXPECTED, f"torn output after call {point}"
        run(output, saved)
        assert output.read_bytes() == EXPECTED, f"killed before call {point}"
        assert leftovers(output) == set(), f"killed before call {point}"
        shutil.rmtree(output.parent)
        if survived:
            break
    assert disk.calls == point > 60


def test_two_kills_in_one_job(tmp_path: Path, locks: list[RunLock]) -> None:
    for first, second in itertools.product(range(20, 90, 9), range(5, 50, 9)):
        output = tmp_path / f"{first}-{second}" / "out.jsonl"
        output.parent.mkdir()
        saved: set[RowKey] = set()
        for point in (first, second):
            with pytest.MonkeyPatch.context() as patch:
                Disk(patch, point, Killed)
                with contextlib.suppress(Killed):
                    run(output, saved)
            free(output, locks)
        run(output, saved)
        assert output.read_bytes() == EXPECTED
        assert leftovers(output) == set()


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_at_any_point_stops_the_job_which_goes_on_when_there_is_room(
    tmp_path: Path, locks: list[RunLock]
) -> None:
    for point in itertools.count():
        output = tmp_path / str(point) / "out.jsonl"
        output.parent.mkdir()
        saved: set[RowKey] = set()
        with pytest.MonkeyPatch.context() as patch:
            # Removing needs no room, so that it works on a full disk.
            patch.setattr(Disk, "CALLS", tuple(call for call in Disk.CALLS if call[1] in ("fsync", "link", "mkdir")))
            disk = Disk(patch, point, no_space)
            try:
                run(output, saved)
                survived = True
            except TemporaryError as error:
                survived = False
                assert str(tmp_path) in str(error) and "MB free" in str(error) and error.exit_code == 75
        free(output, locks)
        run(output, saved)
        assert output.read_bytes() == EXPECTED
        assert leftovers(output) == set()
        shutil.rmtree(output.parent)
        if survived:
            break
    assert disk.calls == point > 30


def test_without_hard_links_a_kill_is_survived_too(tmp_path: Path, locks: list[RunLock]) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    for point in range(0, 80, 5):
        output = tmp_path / str(point) / "out.jsonl"
        output.parent.mkdir()
        saved: set[RowKey] = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "link", no_links)
            Disk(patch, point, Killed)
            with contextlib.suppress(Killed):
                run(output, saved)
        free(output, locks)
        run(output, saved)
        assert output.read_bytes() == EXPECTED
        assert leftovers(output) == set()


def claims_too_many(path: str, envelopes: Iterator[Envelope]) -> int:
    return write(path, envelopes) + 1


def stops_early(path: str, envelopes: Iterator[Envelope]) -> int:
    return write(path, itertools.islice(envelopes, 3))


@pytest.mark.parametrize("wrong", [claims_too_many, stops_early])
def test_a_merge_that_does_not_count_is_not_put_in_place(
    tmp_path: Path, wrong: Callable[[str, Iterator[Envelope]], int]
) -> None:
    output = tmp_path / "out.jsonl"
    with open_job(output) as job:
        prepare(job, set())
        with pytest.raises(CorruptJobError, match="of 5 rows were written"):
            job.finalize(wrong, {"exit_code": 0})
        assert not job.finished
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.job"]
    run(output, {row.key for row in ROWS})
    assert output.read_bytes() == EXPECTED


def test_a_writer_that_fails_leaves_no_file_and_a_job_to_resume(tmp_path: Path) -> None:
    def out_of_room(path: str, envelopes: Iterator[Envelope]) -> int:
        Path(path).write_bytes(b"torn")
        raise no_space()

    output = tmp_path / "out.jsonl"
    with open_job(output) as job:
        prepare(job, set())
        with pytest.raises(TemporaryError, match="No space left"):
            job.finalize(out_of_room, {"exit_code": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.job"]
    run(output, {row.key for row in ROWS})
    assert output.read_bytes() == EXPECTED


def test_the_writer_gets_a_path_with_the_outputs_suffixes_in_its_folder(tmp_path: Path) -> None:
    seen: list[Path] = []

    def note(path: str, envelopes: Iterator[Envelope]) -> int:
        seen.append(Path(path))
        return write(path, envelopes)

    output = tmp_path / "out.jsonl.gz"
    with open_job(output) as job:
        prepare(job, set())
        job.finalize(note, {"exit_code": 0})
    assert seen[0].parent == tmp_path and seen[0].name.endswith("out.jsonl.gz") and seen[0] != output


def test_parts_can_be_kept(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with open_job(output) as job:
        prepare(job, set())
        job.finalize(write, {"exit_code": 0}, keep_parts=True)
    run(output, set())
    assert len(list((tmp_path / "out.jsonl.job" / "parts").iterdir())) == 3
    assert not (tmp_path / "out.jsonl.job" / "state").exists()


def test_renameat2_is_there_for_the_test_without_links() -> None:
    assert hasattr(ctypes.CDLL(None), "renameat2")
