"""A folder of named blobs, local or on an object store, with the one operation that commits: `put_new`."""

from __future__ import annotations

import inspect
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from jobs import local
from jobs.errors import JobError, storage_errors

# Filesystems that pass mode="create" on to their server as a condition of the write itself (S3: If-None-Match, GCS:
# ifGenerationMatch=0, Azure: overwrite=False). Others look first and write afterwards, which two runs at once break.
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})


class Store(Protocol):
    """Blobs under relative names such as "parts/000000.g0.jsonl". Errors are JobError and TemporaryError."""

    def exists(self, name: str) -> bool: ...

    def read(self, name: str, stop: int | None = None) -> bytes | None:
        """The bytes (the first `stop` of them, when given), or None where there is no such blob."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Commit: create atomically and durably. False, and nothing changed, when it exists already."""

    def replace(self, name: str, data: bytes) -> None:
        """Write atomically and durably over whatever is there."""

    def list(self, folder: str) -> list[str]:
        """The names directly inside `folder`, sorted, folders too; empty where there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove a blob or a folder with all it holds; nothing happens where there is none."""

    def sweep(self, folder: str) -> None:
        """Remove what killed writers left half written in `folder`."""


class LocalStore:
    """A folder of the local filesystem."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def exists(self, name: str) -> bool:
        with storage_errors(self.path(name), "read"):
            return self.path(name).exists()

    def read(self, name: str, stop: int | None = None) -> bytes | None:
        with storage_errors(self.path(name), "read"):
            try:
                with self.path(name).open("rb") as file:
                    return file.read() if stop is None else file.read(stop)
            except FileNotFoundError:
                return None

    def put_new(self, name: str, data: bytes) -> bool:
        return local.put_new(self.path(name), data)

    def replace(self, name: str, data: bytes) -> None:
        local.replace(self.path(name), data)

    def list(self, folder: str) -> list[str]:
        with storage_errors(self.path(folder), "list"):
            try:
                names = [entry.name for entry in self.path(folder).iterdir()]
            except FileNotFoundError:
                return []
        return sorted(name for name in names if not local.is_temporary(name))

    def remove(self, name: str) -> None:
        path = self.path(name)
        with storage_errors(path, "remove"):
            if not path.is_dir():
                path.unlink(missing_ok=True)
                return
            with suppress(FileNotFoundError):  # another run removes the same folder
                shutil.rmtree(path)

    def sweep(self, folder: str) -> None:
        local.sweep(self.path(folder))


class ObjectStore:
    """A prefix of any fsspec filesystem which creates conditionally. Raises JobError for one that does not."""

    def __init__(self, url: str) -> None:
        # Imported here because a local job, which may only be asked whether it is finished, need not wait for it.
        import fsspec

        # Listings are never cached: another run or worker may have committed in between.
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._url = url.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        if not protocols & _CONDITIONAL:
            raise JobError(
                f"{url}: {min(protocols)} storage cannot create a file only where none exists, so two runs could "
                f"overwrite each other's results; use a local path or one of {', '.join(sorted(_CONDITIONAL))}"
            )
        put: Any = getattr(self._fs, "_pipe_file", self._fs.pipe_file)
        if "mode" not in inspect.signature(put).parameters:
            raise JobError(f"{url}: the installed {type(self._fs).__module__} is too old for conditional creation")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def _naming(self, name: str) -> str:
        return f"{self._url}/{name}"

    def exists(self, name: str) -> bool:
        with storage_errors(self._naming(name), "read"):
            return bool(self._fs.exists(self._path(name)))

    def read(self, name: str, stop: int | None = None) -> bytes | None:
        with storage_errors(self._naming(name), "read"):
            try:
                return bytes(self._fs.cat_file(self._path(name), start=None, end=stop))
            except FileNotFoundError:
                return None

    def put_new(self, name: str, data: bytes) -> bool:
        with storage_errors(self._naming(name)):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        with storage_errors(self._naming(name)):
            self._fs.pipe_file(self._path(name), data)

    def list(self, folder: str) -> list[str]:
        with storage_errors(self._naming(folder), "list"):
            try:
                paths = self._fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def remove(self, name: str) -> None:
        with storage_errors(self._naming(name), "remove"), suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def sweep(self, folder: str) -> None:
        """Nothing to do: an object appears whole or not at all."""


def local_path(url: str | Path) -> Path | None:
    """The local path that `url` names (a path, or file://...), or None when it names another storage."""
    if isinstance(url, Path):
        return url
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    from urllib.request import url2pathname  # imports an HTTP client

    return Path(url2pathname(parts.path))


def open_store(url: str | Path) -> Store:
    """The store at a local path or any fsspec URL."""
    path = local_path(url)
    return LocalStore(path) if path is not None else ObjectStore(str(url))
