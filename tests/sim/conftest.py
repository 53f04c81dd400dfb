"""Every ShardTensor of these tests says the truth about its order in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import memory_order

memory_order.watch()


@pytest.fixture
def memory_order_unwatched() -> Iterator[None]:
    """For a test in which the watch itself is in the way."""
    with memory_order.unwatched():
        yield
