"""A job as its caller sees it, within one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import (
    CorruptJobError,
    Envelope,
    FingerprintError,
    Job,
    JobError,
    Progress,
    Row,
    RowKey,
    Unit,
    UnitLimits,
    check_output,
    read_job,
)
from jobs.encoding import encode

LIMITS = UnitLimits(rows=3, size=100)
ROWS = [Row(RowKey(number // 4, number), 10, number * 10) for number in range(8)]  # units of 3, 3 and 2 rows


def open_job(output: Path, **changes: Any) -> Job:
    arguments = {"config": {"workers": 1}, "fingerprint": {"model": "m"}, "limits": LIMITS, **changes}
    return Job.open(output, **arguments)


def result(row: Row, status: str = "ok") -> Envelope:
    return Envelope(row.key, status, {"row": row.key.ordinal})


def write(path: str, envelopes: Iterator[Envelope]) -> int:
    lines = [encode(envelope.record) for envelope in envelopes]
    Path(path).write_bytes(b"".join(line + b"\n" for line in lines))
    return len(lines)


def admit(job: Job, rows: Iterable[Row] = ROWS) -> list[Row]:
    needed = [row for row in rows if job.admit(row)]
    job.end_of_input()
    return needed


def finish(output: Path, **changes: Any) -> None:
    with open_job(output, **changes) as job:
        for row in admit(job):
            job.save_row(result(row))
        job.finalize(write, {"exit_code": 0})


def written(output: Path) -> list[int]:
    return [json.loads(line)["row"] for line in output.read_bytes().splitlines()]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"lock", "lock.json"}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def folder(output: Path) -> Path:
    return output.with_name("out.jsonl.job")


def test_rows_finished_backwards_come_out_in_input_order(output: Path, folder: Path) -> None:
    with open_job(output) as job:
        for row in reversed(admit(job)):
            job.save_row(result(row))
        assert job.progress == Progress(rows=8, ok=8, skipped=0, error=0, units=3)
        assert not job.finished and not output.exists()
        job.finalize(write, {"exit_code": 0, "note": "n"})
        assert job.finished
    assert written(output) == list(range(8))
    assert files(folder) == {"job.json", "_SUCCESS"}
    assert [path.name for path in output.parent.iterdir() if path.is_file()] == ["out.jsonl"]


def test_a_row_is_on_disk_when_save_row_returns_and_in_a_part_when_its_unit_is_done(output: Path, folder: Path) -> None:
    with open_job(output) as job:
        needed = admit(job)
        job.save_row(result(needed[1]))
        assert files(folder) == {"job.json", "state/000000/0000-000000001.row"}
        assert job.saved_rows(0) == {needed[1].key: result(needed[1])}
        job.save_row(result(needed[0]))
        job.save_row(result(needed[2]))
        assert files(folder) == {"job.json", "parts/000000.g0.jsonl"}
        assert job.committed_units() == {0}


def test_resuming_asks_only_for_what_is_missing(output: Path) -> None:
    with open_job(output) as job:
        needed = admit(job)
        for place in (0, 1, 2, 4, 6, 7):  # all of units 0 and 2, one row of unit 1
            job.save_row(result(needed[place], "error" if place == 4 else "ok"))
    with open_job(output) as job:
        assert job.resume_after == ROWS[2]
        assert job.progress == Progress(rows=5, ok=5, skipped=0, error=0, units=2)
        assert admit(job, ROWS[3:]) == [ROWS[3], ROWS[5]]
        assert job.progress == Progress(rows=6, ok=5, skipped=0, error=1, units=2)
        job.save_row(result(ROWS[5]))
        job.save_row(result(ROWS[3]))
        job.finalize(write, {"exit_code": 0})
    assert written(output) == list(range(8))


def test_resuming_from_the_first_row_is_right_too(output: Path) -> None:
    with open_job(output) as job:
        for row in admit(job)[:5]:
            job.save_row(result(row))
    with open_job(output) as job:
        assert admit(job) == ROWS[5:]
    with open_job(output) as job:
        assert admit(job, ROWS[2:]) == ROWS[5:]


def test_rows_that_are_not_durable_have_no_files_and_are_asked_for_again(output: Path, folder: Path) -> None:
    with open_job(output) as job:
        needed = admit(job)
        job.save_row(result(needed[0], "skipped"), durable=False)
        job.save_row(result(needed[1]))
        assert files(folder) == {"job.json", "state/000000/0000-000000001.row"}
        assert set(job.saved_rows(0)) == {ROWS[0].key, ROWS[1].key}
    with open_job(output) as job:
        needed = admit(job)
        assert ROWS[0] in needed and ROWS[1] not in needed
        job.save_row(result(needed[0], "skipped"), durable=False)
        job.save_row(result(needed[1]))
        assert files(folder) == {"job.json", "parts/000000.g0.jsonl"}
        assert job.progress.skipped == 1


def test_a_unit_whose_last_row_was_saved_before_the_kill_is_committed_on_the_way(output: Path) -> None:
    with open_job(output) as job:
        for row in ROWS[:2]:
            job.admit(row)
            job.save_row(result(row))  # unit 0 is not complete yet, so both have files
    with open_job(output) as job:
        assert admit(job, ROWS[:2]) == []
        assert job.committed_units() == {0}
        job.finalize(write, {"exit_code": 0})
    assert written(output) == [0, 1]


def test_what_is_left_of_a_committed_units_state_goes(output: Path, folder: Path) -> None:
    with open_job(output) as job:
        for row in admit(job)[:3]:
            job.save_row(result(row))
    for unit in (0, 1):
        (folder / "state" / f"00000{unit}").mkdir(parents=True)
        (folder / "state" / f"00000{unit}" / "0000-000000001.snapshot").write_bytes(b"")
    with open_job(output):
        assert files(folder) == {"job.json", "parts/000000.g0.jsonl", "state/000001/0000-000000001.snapshot"}


def test_states_belong_to_unfinished_rows(output: Path, folder: Path) -> None:
    key = ROWS[3].key
    with open_job(output) as job:
        admit(job)
        job.save_state(key, "snapshot", b"half")
    with open_job(output) as job:
        admit(job)
        assert job.state_names(key) == ["snapshot"]
        assert job.load_state(key, "snapshot") == b"half"
        job.save_state(key, "journal", b"")
        job.drop_state(key, "snapshot")
        assert job.load_state(key, "snapshot") is None
        job.save_row(result(ROWS[3]))
        assert files(folder) == {"job.json", "state/000001/0000-000000003.row"}
        with pytest.raises(ValueError, match="not admitted, or is finished"):
            job.save_state(key, "journal", b"")


def test_an_empty_input_gives_an_empty_output(output: Path) -> None:
    with open_job(output) as job:
        assert admit(job, []) == []
        job.finalize(write, {"exit_code": 4})
    assert output.read_bytes() == b""
    with open_job(output) as job:
        assert job.summary == {"exit_code": 4}


def test_a_finished_job_says_so_whatever_its_defaults_are_by_now(output: Path) -> None:
    finish(output)
    before = output.stat()
    with open_job(output, config={"workers": 9}, limits=UnitLimits(rows=1)) as job:
        assert job.finished
        assert job.summary == {"exit_code": 0}
    assert output.stat().st_mtime_ns == before.st_mtime_ns


def test_units_stay_as_planned_when_the_defaults_change(output: Path) -> None:
    with open_job(output) as job:
        for row in admit(job)[:4]:
            job.save_row(result(row))
    with open_job(output, limits=UnitLimits(rows=2)) as job:
        assert job.record.limits == LIMITS
        assert admit(job) == ROWS[4:]


def test_a_different_fingerprint_is_refused_with_the_difference(output: Path, folder: Path) -> None:
    with open_job(output) as job:
        job.save_row(result(admit(job)[0]))
    before = files(folder)
    with pytest.raises(FingerprintError) as caught:
        open_job(output, fingerprint={"model": "other", "window": 8})
    message = str(caught.value)
    for piece in ("model", 'then: "m"', 'now:  "other"', "window", "(absent)", "--restart"):
        assert piece in message
    assert caught.value.exit_code == 3
    assert files(folder) == before
    open_job(output).close()  # the refusal let the lock go


def test_a_finished_job_refuses_another_fingerprint_too(output: Path) -> None:
    finish(output)
    with pytest.raises(FingerprintError):
        open_job(output, fingerprint={"model": "other"})


def test_restart_begins_anew_and_keeps_the_old_output_until_then(output: Path, folder: Path) -> None:
    finish(output)
    old = output.read_bytes()
    with open_job(output, fingerprint={"model": "other"}, restart=True) as job:
        assert not job.finished
        assert job.record.fingerprint == {"model": "other"}
        for row in admit(job, ROWS[:4]):
            job.save_row(result(row))
        assert output.read_bytes() == old
        job.finalize(write, {"exit_code": 0})
    assert written(output) == [0, 1, 2, 3]
    with open_job(output, fingerprint={"model": "other"}) as job:
        assert job.finished


def test_restart_forgets_rows_of_an_unfinished_job(output: Path) -> None:
    with open_job(output) as job:
        for row in admit(job)[:4]:
            job.save_row(result(row))
    with open_job(output, restart=True) as job:
        assert job.resume_after is None
        assert admit(job) == ROWS


def test_a_strangers_file_is_never_written_over(output: Path, folder: Path) -> None:
    output.write_bytes(b"precious")
    with pytest.raises(JobError, match="no job of it"):
        check_output(output)
    for restart in (False, True):
        with pytest.raises(JobError, match="no job of it") as caught:
            open_job(output, restart=restart)
        assert caught.value.exit_code == 3
    assert output.read_bytes() == b"precious" and not folder.exists()


@pytest.mark.parametrize("name", ["s3://bucket/out.jsonl", "memory://out.jsonl"])
def test_a_remote_output_is_refused(name: str) -> None:
    with pytest.raises(JobError, match="local path"):
        Job.open(name, config={}, fingerprint={})


def test_an_output_can_be_checked_before_any_work(output: Path, folder: Path) -> None:
    check_output(output)
    assert not folder.exists()
    finish(output)
    check_output(output)


def test_a_record_checks_a_fingerprint_by_itself(output: Path) -> None:
    finish(output)
    record = read_job(output)
    assert record is not None
    record.check({"model": "m"})
    with pytest.raises(FingerprintError, match="--restart"):
        record.check({"model": "n"})


def test_a_folder_as_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is a folder"):
        open_job(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_vanished_after_the_job_is_reported(output: Path) -> None:
    finish(output)
    output.unlink()
    with pytest.raises(CorruptJobError, match="is gone; --restart"):
        open_job(output)
    finish(output, restart=True)
    assert written(output) == list(range(8))


def test_an_input_that_lost_rows_is_noticed(output: Path) -> None:
    with open_job(output) as job:
        for row in admit(job)[6:]:  # commits unit 2
            job.save_row(result(row))
    with open_job(output) as job, pytest.raises(CorruptJobError, match="did it shrink"):
        admit(job, ROWS[:5])


def test_an_input_whose_rows_moved_is_noticed(output: Path) -> None:
    with open_job(output) as job:
        for row in admit(job)[6:]:
            job.save_row(result(row))
    moved = [row._replace(offset=row.offset + 1) for row in ROWS]
    with open_job(output) as job, pytest.raises(CorruptJobError, match="no longer has the rows that unit 2"):
        admit(job, moved)


def test_a_damaged_part_is_noticed_and_done_again_when_it_is_removed(output: Path, folder: Path) -> None:
    with open_job(output) as job:
        for row in admit(job):
            job.save_row(result(row))
    part = folder / "parts" / "000001.g0.jsonl"
    part.write_bytes(part.read_bytes().replace(b'"row":4}', b'"row":5}'))
    with open_job(output) as job, pytest.raises(CorruptJobError, match="000001"):
        admit(job)
        job.finalize(write, {"exit_code": 0})
    assert not output.exists()
    part.unlink()
    with open_job(output) as job:
        assert admit(job) == ROWS[3:6]
        for row in ROWS[3:6]:
            job.save_row(result(row))
        job.finalize(write, {"exit_code": 0})
    assert written(output) == list(range(8))


@pytest.mark.parametrize("name", ["job.json", "_SUCCESS"])
def test_damaged_records_are_reported_and_restart_mends_them(output: Path, folder: Path, name: str) -> None:
    finish(output)
    (folder / name).write_bytes(b'{"torn')
    with pytest.raises(CorruptJobError, match=name):
        open_job(output)
    finish(output, restart=True)


def test_a_job_of_a_later_format_is_refused(output: Path, folder: Path) -> None:
    open_job(output).close()
    record = json.loads((folder / "job.json").read_bytes())
    (folder / "job.json").write_bytes(encode({**record, "format": 2}))
    with pytest.raises(JobError, match="format is 2"):
        open_job(output)


def test_calls_out_of_order_are_bugs_of_the_caller(output: Path) -> None:
    with open_job(output) as job:
        job.admit(ROWS[1])
        with pytest.raises(ValueError, match="comes after"):
            job.admit(ROWS[1])
        with pytest.raises(ValueError, match="comes after"):
            job.admit(ROWS[0])
        with pytest.raises(ValueError, match="not admitted"):
            job.save_row(result(ROWS[0]))
        with pytest.raises(ValueError, match="end of the input"):
            job.finalize(write, {"exit_code": 0})
        job.end_of_input()
        with pytest.raises(ValueError, match="the end"):
            job.admit(ROWS[2])
        with pytest.raises(ValueError, match="unfinished"):
            job.finalize(write, {"exit_code": 0})
        job.save_row(result(ROWS[1]))
        with pytest.raises(ValueError, match="not admitted, or is finished"):
            job.save_row(result(ROWS[1]))
        with pytest.raises(ValueError, match="exit_code"):
            job.finalize(write, {})
    assert not output.exists()


def test_reports_are_kept_one_per_attempt(output: Path, folder: Path) -> None:
    for attempt in range(3):
        with open_job(output) as job:
            job.write_report({"attempt": attempt})
    reports = sorted((folder / "runs").iterdir())
    assert [json.loads(path.read_bytes())["attempt"] for path in reports] == [0, 1, 2]


def test_a_job_can_be_read_without_its_lock(output: Path) -> None:
    assert read_job(output) is None
    assert not output.with_name("out.jsonl.job").exists()
    with open_job(output, config={"path": ("a", "b")}) as job:
        record = read_job(output)
        assert record == job.record
    assert record is not None and record.config == {"path": ["a", "b"]}


def test_a_whole_unit_can_be_committed_by_a_worker(output: Path) -> None:
    with open_job(output) as job:
        admit(job)
        unit = Unit(0, tuple(ROWS[:3]))
        assert job.commit_unit(unit, [result(row) for row in ROWS[:3]]) is True
        assert job.commit_unit(unit, [result(row, "error") for row in ROWS[:3]]) is False
        assert job.committed_units() == {0}
        for row in ROWS[3:]:
            job.save_row(result(row))
        job.finalize(write, {"exit_code": 0})
    assert written(output) == list(range(8))


def test_jobs_knows_no_model() -> None:
    others = ["torch", "transformers", "pipeline", "streamllm_core", "pyarrow"]
    code = f"import jobs, sys; print(*set({others}) & set(sys.modules))"
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
