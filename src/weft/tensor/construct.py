"""ShardTensors from full tensors and from nothing; to other layouts, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout
from weft.errors import LayoutError, PlacementError, message
from weft.planner import gradient_layout
from weft.tensor.enter import transition_between
from weft.tensor.meta import Meta, intern, replicated_meta
from weft.tensor.modes import source_line
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.terms import own
from weft.tensor.trees import local_of
from weft.transport import traffic
from weft.transport.transition import Transition, gradient_through

__all__ = [
    "arange", "as_layout", "as_sharded", "deepcopy", "distribute_tensor", "empty", "full",
    "full_tensor", "gathered", "local_to_sharded", "offsets", "ones", "redistribute",
    "redistribute_to", "set_data", "shallow_copy", "to_local", "zeros",
]


def as_layout(mesh: BoundMesh, shape: Sequence[int], placements: Any) -> Layout:
    """The layout that placements, a P or a Layout mean for a tensor of this shape.

    Raises:
        LayoutError: a Layout of another mesh or shape.
    """
    if isinstance(placements, ShardTensor):
        placements = placements.layout
    if not isinstance(placements, Layout):
        return Layout(mesh, shape, placements)
    if placements.shape != tuple(shape) or placements.mesh != mesh:
        raise LayoutError(
            message("placements=Layout", f"the layout is {placements} on {placements.mesh}, the "
                    f"tensor has shape {tuple(shape)} on {mesh}",
                    "a layout is given for the tensor's own shape and mesh", [str(placements)],
                    f"Layout(mesh, {tuple(shape)}, P(...))")
        )
    return placements


def as_sharded(tensor: torch.Tensor, mesh: BoundMesh) -> ShardTensor:
    """A ShardTensor as it is; a plain tensor as Replicate on the mesh."""
    if type(tensor) is ShardTensor:
        return tensor
    return wrap(tensor, replicated_meta(mesh, tensor))


def local_to_sharded(local: torch.Tensor, mesh: BoundMesh, layout: Layout) -> ShardTensor:
    """The ShardTensor of a local tensor that lies as the layout says."""
    return wrap(local, intern(mesh, layout, local.dtype, local.device, local.requires_grad))


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None,
    *, src_data_rank: int | None = 0,
) -> ShardTensor:
    """A leaf ShardTensor of a full tensor.

    Args:
        tensor: the full tensor, of the same shape and dtype on every rank.
        device_mesh: the mesh; None means the current one.
        placements: placements, P or Layout; None replicates.
        src_data_rank: the rank whose data count (the mesh's first, when it holds no such rank);
            None takes each rank's own and communicates nothing.

    Raises:
        LayoutError: `tensor` is distributed already, in another way.
    """
    mesh = as_bound_mesh(device_mesh)
    layout = as_layout(mesh, tensor.shape, placements)
    if type(tensor) is ShardTensor:
        if tensor.layout != layout:
            raise LayoutError(
                message("distribute_tensor(tensor)", f"it is distributed as {tensor.layout}, not "
                        f"as {layout}", "a distributed tensor passes unchanged or not at all",
                        [str(tensor.layout)], "x.redistribute(placements=...)")
            )
        return tensor
    if mesh.here is None:
        local = tensor.new_empty(0)
    elif src_data_rank is None:
        local = _block(tensor.detach(), layout, mesh.here).clone()
    else:
        source = mesh.position_of_rank(src_data_rank)
        local = _scattered(tensor.detach(), mesh, layout, source or 0)
    if layout.is_partial and mesh.here is not None:
        whole = layout.replace(partial=(None,) * mesh.ndim)
        to_partial = transition_between(mesh, whole, layout)
        local = local if to_partial is None else to_partial(local)
    if local.is_floating_point() or local.is_complex():
        own(local.requires_grad_(tensor.requires_grad))
    return local_to_sharded(local, mesh, layout)


def _block(tensor: torch.Tensor, layout: Layout, coordinate: Sequence[int]) -> torch.Tensor:
    box = layout.box_at(coordinate)
    return tensor[tuple(slice(start, stop) for start, stop in box)].contiguous()


def _scattered(
    tensor: torch.Tensor, mesh: BoundMesh, layout: Layout, source: int
) -> torch.Tensor:
    """This rank's block, from the rank at position `source`."""
    comm = mesh.comm(tuple(range(mesh.ndim)))
    assert mesh.here is not None
    mine = layout.local_shape_at(mesh.here)
    if comm.size == 1:
        return _block(tensor, layout, mesh.here).clone()
    if layout.is_replicated or not any(layout.dims):
        return comm.broadcast(tensor.contiguous().flatten(), source).view(mine)
    coordinates = [mesh.coordinate(position) for position in range(comm.size)]
    sizes = [math.prod(layout.local_shape_at(coordinate)) for coordinate in coordinates]
    packed = None
    if comm.index == source:
        blocks = [_block(tensor, layout, coordinate).flatten() for coordinate in coordinates]
        packed = torch.cat(blocks)
    return comm.scatter(packed, sizes, source, tensor.dtype).view(mine)


def redistribute(tensor: ShardTensor, device_mesh: Any, placements: Any) -> ShardTensor:
    """See `ShardTensor.redistribute`."""
    mesh = tensor._meta.mesh
    if device_mesh is None and placements is None:
        raise PlacementError(
            message("redistribute()", f"neither a mesh nor placements are given for "
                    f"{tensor.layout}", "redistribute is told where to", ["placements=None"],
                    "x.redistribute(placements=[Replicate()])")
        )
    target = mesh if device_mesh is None else as_bound_mesh(device_mesh)
    layout = as_layout(target, tensor.shape, placements)
    if target != mesh:
        raise LayoutError(
            message("redistribute(device_mesh)", f"the tensor lives on {mesh!r}, the target is "
                    f"{target!r}", "redistribute to another mesh is not built yet",
                    [repr(target)], "weft.distribute_tensor(x.full_tensor(), other_mesh, ...)")
        )
    return _as_value(tensor, redistribute_to(tensor, layout))


def _as_value(tensor: ShardTensor, out: ShardTensor) -> ShardTensor:
    """`out`; where it shares memory with `tensor`, the first write to either copies."""
    if out._local is tensor._local or _shares(out._local, tensor._local):
        return wrap(torch._lazy_clone(out._local), out._meta)
    return out


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def redistribute_to(tensor: ShardTensor, layout: Layout) -> ShardTensor:
    """The tensor in a layout of its own mesh; may share memory."""
    meta = tensor._meta
    if meta.layout == layout:
        return tensor
    transition = transition_between(meta.mesh, meta.layout, layout)
    if meta.mesh.here is None or transition is None:
        local = tensor._local
    else:
        local = _asked_for("redistribute", transition, tensor._local)
    return wrap(local, meta.replace(layout=layout, requires_grad=local.requires_grad))


def to_replicated(meta: Meta) -> Transition | None:
    """The transition to the whole value on every rank; None where it is there already."""
    transition = meta.to_replicated
    if transition is False:
        full = Layout.replicated(meta.mesh.abstract, meta.shape)
        transition = meta.to_replicated = transition_between(meta.mesh, meta.layout, full)
    return transition


def gathered(tensor: ShardTensor) -> torch.Tensor:
    """The whole tensor, plain and detached; a collective unless replicated."""
    transition = to_replicated(tensor._meta)
    local = tensor._local.detach()
    return local if transition is None else _asked_for("full_tensor", transition, local)


def _asked_for(call: str, transition: Transition, local: torch.Tensor) -> torch.Tensor:
    """A transition that the user has written: no other use shares it, strict mode lets it pass."""
    if not traffic.STATE.on:
        return transition(local)
    with traffic.label(call, source_line(), "asked for"):
        return transition(local)


def to_local(tensor: ShardTensor, grad_placements: Any) -> torch.Tensor:
    """See `ShardTensor.to_local`."""
    local, meta = tensor._local, tensor._meta
    back = None if grad_placements is None else _gradient_from(meta, grad_placements)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return local
    if back is None:
        return local.view_as(local)
    with traffic.label("to_local", source_line() if traffic.STATE.on else "", "asked for"):
        return gradient_through(local, back)


def _gradient_from(meta: Meta, placements: Any) -> Transition | None:
    """The transition from gradients of local tensors, placed as the user says, to the tensor's.

    Raises:
        PlacementError: another gradient than that of the local tensors.
    """
    layout, mesh = meta.layout, meta.mesh
    given = as_layout(mesh, meta.shape, placements)
    wrong = [
        f"{name}: {_word(given, axis)} for {_word(layout, axis)}"
        for axis, name in enumerate(mesh.axis_names)
        if mesh.axis_sizes[axis] > 1 and given.on(axis) != layout.on(axis)
        and (isinstance(given.on(axis), int) or isinstance(layout.on(axis), int))
    ]
    if not wrong:
        wrong = [
            f"dim {dim}: cut as {given.text()} for {layout.text()}" for dim in range(layout.ndim)
            if (given.cuts[dim] is not None and given.sizes_of(dim) != layout.sizes_of(dim))
            or _cutting(given, dim) != _cutting(layout, dim)
        ]
    if wrong:
        raise PlacementError(
            message("to_local(grad_placements)", f"{placements!r} for a tensor {layout}",
                    "where the tensor is sharded, gradients of its local tensors are sharded "
                    "alike; elsewhere they are Replicate(), or Partial() of any kind", wrong,
                    "to_local(grad_placements=None)")
        )
    seen = layout.replace(cuts=layout.cuts, partial=[
        None if isinstance(layout.on(axis), int) else kind
        for axis, kind in enumerate(given.partial)
    ])
    seen.check_dtype(str(meta.dtype).removeprefix("torch."))
    terms = frozenset(axis for axis, kind in enumerate(layout.partial) if kind)
    return transition_between(mesh, seen, gradient_layout(layout), terms, terms)


def _cutting(layout: Layout, dim: int) -> list[int]:
    sizes = layout.mesh.axis_sizes
    return [axis for axis in layout.dims[dim] if sizes[axis] > 1]


def _word(layout: Layout, axis: int) -> str:
    does = layout.on(axis)
    if does is None:
        return "Replicate()"
    return f"Shard({does})" if isinstance(does, int) else f"Partial({does!r})"


def full_tensor(tensor: ShardTensor, grad_placements: Any) -> torch.Tensor:
    """See `ShardTensor.full_tensor`."""
    if tensor._meta.mesh.here is None:
        return tensor.item()  # raises: a rank outside the mesh knows no value
    full = Layout.replicated(tensor._meta.mesh.abstract, tensor.shape)
    return to_local(_as_value(tensor, redistribute_to(tensor, full)), grad_placements)


def offsets(tensor: ShardTensor, mesh_dim: Any) -> Any:
    """See `ShardTensor.offsets`."""
    meta = tensor._meta
    if meta.mesh.here is None:
        return None
    starts = tuple(start for start, _ in meta.layout.box_at(meta.mesh.here))
    if mesh_dim is None:
        return starts
    dim = meta.layout.on(meta.mesh.axis(mesh_dim, "offsets(mesh_dim)"))
    return starts[dim] if isinstance(dim, int) else 0


def set_data(tensor: ShardTensor, value: torch.Tensor) -> None:
    """`x.data = value`: the data, and with it layout and dtype; the leaf stays the same leaf."""
    mesh = tensor._meta.mesh
    given = value if type(value) is ShardTensor else redistribute_to(
        as_sharded(value, mesh), as_layout(mesh, value.shape, tensor._meta.layout)
    )
    tensor._local.data = local_of(given).detach()
    tensor._meta = given._meta.replace(requires_grad=tensor._local.requires_grad)
    tensor._memo = None
    with torch._C.DisableTorchFunctionSubclass():
        torch._C.TensorBase.data.__set__(tensor, wrap(given._local, given._meta))  # type: ignore


def deepcopy(tensor: ShardTensor, memo: dict[int, Any]) -> ShardTensor:
    """A leaf with its own memory, on the same mesh."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    local = tensor._local.detach().clone().requires_grad_(tensor.requires_grad)
    out = wrap(own(local), tensor._meta)
    memo[id(tensor)] = out
    is_parameter = getattr(tensor, "_is_param", False)
    if tensor._local.grad is not None and not is_parameter:  # as torch does
        out._local.grad = tensor._local.grad.detach().clone()
    for name, value in tensor.__dict__.items():
        setattr(out, name, value)
    return out


def shallow_copy(tensor: ShardTensor) -> ShardTensor:
    """`copy.copy`: a leaf that shares the memory."""
    local = tensor._local.detach().requires_grad_(tensor.requires_grad)
    out = wrap(own(local), tensor._meta)
    for name, value in tensor.__dict__.items():
        setattr(out, name, value)
    return out


def full(
    size: Sequence[int] | int, fill_value: Any, *, mesh: Any = None, spec: Any = None,
    dtype: torch.dtype | None = None, requires_grad: bool = False,
) -> ShardTensor:
    """A tensor filled with one value; each rank makes its block."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    bound = as_bound_mesh(mesh)
    layout = as_layout(bound, shape, spec)
    local_shape = (0,) if bound.here is None else layout.local_shape_at(bound.here)
    local = torch.full(local_shape, fill_value, dtype=dtype, device=bound.device)
    if layout.is_partial and bound.here is not None:
        whole = layout.replace(partial=(None,) * bound.ndim)
        to_partial = transition_between(bound, whole, layout)
        local = local if to_partial is None else to_partial(local)
    return local_to_sharded(own(local.requires_grad_(requires_grad)), bound, layout)


def zeros(*size: Any, dtype: torch.dtype | None = None, **where: Any) -> ShardTensor:
    """Zeros of a global shape: `weft.zeros(4, 5, mesh=mesh, spec=P("dp"))`."""
    return full(_size(size), 0, dtype=dtype or torch.get_default_dtype(), **where)


def ones(*size: Any, dtype: torch.dtype | None = None, **where: Any) -> ShardTensor:
    """Ones of a global shape."""
    return full(_size(size), 1, dtype=dtype or torch.get_default_dtype(), **where)


def empty(*size: Any, dtype: torch.dtype | None = None, **where: Any) -> ShardTensor:
    """A tensor whose values mean nothing yet (they are zero)."""
    return zeros(*size, dtype=dtype, **where)


def arange(
    start: int | float, end: int | float | None = None, step: int | float = 1, *,
    mesh: Any = None, spec: Any = None, dtype: torch.dtype | None = None,
) -> ShardTensor:
    """As torch.arange; each rank keeps its block."""
    first, last = (0, start) if end is None else (start, end)
    bound = as_bound_mesh(mesh)
    values = torch.arange(first, last, step, dtype=dtype, device=bound.device)
    return distribute_tensor(values, bound, spec, src_data_rank=None)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
