"""A model quantized on load: packed once into the cache, mapped from there ever after.

Packed are the layers' matrices, single (2-D) or of all experts (3-D). Plain stay norms and biases, which are small;
the routers of mixtures of experts, where a small error picks another expert; the embedding, of which a pass reads a
few rows; and what the format does not hold. A head with weights of its own is int8 in either format: it is as large
as several layers, and decides between near-equal tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from streamllm_core.checkpoint import Checkpoint
from streamllm_core.errors import ModelError
from streamllm_core.quantization import FORMATS, Format, quantize
from streamllm_core.skeleton import Skeleton
from streamllm_core.weights.conversion_cache import build_once, require_space
from streamllm_core.weights.folder import INDEX_FILE, SMALL_FILES, FolderSource
from streamllm_core.weights.safetensors_writer import ModelWriter, Stored
from streamllm_core.weights.source import WeightSource

QUANTIZATION_VERSION = 1  # raised when the same model would be packed differently; part of cache keys and fingerprints
QUANTIZERS = ("int8", "int4")

_ROUTER = re.compile(r"\.(gate|router)\.weight$")
_log = logging.getLogger(__name__)


def quantize_source(
    source: WeightSource,
    skeleton: Skeleton,
    format_name: str,
    rounded_to: torch.dtype,
    device: torch.device | None = None,
) -> FolderSource:
    """The model of ``source`` with its layers packed as ``format_name``, "int8" or "int4".

    Plain weights are rounded to ``rounded_to``; ``device`` does the arithmetic (None: the CPU), some megabytes at a
    time. The result has the names of the modules, and opening it again reads neither the original weights nor
    converts anything. Raises ModelError for weights that cannot be quantized and when the disk is too small.
    """
    format = _quantizer(format_name)
    identity = {
        **source.fingerprint,
        "quantized": format_name,
        "rounded_to": str(rounded_to).removeprefix("torch."),
        "quantization": QUANTIZATION_VERSION,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        _log.info("quantizing %s to %s (once)", source.name, format_name)
        _pack(Checkpoint(source, skeleton, rounded_to), skeleton, format, device, folder)

    stem = Path(source.name).name.removesuffix(".gguf")
    folder = build_once(f"{stem}-{format_name}-{key}", build)
    try:
        return FolderSource(folder, name=source.name, fingerprint=identity)
    except ModelError as error:
        raise ModelError(f"{error}; delete {folder}, and it will be quantized again") from error


def planned_formats(checkpoint: Checkpoint, skeleton: Skeleton, format_name: str) -> dict[str, Format]:
    """Which tensors ``quantize_source`` would pack, by module name, and how. Raises ModelError."""
    planned = _planned(checkpoint, skeleton, _quantizer(format_name))
    return {stored.name: stored.format for stored in planned if stored.format is not None}


def _quantizer(name: str) -> Format:
    if name not in QUANTIZERS:
        raise ModelError(f"weights are quantized to {' or '.join(QUANTIZERS)}, not to '{name}'")
    return FORMATS[name]


def _pack(
    checkpoint: Checkpoint, skeleton: Skeleton, format: Format, device: torch.device | None, folder: Path
) -> None:
    tensors = {stored.name: stored for stored in _planned(checkpoint, skeleton, format)}
    require_space(folder, sum(stored.nbytes for stored in tensors.values()))
    with ModelWriter(folder, tensors.values()) as writer:
        for name, tensor in checkpoint.tensors(""):
            stored = tensors[name]
            try:
                value = quantize(stored.format, tensor, device) if stored.format else tensor.to(stored.dtype)
            except ValueError as error:
                raise ModelError(f"{checkpoint.source.name}: {name}: {error}") from error
            writer.write(name, value)
    small = {path for pattern in SMALL_FILES for path in checkpoint.source.config_dir.glob(pattern) if path.is_file()}
    for path in small:
        if path.name != INDEX_FILE:
            shutil.copyfile(path, folder / path.name)


def _planned(checkpoint: Checkpoint, skeleton: Skeleton, format: Format) -> Iterator[Stored]:
    output = {f"{name}.weight" for name, module in skeleton.causal.named_modules() if module is skeleton.output}
    for name, (dtype, shape) in checkpoint.headers().items():
        packed = name.startswith(skeleton.layers_prefix) and not name.endswith("bias") and not _ROUTER.search(name)
        head = name in output and not skeleton.tied
        kind = FORMATS["int8"] if head else format
        yield Stored(name, shape, dtype, kind if (packed or head) and kind.holds(shape) else None)
