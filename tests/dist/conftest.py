"""One world of four gloo processes for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo import GlooWorld


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooWorld]:
    """`gloo.run(fn, {"dp": 2, "tp": 2}, *args)`: the results of `fn(mesh, *args)` on each rank."""
    world = GlooWorld(4)
    yield world
    world.close()
