"""Memory and time do not depend on how much was read: the benchmark of that name, shortened, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_reading_on_costs_no_memory_and_no_more_time() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.constant_memory", "--tokens", "140000", "--slice", "20000"]
    # One thread: on a machine that is busy with other tests, more of them would only wait for each other.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--device", "cpu"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["growth"] < 1.02
    seconds = [part["cpu_seconds"] for part in result["slices"]]
    # On a busy machine: the fastest of some slices, and room. Time that grew with the text would be up several-fold.
    assert min(seconds[4:]) < 1.5 * min(seconds[1:4])
