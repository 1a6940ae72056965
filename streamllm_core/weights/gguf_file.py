"""A GGUF file: its metadata, its tensors, and their values in float32, one bounded piece at a time.

The header is parsed here and not by gguf.GGUFReader, which makes an array object for every vocabulary entry and
merge (seconds, and hundreds of megabytes, for a large vocabulary); types, block sizes and dequantisation are the gguf
package's own. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from streamllm_core.errors import ModelError

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_VERSIONS = (2, 3)
_PIECE_VALUES = 4 << 20  # values dequantised at a time: 16 MB in float32


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor; `shape` in row-major order (rows first), `offset` and `nbytes` in bytes from the file's start."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """Header of a GGUF file. Raises ModelError, with the path, for a file that is none or is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if self.size < 24 or file.read(4) != b"GGUF":
                    raise ModelError(f"{path}: not a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    self._parse(_Cursor(mapped))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        except (struct.error, ValueError, KeyError) as error:  # ValueError: unknown type numbers, torn text
            raise ModelError(f"{path}: not a whole GGUF file (header: {error}); download or copy it again") from error
        end = max((tensor.offset + tensor.nbytes for tensor in self.tensors.values()), default=0)
        if end > self.size:
            raise ModelError(
                f"{path}: not a whole GGUF file: its header describes {end:,} bytes, the file has {self.size:,}; "
                "download or copy it again"
            )

    def pieces(self, name: str, order: npt.NDArray[np.int64] | None = None) -> Iterator[npt.NDArray[np.float32]]:
        """Values of a tensor in float32, rows in file order or as `order` picks them, a bounded number at a time."""
        tensor = self.tensors[name]
        rows = tensor.shape[0]
        row_values = math.prod(tensor.shape[1:])
        step = max(1, _PIECE_VALUES // row_values)
        if len(tensor.shape) == 1:  # one row of values: `order` picks values
            values = self._dequantized(tensor, self._read(tensor, 0, tensor.nbytes).reshape(1, -1)).reshape(-1)
            yield values if order is None else values[order]
            return
        row_bytes = tensor.nbytes // rows
        # Quantisation blocks never cross rows, so rows are put in order before they grow to float32.
        stored = None if order is None else self._read(tensor, 0, tensor.nbytes).reshape(rows, row_bytes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            if stored is None or order is None:
                raw = self._read(tensor, start * row_bytes, (stop - start) * row_bytes).reshape(-1, row_bytes)
            else:
                raw = stored[order[start:stop]]
            yield self._dequantized(tensor, raw).reshape(stop - start, *tensor.shape[1:])

    def _read(self, tensor: GGUFTensor, start: int, count: int) -> npt.NDArray[np.uint8]:
        # Plain reads: pages of a mapping would stay resident, up to the size of the file.
        data = np.fromfile(self.path, dtype=np.uint8, count=count, offset=tensor.offset + start)
        if data.size != count:
            raise ModelError(f"{self.path}: ended while {tensor.name} was read; was it replaced meanwhile?")
        return data

    def _dequantized(self, tensor: GGUFTensor, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        try:
            values: npt.NDArray[np.float32] = dequantize(raw, tensor.type)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: {tensor.name} has type {tensor.type.name}, not supported") from error
        return values

    def _parse(self, cursor: _Cursor) -> None:
        cursor.position = 4
        version = cursor.scalar("<u4")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3 in little-endian are)")
        tensor_count, value_count = cursor.scalar("<u8"), cursor.scalar("<u8")
        for _ in range(value_count):
            key = cursor.text()
            self.metadata[key] = cursor.value(GGUFValueType(cursor.scalar("<u4")))
        described = []
        for _ in range(tensor_count):
            name = cursor.text()
            extents = [cursor.scalar("<u8") for _ in range(cursor.scalar("<u4"))]
            described.append((name, extents, GGMLQuantizationType(cursor.scalar("<u4")), cursor.scalar("<u8")))
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError(f"alignment {alignment}")
        data_start = -(-cursor.position // alignment) * alignment
        for name, extents, kind, offset in described:
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
            if not extents or min(extents) < 1 or extents[0] % block_values:
                raise ValueError(f"{name} has shape {extents} in type {kind.name}")
            nbytes = math.prod(extents) // block_values * block_bytes
            shape = tuple(reversed(extents))  # GGUF puts the fastest-running extent first
            self.tensors[name] = GGUFTensor(name, kind, shape, data_start + offset, nbytes)


class _Cursor:
    """Reads values one after the other; struct.error when the file ends too soon."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        if len(taken) != count:
            raise struct.error(f"ends at byte {len(self.data):,}")
        self.position += count
        return taken

    def scalar(self, format_: str) -> Any:
        dtype = np.dtype(format_)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.FLOAT32:
            return _shortest(self.take(4))
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        element, count = GGUFValueType(self.scalar("<u4")), self.scalar("<u8")
        if element in _SCALARS:
            dtype = np.dtype(_SCALARS[element])
            return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        return [self.value(element) for _ in range(count)]


def _shortest(raw: bytes) -> float:
    # The shortest decimal that means this float32: an epsilon written as 1e-5 comes back as 1e-5, not 9.99999975e-6.
    return float(str(np.frombuffer(raw, "<f4")[0]))
