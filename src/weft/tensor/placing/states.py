"""Many tensors, moved together to other layouts or meshes: planned by `planner.moving`, carried out
by `transport.moving`.

For work on whole matrices that does not divide (an iteration of Muon, an eigenvalue decomposition)
each matrix has an owner. A tensor at its owner is in the layout in which one rank has everything,
so all of them move together there, and back, as any state does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.planner.moving import Move, moving
from weft.tensor.meta import kept
from weft.tensor.placing.freed import local_data
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.moving import StateMove
from weft.transport.order import strides_in_order

__all__ = ["at_one_rank", "balanced", "buckets", "from_owners", "moved", "owners_of", "to_owners"]

_MAX_PLANS = 64

_NBYTES = 1 << 28
"""Of the tensors of one bucket: each owner holds its part of them."""


def moved(
    tensors: Sequence[tuple[ShardTensor, BoundMesh, Layout]], bucket_nbytes: int | None = None
) -> list[ShardTensor]:
    """Each tensor, without history, on a mesh in a layout; neither side is partial.

    Args:
        tensors: all ranks of their meshes, and of those they move to, call with the same.
        bucket_nbytes: the most bytes that a rank sends at once; None: all of one dtype.
    """
    if not tensors:
        return []
    meshes = tuple(dict.fromkeys(
        mesh for tensor, target, _ in tensors for mesh in (tensor._meta.mesh, target)
    ))
    first = meshes[0]
    if all(mesh.here is None for mesh in meshes):
        locals_ = [tensor._local.new_empty(0) for tensor, _, _ in tensors]
    else:
        moves = tuple([
            Move(tensor._meta.layout, layout, str(tensor.dtype).removeprefix("torch."))
            for tensor, _, layout in tensors
        ])

        def make() -> StateMove:
            comm = first.everyone() if len(meshes) == 1 else first.world.across(*meshes)
            return StateMove(moving(moves, bucket_nbytes), comm, first.rank)

        found = kept(
            first.cache.setdefault("moves of states", {}), (moves, meshes, bucket_nbytes), make,
            _MAX_PLANS)
        with torch.no_grad():
            locals_ = found.move(
                [local_data(tensor) for tensor, _, _ in tensors],
                lambda number: _made(*tensors[number]))
    return [
        local_to_sharded(local.to(mesh.device), mesh, layout, tensor._meta.strides)
        for local, (tensor, mesh, layout) in zip(locals_, tensors)
    ]


def _made(tensor: ShardTensor, mesh: BoundMesh, layout: Layout) -> torch.Tensor:
    """A new local tensor, in the memory order of the global one."""
    like = tensor._local
    if mesh.here is None:
        return like.new_empty(0)
    shape, order = layout.local_shape_at(mesh.here), tensor._meta.order()
    if order is None:
        return like.new_empty(shape)
    rest = [dim for dim in range(len(shape)) if dim not in order]
    return like.new_empty_strided(shape, strides_in_order(shape, [*rest, *order]))


# Whole tensors at single ranks.


def buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive places whose sizes sum up to at most `_NBYTES`, or one that alone is more."""
    some, total = [], 0
    for at, size in enumerate(sizes):
        if some and total + size > _NBYTES:
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
