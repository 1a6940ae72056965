"""The headers of a hub model's weights, fetched by themselves: enough to plan with, a few kilobytes instead of all."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

from streamllm_core.errors import ModelError
from streamllm_core.quantization import Format
from streamllm_core.weights.hub import description, explained
from streamllm_core.weights.safetensors_file import DTYPES


class HubHeaders:
    """A weight source that knows names, types and shapes, and has no values."""

    module_names = False

    def __init__(self, repo: str, folder: Path, headers: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.name = repo
        self.config_dir = folder
        self.fingerprint: dict[str, object] = {"hub": repo, "commit": folder.name}
        self._headers = headers

    def names(self) -> list[str]:
        return list(self._headers)

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in self._headers:
            raise ModelError(f"{self.name}: the checkpoint has no tensor named {name}")
        return self._headers[name]

    def format(self, name: str) -> Format | None:
        return None

    def tensor(self, name: str) -> torch.Tensor:
        """Always raises ModelError: the weights were not downloaded."""
        raise ModelError(f"{self.name}: only the headers were fetched, not {name}")

    raw = tensor

    def release(self, name: str) -> None:
        """Nothing is held."""


def open_hub_headers(repo: str, *, revision: str | None = None) -> HubHeaders:
    """The headers of a hub model, and its configuration. Raises ModelError that says what to do."""
    with explained(repo, revision):
        folder = description(repo, revision, None)
        try:
            metadata = HfApi().get_safetensors_metadata(repo, revision=folder.name)
        except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
            raise ModelError(f"{repo}: has no safetensors that can be read") from error
    headers = {}
    for path, file in metadata.files_metadata.items():
        for name, tensor in file.tensors.items():
            if (dtype := DTYPES.get(tensor.dtype)) is None:
                raise ModelError(f"{repo}: {path}: {name} is stored as {tensor.dtype}, which is not supported")
            headers[name] = dtype, tuple(tensor.shape)
    return HubHeaders(repo, folder, headers)
