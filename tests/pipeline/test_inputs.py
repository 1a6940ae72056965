import dataclasses
import json
import os
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import UserError
from pipeline.inputs import InputFile, resolve_inputs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.jsonl",
        "a.txt",
        "sub/c.log.gz",
        "sub/deeper/d.parquet",
        "sub/.hidden.txt",
        ".git/config.txt",
        "image.png",
        "noending",
    ):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x\n")
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", None),
        ("a.ndjson.gz", "jsonl", "gzip"),
        ("a.json-lines.zst", "jsonl", "zstd"),
        ("A.JSONL.BZ2", "jsonl", "bz2"),
        ("a.parquet", "parquet", None),
        ("a.txt", "text", None),
        ("a.md.zst", "text", "zstd"),
        ("syslog.1", "text", None),
        ("syslog.2.gz", "text", "gzip"),
        ("app.log.12.bz2", "text", "bz2"),
        ("messages-20240131", "text", None),
        ("app-2024-01-31.log", "text", None),
        ("syslog.2024-01-31.gz", "text", "gzip"),
        ("part-2024-01-31.jsonl", "jsonl", None),
    ],
)
def test_names_say_format_and_compression(tmp_path: Path, name: str, kind: str, compression: str | None) -> None:
    (tmp_path / name).write_bytes(b"x\n")
    (file,) = resolve_inputs([str(tmp_path / name)]).files
    assert (file.format, file.compression, file.size) == (kind, compression, 2)
    assert file.version == str((tmp_path / name).stat().st_mtime_ns)


def test_a_folder_is_read_recursively_in_order_and_reports_what_it_skips(tree: Path) -> None:
    inputs = resolve_inputs([str(tree)])
    assert [Path(file.path).relative_to(tree).as_posix() for file in inputs.files] == [
        "a.txt",
        "b.jsonl",
        "sub/c.log.gz",
        "sub/deeper/d.parquet",
    ]
    assert [file.index for file in inputs.files] == [0, 1, 2, 3]
    assert [(Path(skipped.path).name, skipped.reason) for skipped in inputs.skipped] == [
        ("image.png", "unknown ending"),
        ("noending", "unknown ending"),
    ]


def test_the_listing_survives_json(tree: Path) -> None:
    files = resolve_inputs([str(tree)]).files
    listing = json.loads(json.dumps([dataclasses.asdict(file) for file in files]))
    assert tuple(InputFile(**entry) for entry in listing) == files


def test_globs_match_sorted_and_leave_hidden_files_out(tree: Path) -> None:
    files = resolve_inputs([f"{tree}/**/*.*[tlz]"]).files
    assert [Path(file.path).name for file in files] == ["a.txt", "b.jsonl", "c.log.gz", "d.parquet"]
    (tree / "odd[1].txt").write_text("x")
    assert [Path(file.path).name for file in resolve_inputs([f"{tree}/odd[1].txt"]).files] == ["odd[1].txt"]


def test_a_glob_that_matches_a_folder_reads_the_folder(tree: Path) -> None:
    assert [Path(file.path).name for file in resolve_inputs([f"{tree}/s*"]).files] == ["c.log.gz", "d.parquet"]


def test_several_paths_keep_their_order_and_a_file_named_twice_is_taken_once(tree: Path) -> None:
    files = resolve_inputs([str(tree / "b.jsonl"), str(tree), f"{tree}/*.txt"]).files
    assert [Path(file.path).name for file in files] == ["b.jsonl", "a.txt", "c.log.gz", "d.parquet"]


def test_a_link_back_to_a_folder_above_does_not_go_round(tree: Path) -> None:
    (tree / "sub" / "loop").symlink_to(tree)
    assert len(resolve_inputs([str(tree)]).files) == 4


def test_input_format_settles_doubt(tree: Path) -> None:
    (file,) = resolve_inputs([str(tree / "noending")], "text").files
    assert file.format == "text"
    assert {file.format for file in resolve_inputs([str(tree)], "jsonl").files} == {"jsonl"}


