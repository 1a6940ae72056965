"""One safetensors file: its header checked in full, its tensors mapped from disk without a copy.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the header's length, a JSON header
that gives each tensor's type, shape and byte range, then the bytes. The file is read here rather than with the
safetensors package for two reasons: how it is mapped (``MappedFile``), and that a torn file is reported by name before
anything is computed.

A file of ours may hold packed tensors, as one row of bytes each. Its metadata then has, under ``PACKED_KEY``, the
format and the shape of each of them as JSON, and under ``NAMES_KEY`` "modules" if its names are those of the modules.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamllm_core.errors import ModelError
from streamllm_core.quantization import FORMATS, Format, expand
from streamllm_core.weights.mapped_file import MappedFile
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
PACKED_KEY, NAMES_KEY = "streamllm.packed", "streamllm.names"
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
        described = _described(path, header)
        metadata = described.pop("__metadata__", {})
        self.entries = {name: _entry(path, name, value, 8 + length) for name, value in described.items()}
        data_end = max((entry.offset + entry.nbytes for entry in self.entries.values()), default=8 + length)
        if data_end != self.size:
            raise _corrupt(path, f"its header describes {data_end:,} bytes, the file has {self.size:,}")
        self.packed = _packed(path, metadata, self.entries)
        self.module_names = metadata.get(NAMES_KEY) == "modules"
        self._mapped = MappedFile(path, self.size)

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor, from the header alone."""
        if name in self.packed:
            return torch.float32, self.packed[name][1]
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{self.path}: {name} is stored as {entry.dtype}, which is not supported")
        return dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file; its bytes are read when they are first touched.

        It must not be written to: the mapping is read-only, and the operating system ends a process that tries.
        The values of a packed tensor are expanded, into float32.
        """
        dtype, shape = self.header(name)
        if name in self.packed:
            out = torch.empty(shape)
            expand(self.packed[name][0], self.raw(name), out)
            return out
        entry = self.entries[name]
        if entry.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = self.raw(name)
        if entry.offset % dtype.itemsize:  # the format permits it; a typed view needs alignment, so this one is copied
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def range(self, name: str) -> FileRange:
        """Where the tensor's stored bytes lie."""
        entry = self.entries[name]
        return FileRange(self.path, entry.offset, entry.nbytes, self.mtime_ns)

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes, uint8 [nbytes], as a view of the mapped file; same warning."""
        entry = self.entries[name]
        return self._mapped.bytes(entry.offset, entry.nbytes)

    def release(self, name: str) -> None:
        """Give back the process's pages of this tensor; later reads fetch them from the page cache or the disk."""
        entry = self.entries[name]
        self._mapped.release(entry.offset, entry.nbytes)


def _described(path: Path, header: bytes) -> dict[str, Any]:
    try:
        described = json.loads(header)
    except ValueError as error:
        raise _corrupt(path, f"its header is not JSON ({error})") from error
    if not isinstance(described, dict) or not isinstance(described.get("__metadata__", {}), dict):
        raise _corrupt(path, "its header is not a JSON object")
    return described


def _packed(
    path: Path, metadata: dict[str, Any], entries: dict[str, TensorEntry]
) -> dict[str, tuple[Format, tuple[int, ...]]]:
    """Format and shape of the packed tensors."""
    try:
        described = json.loads(metadata.get(PACKED_KEY, "{}"))
        packed = {name: (FORMATS[kind], tuple(map(int, shape))) for name, (kind, shape) in described.items()}
        whole = all(entries[name].nbytes == format.nbytes(shape) for name, (format, shape) in packed.items())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"its list of packed tensors cannot be read ({error})") from error
    if not whole:
        raise _corrupt(path, "its packed tensors are not of the sizes that its metadata says")
    return packed


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
