"""Every small layout, and what each rank holds of a value: for tests of plans and transitions.

Standard library only; blocks and reductions of real tensors are the oracle's business.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from tests.effort import EFFORT
from weft.core import Layout, Mesh

MESHES = ((2,), (3,), (2, 2), (2, 3), (1, 2))
SHAPES = ((), (0,), (1,), (2,), (4,), (5,), (3, 4), (2, 0))


def layouts(mesh: Mesh, shape: Sequence[int], kinds: Sequence[str] = ("sum",)) -> list[Layout]:
    """Every assignment and order of axes, with default cuts and with ragged ones."""
    out = []
    for dims, partial in assignments(mesh, len(shape), kinds):
        plain = Layout.make(mesh, shape, dims, None, partial)
        cuts = [ragged(plain, dim) if axes else None for dim, axes in enumerate(dims)]
        out += [plain, plain.replace(cuts=cuts)]
    return list(dict.fromkeys(out))


def assignments(
    mesh: Mesh, ndim: int, kinds: Sequence[str]
) -> Iterator[tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]]:
    """(axes per dim, kind per axis): each axis idle, partial, or cutting a dim, in every order."""
    does: list[str | int | None] = [None, *kinds, *range(ndim)]
    for choice in itertools.product(does, repeat=mesh.ndim):
        partial = tuple(it if isinstance(it, str) else None for it in choice)
        cutting = [[axis for axis, it in enumerate(choice) if it == dim] for dim in range(ndim)]
        for dims in itertools.product(*(itertools.permutations(axes) for axes in cutting)):
            yield dims, partial


def ragged(layout: Layout, dim: int) -> tuple[int, ...]:
    """Shards of one element, the first one empty, the last one with the rest."""
    length, count = layout.shape[dim], layout.num_shards(dim)
    return (*(min(max(index - 1, 0), length) for index in range(count)), length)


def some(pairs: Sequence[tuple[Layout, Layout]], count: int) -> Sequence[tuple[Layout, Layout]]:
    """All pairs, or a seeded sample of `count` (times the effort) where there are more."""
    count = math.ceil(count * EFFORT)
    return pairs if len(pairs) <= count else random.Random(len(pairs)).sample(pairs, count)


def missing(src: Layout, dst: Layout) -> dict[int, int]:
    """Elements of its target box that each device of the target's mesh lacks, one by one."""

    def elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
        if layout.mesh.position_of_rank(rank) is None:
            return set()
        return set(itertools.product(*(range(*pair) for pair in layout.box(rank))))

    ranks = [dst.mesh.rank_at(place) for place in range(dst.mesh.size())]
    return {rank: len(elements(dst, rank) - elements(src, rank)) for rank in ranks}
