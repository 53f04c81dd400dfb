"""The transitions of one rank: one object for what is the same."""

from __future__ import annotations

import torch

from weft.comm import BoundMesh
from weft.core import Cover, Layout
from weft.tensor.counts import TRANSITIONS
from weft.tensor.meta import kept
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.order import Order, order_of
from weft.transport.transition import Casts, Transition

__all__ = ["MAX_TRANSITIONS", "order_in_memory", "transition_between"]

MAX_TRANSITIONS = 4096


def transition_between(
    mesh: BoundMesh,
    src: Layout,
    dst: Layout,
    src_varying: frozenset[int] = frozenset(),
    dst_varying: frozenset[int] = frozenset(),
    order: Order | None = None,
    cover: Cover | None = None,
    casts: Casts | None = None,
) -> Transition | None:
    """The one Transition of these layouts on this rank; None if it does nothing.

    `order`: see `order_in_memory` of the tensor that moves. `cover`: what ranks read beside `dst`.
    `casts`: its dtypes, where they are not all the same.
    """
    if src == dst and cover is None:
        if src_varying == dst_varying and casts is None:
            return None
        order = None
    def make() -> Transition | None:
        made = Transition(
            mesh, src, dst, src_varying=src_varying, dst_varying=dst_varying, order=order,
            cover=cover, casts=casts)
        return None if made.is_identity else made

    table = mesh.cache.setdefault("transitions", {})
    key = (src, dst, src_varying, dst_varying, order, cover, casts)
    return kept(table, key, make, MAX_TRANSITIONS, TRANSITIONS)


def order_in_memory(tensor: torch.Tensor) -> Order | None:
    """The global memory order of an operand's dims, which it keeps when it moves."""
    if type(tensor) is ShardTensor:
        return tensor._meta.order()
    return order_of(tensor.shape, tensor.stride())
