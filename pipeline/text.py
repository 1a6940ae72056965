"""Text files and the characters that are no text: bytes that are not UTF-8, lone surrogates."""

import codecs
import re
from collections.abc import Iterator

from pipeline.compression import ByteStream
from pipeline.inputs import InputFile
from pipeline.rows import Place, Row

_SURROGATE = re.compile("[\ud800-\udfff]")
# How much larger text is than its compressed form: for planning units only.
_EXPANSION = 5


def printable(text: str) -> str:
    r"""Write every lone surrogate as an escape: `\xNN` for a byte that was not UTF-8 (PEP 383), `\udXXX` for others."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return _SURROGATE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def text_rows(file: InputFile) -> Iterator[Row]:
    """Yield the one row that a text file is. Nothing is opened before its `read` is called."""
    name = file.path.rstrip("/").rsplit("/", 1)[-1]
    if file.size == 0:
        yield Row(file, Place(), id=name, skip_reason="empty file")
        return

    def pieces(start: int, buffer_size: int) -> Iterator[str]:
        return read_text(file, start, buffer_size)

    yield Row(file, Place(), id=name, size=file.size * (_EXPANSION if file.compression else 1), pieces=pieces)


def read_text(file: InputFile, start: int = 0, buffer_size: int = 1 << 20) -> Iterator[str]:
    """Decode a text file from the uncompressed byte `start` on, in pieces of at most `buffer_size` characters.

    Bytes that are no UTF-8 become one lone surrogate each, never U+FFFD, wherever the pieces meet.
    Raises DocumentError and OSError as ByteStream does.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with ByteStream(file) as stream:
        stream.skip_to(start)
        while data := stream.read(buffer_size):
            if piece := decoder.decode(data):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece
