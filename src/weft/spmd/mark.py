"""Annotations: mark how a tensor is sharded, and read how it is.

A mark is a constraint on a value. The returned tensor has the layout of the spec, and so does its
gradient. The ops determine all further layouts, so a few marks are enough for a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.comm import as_bound_mesh
from weft.core import P
from weft.core.arguments import MeshLike
from weft.core.names import also_called
from weft.errors import LayoutError, ShardTypeError
from weft.spmd.mesh import as_spec
from weft.spmd.sharding import OpSharding, ShardingType
from weft.tensor import ShardTensor
from weft.tensor.placing.in_place import become_plain, become_sharded, refuse_kinds
from weft.tensor.placing.layouts import as_layout, as_sharded, check_tensor, local_to_sharded
from weft.tensor.placing.redistribute import copied_on_write, redistribute_to

__all__ = [
    "LocalShard", "clear_sharding", "global_tensor", "load_local_shards_", "local_shards",
    "mark_sharding", "mark_sharding_with_gradients", "shard_as", "sharding_spec", "sharding_type",
    "unwrap_sharded_tensor", "wrap_as_sharded_tensor", "wrap_if_sharded",
]


@also_called(
    device_mesh="mesh", spec="partition_spec", placements="partition_spec",
    sharding="partition_spec")
def mark_sharding(
    t: torch.Tensor, mesh: MeshLike | None, partition_spec: P | Sequence[Any]
) -> ShardTensor:
    """The tensor in the sharding of a spec; gradients flow back through it.

    Args:
        t: a plain tensor, equal on all ranks, of which each keeps its block (nothing is sent); or a
            ShardTensor, which is resharded to the spec. A Parameter, plain or sharded, is marked in
            place, for its module and for an optimizer that was built before, and is returned
            (for a sharded one, `redistribute` gives the value in another layout).
        mesh: the mesh; None takes the current one, else the global one.
        partition_spec: an entry per dim: an axis by name or number, a tuple of them (major to
            minor), or None. Omitted dims are not sharded.

    Raises:
        UnsupportedOpError: a Parameter in a graph whose backward has not run yet; one of
            another class, or sparse.
        PlacementError: a spec that names an axis twice, or more dims than there are.
        MeshError: a name of no axis.
    """
    bound = as_bound_mesh(mesh, "mark_sharding(mesh)")
    check_tensor(t, "mark_sharding(t)")
    is_parameter = isinstance(t, nn.Parameter)
    if is_parameter and type(t) is not ShardTensor:
        refuse_kinds(t, "mark_sharding")
    layout = as_layout(
        bound, t.shape, as_spec(partition_spec, t.ndim), "mark_sharding(partition_spec)")
    if is_parameter:
        if type(t) is ShardTensor and t.device_mesh == bound and t.sharding == layout:
            return t
        return become_sharded(t, bound, layout, "mark_sharding")
    if type(t) is ShardTensor and t.device_mesh != bound:
        return t.redistribute(bound, layout)
    return redistribute_to(as_sharded(t, bound), layout, "mark_sharding")


mark_sharding_with_gradients = mark_sharding
"""`mark_sharding` that also constrains the gradient; in weft both do."""


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """The whole tensor as a plain tensor on every rank; a plain tensor is returned as it is.

    A collective, unless the tensor is replicated. A Parameter is cleared in place.

    Args:
        t: a ShardTensor, or a plain tensor.

    Raises:
        MeshError: on a rank outside the tensor's mesh, which does not get the value.
    """
    if type(t) is ShardTensor and isinstance(t, nn.Parameter):
        return become_plain(t, "clear_sharding")
    return global_tensor(t)


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Both tensors in one sharding: that of `a`, or of `b` if `a` is plain or replicated.

    Args:
        a: a tensor, or a pytree (nested dicts, lists, tuples) of tensors and None.
        b: a tensor of the same shape, of which at least one is a ShardTensor; or such a pytree.

    Raises:
        ShardTypeError: both are plain; something else than tensors.
        LayoutError: their shapes differ, or the structures of pytrees.
    """
    ours, form = tree_flatten(a)
    theirs, other = tree_flatten(b)
    if form != other:
        for name, leaves in (("a", ours), ("b", theirs)):
            for one in leaves:
                check_tensor(one, f"shard_as({name})")
        raise LayoutError(
            "shard_as(a, b)", f"a is {form}, b {other}", "pytrees in one sharding have one "
            "structure", [f"{len(ours)} and {len(theirs)} leaves"], "shard_as(a[key], b[key])")
    pairs = [
        (None, None) if one is None and two is None else _alike(one, two)
        for one, two in zip(ours, theirs)
    ]
    return tree_unflatten([one for one, _ in pairs], form), tree_unflatten(
        [two for _, two in pairs], form)


def _alike(a: Any, b: Any) -> tuple[ShardTensor, ShardTensor]:
    """`shard_as` of two tensors."""
    check_tensor(a, "shard_as(a)")
    check_tensor(b, "shard_as(b)")
    sharded = [one for one in (a, b) if isinstance(one, ShardTensor)]
    if not sharded:
        raise ShardTypeError(
            "shard_as(a, b)", "both are plain tensors", "one of them says how the other is "
            "sharded", ["a", "b"], "mark_sharding(a, mesh, spec) first")
    if a.shape != b.shape:
        raise LayoutError(
            "shard_as(a, b)", f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}",
            "tensors in one sharding have one shape", [tuple(a.shape), tuple(b.shape)],
            "mark_sharding(b, mesh, spec)")
    leader = next((one for one in sharded if not one.sharding.is_replicated), sharded[0])
    mesh, layout = leader.device_mesh, leader.sharding.without_partial()
    both = [redistribute_to(as_sharded(one, mesh), layout, "shard_as") for one in (a, b)]
    return both[0], both[1]


