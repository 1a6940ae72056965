"""Durable progress for long jobs: rows in, results out, exactly once, through any number of kills.

Knows no language model and no file format. An output file `out.jsonl` has a job folder beside it:

    out.jsonl.job/
      job.json                  what the job was begun with: resolved options, fingerprint, unit limits; created once
      lock, lock.json           held by the running process, and who that is
      parts/000000.g0.jsonl     a committed unit: a header line, then one envelope per row in input order; immutable
      state/000001/             a unit still open
        0000-000000007.row        a finished row (input file 0, row 7), created the moment it was finished
        0000-000000008.<name>     a blob of the caller's for a row half done (journal, snapshot), replaced as a whole
      runs/<utc>.json           one report per attempt
      _SUCCESS                  the job is finished: its summary with the exit code

A *row* is known by its input file and its place in it, never by the user's id. A *unit* is a run of consecutive rows,
planned while they are read (`plan`). A unit whose rows are all finished is committed as a *part* (`parts`), and its
state is removed. When every unit is committed, the parts are merged into the output, _SUCCESS is written, and parts and
state are removed (`finalize`). A file appears under its name whole and synced, or not at all (`local`, `store`), and
what exists is committed: nothing is ever appended to, and correctness never depends on a clean exit. `Job` ties it
together.
"""

from jobs.errors import CorruptJobError, FingerprintError, JobError, LockedError, TemporaryError
from jobs.job import Job
from jobs.parts import Envelope
from jobs.plan import Row, RowKey, Unit, UnitLimits
from jobs.progress import Progress
from jobs.record import JobRecord, read_job
from jobs.recovery import check_output

__all__ = [
    "CorruptJobError",
    "Envelope",
    "FingerprintError",
    "Job",
    "JobError",
    "JobRecord",
    "LockedError",
    "Progress",
    "Row",
    "RowKey",
    "TemporaryError",
    "Unit",
    "UnitLimits",
    "check_output",
    "read_job",
]
