"""A GGUF file as a weight source: converted into the cache the first time, mapped from there ever after."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Literal

import torch

from streamllm_core.errors import ModelError
from streamllm_core.weights.conversion_cache import build_once
from streamllm_core.weights.folder import FolderSource, read_json
from streamllm_core.weights.gguf_conversion import CONVERSION_VERSION, RECORD_FILE, convert

_HALF = (torch.bfloat16, torch.float16)
_SAMPLE = 1 << 20
_log = logging.getLogger(__name__)


def open_gguf(
    path: Path, *, name: str, dtype: torch.dtype | Literal["auto"] = "auto", expected_sha256: str | None = None
) -> FolderSource:
    """Open a GGUF file; the first time, and after a change of the file, it is converted.

    `dtype` bfloat16 or float16 stores weights rounded to it, anything else stores them exactly. `expected_sha256` is
    checked when the file is converted. Raises ModelError for a file that cannot be read or is not supported.
    """
    half = dtype if isinstance(dtype, torch.dtype) and dtype in _HALF else None
    stored = "exact" if half is None else str(half).removeprefix("torch.")

    def build(folder: Path) -> None:
        _log.info("converting %s (once)", path)
        convert(path, folder, dtype=half, expected_sha256=expected_sha256)

    folder = build_once(cache_key(path, stored, expected_sha256), build)
    try:
        return FolderSource(folder, name=name, fingerprint=recorded_fingerprint(folder))
    except ModelError as error:
        raise ModelError(f"{error}; delete {folder}, and it will be converted again") from error


def cache_key(path: Path, stored_as: str, expected_sha256: str | None) -> str:
    """Of what is made of a GGUF file; it changes with the file. Raises ModelError when that cannot be read."""
    identity = hashlib.sha256(f"{CONVERSION_VERSION} {stored_as} {expected_sha256}".encode())
    try:
        with path.open("rb") as file:
            status = path.stat()
            # The time settles what the samples cannot see; a file with a known hash is itself at any time.
            identity.update(f"{status.st_size} {status.st_mtime_ns if expected_sha256 is None else 0} ".encode())
            identity.update(file.read(_SAMPLE))
            file.seek(max(0, status.st_size - _SAMPLE))
            identity.update(file.read(_SAMPLE))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    return f"{path.stem}-{identity.hexdigest()[:16]}"


def recorded_fingerprint(folder: Path) -> dict[str, object]:
    """Identity of a conversion, from the record in its folder. Raises ModelError when that is damaged."""
    record = read_json(folder / RECORD_FILE)
    try:
        return {"gguf": record["sha256"], "conversion": record["conversion"], "stored": record["stored"]}
    except KeyError as error:
        raise ModelError(f"{folder / RECORD_FILE}: has no {error}") from error
