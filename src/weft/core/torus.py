"""Logical mesh axes on the axes of a physical torus, the busiest axis on the best links.

Logical axes are given by rising need of bandwidth and served from the last to the first. Whole
physical axes come first: as many of them as give a logical axis its length, because each brings its
own links; the first such choice in order counts. If none fits, physical axes may be split by their
prime factors. The best choice takes most by whole axes, then most whole axes, then axes that are
already in use (as in JAX), then the earlier ones. The results are those of
`jax.experimental.mesh_utils`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from weft.errors import MeshError

__all__ = ["Assignment", "assign", "devices_in_order", "in_blocks"]

Assignment = tuple[tuple[int, ...], ...]
"""Per physical axis, the part of its length that each logical axis takes."""


def assign(physical: Sequence[int], logical: Sequence[int], split: bool = False) -> Assignment:
    """Which physical axes form each logical axis.

    Args:
        physical: the lengths of the torus.
        logical: the lengths of the mesh, by rising need of bandwidth.
        split: whether a physical axis may serve several logical ones.

    Raises:
        MeshError: different numbers of devices; without `split`, lengths that no whole axes form.

    >>> assign((4, 4, 8), (1, 16, 8))
    ((1, 4, 1), (1, 4, 1), (1, 1, 8))
    >>> assign((4, 4, 4), (2, 1, 32), split=True)
    ((1, 1, 4), (1, 1, 4), (2, 1, 2))
    """
    if math.prod(physical) != math.prod(logical):
        raise MeshError(
            "hybrid_mesh", f"{math.prod(physical)} devices in a torus {tuple(physical)}, "
            f"{math.prod(logical)} in the mesh {tuple(logical)}",
            "the mesh holds every device of the torus once", [tuple(logical)],
            "lengths whose product is that of the torus")
    whole = _whole(physical, logical)
    if whole is not None:
        return whole
    if not split:
        raise MeshError(
            "hybrid_mesh", f"no whole axes of the torus {tuple(physical)} make up each of "
            f"the lengths {tuple(logical)}", "a logical axis takes physical "
            "axes whole, unless they may be split",
            [tuple(logical)], "split=True")
    return _split(physical, logical)


def _whole(physical: Sequence[int], logical: Sequence[int]) -> Assignment | None:
    free = list(range(len(physical)))
    taken: dict[int, tuple[int, ...]] = {}
    for axis in reversed(range(len(logical))):
        choices = (
            axes for count in range(len(free), 0, -1)
            for axes in itertools.combinations(free, count)
            if math.prod(physical[one] for one in axes) == logical[axis]
        )
        found = next(choices, None)
        if found is None and logical[axis] > 1:
            return None
        taken[axis] = found or ()
        free = [one for one in free if one not in taken[axis]]
    return tuple(
        tuple(physical[one] if one in taken[axis] else 1 for axis in range(len(logical)))
        for one in range(len(physical))
    )


def _split(physical: Sequence[int], logical: Sequence[int]) -> Assignment:
    used = [1] * len(physical)
    columns: dict[int, tuple[int, ...]] = {}
    for axis in reversed(range(len(logical))):
        left = [length // taken for length, taken in zip(physical, used)]

        def value(shares: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
            whole = [share for share, length in zip(shares, physical) if share == length]
            in_use = [share for share, taken in zip(shares, used) if taken > 1]  # noqa: B023
            return (math.prod(whole), sum(share > 1 for share in whole), math.prod(in_use), shares)

        shares = max(_shares(left, logical[axis]), key=value)
        columns[axis] = shares
        used = [taken * share for taken, share in zip(used, shares)]
    return tuple(
        tuple(columns[axis][one] for axis in range(len(logical))) for one in range(len(physical))
    )


def _shares(left: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """All ways of taking a length from what is left of the physical axes."""
    by_factor: list[list[tuple[int, tuple[int, ...]]]] = []
    for factor, count in Counter(_prime_factors(length)).items():
        places = [one for one, size in enumerate(left) for f in _prime_factors(size) if f == factor]
        by_factor.append([(factor, each) for each in set(itertools.combinations(places, count))])
    for choice in itertools.product(*by_factor):
        shares = [1] * len(left)
        for factor, places in choice:
            for place in places:
                shares[place] *= factor
        yield tuple(shares)


def _prime_factors(number: int) -> list[int]:
    found: list[int] = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def devices_in_order(physical: Sequence[int], assignment: Assignment) -> list[int]:
    """For each position of the logical mesh, row-major, the row-major number of its device in the
    torus. If several logical axes share a physical axis, the first has the largest strides."""
    num_logical = len(assignment[0]) if assignment else 0
    stride = math.prod(physical)
    strides: list[list[int]] = []
    for length, shares in zip(physical, assignment):
        stride //= length
        inner = length
        row: list[int] = []
        for share in shares:
            inner //= share
            row.append(inner * stride)
        strides.append(row)
    digits = [
        (assignment[one][axis], strides[one][axis])
        for axis in range(num_logical) for one in range(len(physical))
    ]
    places = [0]
    for size, step in digits:
        places = [place + at * step for place in places for at in range(size)]
    return places


def in_blocks(fast: Sequence[int], slow: Sequence[int]) -> Iterable[tuple[int, int]]:
    """For each position of the whole mesh, row-major: its block, and its position in the block.

    Both numbers are row-major, over the slow lengths and over the fast ones. An axis of the whole
    is as long as the product of the two, and blocks are side by side.
    """
    for place in itertools.product(*(range(s * f) for s, f in zip(slow, fast))):
        block = inner = 0
        for at, s, f in zip(place, slow, fast):
            block, inner = block * s + at // f, inner * f + at % f
        yield block, inner
