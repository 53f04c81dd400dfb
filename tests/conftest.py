"""Settings of a test run as a whole: its garbage collections, and the cores of its workers."""

from __future__ import annotations

import gc
import itertools
import os

gc.disable()  # until every test file is imported, of which nearly nothing is garbage
STARTED = itertools.count(1)


def pytest_collection_finish() -> None:
    """A full collection would read some million objects, for half a second, again and again."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)  # by default a twentieth of all time goes into it
    gc.enable()


def pytest_runtest_logstart() -> None:
    """Nor is what tests leave for good read again and again: caches, modules imported late."""
    if next(STARTED) % 200 == 0:
        gc.collect()
        gc.freeze()


def pytest_configure() -> None:
    """Each worker stays on one core: simulated ranks are threads that run one at a time, and to
    hand over between two cores takes a sixth more time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
