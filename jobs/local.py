"""Durable writing on a local filesystem: the only place in the package that touches local files.

A file is written under a temporary name in its own folder, synced, and then given its name in one step, so that no
reader and no crash ever sees a part of it. `put_new` never replaces: what exists is committed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from pathlib import Path

from jobs.errors import JobError, storage_errors

_TEMPORARY = ".tmp-"
# What link() says where the filesystem (FAT, some network and FUSE mounts) has no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
# A second run whose lock failed may sweep our temporary file away or remove its folder; then it is written again.
_ATTEMPTS = 5


def put_new(path: Path, data: bytes) -> bool:
    """Create `path` with `data`, atomically and durably. False, and nothing changed, when it exists already.

    Raises JobError or TemporaryError (a full disk, ...), naming the path.
    """
    with storage_errors(path):
        if not path.exists():
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    created = _create(path, data)
                except FileNotFoundError:
                    if attempt == _ATTEMPTS:
                        raise
                    continue
                if created:
                    return True
                break
        # Whoever committed it may have died before its folder was synced.
        sync_folder(path.parent)
    return False


def replace(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically and durably, whether or not it exists. For snapshots, not for results."""
    with storage_errors(path):
        make_folder(path.parent)
        temporary = _write_temporary(path, data)
        try:
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, in place of what was there; durable on return."""
    with storage_errors(path):
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """A fresh name in the same folder which ends in the file's own name, so that its suffixes keep their meaning."""
    return path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}-{path.name}")


def is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files that killed runs left in `folder` (those of the file `name` only, when given).

    Syncs the folder as well: files that a killed run had named but not yet synced are durable from here on.
    """
    with storage_errors(folder, "clean"):
        if not folder.is_dir():
            return
        for entry in folder.iterdir():
            head = len(_TEMPORARY) + 16 + 1
            if is_temporary(entry.name) and (name is None or entry.name[head:] == name):
                entry.unlink(missing_ok=True)
        sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, each of them synced into the one above."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Windows cannot open folders, and journals names by itself."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # removed by a run that was done with it
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, data: bytes) -> bool:
    make_folder(path.parent)
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            _rename_new(temporary, path)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = temporary_name(path)
    try:
        with temporary.open("xb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _rename_new(source: Path, target: Path) -> None:
    """rename() that fails with FileExistsError instead of replacing; `renameat2(2)` with RENAME_NOREPLACE."""
    if os.name == "nt":
        source.rename(target)  # never replaces on Windows
        return
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        at_working_folder, no_replace = -100, 1
        if rename(at_working_folder, os.fsencode(source), at_working_folder, os.fsencode(target), no_replace) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_LINKS:
            raise OSError(code, os.strerror(code), str(target))
    # Creating the final name first (O_EXCL) and filling it would leave a torn file after a crash: refused.
    raise JobError(
        f"the filesystem of {target.parent} has neither hard links nor a rename that does not replace; "
        "write the output to another filesystem"
    )
