"""The owners of whole tensors, and the exchange of blocks with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from weft.comm import BoundMesh
from weft.tensor.meta import kept
from weft.transport import ToOwners, balanced

__all__ = ["buckets", "owners_of", "way_to_owners"]

NBYTES = 1 << 28
"""Of the tensors of one bucket: each owner holds its part of them."""

_MAX_WAYS = 64


def buckets(sizes: Sequence[int], most: int = NBYTES) -> Iterator[list[int]]:
    """Consecutive places whose sizes sum up to at most that, or one that alone is more."""
    some, total = [], 0
    for at, size in enumerate(sizes):
        if some and total + size > most:
            yield some
            some, total = [], 0
        some.append(at)
        total += size
    if some:
        yield some


def way_to_owners(
    mesh: BoundMesh, tensors: Sequence[Any], owners: Sequence[int] | None = None
) -> ToOwners:
    """The exchange of these tensors with their owners, which balance the work by default."""
    layouts = tuple([one._meta.layout for one in tensors])
    key = layouts, None if owners is None else tuple(owners)

    def make() -> ToOwners:
        shapes = [layout.shape for layout in layouts]
        return ToOwners(
            mesh, layouts, owners_of(shapes, mesh.size()) if owners is None else owners)

    return kept(mesh.cache.setdefault("ways to owners", {}), key, make, _MAX_WAYS)


def owners_of(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """An owner for each matrix, whose work is that of its product with itself."""
    costs = [float(math.prod(shape) * min(shape, default=1)) for shape in shapes]
    return balanced(costs, num_ranks)
