"""Every ShardTensor of these tests says the truth about its order in memory; and how much of what
rules are tried with is tried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import memory_order
from tests.effort import EFFORT
from weft.own import trials

memory_order.watch()


@pytest.fixture
def few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_rule` lays operands out in fewer ways at random; in all ways that the rule names."""
    monkeypatch.setattr(trials, "_MANY", round(EFFORT * trials._MANY))


@pytest.fixture
def memory_order_unwatched() -> Iterator[None]:
    """For a test in which the watch itself is in the way."""
    with memory_order.unwatched():
        yield
