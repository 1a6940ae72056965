"""Tests; a package only so that helpers can be imported as tests.…; not installed."""

import unittest


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """unittest's hook for discovery from the repository's root: see ``test_discovery``."""
    from .test_discovery import load_tests as bridge  # here, so that importing a helper does not import pytest

    return bridge(loader, tests, pattern)
