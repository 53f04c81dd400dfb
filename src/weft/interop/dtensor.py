"""torch's DTensors as ShardTensors, and back: the same local tensors, under another class.

A gradient crosses as the gradient of the global value, as DTensor keeps it: placed like the tensor
if that is sharded or replicated, and replicated if it is a partial sum. For a mean, weft keeps each
partial value's share of the gradient, so it is multiplied by their number on the way out of weft's
graph. The gradients of other kinds of partial values depend on these values, not only on
the global value: with a gradient they are refused.

`torch.distributed.tensor` takes 0.7 s of CPU to import, as much as all of weft. So it is found by
name when a ShardTensor becomes a DTensor, and a DTensor brings its own class.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout, Mesh, Partial, Placement, Replicate, Shard, StridedShard
from weft.core.arguments import MeshLike
from weft.core.names import also_called
from weft.core.torch_strided import check_torch_strided
from weft.errors import LayoutError, MeshError, PlacementError, ShardTypeError
from weft.tensor import ShardTensor, hooks
from weft.tensor.modes import STRICT
from weft.tensor.placing import foreign
from weft.transport.order import memory_order, strides_in_order

__all__ = ["from_dtensor", "install", "to_dtensor"]

_MODULE = "torch.distributed.tensor"
_KINDS = ("sum", "avg", "max", "min", "product")
"""The reductions that DTensor carries out."""


@also_called(device_mesh="mesh")
def from_dtensor(dtensor: Any, mesh: MeshLike | None = None) -> ShardTensor:
    """The ShardTensor of a DTensor: the same local tensors; nothing is copied or sent.

    A write to one is a write to both; if a gradient is due, such a write is refused.
    Differentiable to any order; a DTensor that is a leaf gets its `grad` as a DTensor.

    Args:
        dtensor: a DTensor in any placements that are an order of axes, partial ones included.
        mesh: a mesh of the same ranks whose axis names the result takes; None takes those
            of the DTensor's own mesh (numbers, if it has no names).

    Raises:
        ShardTypeError: not a DTensor.
        MeshError: a mesh of other ranks.
        PlacementError: placements without a counterpart in weft (masked partial, a flattened dim);
            partial max, min or product values that require a gradient.
        LayoutError: a local tensor whose shape differs from what the placements give this rank.
    """
    call = "from_dtensor(dtensor)"
    if not foreign.is_foreign(dtensor):
        raise ShardTypeError(
            call, f"it is a {type(dtensor).__name__}", "from_dtensor takes torch's DTensor",
            [type(dtensor).__name__], "weft.distribute_tensor(x, mesh, placements), or "
            "weft.ShardTensor.from_local(x, mesh, placements)")
    bound = _mesh_for(dtensor.device_mesh, mesh, call)
    order = getattr(dtensor._spec, "shard_order", None)
    layout = _layout_of(bound.abstract, dtensor.shape, dtensor.placements, order)
    grad = torch.is_grad_enabled() and dtensor.requires_grad
    if grad:
        _check_gradient(call, layout, "d.redistribute(placements=[Replicate()]), or d.detach()")
    wait = getattr(dtensor._local_tensor, "wait", None)  # of a collective that is not finished
    landed = dtensor._local_tensor if wait is None else wait()
    local = _Entering.apply(dtensor, landed, layout) if grad else landed.detach()
    if bound.here is not None and tuple(local.shape) != layout.local_shape_at(bound.here):
        raise LayoutError(
            call, f"rank {bound.rank} holds shape {tuple(local.shape)}, the placements "
            f"give it {layout.local_shape_at(bound.here)} of {layout}",
            "DTensor cuts as torch.chunk; made from uneven local tensors without shape= it "
            "has another global shape than they add up to", [bound.rank],
            "weft.ShardTensor.from_local(d.to_local(), mesh, placements), which asks the "
            "ranks for their sizes")
    return ShardTensor.from_local(local, bound, layout, stride=dtensor.stride())


@also_called(device_mesh="mesh")
def to_dtensor(tensor: ShardTensor, mesh: MeshLike | None = None) -> Any:
    """The DTensor of a ShardTensor: the same local tensors; nothing is copied or sent.

    Differentiable to any order. The first call on a mesh that weft has made is a collective, if
    process groups have to be made.

    Args:
        tensor: a ShardTensor.
        mesh: the torch DeviceMesh of the result, with the same ranks; None takes the one
            that the tensor's mesh wraps.

    Raises:
        ShardTypeError: not a ShardTensor.
        MeshError: a mesh of other ranks; no process groups; ranks that do not ascend along an
            axis, which torch 2.13's collectives of DTensor mix up.
        PlacementError: a layout that DTensor's placements cannot express: explicit cuts, uneven
            shards in another order of axes, logical or bitwise partial values, sums beside means;
            partial max, min or product values that require a gradient.
    """
    call = "to_dtensor(tensor)"
    if type(tensor) is not ShardTensor:
        raise ShardTypeError(
            call, f"it is a {type(tensor).__name__}", "to_dtensor takes a ShardTensor",
            [type(tensor).__name__],
            "torch.distributed.tensor.distribute_tensor(x, mesh, placements)")
    layout, own = tensor.sharding, tensor.device_mesh
    placements, value = _spelled(layout)
    _check_ascends(own.abstract)
    if torch.is_grad_enabled() and tensor.requires_grad:
        _check_gradient(call, layout, "x.redistribute(placements=[Replicate()]), or x.detach()")
    if mesh is not None:
        _mesh_for(mesh, own, call)
    # A gradient that is asked for as that of the value.
    local = tensor.to_local(grad_placements=value if tensor.requires_grad else None)
    return pkgutil.resolve_name(_MODULE).DTensor.from_local(
        local, own.device_mesh if mesh is None else mesh, placements, shape=tensor.shape,
        stride=tensor.stride(),
    )


def install() -> None:
    """Let calls accept DTensors; give ShardTensor its two methods."""
    foreign.TAKERS[_MODULE, "DTensor"] = _take
    hooks.from_dtensor, hooks.to_dtensor = from_dtensor, to_dtensor


def _take(dtensor: Any, mesh: BoundMesh | None) -> ShardTensor:
    """A DTensor as an operand: on the mesh of the other operands if that has the same ranks.

    Partial values that only DTensor can reduce (of a norm, of a masked look-up) are reduced by it,
    as by any op of its own; strict mode refuses them.
    """
    if not STRICT.on and any(_is_its_own(one) for one in dtensor.placements):
        replicate = pkgutil.resolve_name(_MODULE).Replicate()
        dtensor = dtensor.redistribute(placements=[
            replicate if _is_its_own(one) else one for one in dtensor.placements
        ])
    own = as_bound_mesh(dtensor.device_mesh)
    return from_dtensor(dtensor, mesh if mesh is not None and _same_ranks(own, mesh) else None)


def _is_its_own(placement: Any) -> bool:
    return placement.is_partial() and type(placement).__name__ != "Partial"


class _Entering(torch.autograd.Function):
    """The local tensor of a DTensor; its gradient returns as a DTensor."""

    @staticmethod
    def forward(ctx: Any, dtensor: Any, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.kind, ctx.spec, ctx.layout = type(dtensor), dtensor._spec, layout
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        spec, layout = ctx.spec, ctx.layout
        num_values = math.prod(
            size for kind, size in zip(layout.partial, layout.mesh.axis_sizes) if kind == "avg"
        )
        replicate = pkgutil.resolve_name(_MODULE).Replicate()
        placements = [replicate if one.is_partial() else one for one in spec.placements]
        shape = torch.Size(layout.shape)
        strides = strides_in_order(shape, memory_order(shape, grad.stride()))
        return ctx.kind.from_local(
            grad if num_values == 1 else grad * num_values, spec.mesh, placements, shape=shape,
            stride=strides,
        ), None, None


@lru_cache(maxsize=4096)
def _layout_of(mesh: Mesh, shape: tuple[int, ...], placements: Any, order: Any) -> Layout:
    """`order` is of plain Shards, torch's `shard_order`; None beside _StridedShard."""
    try:
        layout = Layout(mesh, shape, placements)
    except (PlacementError, ShardTypeError) as error:
        raise PlacementError(
            "from_dtensor(dtensor)", f"a DTensor of shape {tuple(shape)} has the "
            f"placements {list(map(str, placements))}",
            "a placement is Shard, an order of axes by _StridedShard, Replicate, or "
            "Partial of a kind; masked partial values and flattened dims are none of these",
            [str(error).splitlines()[0]],
            "weft.from_dtensor(d.redistribute(placements=[Replicate(), ...]))") from error
    if order is None:
        return layout
    dims: list[tuple[int, ...]] = [()] * layout.ndim
    for entry in order:
        dims[entry.tensor_dim] = tuple(entry.mesh_dims)
    return layout.replace(dims=dims)


def _mesh_for(theirs: Any, asked: Any, call: str) -> BoundMesh:
    """The bound mesh of a DeviceMesh, or the requested one in its place."""
    mesh = as_bound_mesh(theirs, call)
    if asked is None:
        return mesh
    other = as_bound_mesh(asked, call)
    if not _same_ranks(mesh, other):
        raise MeshError(
            call, f"the DTensor's mesh is {mesh!r}, the other one is {other!r}",
            "both meshes have the same sizes and ranks; only names may differ",
            [repr(mesh.abstract), repr(other.abstract)],
            "x.redistribute(mesh, placements) moves a ShardTensor to another mesh")
    return other


def _same_ranks(one: BoundMesh, other: BoundMesh) -> bool:
    def plain(mesh: Mesh) -> Mesh:
        return Mesh(mesh.axis_sizes, mesh.ranks)

    return one is other or (one.device_type == other.device_type and plain(one) == plain(other))


@lru_cache(maxsize=256)
def _check_ascends(mesh: Mesh) -> None:
    """Refuse a mesh on which DTensor's `full_tensor` differs from the tensor of its blocks.

    DTensor's groups are sorted by rank, and it takes a position in the group for the coordinate.
    """
    if mesh.ranks is None:
        return
    ranks = torch.tensor(mesh.ranks).view(mesh.axis_sizes)
    wrong = [
        f"axis {name!r}" for axis, name in enumerate(mesh.axis_names)
        if mesh.axis_sizes[axis] > 1 and bool((ranks.diff(dim=axis) < 0).any())
    ]
    if wrong:
        raise MeshError(
            "to_dtensor(tensor)", f"the mesh is {mesh!r}, along {len(wrong)} axes of which "
            "ranks do not ascend",
            "DTensor gathers in ascending order of ranks, whatever their coordinates",
            wrong, "to_dtensor(x.redistribute(weft.init_mesh(axes, ranks=sorted(ranks)), "
            "x.placements))")


