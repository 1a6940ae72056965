"""Finding the input files: paths, folders, globs and URLs become one pinned, ordered listing."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import fsspec

from pipeline.errors import UserError

FORMATS = ("auto", "jsonl", "parquet", "text")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json-lines": "jsonl",
    ".jsonlines": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".log": "text",
    ".md": "text",
    ".markdown": "text",
}
# syslog.1, app.log.3, messages-20240131, syslog.2024-01-31: what logrotate makes of a name.
_ROTATED = re.compile(r"(?:\.\d{1,4}|[-.]\d{4}-?\d{2}-?\d{2}(?:[-T_.]?\d+)?)$")
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class InputFile:
    """One file of the pinned listing. `size` is in bytes as stored; `version` is an etag or a modification time."""

    index: int
    path: str
    format: str
    compression: str | None
    size: int
    version: str

    @property
    def resumable(self) -> bool:
        return self.path != "-"


@dataclass(frozen=True)
class SkippedFile:
    path: str
    reason: str


@dataclass(frozen=True)
class Inputs:
    files: tuple[InputFile, ...]
    skipped: tuple[SkippedFile, ...]


@dataclass(frozen=True)
class _Found:
    path: str
    size: int
    version: str
    named: bool  # the user named this very file, or a pattern that matches it; a folder's files are only found


def is_url(path: str) -> bool:
    return "://" in path or "::" in path


def resolve_inputs(paths: Sequence[str], input_format: str = "auto", output: str | None = None) -> Inputs:
    """List the files behind `paths`, in the order given and sorted within a folder or pattern.

    Hidden files are left out of folders and patterns. A folder's file of unknown kind is skipped and reported; one
    that was named is refused. The files of `output` and its job folder are skipped in folders and refused by name.
    Raises UserError.
    """
    if input_format not in FORMATS:
        raise UserError(f"--input-format {input_format}: not one of {', '.join(FORMATS)}")
    if not paths:
        raise UserError("no input given")
    own = None if output is None else _identity(output)
    files: dict[str, InputFile] = {}
    skipped: list[SkippedFile] = []
    for path in paths:
        listed = list(_expand(path))
        if not listed:
            raise UserError(f"{path}: no files there (hidden files are left out)")
        for found in listed:
            key = _identity(found.path)
            if own is not None and (key == own or key.startswith(f"{own}.job/")):
                if found.named:
                    raise UserError(f"{found.path}: is both input and output; choose another output name")
                skipped.append(SkippedFile(found.path, "output of this job"))
                continue
            kind, compression = _kind_of(found.path, input_format)
            if kind is None:
                if found.named:
                    raise UserError(
                        f"{found.path}: cannot tell its format from its name; "
                        "say it with --input-format jsonl, parquet or text"
                    )
                skipped.append(SkippedFile(found.path, "unknown ending"))
            elif key not in files:
                files[key] = InputFile(len(files), found.path, kind, compression, found.size, found.version)
    if not files:
        example = f", for example {skipped[0].path} ({skipped[0].reason})" if skipped else ""
        raise UserError(
            f"no readable input in {', '.join(paths)}: {len(skipped)} files were skipped{example}; "
            "--input-format says how to read files of other names"
        )
    if len(files) > 1 and any(file.path == "-" for file in files.values()):
        raise UserError("- (standard input) cannot be combined with other inputs")
    return Inputs(tuple(files.values()), tuple(skipped))


def _kind_of(path: str, input_format: str) -> tuple[str | None, str | None]:
    """Return the format, None when unknown, and the compression that the file's name stands for."""
    if path == "-":
        if input_format not in ("auto", "jsonl"):
            raise UserError(f"standard input is read as JSONL, not as {input_format}; write it to a file first")
        return "jsonl", None
    name = path.rstrip("/").rsplit("/", 1)[-1].lower()
    name = name.split("?", 1)[0] if path.startswith(("http://", "https://")) else name
    stem, ending = os.path.splitext(name)  # noqa: PTH122 - a name, perhaps of a URL
    compression = _COMPRESSIONS.get(ending)
    if compression is not None:
        name = stem
    if input_format != "auto":
        kind: str | None = input_format
    elif _ROTATED.search(name) and os.path.splitext(name)[1] not in _ENDINGS:  # noqa: PTH122
        kind = "text"
    else:
        kind = _ENDINGS.get(os.path.splitext(name)[1])  # noqa: PTH122
    if kind == "parquet" and compression is not None:
        raise UserError(f"{path}: a compressed Parquet file cannot be read in place; unpack it")
    return kind, compression


def _expand(path: str) -> Iterator[_Found]:
    if path == "-":
        yield _Found("-", 0, "", True)
    elif is_url(path):
        yield from _expand_url(path)
    elif Path(path).is_dir():
        yield from _walk(path)
    elif os.path.lexists(path):
        yield _local(path, named=True)
    elif any(sign in path for sign in "*?["):
        matches = sorted(glob(path, recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise UserError(f"{path}: no file matches this pattern")
        for match in matches:
            yield from _walk(match) if Path(match).is_dir() and "**" not in path else _listed(match)
    else:
        raise UserError(f"{path}: no such file or folder")


def _listed(match: str) -> Iterator[_Found]:
    if not Path(match).is_dir():
        yield _local(match, named=True)


def _walk(folder: str) -> Iterator[_Found]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}") from error

    found: list[str] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:  # a link back to a folder above would go round for ever
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found.extend(os.path.join(parent, name) for name in names if not name.startswith("."))  # noqa: PTH118
    for path in sorted(found):
        yield _local(path, named=False)


def _local(path: str, named: bool) -> _Found:
    try:
        info = os.stat(path)  # noqa: PTH116 - keeps the user's own spelling of the path
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if named and not (stat.S_ISREG(info.st_mode) and os.access(path, os.R_OK)):
        why = "permission denied" if stat.S_ISREG(info.st_mode) else "not a regular file; use - for a pipe"
        raise UserError(f"{path}: {why}")
    return _Found(path, info.st_size, str(info.st_mtime_ns), named)


def _expand_url(url: str) -> Iterator[_Found]:
    files, path = _filesystem(url)
    pattern = ("*" in path or "[" in path) and not files.exists(path)
    try:
        infos: dict[str, dict[str, Any]] = (files.glob if pattern else files.find)(path, detail=True)
    except FileNotFoundError:
        infos = {}
    if not infos:
        raise UserError(f"{url}: {'no file matches this pattern' if pattern else 'no such file, or an empty folder'}")
    single = set(infos) == {path} or set(infos) == {path.rstrip("/")}
    base = "" if pattern else path.rstrip("/")
    for name in sorted(infos):
        inside = name[len(base) :].lstrip("/")
        if infos[name]["type"] != "file" or (not single and _hidden(inside.split("/"), pattern)):
            continue
        version = next((str(infos[name][key]) for key in _VERSIONS if infos[name].get(key)), "")
        spelled = url if single else _unstripped(files, name)
        yield _Found(spelled, int(infos[name]["size"] or 0), version, named=single or pattern)


def _hidden(parts: list[str], pattern: bool) -> bool:
    return any(part.startswith(".") for part in (parts[-1:] if pattern else parts))


def _identity(path: str) -> str:
    """Return one spelling of a path or URL, so that the same file is known under two names."""
    if path == "-" or (is_url(path) and not path.startswith("file://")):
        return path if path == "-" else _unstripped(*_filesystem(path))
    return os.path.realpath(path.removeprefix("file://"))


def _filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from error
    return files, path


def _unstripped(files: fsspec.AbstractFileSystem, path: str) -> str:
    return str(files.unstrip_protocol(path))
