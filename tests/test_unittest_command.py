"""The unittest command on small copies of the bridge: it must say what pytest says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def discover(root: Path, sample: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run unittest's discovery in ``root``, over a tests folder that holds the bridge and ``sample``."""
    folder = root / "tests"
    folder.mkdir()
    for name in ("__init__.py", "test_discovery.py"):
        shutil.copy(HERE / name, folder)
    (folder / "test_sample.py").write_text(sample, encoding="utf-8")
    command = [sys.executable, "-m", "unittest", "discover", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [("-s", "tests"), ()], ids=["from tests", "from the root"])
@pytest.mark.parametrize(("claim", "verdict"), [("True", "1 passed"), ("False", "1 failed")])
def test_unittest_says_what_pytest_says(tmp_path: Path, options: tuple[str, ...], claim: str, verdict: str) -> None:
    done = discover(tmp_path, f"def test_sample():\n    assert {claim}\n", *options)

    assert verdict in done.stdout
    assert "Ran 1 test" in done.stderr
    assert (done.returncode == 0) is (verdict == "1 passed")


@pytest.mark.parametrize("sample", ["", "import no_such_module\n"], ids=["no test at all", "a module that breaks"])
def test_a_suite_that_could_not_run_fails(tmp_path: Path, sample: str) -> None:
    assert discover(tmp_path, sample, "-s", "tests").returncode == 1
