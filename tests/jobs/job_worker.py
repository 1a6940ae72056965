"""A job without a model, run as a process of its own so that tests can kill it.

    python job_worker.py OUTPUT --rows 60 [--delay MS] [--no-lock] [--file-limit BYTES] [--log FILE]

Rows finish out of order, some need several steps (kept as states), some are skipped. What a row yields depends on its
key only. `saved K` lines in the log say that save_row has returned; lines on stdout say what happens.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jobs import Envelope, Job, JobError, Row, RowKey, UnitLimits
from jobs.encoding import encode
from jobs.lock import RunLock

LIMITS = UnitLimits(rows=7, size=2_000)
STEPS = 4  # of a row that takes long


def rows(count: int) -> Iterator[Row]:
    """Rows of three files; one in eleven is larger than a unit."""
    offset = 0
    for number in range(count):
        size = 2_500 if number % 11 == 5 else 100 + 37 * (number % 9)
        yield Row(RowKey(number * 3 // max(count, 1), number), size, offset)
        offset += size


def envelope(key: RowKey) -> Envelope:
    if key.ordinal % 13 == 4:
        return Envelope(key, "skipped", {"row": key.ordinal, "reason": "empty"})
    if key.ordinal % 17 == 6:
        return Envelope(key, "error", {"row": key.ordinal, "error": {"type": "ValueError", "message": "\ud800"}})
    return Envelope(key, "ok", {"row": key.ordinal, "text": random.Random(key.ordinal).randbytes(300).hex()})


def write(path: str, envelopes: Iterator[Envelope]) -> int:
    count = 0
    with Path(path).open("wb") as out:
        for found in envelopes:
            out.write(encode(found.record) + b"\n")
            count += 1
    return count


def expected(count: int) -> bytes:
    """The output, worked out without a job."""
    return b"".join(encode(envelope(row.key).record) + b"\n" for row in rows(count))


class Work:
    """Up to five rows in flight; `step` advances one of them, and says when it is done."""

    def __init__(self, job: Job, delay: float, log: Path | None) -> None:
        self.job, self.delay, self.log = job, delay, log
        self.flight: dict[RowKey, int] = {}
        self.dice = random.Random()

    def start(self, row: Row) -> None:
        kept = self.job.load_state(row.key, "steps")
        self.flight[row.key] = int(kept) if kept else 0

    def step(self) -> None:
        key = self.dice.choice(list(self.flight))
        time.sleep(self.delay)
        self.flight[key] += 1
        if self.flight[key] < STEPS and key.ordinal % 5 == 0:
            self.job.save_state(key, "steps", b"%d" % self.flight[key])
            return
        del self.flight[key]
        result = envelope(key)
        durable = result.status != "skipped"
        self.job.save_row(result, durable=durable)
        if durable and self.log:
            with self.log.open("ab", buffering=0) as log:
                log.write(b"saved %d\n" % key.ordinal)


def run(options: argparse.Namespace) -> int:
    fingerprint = {"rows": options.rows}
    with Job.open(options.output, config={"delay": options.delay}, fingerprint=fingerprint, limits=LIMITS) as job:
        print("open", os.getpid(), flush=True)
        if job.summary is not None:
            print("finished before", flush=True)
            return int(job.summary["exit_code"])
        work = Work(job, options.delay / 1000, options.log)
        for row in rows(options.rows):
            if job.admit(row):
                work.start(row)
            while len(work.flight) >= 5:
                work.step()
        job.end_of_input()
        while work.flight:
            work.step()
        print("merging", flush=True)
        job.finalize(write, {"exit_code": 0, "rows": job.progress.rows})
        return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--no-lock", action="store_true")
    parser.add_argument("--file-limit", type=int)
    options = parser.parse_args()
    if options.no_lock:
        RunLock.acquire = lambda self: None  # type: ignore[method-assign]
    if options.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, resource.RLIM_INFINITY))
    try:
        return run(options)
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
