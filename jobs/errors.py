"""What can go wrong with a job's files. Each class carries the exit code that the command line ends with."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class JobError(Exception):
    """A job that cannot start or go on as it was asked for; the message says what to change."""

    exit_code = 3


class LockedError(JobError):
    """Another run holds the job. `holder` has its pid, host and since, as far as they are known."""

    exit_code = 75

    def __init__(self, message: str, holder: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.holder = dict(holder or {})


class TemporaryError(JobError):
    """Storage that fails now and may work later: a full disk, an I/O error. The same command resumes."""

    exit_code = 75


class FingerprintError(JobError):
    """The job was begun with other inputs or options; the message lists the fields that differ."""


class CorruptJobError(JobError):
    """A file of the job folder does not hold what was written to it."""


# Waiting does not mend these. Every other error of a filesystem is taken as temporary: a rerun resumes at no cost,
# whereas a scheduler that was told "permanent" never tries again.
_PERMANENT = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
    }
)


@contextmanager
def storage_errors(path: Path | str, action: str = "write") -> Iterator[None]:
    """Turn the OSErrors of the block into job errors that name `path` and, where it is local, the free space.

    Raises JobError for what stays wrong until a person changes it (permissions, a folder in the way), and
    TemporaryError for everything else.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        if isinstance(error, PermissionError) or error.errno in _PERMANENT:
            raise JobError(f"cannot {action} {path}: {reason}") from error
        raise TemporaryError(
            f"cannot {action} {path}: {reason}{_free_space(path)}; "
            "nothing committed is lost, run the same command again"
        ) from error


def _free_space(path: Path | str) -> str:
    if not isinstance(path, Path):
        return ""
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None:
        return ""
    return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB free there)"
