"""ShardTensors of data that one rank has.

Theory of operation. Ranks that differ from the source in replicated axes only hold the same block.
So blocks go out once, from the source to those ranks that share its coordinates on the axes that
do not cut; each of them then broadcasts its own block over those axes, by the backend's tree. What
the source hands over is the whole, less its own block, and its own block once more where there are
replicas. A block that lies in the source's memory without gaps is sent as it lies, and every
rank receives its block in place: no rank but the source ever holds more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm import BoundMesh, Communicator, as_bound_mesh
from weft.core import Layout
from weft.errors import LayoutError, MeshError, message
from weft.tensor.placing.arguments import mesh_and_placements
from weft.tensor.placing.enter import transition_between
from weft.tensor.placing.foreign import taken
from weft.tensor.placing.layouts import as_layout, check_given, local_to_sharded
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.terms import own

__all__ = ["distribute_tensor", "scatter_tensor"]


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None,
    *, src_data_rank: int | None = 0,
) -> ShardTensor:
    """A leaf ShardTensor of a full tensor.

    Args:
        tensor: the full tensor, of the same shape and dtype on every rank. One on the meta device
            gives a ShardTensor on the meta device.
        device_mesh: the mesh; None means the current one.
        placements: placements, P or Layout; None replicates.
        src_data_rank: the rank whose data count (the mesh's first, when it holds no such rank):
            it sends each rank its block. None takes each rank's own and communicates nothing.

    Raises:
        LayoutError: `tensor` is distributed already, in another way.
        UnsupportedOpError: it is sparse or nested.
    """
    device_mesh, placements = mesh_and_placements(device_mesh, placements)
    mesh = as_bound_mesh(device_mesh)
    tensor = taken(tensor, mesh)
    layout = as_layout(mesh, tensor.shape, placements)
    if type(tensor) is ShardTensor:
        if tensor.sharding != layout:
            raise LayoutError(
                message("distribute_tensor(tensor)", f"it is distributed as {tensor.sharding}, not "
                        f"as {layout}", "a distributed tensor passes unchanged or not at all",
                        [str(tensor.sharding)], "x.redistribute(placements=...)")
            )
        return tensor
    check_given(tensor, "distribute_tensor(tensor)")
    full, requires_grad = tensor.detach(), tensor.requires_grad
    if mesh.here is None:
        local = full.new_empty(0)
    elif full.is_meta and mesh.device.type != "meta":  # nothing to send
        local = full.new_empty(layout.local_shape_at(mesh.here)).requires_grad_(requires_grad)
        return local_to_sharded(own(local), mesh, layout)
    elif src_data_rank is None:
        local = _copied(_block(full, layout, mesh.here), mesh)
    else:
        source = mesh.position_of_rank(src_data_rank) or 0
        local = _scattered(full, full.dtype, mesh, layout, mesh.coordinate(source))
    return _leaf(local, mesh, layout, requires_grad)


def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    mesh: Any = None,
    placements: Any = None,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """A leaf ShardTensor of a full tensor that one rank has.

    Args:
        tensor: the full tensor on rank `global_src`; what other ranks pass is not looked at.
        global_src: a rank of the mesh.
        mesh: the mesh; None means the current one.
        placements: placements, P or Layout; None replicates.
        global_shape, dtype: of the full tensor; the source tells them to ranks that pass None.
            Ranks outside the mesh must give them.
        requires_grad: whether the result wants a gradient.

    Raises:
        MeshError: `global_src` is no rank of the mesh.
        LayoutError: on all ranks, when the source has no tensor, or another shape or dtype than
            some rank says; on a rank outside the mesh that says none.
    """
    bound = as_bound_mesh(mesh, "mesh")
    source = bound.position_of_rank(global_src)
    if source is None:
        raise MeshError(
            message("scatter_tensor(global_src)", f"rank {global_src} is outside {bound!r}",
                    "the source is one of the mesh's ranks", [global_src],
                    f"scatter_tensor(tensor, {bound.rank_at(0)}, ...)")
        )
    full = tensor.detach() if tensor is not None and bound.rank == global_src else None
    shape, dtype = _facts(full, bound, source, global_shape, dtype)
    layout = as_layout(bound, shape, placements)
    if bound.here is None:
        local = torch.empty(0, dtype=dtype, device=bound.device)
    else:
        local = _scattered(full, dtype, bound, layout, bound.coordinate(source))
    return _leaf(local, bound, layout, requires_grad)


def _facts(
    full: torch.Tensor | None, mesh: BoundMesh, source: int, shape: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the source's tensor, the same on every rank."""
    said = None if shape is None else tuple(shape)
    if mesh.here is None:
        if said is None or dtype is None:
            raise LayoutError(
                message("scatter_tensor(global_shape, dtype)", f"they are {shape} and {dtype} on "
                        f"rank {mesh.rank}, which is outside {mesh!r}",
                        "a rank outside the mesh is told nothing, and knows the global shape and "
                        "dtype all the same", [mesh.rank],
                        "scatter_tensor(..., global_shape=(8, 4), dtype=torch.float32)")
            )
        return said, dtype
    mine = None if full is None else (tuple(full.shape), full.dtype)
    told: list[Any] = mesh.comm(tuple(range(mesh.ndim))).exchange((mine, said, dtype))
    truth = told[source][0]
    wrong = [] if truth else [f"rank {mesh.rank_at(source)}: None"]
    for position, (_, shape_there, dtype_there) in enumerate(told if truth else ()):
        if shape_there not in (None, truth[0]) or dtype_there not in (None, truth[1]):
            wrong.append(f"rank {mesh.rank_at(position)}: {shape_there}, {dtype_there}")
    if wrong:
        fact = "no tensor" if truth is None else f"{truth[1]} of shape {truth[0]}"
        raise LayoutError(
            message("scatter_tensor(tensor)", f"rank {mesh.rank_at(source)} has {fact}, "
                    f"{len(wrong)} ranks say otherwise",
                    "the source has the full tensor, of the shape and dtype that ranks say", wrong,
                    "tensor=full on the source, global_shape=None elsewhere")
        )
    return truth


def _leaf(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, requires_grad: bool
) -> ShardTensor:
    """The leaf of a local tensor that holds the value (not yet a term of it)."""
    if layout.is_partial and mesh.here is not None:
        to_partial = transition_between(mesh, _value(layout), layout)
        local = local if to_partial is None else to_partial(local)
    own(local.requires_grad_(requires_grad))
    return local_to_sharded(local, mesh, layout)


def _value(layout: Layout) -> Layout:
    return layout.replace(cuts=layout.cuts, partial=(None,) * layout.mesh.ndim)


def _block(tensor: torch.Tensor, layout: Layout, coordinate: Sequence[int]) -> torch.Tensor:
    box = layout.box_at(coordinate)
    return tensor[tuple(slice(start, stop) for start, stop in box)]


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
    cutting = {axis for axes in layout.dims for axis in axes}
    over = tuple(axis for axis in range(mesh.ndim) if axis in cutting)
    copies = tuple(axis for axis in range(mesh.ndim) if axis not in cutting)
    if here == source:
        assert full is not None
        local = _copied(_block(full, layout, here), mesh)
    else:
        full = None
        local = torch.empty(layout.local_shape_at(here), dtype=dtype, device=mesh.device)
    takers, peers = mesh.comm(over), mesh.comm(copies)
    if all(here[axis] == source[axis] for axis in copies):
        _send_blocks(full, local, mesh, layout, takers, _place(mesh, over, source))
    if peers.size == 1:
        return local
    return peers.broadcast(local, _place(mesh, copies, source))


def _send_blocks(
    full: torch.Tensor | None, local: torch.Tensor, mesh: BoundMesh, layout: Layout,
    comm: Communicator, place: int,
) -> None:
    """From the source, at a place of the group, to the ranks that differ in axes that cut."""
    send, recv = [], []
    if full is None:
        recv = [(place, local)] if local.numel() else []
    else:
        for to, rank in enumerate(comm.ranks):
            if to != place:
                position = mesh.position_of_rank(rank)
                assert position is not None
                block = _block(full, layout, mesh.coordinate(position)).to(mesh.device)
                block = block.contiguous()
                send += [(to, block)] if block.numel() else []
    comm.swap(send, recv, local.dtype)()


def _place(mesh: BoundMesh, axes: tuple[int, ...], at: tuple[int, ...]) -> int:
    """The place of a coordinate in its group over some axes."""
    place = 0
    for axis in axes:
        place = place * mesh.axis_sizes[axis] + at[axis]
    return place
