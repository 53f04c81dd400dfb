"""Garbage collections of a test run look at what the tests make, not at what was imported."""

from __future__ import annotations

import gc

gc.disable()  # until every test file is imported, of which nearly nothing is garbage


def pytest_collection_finish() -> None:
    """A full collection would read some million objects, for half a second, again and again."""
    gc.freeze()
    gc.enable()
