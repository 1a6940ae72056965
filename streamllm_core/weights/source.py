"""Which kind of model a name means, and the one interface that every kind offers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import torch

from streamllm_core.errors import ModelError
from streamllm_core.weights.folder import FolderSource


class WeightSource(Protocol):
    """Named tensors on disk, and the folder with the files that describe them."""

    name: str
    """What the user called the model: an alias, a hub id or a path."""
    config_dir: Path
    """Local folder with config.json and, if the model has them, tokenizer files."""
    fingerprint: dict[str, object]
    """Identity of weights, configuration and tokenizer, as JSON values; equal means that results are comparable."""

    def names(self) -> list[str]:
        """Names of all tensors as the checkpoint stores them."""
        ...

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor without reading it; ModelError when the checkpoint does not hold it."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, mapped from disk, to be treated as read-only; may be called from any thread."""
        ...

    def release(self, name: str) -> None:
        """Give back the memory pages of a tensor that has been copied elsewhere; it stays readable."""
        ...


def open_source(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
) -> WeightSource:
    """Open a model by path."""
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise ModelError(f"{name_or_path}: no such folder")
    return FolderSource(path, name=str(name_or_path))
