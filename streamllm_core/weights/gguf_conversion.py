"""A GGUF file becomes a model folder: config.json, model.safetensors and a tokenizer, one bounded piece at a time.

Stored types: what is quantised in the file is stored as float32, because nothing narrower holds its values. A Q4_1
weight is scale * q + minimum with a 4-bit q and two float16 numbers, up to 15 significant bits before the sum; bfloat16
has 8, float16 11. What the file has as float16 or bfloat16 stays so. A caller that computes in bfloat16 or float16
anyway asks for that type: the rounding is the one its engine would do, done once, and the file is half the size.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType

from streamllm_core.errors import ModelError
from streamllm_core.weights.conversion_cache import require_space
from streamllm_core.weights.folder import SINGLE_FILE
from streamllm_core.weights.gguf_config import GGUFModel, read_model
from streamllm_core.weights.gguf_file import GGUFFile
from streamllm_core.weights.gguf_tokenizer import write_tokenizer
from streamllm_core.weights.safetensors_file import DTYPES

CONVERSION_VERSION = 1  # raised when the same GGUF would be converted differently; part of cache keys and fingerprints
RECORD_FILE = "conversion.json"

_NATIVE = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def convert(path: Path, folder: Path, *, dtype: torch.dtype | None, expected_sha256: str | None = None) -> None:
    """Fill `folder` from the GGUF at `path`; `dtype` None stores every value exactly.

    Raises ModelError for a file that is torn, not supported, or not the expected one, and when the disk is too small.
    """
    model = read_model(GGUFFile(path))
    types = {tensor.name: dtype or _exact_dtype(model, tensor.source) for tensor in model.plan.tensors}
    sizes = Counter[torch.dtype]()
    for tensor in model.plan.tensors:
        stored = types[tensor.name]
        sizes[stored] += math.prod(model.file.tensors[tensor.source].shape) * stored.itemsize
    require_space(folder, sizes.total())
    most, _ = sizes.most_common(1)[0]  # norms are float32 in every GGUF; the matrices say what the model is
    stored_as = "exact" if dtype is None else _NAMES[dtype]
    describe(model, folder, dtype=most, stored_as=stored_as, expected_sha256=expected_sha256)
    _write_weights(model, types, folder / SINGLE_FILE)


def describe(
    model: GGUFModel, folder: Path, *, dtype: torch.dtype, stored_as: str, expected_sha256: str | None = None
) -> None:
    """Write everything but the weights: configuration, tokenizer, and a record of the file and of how it was converted.

    Raises ModelError when the file is not the expected one.
    """
    path = model.file.path
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise ModelError(f"{path}: damaged: its sha256 is {sha256}, not {expected_sha256}; install or copy it again")
    _write_json(folder / "config.json", model.config | {"dtype": str(dtype).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", model.generation_config)
    write_tokenizer(model.file.metadata, folder, model.config["max_position_embeddings"])
    record = {"file": path.name, "sha256": sha256, "conversion": CONVERSION_VERSION, "stored": stored_as}
    _write_json(folder / RECORD_FILE, record)


def _exact_dtype(model: GGUFModel, source: str) -> torch.dtype:
    return _NATIVE.get(model.file.tensors[source].type, torch.float32)


def _write_weights(model: GGUFModel, types: dict[str, torch.dtype], path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in model.plan.tensors:
        shape, dtype = model.file.tensors[tensor.source].shape, types[tensor.name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in model.plan.tensors:
            for piece in model.file.pieces(tensor.source, tensor.order):
                stored = torch.from_numpy(piece).to(types[tensor.name]).contiguous()
                file.write(stored.reshape(-1).view(torch.uint8).numpy().data)
        if file.tell() != 8 + len(encoded) + end:
            raise ModelError(f"{model.file.path}: its tensors are not of the size that its header announces")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
