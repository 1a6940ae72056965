"""A model quantized on load: packed once into the cache, mapped from there ever after.

Packed are the layers' matrices, single (2-D) or of all experts (3-D). Plain stay norms and biases, which are small;
the routers of mixtures of experts, where a small error picks another expert; the embedding, of which a pass reads a
few rows; and what the format does not hold. int8 in either format are a head with weights of its own, which decides
between near-equal tokens, and the value projections: with grouped queries they are a hundredth of a layer, and in int4
they did a quarter of the damage (divergence of the default model's predictions, each kind of matrix alone).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
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
_VALUES = re.compile(r"\.v_proj\.weight$")
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
    check_quantizer(format_name)
    identity = {
        **source.fingerprint,
        "quantized": format_name,
        "rounded_to": str(rounded_to).removeprefix("torch."),
        "quantization": QUANTIZATION_VERSION,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        _log.info("quantizing %s to %s (once)", source.name, format_name)
        _pack(Checkpoint(source, skeleton, rounded_to), skeleton, format_name, device, folder)

    stem = Path(source.name).name.removesuffix(".gguf")
    folder = build_once(f"{stem}-{format_name}-{key}", build)
    try:
        return FolderSource(folder, name=source.name, fingerprint=identity)
    except ModelError as error:
        raise ModelError(f"{error}; delete {folder}, and it will be quantized again") from error


def planned_formats(checkpoint: Checkpoint, skeleton: Skeleton, format_name: str) -> dict[str, Format]:
    """Which tensors ``quantize_source`` would pack, by module name, and how. Raises ModelError."""
    check_quantizer(format_name)
    formats = {
        name: format_for(name, shape, skeleton, format_name) for name, (_, shape) in checkpoint.headers().items()
    }
    return {name: format for name, format in formats.items() if format is not None}


def check_quantizer(name: str) -> None:
    """Raise ModelError unless weights can be quantized to this format."""
    if name not in QUANTIZERS:
        raise ModelError(f"weights are quantized to {' or '.join(QUANTIZERS)}, not to '{name}'")


def _pack(
    checkpoint: Checkpoint, skeleton: Skeleton, format_name: str, device: torch.device | None, folder: Path
) -> None:
    tensors = {
        name: Stored(name, shape, dtype, format_for(name, shape, skeleton, format_name))
        for name, (dtype, shape) in checkpoint.headers().items()
    }
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


def format_for(name: str, shape: tuple[int, ...], skeleton: Skeleton, format_name: str) -> Format | None:
    """How a quantized model has the tensor of this module name; None: plain."""
    head = not skeleton.tied and skeleton.causal.get_submodule(name.rpartition(".")[0]) is skeleton.output
    layer = name.startswith(skeleton.layers_prefix) and not _ROUTER.search(name)
    if name.endswith("bias") or not (head or layer):
        return None
    format = FORMATS["int8" if head or _VALUES.search(name) else format_name]
    return format if format.holds(shape) else None
