"""Many tensors, moved together to other layouts or meshes: planned by `planner.moving`, carried out
by `transport.moving`."""

from __future__ import annotations

from collections.abc import Sequence

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

__all__ = ["moved"]

_MAX_PLANS = 64


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
