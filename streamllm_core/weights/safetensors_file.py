"""One safetensors file: its header checked in full, its tensors mapped from disk without a copy.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the header's length, a JSON header
that gives each tensor's type, shape and byte range, then the bytes. The file is mapped here rather than opened with
the safetensors package for three reasons: the mapping is read-only, so that the kernel does not count it as memory
that might be written, and a file larger than RAM maps at all; pages can be given back one tensor at a time
(`release`), so that reading a model from disk for hours does not show as gigabytes of resident memory; and a torn
file is reported by name before anything is computed.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamllm_core.errors import ModelError
from streamllm_core.weights.reading import FileRange

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000  # the format's own limit; a larger length means that this is no safetensors file


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `offset` and `nbytes` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """A safetensors file whose tensors can be read from any thread.

    Raises ModelError, with the file's path, when the file cannot be read or is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                length_bytes = file.read(8)
                length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
                if not 2 <= length <= min(_MAX_HEADER, status.st_size - 8):
                    raise _corrupt(path, f"its first 8 bytes announce a header of {length:,} bytes")
                header = file.read(length)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self.header_sha256 = hashlib.sha256(header).hexdigest()
        self.entries = _parse(path, header, 8 + length)
        data_end = max((entry.offset + entry.nbytes for entry in self.entries.values()), default=8 + length)
        if data_end != self.size:
            raise _corrupt(path, f"its header describes {data_end:,} bytes, the file has {self.size:,}")
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor, from the header alone."""
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{self.path}: {name} is stored as {entry.dtype}, which is not supported")
        return dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file; its bytes are read when they are first touched.

        It must not be written to: the mapping is read-only, and the operating system ends a process that tries.
        """
        dtype, shape = self.header(name)
        entry = self.entries[name]
        if entry.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = _as_tensor(self._mapped(), entry)
        if entry.offset % dtype.itemsize:  # the format permits it; a typed view needs alignment, so this one is copied
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def range(self, name: str) -> FileRange:
        """Where the tensor's bytes lie."""
        entry = self.entries[name]
        return FileRange(self.path, entry.offset, entry.nbytes, self.mtime_ns)

    def release(self, name: str) -> None:
        """Give back the process's pages of this tensor; later reads fetch them from the page cache or the disk.

        Only pages that belong to the tensor alone go: a page it shares with a neighbour may be in use there.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        entry = self.entries[name]
        start = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (entry.offset + entry.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if advice is not None and start < stop:
            self._mapped().madvise(advice, start, stop - start)

    def _mapped(self) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                self._map = _map_file(self.path, self.size)
            return self._map


def _map_file(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise _corrupt(path, "its size has changed since it was opened")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be mapped into memory ({error.strerror})") from error


class _Exposed:
    """Bytes of a read-only mapping, which it keeps, in a form that torch takes without warning about writes."""

    def __init__(self, mapped: mmap.mmap, entry: TensorEntry) -> None:
        self._bytes = np.frombuffer(
            mapped, dtype=np.uint8, count=entry.nbytes, offset=entry.offset
        )  # keeps the mapping
        address, _ = self._bytes.__array_interface__["data"]
        self.__array_interface__ = self._bytes.__array_interface__ | {"data": (address, False)}


def _as_tensor(mapped: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Exposed(mapped, entry)))


def _parse(path: Path, header: bytes, data_start: int) -> dict[str, TensorEntry]:
    try:
        described = json.loads(header)
    except ValueError as error:
        raise _corrupt(path, f"its header is not JSON ({error})") from error
    if not isinstance(described, dict):
        raise _corrupt(path, "its header is not a JSON object")
    described.pop("__metadata__", None)
    return {name: _entry(path, name, value, data_start) for name, value in described.items()}


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = str(value["dtype"]), tuple(map(int, value["shape"])), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"its entry for {name} lacks a type, shape or byte range") from error
    known = DTYPES.get(dtype)
    expected = math.prod(shape) * known.itemsize if known is not None else end - begin
    if not 0 <= begin <= end or end - begin != expected or any(extent < 0 for extent in shape):
        raise _corrupt(path, f"{name} ({dtype} {list(shape)}) claims bytes {begin} to {end}")
    return TensorEntry(dtype, shape, data_start + begin, end - begin)


def _corrupt(path: Path, detail: str) -> ModelError:
    return ModelError(f"{path}: not a whole safetensors file: {detail}; download or copy it again")
