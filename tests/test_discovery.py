"""``python -m unittest discover -s tests`` runs the pytest suite, and fails when it fails.

unittest finds no pytest test by itself and would report success over nothing. Discovery with ``-s tests`` takes that
folder as its top level and never asks ``tests/__init__.py`` for ``load_tests``, so the bridge stands in a module
that it does load; ``tests/__init__.py`` passes it on for discovery from the root.
"""

import subprocess
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent


class WholeSuite(unittest.TestCase):
    """One unittest test: pytest over this folder, in a process of its own, as if typed by hand."""

    __test__ = False  # pytest must not collect it: it would start itself for ever

    def test_pytest_passes(self) -> None:
        done = subprocess.run([sys.executable, "-m", "pytest", str(HERE)], cwd=HERE.parent, check=False)
        self.assertEqual(done.returncode, 0, "pytest failed; its report is above")


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """unittest's hook: the whole suite instead of whatever the loader found."""
    return unittest.TestSuite([WholeSuite("test_pytest_passes")])
