"""A GGUF file as a weight source whose matrices come as the blocks of the file, mapped, never converted."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType

from streamllm_core.errors import ModelError
from streamllm_core.quantization import FORMATS, Format, expand
from streamllm_core.quantization.formats import GGUF_BLOCKS
from streamllm_core.weights.conversion_cache import build_once
from streamllm_core.weights.gguf_config import GGUFModel, read_model
from streamllm_core.weights.gguf_conversion import describe
from streamllm_core.weights.gguf_file import GGUFFile, GGUFTensor
from streamllm_core.weights.gguf_source import cache_key, recorded_fingerprint
from streamllm_core.weights.gguf_tensors import TensorPlan
from streamllm_core.weights.mapped_file import MappedFile
from streamllm_core.weights.reading import FileRange

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_STORED_AS = "blocks"
_log = logging.getLogger(__name__)


def open_gguf_blocks(path: Path, *, name: str, expected_sha256: str | None = None) -> GGUFBlocks:
    """Open a GGUF file as it is; only its configuration and tokenizer are written into the cache, the first time.

    Raises ModelError for a file that cannot be read, is not supported, or has blocks that are not expanded here.
    """
    model = read_model(GGUFFile(path))
    for tensor in model.file.tensors.values():
        _check_type(model, tensor)

    def build(folder: Path) -> None:
        _log.info("reading the configuration of %s (once)", path)
        describe(model, folder, dtype=torch.float32, stored_as=_STORED_AS, expected_sha256=expected_sha256)

    folder = build_once(cache_key(path, _STORED_AS, expected_sha256), build)
    try:
        return GGUFBlocks(model, folder, name, recorded_fingerprint(folder))
    except ModelError as error:
        raise ModelError(f"{error}; delete {folder}, and it will be written again") from error


class GGUFBlocks:
    """Weights of a GGUF file: matrices in blocks, in the checkpoint's order of rows; the rest plain."""

    def __init__(self, model: GGUFModel, config_dir: Path, name: str, fingerprint: dict[str, object]) -> None:
        self.name = name
        self.config_dir = config_dir
        self.fingerprint = fingerprint
        self.module_names = False
        self._file = model.file
        self._plans = {plan.name: plan for plan in model.plan.tensors}
        self._mapped = MappedFile(model.file.path, model.file.size)
        self._mtime_ns = model.file.path.stat().st_mtime_ns

    def names(self) -> list[str]:
        """Names of all tensors as a checkpoint of the model has them."""
        return list(self._plans)

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor; float32 if it is packed. ModelError when there is none of this name."""
        tensor = self._tensor(name)
        return _PLAIN.get(tensor.type, torch.float32), tensor.shape

    def format(self, name: str) -> Format | None:
        """The type of the tensor's blocks; None when it is stored plain."""
        kind = self._tensor(name).type
        return None if kind in _PLAIN else FORMATS[kind.name]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor's values, mapped when they are plain; may be called from any thread."""
        dtype, shape = self.header(name)
        format = self.format(name)
        raw = self.raw(name)
        if format is not None:
            out = torch.empty(shape)
            expand(format, raw, out)
            return out
        return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype).view(shape)

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes, uint8 [nbytes], to be treated as read-only; may be called from any thread.

        They are mapped, but for rows that the file has in another order: blocks never cross rows, so those are copied.
        """
        tensor, order = self._tensor(name), self._plan(name).order
        raw = self._mapped.bytes(tensor.offset, tensor.nbytes)
        return raw if order is None else raw.view(len(order), -1)[torch.from_numpy(order)].view(-1)

    def range(self, name: str) -> FileRange | None:
        """Where the tensor's bytes lie in the file; None when the file has its rows in another order."""
        if self._plan(name).order is not None:
            return None
        tensor = self._tensor(name)
        return FileRange(self._file.path, tensor.offset, tensor.nbytes, self._mtime_ns)

    def release(self, name: str) -> None:
        """Give back the memory pages of a tensor that has been copied elsewhere; it stays readable."""
        tensor = self._tensor(name)
        self._mapped.release(tensor.offset, tensor.nbytes)

    def _tensor(self, name: str) -> GGUFTensor:
        return self._file.tensors[self._plan(name).source]

    def _plan(self, name: str) -> TensorPlan:
        plan = self._plans.get(name)
        if plan is None:
            raise ModelError(f"{self.name}: {self._file.path} has no tensor {name}")
        return plan


def _check_type(model: GGUFModel, tensor: GGUFTensor) -> None:
    if tensor.type in _PLAIN or (tensor.type.name in GGUF_BLOCKS and len(tensor.shape) > 1):
        return
    raise ModelError(
        f"{model.file.path}: its tensor {tensor.name} has type {tensor.type.name}, which cannot be streamed as it is; "
        f"use a file of {', '.join(GGUF_BLOCKS)}, F16, BF16 or F32, or have it converted when it is loaded"
    )
