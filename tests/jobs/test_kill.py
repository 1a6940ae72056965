"""Whole jobs in real processes, which are killed, starved and run twice at once."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import job_worker
import pytest

Start = Callable[..., "subprocess.Popen[str]"]


def leftovers(output: Path) -> set[str]:
    found = {path.relative_to(output.parent).as_posix() for path in output.parent.rglob("*")}
    job = output.name + ".job"
    return found - {
        output.name,
        job,
        "log",
        *(f"{job}/{name}" for name in ("lock", "lock.json", "job.json", "_SUCCESS")),
    }


def finish(start: Start, output: Path, *arguments: object) -> str:
    process = start(output, *arguments)
    said, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint
    return said


def test_uninterrupted(tmp_path: Path, start: Start) -> None:
    output = tmp_path / "out.jsonl"
    finish(start, output, "--rows", 40)
    assert output.read_bytes() == job_worker.expected(40)
    assert leftovers(output) == set()
    assert "finished before" in finish(start, output, "--rows", 40)


def test_killed_at_random_moments_the_output_is_exact_and_no_saved_row_is_done_twice(
    tmp_path: Path, start: Start
) -> None:
    seed = random.randrange(1_000_000)
    print("seed", seed)  # shown when the test fails
    dice = random.Random(seed)
    output, log, rows = tmp_path / "out.jsonl", tmp_path / "log", 120
    kills = 0
    for _ in range(16):
        process = start(output, "--rows", rows, "--delay", 6, "--log", log)
        assert process.stdout is not None and process.stdout.readline().startswith("open")
        time.sleep(dice.uniform(0, 0.25))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    said = finish(start, output, "--rows", rows, "--log", log)
    assert output.read_bytes() == job_worker.expected(rows)
    assert leftovers(output) == set()
    assert kills >= 6, said
    saved = Counter(log.read_bytes().splitlines())
    assert max(saved.values()) == 1


def test_killed_while_merging(tmp_path: Path, start: Start) -> None:
    output = tmp_path / "out.jsonl"
    for delay in (0, 0.003, 0.006, 0.012):
        process = start(output, "--rows", 150, "--delay", 0)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("merging", "finished")):
                break
        time.sleep(delay)
        process.kill()
        process.wait()
        if output.exists():
            assert output.read_bytes() == job_worker.expected(150)
    finish(start, output, "--rows", 150)
    assert output.read_bytes() == job_worker.expected(150)
    assert leftovers(output) == set()


@pytest.mark.parametrize("kill", [False, True])
def test_three_runs_at_once_whose_lock_is_defeated_still_give_each_row_once(
    tmp_path: Path, start: Start, kill: bool
) -> None:
    output, rows = tmp_path / "out.jsonl", 60
    processes = [start(output, "--rows", rows, "--delay", 1 + number, "--no-lock") for number in range(3)]
    if kill:
        assert processes[0].stdout is not None and processes[0].stdout.readline().startswith("open")
        time.sleep(0.1)
        processes[0].kill()
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
    survivors = ends[kill:]
    assert all(code in (0, 75) for _, code in survivors), survivors
    assert any(code == 0 for _, code in survivors), survivors
    assert output.read_bytes() == job_worker.expected(rows)
    assert "finished before" in finish(start, output, "--rows", rows)
    assert output.read_bytes() == job_worker.expected(rows)
    assert leftovers(output) == set()


def test_a_file_that_cannot_grow_stops_the_job_with_75_and_leaves_it_whole(tmp_path: Path, start: Start) -> None:
    output = tmp_path / "out.jsonl"
    codes = []
    for limit in (200, 600, 3_000, 20_000):  # no job.json; no row's file; no part; no merged output
        process = start(output, "--rows", 60, "--file-limit", limit)
        _, complaint = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert "MB free" in complaint and str(tmp_path) in complaint
        assert not output.exists()
    assert codes == [75] * 4
    finish(start, output, "--rows", 60)
    assert output.read_bytes() == job_worker.expected(60)
    assert leftovers(output) == set()
