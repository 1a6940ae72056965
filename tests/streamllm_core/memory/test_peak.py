"""Loading a model takes hardly more memory than the model: measured on a process that does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment
from tests.streamllm_core.tiny_llama import write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 300 MB in float32."""
    return write_llama(tmp_path_factory.mktemp("large"), layers=10, hidden=1024)


@pytest.mark.parametrize(("way", "dtype"), [("pinned", "float32"), ("pinned", "bfloat16"), ("resident", "float32")])
def test_the_peak_is_at_most_a_tenth_above_what_is_stored(folder: Path, way: str, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.streamllm_core.loading_process", str(folder), way, dtype]
    done = subprocess.run(command, cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    stored = (folder / "model.safetensors").stat().st_size
    assert held > 0.4 * stored
    assert held < peak < 1.1 * stored
