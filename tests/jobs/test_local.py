"""The commit function on a real filesystem: one winner, whole files only, errors that name the path."""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs import local
from jobs.errors import JobError, TemporaryError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_exists_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "part"
    assert local.put_new(path, b"first") is True
    assert local.put_new(path, b"second") is False
    assert path.read_bytes() == b"first"
    assert names(path.parent) == ["part"]


def test_one_of_many_writers_wins(tmp_path: Path) -> None:
    def race(number: int) -> list[bool]:
        return [local.put_new(tmp_path / f"{place}", b"%d" % number * 1000) for place in range(30)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(race, range(8)))
    for place in range(30):
        winners = [number for number in range(8) if results[number][place]]
        assert len(winners) == 1
        assert (tmp_path / f"{place}").read_bytes() == b"%d" % winners[0] * 1000
    assert len(names(tmp_path)) == 30


def test_the_file_is_whole_and_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def record_fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append("folder" if target.is_dir() else f"file of {target.stat().st_size}")
        fsync(descriptor)

    def record_link(source: Path, target: Path) -> None:
        events.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "link", record_link)
    local.put_new(tmp_path / "part", b"x" * 1234)
    assert events == ["file of 1234", "link", "folder"]


def test_replace_replaces(tmp_path: Path) -> None:
    local.replace(tmp_path / "s" / "snapshot", b"1")
    local.replace(tmp_path / "s" / "snapshot", b"2")
    assert (tmp_path / "s" / "snapshot").read_bytes() == b"2"
    assert names(tmp_path / "s") == ["snapshot"]


def no_links(source: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_without_hard_links_a_rename_commits_and_still_does_not_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    assert local.put_new(tmp_path / "part", b"first") is True
    monkeypatch.setattr(Path, "exists", lambda self: False)  # the other run commits after we have looked
    assert local.put_new(tmp_path / "part", b"second") is False
    assert (tmp_path / "part").read_bytes() == b"first"
    assert names(tmp_path) == ["part"]


def test_a_filesystem_with_neither_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_kwargs: object())
    with pytest.raises(JobError, match="neither hard links nor") as caught:
        local.put_new(tmp_path / "part", b"x")
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("write", [local.put_new, local.replace])
def test_a_full_disk_is_temporary_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "part"
    with monkeypatch.context() as patch, pytest.raises(TemporaryError) as caught:
        patch.setattr(os, "fsync", full)
        write(path, b"x")  # type: ignore[operator]
    assert caught.value.exit_code == 75
    assert str(path) in str(caught.value)
    assert "No space left" in str(caught.value)
    assert "MB free" in str(caught.value)
    assert names(tmp_path) == []


def test_permission_denied_is_for_the_user_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(source: Path, target: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "link", denied)
    with pytest.raises(JobError, match="Permission denied") as caught:
        local.put_new(tmp_path / "part", b"x")
    assert caught.value.exit_code == 3
    assert str(tmp_path / "part") in str(caught.value)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JobError, match="file") as caught:
        local.put_new(tmp_path / "file" / "part", b"x")
    assert caught.value.exit_code == 3


def test_a_folder_that_is_swept_away_while_writing_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    calls: list[Path] = []

    def swept_once(source: Path, target: Path) -> None:
        if not calls:
            Path(source).unlink()
        calls.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", swept_once)
    assert local.put_new(tmp_path / "part", b"x") is True
    assert len(calls) == 2
    assert (tmp_path / "part").read_bytes() == b"x"


def test_sweep_takes_temporary_files_only(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    mine, other = local.temporary_name(out), local.temporary_name(tmp_path / "other.jsonl")
    for path in (out, mine, other, tmp_path / ".tmp-mine"):
        path.write_bytes(b"torn")
    assert mine.name.endswith("out.jsonl")
    local.sweep(tmp_path, "out.jsonl")
    assert set(names(tmp_path)) == {"out.jsonl", other.name, ".tmp-mine"}
    local.sweep(tmp_path)
    assert names(tmp_path) == ["out.jsonl"]
    local.sweep(tmp_path / "absent")