def wrap_as_sharded_tensor(t: torch.Tensor, mesh: MeshLike | None = None) -> ShardTensor:
    """A plain tensor, equal on all ranks, as a replicated ShardTensor; a ShardTensor as it is.

    Args:
        t: a ShardTensor, or a plain tensor.
        mesh: None takes the current or global one.

    Raises:
        MeshError: there is none.
    """
    if isinstance(t, ShardTensor):
        return t
    check_tensor(t, "wrap_as_sharded_tensor(t)")
    return as_sharded(t, as_bound_mesh(mesh, "wrap_as_sharded_tensor(mesh)"))


def wrap_if_sharded(t: Any) -> Any:
    """Returns the argument: a sharded tensor is already a ShardTensor.

    Args:
        t: anything.
    """
    return t


def global_tensor(t: torch.Tensor) -> torch.Tensor:
    """The whole tensor, plain; a collective unless it is replicated.

    Args:
        t: a ShardTensor, or a plain tensor.
    """
    return t.full_tensor() if isinstance(t, ShardTensor) else t


unwrap_sharded_tensor = global_tensor
"""`global_tensor`, by torch_xla's other name. This rank's block is `t.to_local()`."""


def sharding_type(t: torch.Tensor) -> ShardingType | None:
    """The kind of a tensor's sharding, whatever its blocks; None for a plain tensor.

    Args:
        t: a ShardTensor, or a plain tensor.

    Raises:
        PlacementError: partial sums.
    """
    if not isinstance(t, ShardTensor):
        return None
    layout = t.sharding
    return OpSharding.of(layout.replace(shape=(layout.mesh.size(),) * layout.ndim)).type


def sharding_spec(t: torch.Tensor) -> str | None:
    """The HLO string of a tensor's sharding; None for a plain tensor.

    Args:
        t: a ShardTensor, or a plain tensor.

    Raises:
        PlacementError: partial sums, or blocks that XLA could not name.
    """
    return str(OpSharding.of(t.sharding)) if isinstance(t, ShardTensor) else None


@dataclass(eq=False)
class LocalShard:
    """A block of a tensor on this rank, as it was when `local_shards` was called.

    Attributes:
        data: the block.
        indices: its slices of the global tensor.
        rank: this rank.
        replica_id: this rank's number, in mesh order, among the ranks that hold the same block.
    """

    data: torch.Tensor
    indices: tuple[slice, ...]
    rank: int
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The block; weft does not pad. An assigned value (also a number) is written to it, and
        `load_local_shards_` writes it to the tensor."""
        return self.data

    @unpadded_data.setter
    def unpadded_data(self, value: Any) -> None:
        self.data[...] = value


def local_shards(t: ShardTensor) -> list[LocalShard]:
    """The blocks of a tensor on this rank: one, or none outside the mesh.

    Args:
        t: a ShardTensor.
    """
    mesh = t.device_mesh
    if mesh.here is None:
        return []
    block = copied_on_write(t.to_local().detach())
    replica = mesh.place_along(t.sharding.free_axes, mesh.here)  # along those that do not shard
    return [LocalShard(block, _indices(t), mesh.rank, replica)]


def _indices(t: ShardTensor) -> tuple[slice, ...]:
    here = t.device_mesh.here
    assert here is not None
    return tuple(slice(*interval) for interval in t.sharding.box_at(here))


def load_local_shards_(
    t: ShardTensor, shards: Sequence[torch.Tensor | LocalShard]
) -> ShardTensor:
    """Put a block into this rank's part of a tensor, in place; nothing is sent.

    Args:
        t: the tensor.
        shards: what `local_shards` returned, or tensors of those shapes.

    Returns:
        `t`.

    Raises:
        ShardTypeError: something else.
        LayoutError: a number of blocks different from what this rank holds, or a block with another
            shape or other indices.
    """
    mesh, call = t.device_mesh, "load_local_shards_(shards)"
    kinds = [
        type(one).__name__ for one in shards
        if isinstance(one, ShardTensor) or not isinstance(one, (LocalShard, Tensor))
    ]
    if kinds:
        raise ShardTypeError(
            call, f"there are {', '.join(kinds)} among them", "a block is a plain tensor, "
            "or a LocalShard", kinds, "load_local_shards_(t, local_shards(t))")
    held = [] if mesh.here is None else [(t.sharding.local_shape_at(mesh.here), _indices(t))]
    wrong: list[Any] = []
    for new, (shape, indices) in zip(shards, held):
        block = new.data if isinstance(new, LocalShard) else new
        if tuple(block.shape) != shape:
            wrong.append(tuple(block.shape))
        elif isinstance(new, LocalShard) and new.indices != indices:
            wrong.append(new.indices)
    if wrong or len(shards) != len(held):
        raise LayoutError(
            call, f"{len(shards)} blocks are given, and rank {mesh.rank} holds "
            f"{held[0] if held else 'none'}",
            "each rank gives the blocks that it holds", wrong or [f"{len(shards)} blocks"],
            "load_local_shards_(t, [torch.empty_like(s.data) for s in local_shards(t)])")
    for new in shards:
        block = new.data if isinstance(new, LocalShard) else new
        with torch.no_grad():
            t.copy_(local_to_sharded(block.detach().to(mesh.device), mesh, t.sharding))
    return t
