"""The CUDA kernels on a machine without a card: some of their tests, in Triton's interpreter.

The interpreter is chosen before Triton is imported, so it runs in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import command_environment

TESTS = Path(__file__).with_name("test_sink_window.py")
CHOSEN = "small"


def interpreter_works() -> bool:
    """Triton is installed, and newer than 3.6: that one's interpreter fails with numpy 2.4."""
    if importlib.util.find_spec("triton") is None:
        return False
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return (int(major), int(minor)) >= (3, 7)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is the interpreted run")
@pytest.mark.skipif(not interpreter_works(), reason="needs Triton 3.7 or newer")
def test_attention_in_the_interpreter() -> None:
    environment = command_environment() | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-k", CHOSEN, str(TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
