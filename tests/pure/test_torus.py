"""Logical axes on physical ones: figures of JAX's mesh_utils, and what every assignment keeps."""

from __future__ import annotations

import itertools
import math

import pytest

from weft import MeshError
from weft.core.torus import assign, devices_in_order, in_blocks

# (torus, mesh, split) -> the share of each logical axis of each physical one, as JAX 0.10.2 has it.
KNOWN = [
    ((4, 4, 8), (1, 16, 8), False, ((1, 4, 1), (1, 4, 1), (1, 1, 8))),
    ((4, 4, 4), (2, 1, 32), True, ((1, 1, 4), (1, 1, 4), (2, 1, 2))),
    ((2, 2, 2, 2), (1, 16), False, ((1, 2), (1, 2), (1, 2), (1, 2))),
    ((4, 4), (2, 2, 4), True, ((1, 1, 4), (2, 2, 1))),
    ((8, 8), (2, 2, 16), True, ((1, 1, 8), (2, 2, 2))),
    ((2, 3, 4), (4, 6), False, ((1, 2), (1, 3), (4, 1))),
    ((12, 2), (4, 6), True, ((4, 3), (1, 2))),
    ((4, 1, 4), (4, 4), False, ((1, 4), (1, 1), (4, 1))),
]


@pytest.mark.parametrize(("torus", "mesh", "split", "shares"), KNOWN)
def test_known_assignments(torus, mesh, split, shares) -> None:  # type: ignore[no-untyped-def]
    assert assign(torus, mesh, split) == shares


def test_the_devices_of_a_known_mesh() -> None:
    found = devices_in_order((2, 3, 4), assign((2, 3, 4), (4, 6)))
    assert found == [at + 4 * inner for at in range(4) for inner in range(6)]
    found = devices_in_order((2, 2), assign((2, 2), (4,)))
    assert found == [0, 1, 2, 3]


def _factorizations(number: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(number,)]
    return [(first, *rest) for first in range(1, number + 1) if number % first == 0
            for rest in _factorizations(number // first, count - 1)]


@pytest.mark.parametrize("torus", [(4, 4, 4), (6, 4), (2, 3, 4), (12,), (2, 2, 3, 3)])
def test_every_mesh_of_the_size_is_made(torus: tuple[int, ...]) -> None:
    """Shares multiply up both ways, and every device stands in one place."""
    for count, split in itertools.product((1, 2, 3), (False, True)):
        for mesh in _factorizations(math.prod(torus), count):
            try:
                shares = assign(torus, mesh, split)
            except MeshError:
                assert not split
                continue
            assert tuple(map(math.prod, shares)) == torus
            assert tuple(map(math.prod, zip(*shares))) == mesh
            assert sorted(devices_in_order(torus, shares)) == list(range(math.prod(torus)))


def test_blocks_lie_side_by_side() -> None:
    numbers = [block * 4 + inner for block, inner in in_blocks((2, 2), (2, 1))]
    assert numbers == [0, 1, 2, 3, 4, 5, 6, 7]
    numbers = [block * 4 + inner for block, inner in in_blocks((2, 2), (1, 2))]
    assert numbers == [0, 1, 4, 5, 2, 3, 6, 7]


def test_what_does_not_fit() -> None:
    with pytest.raises(MeshError, match="8 devices in a torus"):
        assign((4, 2), (4, 4))
    with pytest.raises(MeshError, match="no whole axes of the torus"):
        assign((4, 2), (2, 2, 2))
