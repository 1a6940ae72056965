"""A model folder on disk: config.json beside one safetensors file, or beside an index and its shards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from streamllm_core.errors import ModelError
from streamllm_core.quantization import Format
from streamllm_core.weights.reading import FileRange
from streamllm_core.weights.safetensors_file import SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Files beside the weights that change what a model says; their contents are part of the fingerprint.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class FolderSource:
    """Weights of a local folder; `name` is what the user called the model, for messages.

    `fingerprint` may be given by a caller that knows a better identity than sizes and times, such as a commit.
    """

    def __init__(self, folder: Path, *, name: str, fingerprint: dict[str, object] | None = None) -> None:
        self.name = name
        self.config_dir = folder
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name}: no config.json in {folder}" + _gguf_hint(folder))
        read_json(folder / "config.json")  # a torn file is reported here, by name
        self._file_of = _locate(folder, name)
        self.module_names = all(file.module_names for file in self._file_of.values())
        self.fingerprint = fingerprint if fingerprint is not None else self._describe()

    def names(self) -> list[str]:
        """Names of all tensors as the checkpoint stores them, in the order of its files."""
        return list(self._file_of)

    def header(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor without reading it; ModelError when the checkpoint does not hold it."""
        return self._file(name).header(name)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file, to be treated as read-only; may be called from any thread."""
        return self._file(name).tensor(name)

    def format(self, name: str) -> Format | None:
        """How the tensor is packed; None when it is stored plain."""
        return self._file(name).packed.get(name, (None, ()))[0]

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes as stored, uint8 [nbytes], to be treated as read-only; may be called from any thread."""
        return self._file(name).raw(name)

    def range(self, name: str) -> FileRange:
        """Where the tensor's stored bytes lie on disk."""
        return self._file(name).range(name)

    def release(self, name: str) -> None:
        """Give back the memory pages of a tensor that has been copied elsewhere; it stays readable."""
        self._file(name).release(name)

    def _file(self, name: str) -> SafetensorsFile:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self.name}: the checkpoint in {self.config_dir} has no tensor named {name}")
        return file

    def _describe(self) -> dict[str, object]:
        weights = {
            file.path.name: {"header": file.header_sha256, "size": file.size, "mtime_ns": file.mtime_ns}
            for file in dict.fromkeys(self._file_of.values())
        }
        small = sorted({path for pattern in SMALL_FILES for path in self.config_dir.glob(pattern) if path.is_file()})
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small}
        return {"weights": weights, "files": hashes}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError, with the path, when it is missing or is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def shard_names(index: Path) -> dict[str, str]:
    """Tensor name to shard file name, from an index; ModelError when a shard would lie outside the folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: names {shard!r} as a shard, which is not a safetensors file beside it")
    return weight_map


def _locate(folder: Path, name: str) -> dict[str, SafetensorsFile]:
    # The same order as in transformers: the single file wins over an index.
    if (folder / SINGLE_FILE).is_file():
        file = SafetensorsFile(folder / SINGLE_FILE)
        return dict.fromkeys(file.entries, file)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise _no_weights(folder, name)
    located = shard_names(index)
    shards = list(dict.fromkeys(located.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        listed = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
        raise ModelError(f"{name}: {len(missing)} of {len(shards)} shards named in {index} are missing: {listed}")
    files = {shard: SafetensorsFile(folder / shard) for shard in shards}
    for tensor, shard in located.items():
        if tensor not in files[shard].entries:
            raise ModelError(f"{folder / shard}: does not hold {tensor}, which {index.name} says it does")
    return {tensor: files[shard] for tensor, shard in located.items()}


def _no_weights(folder: Path, name: str) -> ModelError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if not pickles:
        return ModelError(f"{name}: no {SINGLE_FILE} and no {INDEX_FILE} in {folder}" + _gguf_hint(folder))
    convert = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('converted')"
    return ModelError(
        f"{name}: {folder} holds only pickled weights ({pickles[0]}), which are refused because loading a pickle can "
        f"run any code in it. If you trust the file, convert it once with transformers: {convert}, copy the tokenizer "
        "files, and give the folder 'converted'"
    )


def _gguf_hint(folder: Path) -> str:
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; to use a GGUF file, give its own path: {folder / ggufs[0]}" if ggufs else ""