def _check_gradient(call: str, layout: Layout, fix: str) -> None:
    wrong = _named(layout, [kind not in (None, "sum", "avg") for kind in layout.partial])
    if wrong:
        raise PlacementError(
            call, f"the tensor is {layout} and requires a gradient",
            "partial sums and means have the gradient of the value; partial values of "
            "other kinds have gradients of their own, in which the two libraries differ",
            wrong, fix)


@lru_cache(maxsize=4096)
def _spelled(layout: Layout) -> tuple[Any, list[Placement]]:
    """torch's placements, and weft's of the layout without partial axes."""
    _check_says(layout)
    ours, theirs = layout.placements, pkgutil.resolve_name(_MODULE)
    return (
        [_theirs(theirs, placement) for placement in ours],
        [Replicate() if placement.is_partial() else placement for placement in ours],
    )


def _check_says(layout: Layout) -> None:
    """Refuse layouts that DTensor's placements cannot express, all offenders at once."""
    wrong: list[str] = []
    for dim, (axes, cuts) in enumerate(zip(layout.dims, layout.cuts)):
        names = ", ".join(str(layout.mesh.axis_names[axis]) for axis in axes)
        if cuts is not None:
            wrong.append(f"dim {dim}, sharded over ({names}) into explicit sizes "
                         f"{layout.sizes_of(dim)}")
        elif not _says_order(layout, dim):
            wrong.append(f"dim {dim} of length {layout.shape[dim]}, sharded unevenly over "
                         f"({names}) in this order")
    kinds = set(layout.partial) - {None}
    wrong += _named(layout, [kind not in (None, *_KINDS) for kind in layout.partial])
    mixed = len(kinds) > 1
    wrong += _named(layout, [mixed and kind is not None for kind in layout.partial])
    if wrong:
        placements = _nearest(layout).placements
        raise PlacementError(
            "to_dtensor(tensor)", f"the tensor is {layout}, of which DTensor's placements "
            f"cannot express {len(wrong)} parts",
            "DTensor cuts as torch.chunk, in the order of mesh axes (in another one where "
            f"shards are even), and has one kind of {', '.join(_KINDS)}", wrong,
            f"weft.to_dtensor(x.redistribute(placements={list(placements)}))")


def _says_order(layout: Layout, dim: int) -> bool:
    try:
        check_torch_strided(
            layout.mesh, layout.shape[dim : dim + 1], layout.dims[dim : dim + 1], layout.placements
        )
    except PlacementError:
        return False
    return True


def _nearest(layout: Layout) -> Layout:
    """The layout without what DTensor cannot express: default cuts, axes in order, other partial
    values reduced."""
    kinds = set(layout.partial) - {None}
    keep = len(kinds) == 1 and kinds <= set(_KINDS)
    return Layout.make(
        layout.mesh, layout.shape,
        [axes if layout.cuts[dim] is None and _says_order(layout, dim) else sorted(axes)
         for dim, axes in enumerate(layout.dims)],
        None, layout.partial if keep else None,
    )


def _named(layout: Layout, chosen: Sequence[bool]) -> list[str]:
    return [
        f"{kind}@{name}"
        for kind, name, yes in zip(layout.partial, layout.mesh.axis_names, chosen) if yes
    ]


def _theirs(theirs: Any, placement: Placement) -> Any:
    match placement:
        case Shard(dim) | StridedShard(dim, 1):  # of one shard's parts a stride of one is none
            return theirs.Shard(dim)
        case StridedShard(dim, factor):
            return theirs.placement_types._StridedShard(dim, split_factor=factor)
        case Partial(kind):
            return theirs.Partial(kind)
        case _:
            return theirs.Replicate()