@pytest.mark.parametrize(
    ("paths", "input_format", "message"),
    [
        ([], "auto", "no input"),
        (["missing.txt"], "auto", "no such file"),
        (["*.nothing"], "auto", "no file matches"),
        (["noending"], "auto", "--input-format"),
        (["image.png"], "auto", "--input-format"),
        (["empty"], "auto", "no files there"),
        (["only_unknown"], "auto", "--input-format"),
        (["a.txt"], "csv", "not one of"),
        (["t.parquet.gz"], "auto", "unpack"),
        (["-", "a.txt"], "auto", "cannot be combined"),
        (["-"], "text", "JSONL"),
        (["pipe"], "text", "not a regular file"),
        (["dangling.txt"], "auto", "No such file"),
        (["nosuchscheme://x/y.txt"], "auto", "nosuchscheme"),
        (["memory://nothing-here/y.txt"], "auto", "no such file"),
        (["memory://nothing-here/*.txt"], "auto", "no file matches"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], input_format: str, message: str
) -> None:
    monkeypatch.chdir(tree)
    (tree / "empty").mkdir()
    (tree / "only_unknown").mkdir()
    (tree / "only_unknown" / "x.png").write_bytes(b"x")
    (tree / "t.parquet.gz").write_bytes(b"x")
    (tree / "dangling.txt").symlink_to("gone.txt")
    os.mkfifo(tree / "pipe")
    with pytest.raises(UserError, match=message):
        resolve_inputs(paths, input_format)


def test_a_named_file_without_permission_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(UserError, match="permission denied"):
        resolve_inputs([str(tree / "a.txt")])


def test_the_output_is_never_an_input(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tree / "out.jsonl"
    output.write_text("{}\n")
    (tree / "out.jsonl.job").mkdir()
    (tree / "out.jsonl.job" / "part.jsonl").write_text("{}\n")
    monkeypatch.chdir(tree)
    inputs = resolve_inputs(["."], output=str(output))
    assert sorted(s.path for s in inputs.skipped if s.reason == "output of this job") == [
        "./out.jsonl",
        "./out.jsonl.job/part.jsonl",
    ]
    assert all("out.jsonl" not in file.path for file in inputs.files)
    for name in ("out.jsonl", f"file://{output}"):
        with pytest.raises(UserError, match="both input and output"):
            resolve_inputs([name], output=str(output))
    memory = fsspec.filesystem("memory")
    for name in ("/own/in.jsonl", "/own/out.jsonl", "/own/out.jsonl.job/part"):
        memory.pipe(name, b"{}\n")
    for spelled in ("memory://own/out.jsonl", "memory:///own/out.jsonl"):
        found = resolve_inputs(["memory://own"], output=spelled)
        assert [file.path for file in found.files] == ["memory:///own/in.jsonl"]


def test_standard_input() -> None:
    (file,) = resolve_inputs(["-"]).files
    assert (file.path, file.format, file.resumable) == ("-", "jsonl", False)


def test_urls_are_listed_like_folders() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("b.jsonl", "sub/a.txt", "sub/.hidden.txt", "x.bin"):
        memory.pipe(f"/listing/{name}", b"x\n")
    inputs = resolve_inputs(["memory://listing"])
    assert [file.path for file in inputs.files] == ["memory:///listing/b.jsonl", "memory:///listing/sub/a.txt"]
    assert all(file.version and file.size == 2 for file in inputs.files)
    assert [skipped.path for skipped in inputs.skipped] == ["memory:///listing/x.bin"]
    assert [file.path for file in resolve_inputs(["memory://listing/b.jsonl"]).files] == ["memory://listing/b.jsonl"]
    assert [file.path for file in resolve_inputs(["memory://listing/*.jsonl"]).files] == ["memory:///listing/b.jsonl"]


def test_file_urls(tree: Path) -> None:
    (file,) = resolve_inputs([f"file://{tree}/a.txt"]).files
    assert (file.format, file.size) == ("text", 2)
    assert len(resolve_inputs([f"file://{tree}"]).files) == 4
