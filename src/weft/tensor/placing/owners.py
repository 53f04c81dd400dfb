"""Whole tensors at single ranks: each moves to its owner, and what the owner makes of it back.

For work on whole matrices that does not divide (an iteration of Muon, an eigenvalue decomposition)
each matrix has an owner. A tensor at its owner is in the layout in which one rank has everything,
so all of them move together there, and back, as any state does (`states`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.placing.states import moved
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["at_one_rank", "balanced", "buckets", "from_owners", "owners_of", "to_owners"]

NBYTES = 1 << 28
"""Of the tensors of one bucket: each owner holds its part of them."""


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


def to_owners(
    mesh: BoundMesh, tensors: Sequence[Any], owners: Sequence[int]
) -> list[ShardTensor]:
    """The tensors, whole at their owners; one of no dims has one there."""
    wide = [one if one.dim() else one.reshape(1) for one in tensors]
    return moved([
        (one, mesh, at_one_rank(mesh, owner, one.shape)) for one, owner in zip(wide, owners)])


def from_owners(
    mesh: BoundMesh, whole: Sequence[ShardTensor], like: Sequence[Any]
) -> list[ShardTensor]:
    """The tensors at their owners, moved to the layouts of those that they came from."""
    wide = [one if one.dim() else one.reshape(1) for one in like]
    found = moved([(one, mesh, other.sharding) for one, other in zip(whole, wide)])
    return [one if other.dim() else one.reshape(()) for one, other in zip(found, like)]


def at_one_rank(mesh: BoundMesh, owner: int, shape: Sequence[int]) -> Layout:
    """The layout in which one rank has everything; `owner` is its position in the mesh."""
    cuts = (0,) * (owner + 1) + (shape[0],) * (mesh.size() - owner)
    rest = [()] * (len(shape) - 1)
    return Layout.make(mesh, shape, (tuple(range(mesh.ndim)), *rest), (cuts, *[None] * len(rest)))


def owners_of(shapes: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """An owner for each matrix, whose work is that of its product with itself."""
    costs = [float(math.prod(shape) * min(shape, default=1)) for shape in shapes]
    return balanced(costs, num_ranks)


def balanced(costs: Sequence[float], num_ranks: int) -> list[int]:
    """An owner for each piece of work: the dearest first, each to the rank with the least so far
    (Graham's rule: at most 4/3 of the best)."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        load, rank = heapq.heappop(loads)
        owners[at] = rank
        heapq.heappush(loads, (load + costs[at], rank))
    return owners
