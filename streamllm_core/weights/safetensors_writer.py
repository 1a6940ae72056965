"""Safetensors files of which every tensor's size is known before the first is written; they come in any order."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from streamllm_core.quantization import Format
from streamllm_core.weights.folder import INDEX_FILE, SINGLE_FILE
from streamllm_core.weights.safetensors_file import DTYPES, NAMES_KEY, PACKED_KEY

SHARD_BYTES = 4 << 30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor to be written: packed in ``format``, or plain in ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format | None = None

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape) if self.format else math.prod(self.shape) * self.dtype.itemsize

    @property
    def entry(self) -> dict[str, object]:
        if self.format:
            return {"dtype": "U8", "shape": [self.nbytes]}
        return {"dtype": _NAMES[self.dtype], "shape": self.shape}


class ModelWriter:
    """Writes a model folder's weights, under the names of its modules: one file, or shards of about 4 GB.

    Used as a context; ``write`` is called once for every tensor.
    """

    def __init__(self, folder: Path, tensors: Iterable[Stored]) -> None:
        self._folder = folder
        self._place: dict[str, tuple[BinaryIO, int, int]] = {}  # file, offset, bytes
        self._shards = _shards(tensors)
        self._open = ExitStack()

    def __enter__(self) -> ModelWriter:
        count = len(self._shards)
        files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
        for name, shard in zip(files, self._shards, strict=True):
            self._begin(self._open.enter_context((self._folder / name).open("wb")), shard)
        if count > 1:
            located = {stored.name: name for name, shard in zip(files, self._shards, strict=True) for stored in shard}
            (self._folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": located}, indent=2))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """``tensor`` is on the CPU, of the announced type and shape; packed ones are uint8 [nbytes]."""
        file, offset, nbytes = self._place.pop(name)
        if tensor.nbytes != nbytes:
            raise ValueError(f"{name} has {tensor.nbytes:,} bytes, {nbytes:,} were announced")
        file.seek(offset)
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _begin(self, file: BinaryIO, shard: list[Stored]) -> None:
        packed = {stored.name: [stored.format.name, stored.shape] for stored in shard if stored.format}
        metadata = {"format": "pt", NAMES_KEY: "modules", PACKED_KEY: json.dumps(packed)}
        header: dict[str, object] = {"__metadata__": metadata}
        end = 0
        for stored in shard:
            begin, end = end, end + stored.nbytes
            header[stored.name] = {**stored.entry, "data_offsets": [begin, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # the data begins aligned
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        offset = file.tell()
        for stored in shard:
            self._place[stored.name] = file, offset, stored.nbytes
            offset += stored.nbytes


def _shards(tensors: Iterable[Stored]) -> list[list[Stored]]:
    shards: list[list[Stored]] = [[]]
    size = 0
    for stored in tensors:
        if shards[-1] and size + stored.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(stored)
        size += stored.nbytes
    return shards
