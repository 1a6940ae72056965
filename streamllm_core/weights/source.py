"""Which kind of model a name means, and the one interface that every kind offers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch

from streamllm_core.errors import ModelError
from streamllm_core.quantization import Format
from streamllm_core.weights.default_model import DEFAULT_MODEL, SHA256, default_model_file
from streamllm_core.weights.folder import FolderSource
from streamllm_core.weights.gguf_blocks import open_gguf_blocks
from streamllm_core.weights.gguf_source import open_gguf
from streamllm_core.weights.hub import open_hub
from streamllm_core.weights.hub_headers import open_hub_headers
from streamllm_core.weights.reading import FileRange


class WeightSource(Protocol):
    """Named tensors on disk, and the folder with the files that describe them."""

    name: str
    """What the user called the model: an alias, a hub id or a path."""
    config_dir: Path
    """Local folder with config.json and, if the model has them, tokenizer files."""
    fingerprint: dict[str, object]
    """Identity of weights, configuration and tokenizer, as JSON values; equal means that results are comparable."""
    module_names: bool
    """Tensors have the names and shapes of the model's modules already; no conversion applies to them."""

    def names(self) -> list[str]:
        """Names of all tensors as the checkpoint stores them."""
        ...

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor without reading it; ModelError when the checkpoint does not hold it.

        Of a packed one, the shape that it expands to, and float32.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, mapped from disk, to be treated as read-only; may be called from any thread.

        The values of a packed one are expanded, into float32.
        """
        ...

    def format(self, name: str) -> Format | None:
        """How the tensor is packed; None when it is stored plain."""
        ...

    def raw(self, name: str) -> torch.Tensor:
        """The bytes of a packed tensor, uint8 [format.nbytes(shape)] on the CPU, mapped from disk where possible, to be
        treated as read-only; may be called from any thread."""
        ...

    def release(self, name: str) -> None:
        """Give back the memory pages of a tensor that has been copied elsewhere; it stays readable."""
        ...


@runtime_checkable
class FileSource(Protocol):
    """A weight source may also tell where bytes lie, so that a layer can be read from disk without a mapping."""

    def range(self, name: str) -> FileRange | None:
        """The stored bytes of a tensor, packed or not; None when they do not lie together in this order."""
        ...


def open_source(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    packed: bool = False,
) -> WeightSource:
    """Open a model by alias, path or hub id.

    The alias of the default model comes first, then what exists on disk: a folder with safetensors or a .gguf file.
    What merely looks like a path and does not exist is an error; everything else is a hub id, for which `revision`
    and `token` count. `dtype` is the type the caller computes in, if known: it only decides how a GGUF's weights are
    stored when they are converted ("auto" and float32: exactly). With `packed`, a GGUF is not converted: its weights
    come as the blocks of the file. Raises ModelError for all that the user can mend.
    """
    name = str(name_or_path)
    if name == DEFAULT_MODEL:
        return _open_gguf(default_model_file(), name, dtype, packed, SHA256)
    path = Path(name).expanduser()
    if path.is_dir():
        return FolderSource(path, name=name)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _open_gguf(path, name, dtype, packed)
    if path.exists():
        raise ModelError(f"{name}: neither a folder with safetensors nor a .gguf file; give the folder it lies in")
    if isinstance(name_or_path, Path) or _looks_like_path(name):
        raise ModelError(f"{name}: no such file or folder")
    return open_hub(name, revision=revision, token=token)


def open_headers(name_or_path: str | Path, *, revision: str | None = None, packed: bool = False) -> WeightSource:
    """Like ``open_source`` for those who want names, types and shapes alone: of a hub model no weights are downloaded.
    Raises ModelError."""
    name = str(name_or_path)
    if name == DEFAULT_MODEL or isinstance(name_or_path, Path) or Path(name).exists() or _looks_like_path(name):
        return open_source(name_or_path, packed=packed)
    return open_hub_headers(name, revision=revision)


def _open_gguf(
    path: Path, name: str, dtype: torch.dtype | Literal["auto"], packed: bool, expected_sha256: str | None = None
) -> WeightSource:
    if packed:
        return open_gguf_blocks(path, name=name, expected_sha256=expected_sha256)
    return open_gguf(path, name=name, dtype=dtype, expected_sha256=expected_sha256)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.lower().endswith(".gguf")
