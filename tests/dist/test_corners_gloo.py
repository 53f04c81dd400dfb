"""Life, writes, keys and modes on real processes: the programs of the simulated tests."""

from __future__ import annotations

import pytest

from tests.cases.corners import corners
from tests.gloo import GlooWorld


@pytest.mark.parametrize(
    ("kind", "way"),
    [("life", "both"), ("writes", "both"), ("writes", "ragged"), ("keys and modes", "ragged")],
)
def test_programs(gloo: GlooWorld, kind: str, way: str) -> None:
    assert gloo.run(corners, {"dp": 2, "tp": 2}, kind, way) == [[]] * 4
