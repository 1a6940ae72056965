"""One run at a time: a lock of the operating system on the job folder, which dies with its process."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jobs import local
from jobs.encoding import decode, encode
from jobs.errors import LockedError, storage_errors


class RunLock:
    """The lock of a job folder on a local filesystem. Nothing waits: a second run is told who holds it.

    Who that is stands in lock.json beside the lock file, because taking a lock may empty the file that is locked.
    """

    def __init__(self, folder: Path) -> None:
        self._holder = folder / "lock.json"
        self._lock = FileLock(folder / "lock", timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Raises LockedError at once when another process holds the lock, and JobError where it cannot be taken."""
        with storage_errors(Path(self._lock.lock_file), "lock"):
            try:
                self._lock.acquire()
            except Timeout:
                raise self._locked() from None
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        local.replace(self._holder, encode(me))

    def release(self) -> None:
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()

    def holder(self) -> dict[str, Any]:
        """Pid, host and since of the run that took the lock last; empty when it was released, or just now taken."""
        try:
            fields = decode(self._holder.read_bytes())
        except (OSError, ValueError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def _locked(self) -> LockedError:
        holder = self.holder()
        who = "by another process"
        if holder:
            who = f"by process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
        return LockedError(f"the job {self._holder.parent} is being run {who}", holder)
