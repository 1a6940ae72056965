"""What the tests of jobs share: worker processes, and a small job run within the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jobs

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start job_worker.py with these arguments; what still runs at the end of the test is killed."""
    running: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[1])}

    def begin(*arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("job_worker.py")), *map(str, arguments)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()
