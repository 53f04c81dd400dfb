"""One world of four gloo processes for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gloo import GlooWorld


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooWorld]:
    """`gloo.run(fn, {"dp": 2, "tp": 2}, *args)`: the results of `fn(mesh, *args)` on each rank."""
    world = GlooWorld(4)
    yield world
    world.close()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are spread over processes; those that need the world go to one of them."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("gloo"))
