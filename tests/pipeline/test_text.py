import gzip
import random
from pathlib import Path

import pytest

from pipeline.documents import Document, read_rows
from pipeline.inputs import InputFile, resolve_inputs
from pipeline.rows import DAMAGED_FILE, DocumentError
from pipeline.text import printable


def written(path: Path, data: bytes) -> InputFile:
    path.write_bytes(data)
    return resolve_inputs([str(path)]).files[0]


def document(path: Path, data: bytes) -> Document:
    (row,) = read_rows(written(path, data))
    return Document(row, lambda text: list(text.encode()))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é \U0001f600 \ufeff", "plain é \U0001f600 \ufeff"),
        (b"caf\xe9 \x80\xff".decode("utf-8", "surrogateescape"), "caf\\xe9 \\x80\\xff"),
        ("\ud800 \udfff", "\\ud800 \\udfff"),
    ],
)
def test_printable(raw: str, shown: str) -> None:
    assert printable(raw) == shown


def test_a_text_file_is_one_row_that_nothing_has_read(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path / "a.log", b"hello\n"), keep=("x",))
    assert (row.id, row.ordinal, row.size, row.fields, row.is_file, row.text) == ("a.log", 0, 6, {}, True, None)
    (tmp_path / "a.log").unlink()
    with pytest.raises(DocumentError, match=r"a\.log: No such file"):
        list(row.read())


def test_an_empty_file_is_skipped(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path / "a.txt", b""))
    assert (row.skip_reason, row.is_file) == ("empty file", False)
    assert list(document(tmp_path / "b.txt", b"\xef\xbb\xbf \r\n\n").segments(16)) == []


@pytest.mark.parametrize("buffer_size", [1, 2, 3, 5, 1 << 20])
def test_pieces_never_cut_a_character(tmp_path: Path, buffer_size: int) -> None:
    random_ = random.Random(buffer_size)
    good = "".join(random_.choice("aé文😀\u05d0\u0301\n") for _ in range(500)).encode()
    noise = bytearray(good)
    for _ in range(40):
        noise.insert(random_.randrange(len(noise)), random_.randrange(128, 256))
    for data in (good, bytes(noise)):
        (row,) = read_rows(written(tmp_path / "a.txt", data))
        text = "".join(row.read(buffer_size=buffer_size))
        assert text == data.decode("utf-8", "surrogateescape")
        assert "\ufffd" not in text


def test_offsets_are_bytes_of_the_file(tmp_path: Path) -> None:
    lines = ["Ünïcode — text line no %d.\r\n", "Bad byte here: \udcff line %d.\r\n", "\ufeffJoined 文字 file %d.\r\n"]
    data = "".join(line % n for n in range(60) for line in lines).encode("utf-8", "surrogateescape")
    found = list(document(tmp_path / "a.txt", data).segments(200))
    assert [segment.start for segment in found[1:]] == [segment.end for segment in found[:-1]]
    assert (found[0].start, found[-1].end) == (0, len(data))
    for segment in found:
        for start, end in segment.sentences:
            piece = data[segment.locate(start) : segment.locate(end)]
            assert printable(piece.decode("utf-8", "surrogateescape")) == segment.text[start:end]
            assert piece.endswith(b".")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_reading_starts_again_at_a_segments_end(tmp_path: Path, name: str) -> None:
    data = b"\xef\xbb\xbf" + "".join(f"Sätze no {n}. \xff\n" for n in range(300)).encode("latin-1", "replace")
    whole = document(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    found = list(whole.segments(300))
    assert len(found) > 10
    for place in (0, 1, len(found) // 2, len(found) - 1):
        assert list(whole.segments(300, start=found[place].end)) == found[place + 1 :]


def test_a_truncated_file_is_an_error_while_reading(tmp_path: Path) -> None:
    packed = gzip.compress(random.Random(0).randbytes(50_000).hex().encode())
    broken = document(tmp_path / "a.log.gz", packed[:-20_000])
    with pytest.raises(DocumentError, match="what follows is lost") as caught:
        list(broken.segments(1000))
    assert caught.value.type == DAMAGED_FILE


def test_utf_16_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="iconv"):
        list(document(tmp_path / "a.txt", "hello".encode("utf-16")).segments(16))
