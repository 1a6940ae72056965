"""Opening an input file as a stream of its uncompressed bytes, on any storage.

Decompression is pyarrow's: it reads all members of a file and reports one that ends early, where fsspec's zstd reader
returns what it has as if that were all.
"""

import sys
from types import TracebackType
from typing import BinaryIO, Self, cast

import fsspec
import pyarrow as pa

from pipeline.errors import UserError
from pipeline.inputs import InputFile, is_url
from pipeline.rows import DAMAGED_FILE, UNREADABLE_FILE, DocumentError

_MAGIC = {
    "gzip": (b"\x1f\x8b\x08",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))),
    "bz2": tuple(b"BZh%d" % level + body for level in range(1, 10) for body in (b"1AY&SY", b"\x17rE8P\x90")),
}
_HEAD = 16
_STEPS = (1 << 20, 1 << 12, 1)


def open_raw(path: str) -> BinaryIO:
    """Open a local path, a URL or `-` (standard input) for reading bytes; raises OSError."""
    if path == "-":
        return sys.stdin.buffer
    if not is_url(path):
        return open(path, "rb")  # noqa: PTH123 - the path is the user's own string, and the caller closes it
    try:
        return cast(BinaryIO, fsspec.open(path, "rb").open())
    except (ImportError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


class _Raw:
    """The stored bytes. It remembers whether storage itself failed, since pyarrow reports bad data as OSError too."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed = False
        self.closed = False
        self._read_some = getattr(file, "read1", file.read)
        self._pushed = b""
        self.head = self._fill_head()

    def _fill_head(self) -> bytes:
        while len(self._pushed) < _HEAD and (more := self._read_some(_HEAD - len(self._pushed))):
            self._pushed += more
        return self._pushed

    def read(self, size: int) -> bytes:
        if self._pushed:
            data, self._pushed = self._pushed[:size], self._pushed[size:]
            return data
        try:
            return self._read_some(size)
        except Exception:
            self.failed = True
            raise

    def seek(self, offset: int) -> None:
        self._pushed = b""
        self._file.seek(offset)

    def close(self) -> None:
        if not self.closed and self._file is not sys.stdin.buffer:
            self._file.close()
        self.closed = True


class ByteStream:
    """The uncompressed bytes of an input file, in order.

    Raises DocumentError("UnreadableFile") when the file cannot be opened at all, DocumentError("DamagedFile") when its
    data is not what its name says, is corrupt or ends early; OSError passes through when storage fails half-way.
    """

    def __init__(self, file: InputFile) -> None:
        self._name = file.path
        self._compression = file.compression
        self._place = 0  # uncompressed bytes given out
        self._step = _STEPS[0]
        self._open()

    def _open(self) -> None:
        try:
            self._raw = _Raw(open_raw(self._name))
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise DocumentError(UNREADABLE_FILE, f"{self._name}: {error.strerror or error}") from error
        try:
            self._check_head()
            self._stream: pa.NativeFile | None = None
            if self._compression is not None:
                self._stream = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), self._compression)
        except BaseException:
            self._raw.close()
            raise

    def _check_head(self) -> None:
        head = self._raw.head
        found = next((name for name, magics in _MAGIC.items() if head.startswith(magics)), None)
        if self._compression is not None and found != self._compression:
            what = "empty" if not head else f"{found} data" if found else "not compressed, or damaged at its start"
            raise DocumentError(DAMAGED_FILE, f"{self._name}: named as {self._compression} data, but it is {what}")
        if self._compression is None and found is not None:
            raise DocumentError(
                DAMAGED_FILE, f"{self._name}: this is {found} data, but its name does not say so; rename the file"
            )
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DocumentError(DAMAGED_FILE, f"{self._name}: UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8")
        if head.startswith(b"PAR1"):
            raise DocumentError(DAMAGED_FILE, f"{self._name}: a Parquet file; rename it or use --input-format parquet")

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, and b"" only at the end."""
        while True:
            try:
                data = self._raw.read(size) if self._stream is None else self._stream.read(min(size, self._step))
            except (OSError, pa.ArrowException) as error:
                if self._stream is None or self._raw.failed:
                    raise
                if self._step == _STEPS[-1]:
                    message = f"{self._name}: damaged {self._compression} data: {error}; what follows is lost"
                    raise DocumentError(DAMAGED_FILE, message) from error
                self._retry_with_smaller_steps()
            else:
                self._place += len(data)
                return cast(bytes, data)

    def _retry_with_smaller_steps(self) -> None:
        """Start again where the damage was met: a failed read loses the good bytes before it, so make it short."""
        self.close()
        self._open()
        place = 0
        while self._stream is not None and place < self._place:
            place += len(self._stream.read(min(self._place - place, _STEPS[0])))
        self._step = _STEPS[_STEPS.index(self._step) + 1]

    def skip_to(self, offset: int) -> None:
        """Move from the start to `offset` uncompressed bytes: a seek where possible, else read and thrown away."""
        if offset and self._stream is None and self._name != "-":
            self._raw.seek(offset)
            self._place = offset
            return
        while self._place < offset and self.read(min(offset - self._place, _STEPS[0])):
            pass

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
