import bz2
import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
import pyarrow as pa
import pytest

from pipeline import compression
from pipeline.compression import ByteStream
from pipeline.inputs import InputFile
from pipeline.rows import DAMAGED_FILE, UNREADABLE_FILE, DocumentError


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return cast(bytes, sink.getvalue().to_pybytes())


PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd, "bz2": bz2.compress}
DATA = random.Random(0).randbytes(3000) + b"line\n" * 20000


def input_file(path: Path | str, kind: str | None) -> InputFile:
    return InputFile(0, str(path), "text", kind, 1, "")


def read_all(path: Path | str, kind: str | None, size: int = 1000) -> bytes:
    with ByteStream(input_file(path, kind)) as stream:
        return b"".join(iter(lambda: stream.read(size), b""))


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_files_of_several_members_are_read_whole(tmp_path: Path, kind: str, size: int) -> None:
    pack = PACKERS[kind]
    path = tmp_path / "file"
    path.write_bytes(pack(DATA) + pack(DATA[:2000]) + pack(b""))
    assert read_all(path, kind, size) == DATA + DATA[:2000]
    path.write_bytes(pack(b""))
    assert read_all(path, kind, size) == b""


@pytest.mark.parametrize("kind", PACKERS)
def test_a_file_that_ends_early_is_never_short_in_silence(tmp_path: Path, kind: str) -> None:
    first, second = PACKERS[kind](DATA), PACKERS[kind](DATA[:2000])
    path = tmp_path / "file"
    cuts = [*range(40), len(first) // 2, *range(len(first) - 12, len(first)), *range(len(first) + 1, len(first) + 40)]
    for cut in [*cuts, len(first) + len(second) - 1]:
        path.write_bytes((first + second)[:cut])
        with pytest.raises(DocumentError) as caught:
            read_all(path, kind)
        assert caught.value.type == DAMAGED_FILE
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["gzip", "bz2"])
def test_flipped_bits_are_noticed(tmp_path: Path, kind: str) -> None:
    packed = bytearray(PACKERS[kind](DATA))
    packed[len(packed) // 2] ^= 0x55
    (tmp_path / "file").write_bytes(packed)
    with pytest.raises(DocumentError, match="damaged"):
        read_all(tmp_path / "file", kind)


@pytest.mark.parametrize("kind", PACKERS)
def test_rubbish_after_the_end_is_noticed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(PACKERS[kind](DATA) + b"rubbish")
    with pytest.raises(DocumentError, match="damaged"):
        read_all(tmp_path / "file", kind)


@pytest.mark.parametrize(
    ("named", "data", "message"),
    [
        ("gzip", b"plain text\n", "not compressed"),
        ("gzip", b"", "it is empty"),
        ("zstd", gzip.compress(DATA), "gzip data"),
        (None, gzip.compress(DATA), "rename"),
        (None, bz2.compress(DATA), "rename"),
        (None, bz2.compress(b""), "rename"),
        (None, zstd(DATA), "rename"),
        (None, "text".encode("utf-16"), "UTF-16"),
        (None, b"PAR1 and so on", "Parquet"),
    ],
)
def test_what_is_not_as_it_is_named_is_refused(tmp_path: Path, named: str | None, data: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(DocumentError, match=message) as caught:
        read_all(tmp_path / "file", named)
    assert caught.value.type == DAMAGED_FILE


def test_text_that_only_begins_like_a_magic_number_is_text(tmp_path: Path) -> None:
    for data in (b"BZh is a prefix", b"PAR is not parquet", b"\x1f", b"B"):
        (tmp_path / "file").write_bytes(data)
        assert read_all(tmp_path / "file", None) == data


def test_missing_files_and_folders_are_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(DocumentError) as caught:
            ByteStream(input_file(path, None))
        assert caught.value.type == UNREADABLE_FILE


@pytest.mark.parametrize("kind", [None, *PACKERS])
@pytest.mark.parametrize("offset", [0, 1, 3000, len(DATA) - 1, len(DATA)])
def test_skipping(tmp_path: Path, kind: str | None, offset: int) -> None:
    (tmp_path / "file").write_bytes(PACKERS[kind](DATA) if kind else DATA)
    with ByteStream(input_file(tmp_path / "file", kind)) as stream:
        stream.skip_to(offset)
        assert b"".join(iter(lambda: stream.read(777), b"")) == DATA[offset:]


@pytest.mark.parametrize("kind", [None, *PACKERS])
def test_urls(kind: str | None) -> None:
    fsspec.filesystem("memory").pipe("/packed", PACKERS[kind](DATA) if kind else DATA)
    assert read_all("memory://packed", kind) == DATA


@pytest.mark.parametrize("kind", [None, *PACKERS])
def test_storage_that_fails_half_way_is_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    packed = PACKERS[kind](random.Random(1).randbytes(200_000)) if kind else DATA

    class Failing:
        place = 0

        def read(self, size: int) -> bytes:
            if self.place > 50_000:
                raise OSError(5, "storage is down")
            data = packed[self.place : self.place + min(size, 10_000)]
            self.place += len(data)
            return data

        def close(self) -> None:
            pass

    monkeypatch.setattr(compression, "open_raw", lambda path: cast(BinaryIO, Failing()))
    with pytest.raises(OSError, match="storage is down"):
        read_all(tmp_path / "file", kind, 100_000)
