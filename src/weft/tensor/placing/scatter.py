"""ShardTensors of data that one rank has.

Theory of operation. Ranks that differ from the source only in replicated axes hold the same block.
So blocks are sent once, from the source to the ranks that share its coordinates on the axes that
do not shard. Each of them then broadcasts its own block over those axes, by the backend's tree. The
source sends the whole except its own block, and its own block once more if there are
replicas. A block that is contiguous in the source's memory is sent without a copy, and every
rank receives its block in place: no rank except the source ever holds more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh, Communicator, as_bound_mesh
from weft.core import Layout
from weft.core.arguments import MeshLike, Placements
from weft.core.integers import integers
from weft.core.names import ADVICE, PLACEMENTS, also_called
from weft.errors import (
    LayoutError,
    MeshError,
    ShardTypeError,
    UnsupportedOpError,
    WeftError,
)
from weft.tensor.placing.agreed import Strides, compared, exchanged, facts_of, strides_of
from weft.tensor.placing.arguments import mesh_and_placements, mesh_for
from weft.tensor.placing.foreign import is_foreign, taken
from weft.tensor.placing.layouts import (
    as_layout,
    as_sharded,
    check_given,
    check_plain,
    check_tensor,
    leaf,
)
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.boxes import slices
from weft.transport.nodes import untransformed
from weft.transport.order import Order, memory_order

__all__ = ["distribute_tensor", "distributed_alike", "scatter_tensor"]

_PLACEMENTS = "distribute_tensor(placements)"


@also_called({
    **ADVICE, "dtype": "distribute_tensor(tensor.to(dtype), ...)",
    "device": 'the mesh says where tensors live: weft.init_mesh(axes, "cuda")',
    "requires_grad": "distribute_tensor(...).requires_grad_()",
}, mesh="device_mesh", src="src_data_rank", **PLACEMENTS)
@untransformed
def distribute_tensor(
    tensor: torch.Tensor, device_mesh: MeshLike | Placements | None = None,
    placements: Placements | None = None,
    *, src_data_rank: int | None = 0,
) -> ShardTensor:
    """Make a ShardTensor of a full tensor; a leaf, unless the tensor has history (see below).

    Args:
        tensor: the full tensor, with the same shape and dtype on every rank. One on the meta device
            gives a ShardTensor on the meta device.
        device_mesh: the mesh, also accepted as `mesh=`; None means the current one, or
            else that of a Layout.
        placements: placements, P or Layout; None replicates.
        src_data_rank: the rank whose data count (the mesh's first, if the mesh does not hold it):
            it sends each rank its block. Ranks first compare what they pass. None takes each
            rank's own tensor and communicates nothing; debug mode compares. If that tensor has
            history, the gradient goes back to it, as to a replicated one.

    Raises:
        LayoutError: `tensor` is already distributed in another layout; on all ranks, if they pass
            different shapes, dtypes or placements.
        ShardTypeError: it is not a tensor.
        UnsupportedOpError: it is sparse or nested; it has history, and one rank's data count.
    """
    given, placements = mesh_and_placements(device_mesh, placements)
    mesh = mesh_for(given, placements, "distribute_tensor(device_mesh)")
    tensor = taken(tensor, mesh) if isinstance(tensor, torch.Tensor) else tensor
    call = "distribute_tensor(tensor)"
    if type(tensor) is ShardTensor:
        layout = as_layout(mesh, tensor.shape, placements, _PLACEMENTS)
        if tensor.sharding != layout:
            raise LayoutError(
                call, f"it is distributed as {tensor.sharding}, not as {layout}",
                "a distributed tensor passes unchanged or not at all",
                [str(tensor.sharding)], "x.redistribute(placements=...)")
        return tensor
    source = None if src_data_rank is None else (
        _source("distribute_tensor(src_data_rank=)", src_data_rank, mesh) or 0)
    fault, layout, mine = None, None, []
    try:
        check_tensor(tensor, call)
        _check_source(tensor, call)
        if source is not None:
            _check_history(tensor, call)
        layout = as_layout(mesh, tensor.shape, placements, _PLACEMENTS)
        mine = [facts_of("", tensor, layout)]
    except WeftError as error:
        fault = error
    sends = source is not None and not (fault is None and tensor.is_meta)
    if mesh.here is not None and (sends or mesh.world.debug.on):
        mine = compared(call, mesh, mine, fault, source or 0)
    if fault is not None:
        raise fault
    assert layout is not None
    if _has_history(tensor):
        return redistribute_to(as_sharded(tensor, mesh), layout)
    return _laid_out(tensor, mesh, layout, source, mine[0].strides)


def distributed_alike(
    call: str, tensors: Mapping[str, tuple[torch.Tensor, Layout]], mesh: BoundMesh,
    src_data_rank: int | None,
) -> Callable[[str, torch.Tensor], ShardTensor]:
    """The function that distributes these plain tensors, by name, one after the other. Ranks
    compare all of them here, at once, as `distribute_tensor` compares one; all raise LayoutError if
    they differ."""
    source = None if src_data_rank is None else _source(call, src_data_rank, mesh) or 0
    layouts = {name: layout for name, (_, layout) in tensors.items()}
    given = {name: one for name, one in tensors.items() if not is_foreign(one[0])}
    for name, (tensor, _) in given.items():
        _check_source(tensor, f"{call}: {name}")
        _check_history(tensor, f"{call}: {name}")
    facts = [facts_of(name, *one) for name, one in given.items()]
    sends = source is not None and not all(tensor.is_meta for tensor, _ in given.values())
    if mesh.here is not None and (sends or mesh.world.debug.on):
        facts = compared(call, mesh, facts, None, source or 0)
    strides = {one.name: one.strides for one in facts}

    def make(name: str, tensor: torch.Tensor) -> ShardTensor:
        if name not in strides:
            return distribute_tensor(tensor, mesh, layouts[name], src_data_rank=src_data_rank)
        return _laid_out(tensor, mesh, layouts[name], source, strides[name])

    return make


def _laid_out(
    tensor: torch.Tensor, mesh: BoundMesh, layout: Layout, source: int | None, strides: Strides
) -> ShardTensor:
    """The leaf of a full tensor: of the source's, or of each rank's own."""
    if mesh.here is None:
        local = tensor.detach().new_empty(0)
        return leaf(local, mesh, layout, tensor.requires_grad, strides)
    order, turned = _turned(layout, strides)
    full = _values(tensor) if order is None else _values(tensor).permute(order)
    if full.is_meta and mesh.device.type != "meta":  # nothing to send
        local = full.new_empty(turned.local_shape_at(mesh.here))
    elif source is None or mesh.device.type == "meta":  # or each rank takes its own
        local = _copied(_block(full, turned, mesh.here), mesh)
    else:
        local = _scattered(full, full.dtype, mesh, turned, mesh.coordinate(source))
    return leaf(_back(local, order), mesh, layout, tensor.requires_grad, strides)


def _has_history(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None and torch.is_grad_enabled()


def _check_source(tensor: torch.Tensor, call: str) -> None:
    """Raise UnsupportedOpError unless the blocks are plain tensors. Of a class with data of its
    own, the source would keep a block, and others receive numbers."""
    check_given(tensor, call)
    if hasattr(tensor, "__tensor_flatten__"):
        kind = type(tensor).__name__
        raise UnsupportedOpError(
            call, f"it is of class {kind}, with data of its own",
            "a ShardTensor's blocks are plain tensors", [kind],
            "the plain tensor, before a library converts it")


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as a plain tensor: another class would be that of the source's block alone."""
    values = tensor.detach()
    return values if type(values) is torch.Tensor else values.as_subclass(torch.Tensor)


def _check_history(tensor: torch.Tensor, call: str) -> None:
    """Raise UnsupportedOpError if a gradient would end at the leaf that is made of a tensor."""
    if _has_history(tensor):
        node = type(tensor.grad_fn).__name__
        raise UnsupportedOpError(
            call, f"it has history ({node}), and becomes a leaf",
            "the gradient of a leaf ends there; it goes on to the tensor only where each "
            "rank takes its own",
            [f"{node}, shape {tuple(tensor.shape)}"],
            "weft.distribute_tensor(x, mesh, placements, src_data_rank=None), for which x "
            "is the same on all ranks; or x.detach()")


def _source(call: str, rank: Any, mesh: BoundMesh) -> int | None:
    """The position of the source; None if the mesh does not hold it. ShardTypeError if it is no
    rank."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ShardTypeError(
            call, f"{rank!r} is of type {type(rank).__name__}", "the source is a rank, a "
            "whole number", [repr(rank)], f"{call.split('(')[0]}(..., {mesh.rank_at(0)}, ...)")
    return mesh.position_of_rank(rank)


@also_called(ADVICE, device_mesh="mesh", src_data_rank="global_src", src="global_src", **PLACEMENTS)
@untransformed
def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    mesh: MeshLike | None = None,
    placements: Placements | None = None,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """A leaf ShardTensor of a full tensor that one rank has.

    Args:
        tensor: the full tensor on rank `global_src`; ignored on other ranks.
        global_src: a rank of the mesh.
        mesh: the mesh; None means the current one.
        placements: placements, P or Layout; None replicates.
        global_shape: the shape of the full tensor; the source sends it to ranks that pass None.
            Ranks outside the mesh must give it.
        dtype: the dtype of the full tensor, by the same rule.
        requires_grad: whether the result requires a gradient.

    Raises:
        MeshError: `global_src` is not a rank of the mesh.
        ShardTypeError: it is not a number; the source has no plain tensor.
        UnsupportedOpError: on all ranks, if the source's tensor has history.
        LayoutError: on all ranks, if the source has no tensor, or one whose shape or dtype differs
            from what some rank says; on a rank outside the mesh that gives none.
    """
    bound = as_bound_mesh(mesh, "scatter_tensor(mesh)")
    call = "scatter_tensor(global_src)"
    source = _source(call, global_src, bound)
    if source is None:
        is_part = bound.size() < bound.world.size  # then other ranks' meshes have other firsts
        first = "mesh.rank_at(0)" if is_part else bound.rank_at(0)
        raise MeshError(
            call, f"rank {global_src} is outside {bound!r}",
            "the source is one of the mesh's ranks", [global_src],
            f"scatter_tensor(tensor, {first}, ...)")
    full, fault = None, None
    if tensor is not None and bound.rank == global_src:
        given = "scatter_tensor(tensor)"
        try:
            check_plain(tensor, given)
            _check_source(tensor, given)
            _check_history(tensor, given)
            full = _values(tensor)
        except WeftError as error:
            fault = error
    shape, dtype, strides = _told(full, fault, bound, source, global_shape, dtype)
    layout = as_layout(bound, shape, placements, "scatter_tensor(placements)")
    if bound.here is None:
        local = torch.empty(0, dtype=dtype, device=bound.device)
        return leaf(local, bound, layout, requires_grad, strides)
    order, turned = _turned(layout, strides)
    full = full if full is None or order is None else full.permute(order)
    local = _scattered(full, dtype, bound, turned, bound.coordinate(source))
    return leaf(_back(local, order), bound, layout, requires_grad, strides)


def _told(
    full: torch.Tensor | None, fault: WeftError | None, mesh: BoundMesh, source: int,
    shape: Any, dtype: torch.dtype | None,
) -> tuple[tuple[int, ...], torch.dtype, Strides]:
    """Shape, dtype and strides of the source's tensor, the same on every rank."""
    said = None
    try:
        said = None if shape is None else integers(
            shape, "scatter_tensor(global_shape=)", "lengths", "global_shape=(8, 4)")
    except WeftError as error:
        fault = fault or error
    if mesh.here is None:
        if fault is not None:
            raise fault
        if said is None or dtype is None:
            raise LayoutError(
                "scatter_tensor(global_shape, dtype)", f"they are {shape} and {dtype} on "
                f"rank {mesh.rank}, which is outside {mesh!r}",
                "a rank outside the mesh receives nothing, so it has to give the global "
                "shape and dtype", [mesh.rank],
                "scatter_tensor(..., global_shape=(8, 4), dtype=torch.float32)")
        return said, dtype, None
    mine = None if full is None else (tuple(full.shape), full.dtype, strides_of(full))
    told: list[Any] = exchanged("scatter_tensor(tensor)", mesh, [mine, said, dtype], fault)
    truth = told[source][0]
    wrong = [] if truth else [f"rank {mesh.rank_at(source)}: None"]
    for position, (_, shape_there, dtype_there) in enumerate(told if truth else ()):
        if shape_there not in (None, truth[0]) or dtype_there not in (None, truth[1]):
            wrong.append(f"rank {mesh.rank_at(position)}: {shape_there}, {dtype_there}")
    if wrong:
        fact = "no tensor" if truth is None else f"{truth[1]} of shape {truth[0]}"
        raise LayoutError(
            "scatter_tensor(tensor)", f"rank {mesh.rank_at(source)} has {fact}, "
            f"{len(wrong)} ranks say otherwise",
            "the source has the full tensor, of the shape and dtype that ranks say", wrong,
            "tensor=full on the source, global_shape=None elsewhere")
    return truth


def _turned(layout: Layout, strides: Strides) -> tuple[Order | None, Layout]:
    """The dims in their memory order (None: that is their own), and the layout of the tensor with
    dims in that order: so its blocks travel."""
    if strides is None:
        return None, layout
    order = memory_order(layout.shape, strides)
    return order, layout.take(order)


def _back(block: torch.Tensor, order: Order | None) -> torch.Tensor:
    """A block, dims in their own order again."""
    if order is None:
        return block
    return block.permute([order.index(dim) for dim in range(len(order))])


def _block(tensor: torch.Tensor, layout: Layout, coordinate: Sequence[int]) -> torch.Tensor:
    return tensor[slices(layout.box_at(coordinate))]


def _copied(block: torch.Tensor, mesh: BoundMesh) -> torch.Tensor:
    """A block with memory of its own, on the device of the mesh."""
    return block.to(mesh.device, copy=True, memory_format=torch.contiguous_format)


def _scattered(
    full: torch.Tensor | None, dtype: torch.dtype, mesh: BoundMesh, layout: Layout,
    source: tuple[int, ...],
) -> torch.Tensor:
    """This rank's block of the tensor that the rank at coordinate `source` has."""
    here = mesh.here
    assert here is not None
    over = layout.sharded_axes
    copies = tuple(axis for axis in range(mesh.ndim) if axis not in over)
    if here == source:
        assert full is not None
        local = _copied(_block(full, layout, here), mesh)
    else:
        full = None
        local = torch.empty(layout.local_shape_at(here), dtype=dtype, device=mesh.device)
    takers, peers = mesh.comm(over), mesh.comm(copies)
    if all(here[axis] == source[axis] for axis in copies):
        _send_blocks(full, local, mesh, layout, takers, mesh.place_along(over, source))
    if peers.size > 1:
        local = peers.broadcast(local, mesh.place_along(copies, source))
    return local


def _send_blocks(
    full: torch.Tensor | None, local: torch.Tensor, mesh: BoundMesh, layout: Layout,
    comm: Communicator, place: int,
) -> None:
    """From the source, at a position of the group, to the ranks that differ in sharding axes."""
    send, recv = [], []
    if full is None:
        recv = [(place, local)] if local.numel() else []
    else:
        for to, rank in enumerate(comm.ranks):
            if to != place:
                at = mesh.coordinate_of_rank(rank)
                assert at is not None
                block = _block(full, layout, at).to(mesh.device)
                block = block.contiguous()
                send += [(to, block)] if block.numel() else []
    comm.swap(send, recv, local.dtype)()
