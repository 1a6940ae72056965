"""The ``streamllm`` command as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment


def streamllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from streamllm_core.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=300, check=False
    )


def test_bench_reports_passes_against_their_limit() -> None:
    arguments = ("--layers", "3", "--hidden-dim", "256", "--seq-len", "1", "--seq-len", "128", "--window", "64")
    done = streamllm("bench", *arguments, "--device", "cpu", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["tokens"] for row in rows] == [1, 128]
    for row in rows:
        assert row["limit"] == max(row["transfer"], row["compute"]) > 0
        assert row["prefetched"] > 0
        assert row["sequential"] > 0


def test_hardware_names_what_it_did_not_measure(tmp_path: Path) -> None:
    done = streamllm("hardware", "--device", "cpu", "--disk", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ram gb" in done.stdout
    assert "disk read gb s" in done.stdout
    assert "No CUDA device" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--model-shape", "qwen9"), "known: qwen2.5-7b"),
        (("bench", "--hidden-dim", "300"), "multiple of 256"),
        (("hardware", "--device", "tpu"), "device must be"),
        (("bench", "--dtype", "int3"), "dtype must be"),
    ],
)
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = streamllm(*arguments)
    assert done.returncode == 3
    assert message in done.stderr
    assert "Traceback" not in done.stderr
