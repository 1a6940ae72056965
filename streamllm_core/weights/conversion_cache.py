"""The folder where converted models are kept: each is built once, and is either whole or not there.

A conversion is written into a temporary folder beside its final place, flushed to disk and then renamed, which is
atomic: a process killed half-way leaves only a temporary folder, which is never read and is removed by the next
conversion of the same model. A lock spares two processes from doing the same work, but nothing depends on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from streamllm_core.errors import ModelError


def cache_root() -> Path:
    """Where conversions are kept: $STREAMLLM_CACHE, or streamllm under the user's cache folder."""
    own = os.environ.get("STREAMLLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "streamllm"


def build_once(key: str, build: Callable[[Path], None]) -> Path:
    """The folder named `key` in the cache; when there is none, `build(folder)` fills a new one first.

    Raises ModelError when the cache cannot be written; errors of `build` pass through and leave nothing behind.
    """
    root = cache_root()
    final = root / key
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{key}.lock") as locked:
            if final.is_dir():  # another process built it while this one waited
                return final
            if locked:
                for torn in root.glob(f"{key}.*.tmp"):
                    shutil.rmtree(torn, ignore_errors=True)
            _build(root, final, build)
    except OSError as error:
        raise ModelError(
            f"cannot write the conversion cache {root} ({error.strerror or error}); set STREAMLLM_CACHE to a folder "
            "with enough space"
        ) from error
    return final


def require_space(folder: Path, nbytes: int) -> None:
    """ModelError, with the numbers, unless `nbytes` fit on the disk that holds `folder`."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ModelError(
            f"the converted model needs {nbytes / 1e9:.1f} GB in {folder.parent}, which has {free / 1e9:.1f} GB free; "
            "set STREAMLLM_CACHE to a folder on a larger disk"
        )


def _build(root: Path, final: Path, build: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.", suffix=".tmp", dir=root))
    try:
        build(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        for path in temporary.iterdir():
            _flush(path)
        _flush(temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        _flush(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # nothing to remove after the rename


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    lock = FileLock(path)
    try:
        lock.acquire()
    except NotImplementedError:  # a filesystem without locks
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _flush(path: Path) -> None:
    if path.is_dir() and sys.platform == "win32":
        return  # Windows cannot flush folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
