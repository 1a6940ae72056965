"""The same behaviour from a local folder and from an object store; refusal of stores that cannot commit."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jobs.errors import JobError, TemporaryError
from jobs.store import LocalStore, ObjectStore, Store, local_path, open_store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    yield open_store(tmp_path / "job" if request.param == "local" else f"memory://{uuid.uuid4().hex}/job")


def test_put_new_creates_once(store: Store) -> None:
    assert store.put_new("parts/0", b"first") is True
    assert store.put_new("parts/0", b"second") is False
    assert store.read("parts/0") == b"first"
    assert store.read("parts/0", 3) == b"fir"


def test_replace_overwrites(store: Store) -> None:
    store.replace("state/1", b"a")
    store.replace("state/1", b"bb")
    assert store.read("state/1") == b"bb"


def test_what_is_not_there(store: Store) -> None:
    assert store.read("nothing") is None
    assert store.list("nowhere") == []
    assert not store.exists("nothing")
    store.remove("nothing")
    store.sweep("nowhere")


def test_list_names_files_and_folders_of_one_level(store: Store) -> None:
    for name in ("s/2", "s/1", "s/deep/3", "top"):
        store.put_new(name, b"")
    assert store.list("s") == ["1", "2", "deep"]
    assert store.exists("s/1") and store.exists("top")


def test_remove_takes_a_blob_or_a_whole_folder(store: Store) -> None:
    for name in ("s/1", "s/deep/3", "t/1"):
        store.put_new(name, b"")
    store.remove("s/1")
    assert store.list("s") == ["deep"]
    store.remove("s")
    assert store.list("s") == []
    assert store.list("t") == ["1"]


def test_half_written_files_are_no_blobs(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a", b"")
    (tmp_path / ".tmp-0123456789abcdef-b").write_bytes(b"torn")
    assert store.list("") == ["a"]
    store.sweep("")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class LooksFirst(MemoryFileSystem):
    """Like most filesystems: whether the file exists is asked before it is written, not while."""

    protocol = "looksfirst"


class Old(MemoryFileSystem):
    """A version from before conditional creation."""

    protocol = "memory"

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        raise AssertionError("would have been written without a condition")


def test_a_store_without_conditional_creation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("looksfirst", LooksFirst, clobber=True)
    with pytest.raises(JobError, match="looksfirst storage cannot create a file only where none exists"):
        ObjectStore("looksfirst://bucket/job")
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **_: (Old(), "bucket/job"))
    with pytest.raises(JobError, match="too old"):
        ObjectStore("memory://bucket/job")


def test_s3_is_asked_to_create_conditionally(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    asked: list[dict[str, Any]] = []

    async def call(self: Any, method: str, *_args: Any, **kwargs: Any) -> dict[str, Any]:
        asked.append({"method": method, **kwargs})
        if len(asked) > 1:
            raise FileExistsError(kwargs["Key"])
        return {}

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    store = open_store("s3://bucket/job")
    assert store.put_new("parts/0", b"x") is True
    assert store.put_new("parts/0", b"y") is False
    assert [(a["method"], a["Key"], a["IfNoneMatch"]) for a in asked] == [("put_object", "job/parts/0", "*")] * 2


def test_failing_storage_is_named_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        raise OSError("503 Slow Down")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", down)
    with pytest.raises(TemporaryError, match="memory://bucket/job/parts/0: 503 Slow Down"):
        open_store("memory://bucket/job").put_new("parts/0", b"x")


def test_local_paths_and_urls() -> None:
    assert local_path("a/b.jsonl") == Path("a/b.jsonl")
    assert local_path("file:///tmp/a%20b") == Path("/tmp/a b")
    assert local_path(Path("x")) == Path("x")
    assert local_path("s3://bucket/x") is None
