"""Tests; a package only so that helpers can be imported as tests.…; not installed."""

from .test_discovery import load_tests

__all__ = ["load_tests"]  # what unittest looks for when it discovers from the repository's root
