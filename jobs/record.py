"""job.json: what a job was begun with. Created once; only a restart writes it anew."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.encoding import decode, encode
from jobs.errors import CorruptJobError, FingerprintError, JobError
from jobs.fingerprint import describe, differences, normalize
from jobs.plan import UnitLimits
from jobs.store import Store, local_path, open_store

NAME = "job.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The job's own id, when it was begun (UTC, ISO 8601), its resolved options, fingerprint and unit limits.

    The limits are part of it because units must come out the same on every attempt, whatever the defaults are by then.
    """

    id: str
    created: str
    config: dict[str, Any]
    fingerprint: dict[str, Any]
    limits: UnitLimits

    @classmethod
    def new(cls, config: Mapping[str, Any], fingerprint: Mapping[str, Any], limits: UnitLimits) -> JobRecord:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(uuid.uuid4().hex, created, normalize(config), normalize(fingerprint), limits)

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Raises FingerprintError with a field-by-field difference when the job was begun with another one."""
        if found := differences(self.fingerprint, fingerprint):
            raise FingerprintError(
                f"the job was begun on {self.created} with something else:\n{describe(found)}\n"
                "Run it as before to resume it, or with --restart to throw its results away and begin anew."
            )

    def to_bytes(self) -> bytes:
        return encode({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> JobRecord:
        try:
            fields = decode(data)
            version = fields.pop("format")
            if version != _FORMAT:
                raise JobError(f"the job was begun by a version whose job format is {version}; this reads {_FORMAT}")
            return cls(**{**fields, "limits": UnitLimits(**fields["limits"])})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptJobError(f"{NAME} of the job cannot be read; --restart begins anew") from error


def job_folder(output: str | Path) -> Path:
    """out.jsonl -> out.jsonl.job, beside it. Raises JobError where that is not a local path."""
    path = local_path(output)
    if path is None:
        raise JobError(
            f"{output}: the output and its job folder must be on a local path; copy the output when it is done"
        )
    if path.name in ("", ".."):
        raise JobError(f"{output} is a folder; the output must be a file")
    return path.with_name(path.name + ".job")


def output_path(folder: Path) -> Path:
    """The output that a job folder stands beside."""
    return folder.with_name(folder.name.removesuffix(".job"))


def read_job(output: str | Path) -> JobRecord | None:
    """What the job of this output was begun with, or None when there is no job. Takes no lock and changes nothing."""
    data = open_store(job_folder(output)).read(NAME)
    return None if data is None else JobRecord.from_bytes(data)


def agree(store: Store, wanted: JobRecord) -> JobRecord:
    """Create job.json, or find that it exists and asks for the same. Returns the record that counts.

    Raises FingerprintError with a field-by-field difference.
    """
    if store.put_new(NAME, wanted.to_bytes()):
        return wanted
    data = store.read(NAME)
    if data is None:
        raise CorruptJobError(f"{NAME} vanished while it was being read; is something cleaning the folder up?")
    found = JobRecord.from_bytes(data)
    found.check(wanted.fingerprint)
    return found
