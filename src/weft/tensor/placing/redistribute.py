"""ShardTensors in other layouts, and their local and full tensors."""

from __future__ import annotations

from typing import Any

import torch

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout, StretchedLayout, as_boxes
from weft.errors import PlacementError, ShardTypeError
from weft.planner import gradient_layout
from weft.planner.geometry import strip
from weft.tensor.meta import NONE, Meta, bounded_put, intern
from weft.tensor.placing.arguments import mesh_and_placements
from weft.tensor.placing.boxed import boxed, joined, seen, viewed
from weft.tensor.placing.freed import fill, keep, memory_of
from weft.tensor.placing.layouts import as_layout
from weft.tensor.placing.operand_cache import MAX_VIEWS
from weft.tensor.placing.operands import as_value
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.views.moved import unwrap_view
from weft.transport import facts, traffic
from weft.transport.in_flight import landed
from weft.transport.nodes import gradient_through, untransformed
from weft.transport.transition import Casts, Transition

__all__ = [
    "copied_on_write", "full_tensor", "gathered", "offsets", "placed_gradients", "redistribute",
    "redistribute_to", "to_local", "to_replicated",
]


@untransformed
def redistribute(
    tensor: ShardTensor, device_mesh: Any, placements: Any, async_op: bool,
    forward_dtype: torch.dtype | None = None, backward_dtype: torch.dtype | None = None,
    grad_placements: Any = None,
) -> ShardTensor:
    """See `ShardTensor.redistribute`."""
    tensor = boxed(tensor)
    meta = tensor._meta
    if device_mesh is not None:
        device_mesh, placements = mesh_and_placements(device_mesh, placements)
    if type(placements) is ShardTensor:
        placements = placements.sharding
    dtypes = forward_dtype, backward_dtype
    key: Any = (  # meshes on other devices are equal
        meta, device_mesh, getattr(device_mesh, "device_type", None), dtypes,
        tuple(placements) if type(placements) is list else placements,
        tuple(grad_placements) if type(grad_placements) is list else grad_placements)
    known: dict[Any, _Move] = meta.mesh.cache.setdefault("moves", {})
    try:
        move = known.get(key)
    except TypeError:  # something in it is not hashable
        key = move = None
    if move is None:
        move = _Move(meta, device_mesh, placements, dtypes, grad_placements)
        if key is not None:
            bounded_put(known, key, move, MAX_VIEWS)
    if meta.varying:
        fill(tensor)
    local, transition = unwrap_view(tensor._local), move.transition
    if transition is None:
        out = copied_on_write(local)
    else:
        with traffic.label("redistribute", "asked for"):
            out = transition.start(local) if async_op else transition(local)
        if not transition.communicates and _shares(out, local):
            out = copied_on_write(out)
    if move.device is not None:
        out = out.to(move.device)
    return wrap(out, move.meta(out))


class _Move:
    """The route of a call of `redistribute`, found once.

    `transition` is None if this rank has nothing to do, `device` if the result stays where it is.
    """

    __slots__ = ("_metas", "_parts", "_strides", "_varying", "device", "transition")

    transition: Transition | None

    def __init__(
        self, meta: Meta, device_mesh: Any, placements: Any,
        dtypes: tuple[torch.dtype | None, torch.dtype | None], grad_placements: Any,
    ) -> None:
        mesh = meta.mesh
        if device_mesh is None and placements is None:
            raise PlacementError(
                "redistribute()", f"neither a mesh nor placements are given for "
                f"{meta.layout}", "redistribute needs a mesh or placements",
                ["placements=None"],
                "x.redistribute(placements=P())")
        target = mesh if device_mesh is None else as_bound_mesh(
            device_mesh, "redistribute(device_mesh)")
        layout, order = as_layout(
            target, meta.shape, placements, "redistribute(placements)"), meta.order()
        varying = _varying(target, layout, grad_placements, meta.dtype)
        forward, backward = _dtypes(meta, dtypes)
        casts = Casts(meta.dtype, forward, forward, backward)
        casts = casts if len({*casts}) > 1 else None
        if target == mesh:
            target = mesh if target.device == mesh.device else target
            self.transition = transition_between(
                mesh, meta.layout, layout, meta.varying, varying, order=order, casts=casts)
        else:  # every rank that is in one of the two takes part
            crossing = Transition(
                mesh, meta.layout, layout, target, order=order,
                src_varying=meta.varying, dst_varying=varying, casts=casts)
            self.transition = None if crossing.is_identity else crossing
        self.device = None if target.device == mesh.device else target.device
        self._parts = target, layout, forward, target.device
        self._metas: list[Meta | None] = [None, None]
        self._strides, self._varying = meta.strides, varying

    def meta(self, local: torch.Tensor) -> Meta:
        """The Meta of the result."""
        grad = local.requires_grad
        found = self._metas[grad]
        if found is None:
            found = self._metas[grad] = intern(
                *self._parts, grad, self._strides, None, self._varying if grad else NONE)
        return found


def _varying(
    mesh: BoundMesh, layout: Layout, placements: Any, dtype: torch.dtype
) -> frozenset[int]:
    """The axes over which a result is R, by the placements of its gradient, which has to be sharded
    alike and partial by sums alone."""
    if placements is None:
        return NONE
    seen = placed_gradients(mesh, layout, placements, dtype, "redistribute")
    wrong = [
        f"{mesh.axis_names[axis]}: {seen.placements[axis]!r} for {layout.placements[axis]!r}"
        for axis, kind in enumerate(seen.partial)
        if kind is not None and (kind != "sum" or layout.on(axis) is not None)
    ]
    if wrong:
        raise PlacementError(
            "redistribute(grad_placements)", f"{placements!r} for a result {layout}",
            "the gradient of a replicated result is Replicate(), or a partial sum that is "
            "reduced on its way back", wrong, "redistribute(P(), grad_placements="
            "[Partial()])")
    return facts.partial_axes(seen)


def _dtypes(
    meta: Meta, given: tuple[torch.dtype | None, torch.dtype | None]
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which values and gradients are sent, which a tensor's partial kinds can
    carry."""
    wrong = [
        f"{name}={one!r}" for name, one in zip(("forward_dtype", "backward_dtype"), given)
        if one is not None and not isinstance(one, torch.dtype)
    ]
    if wrong:
        raise ShardTypeError(
            "redistribute(forward_dtype=, backward_dtype=)", f"of {len(given)}, "
            f"{len(wrong)} are no torch.dtype", "values travel in forward_dtype, "
            "gradients in backward_dtype", wrong, "torch.bfloat16")
    forward, backward = (one or meta.dtype for one in given)
    for one in (forward, backward):
        meta.layout.check_dtype(str(one).removeprefix("torch."))
    return forward, backward


def copied_on_write(local: torch.Tensor) -> torch.Tensor:
    """The same values; the first write to either copies.

    Three kinds of memory are copied at once. Some is freed and filled again (`freed`). A view of
    more memory than it needs would keep all of it, and a write would copy all of it. Memory that
    torch's own allocators did not provide (from_numpy, torch.load) is recognized because it cannot
    be resized; for torch.load's, a first write would crash.
    """
    memory = local.untyped_storage()
    is_larger = memory.nbytes() > local.numel() * local.element_size()
    if is_larger or not memory.resizable() or memory_of(local) is not None:
        return local.clone()
    try:
        return torch._lazy_clone(local)
    except RuntimeError:  # shared between processes
        return local.clone()


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def redistribute_to(tensor: ShardTensor, layout: Layout, call: str = "redistribute") -> ShardTensor:
    """The tensor in a layout of its own mesh; may share memory. `call` names the request."""
    if as_boxes(tensor._meta.layout, layout) is None:
        tensor = boxed(tensor)
        if isinstance(layout, StretchedLayout):
            apart = layout.apart
            return joined(redistribute_to(viewed(tensor, apart.shape), apart, call), layout)
    if tensor._meta.varying:
        fill(tensor)
        tensor = as_value(tensor)  # type: ignore[assignment]
    meta = tensor._meta
    if meta.layout == layout:
        return tensor
    transition = transition_between(meta.mesh, meta.layout, layout, order=meta.order())
    if meta.mesh.here is None or transition is None:
        local = tensor._local
    else:
        local = _asked_for(call, transition, tensor._local)
    return wrap(local, meta.replace(layout=layout, requires_grad=local.requires_grad))


def to_replicated(meta: Meta) -> Transition | None:
    """The transition to the whole value on every rank; None if it is there already."""
    transition = meta.to_replicated
    if transition is False:
        full = Layout.replicated(meta.mesh.abstract, meta.shape)
        transition = meta.to_replicated = transition_between(
            meta.mesh, meta.layout, full, order=meta.order()
        )
    return transition


def gathered(tensor: ShardTensor) -> torch.Tensor:
    """The whole tensor, plain and detached; a collective unless replicated."""
    transition = to_replicated(tensor._meta)
    local = tensor._local.detach()
    return local if transition is None else _asked_for("full_tensor", transition, local)


def _asked_for(call: str, transition: Transition, local: torch.Tensor) -> torch.Tensor:
    """A transition that the user has written: no other use shares it, and strict mode allows it."""
    local = unwrap_view(local)
    with traffic.label(call, "asked for"):
        return transition(local)


def to_local(
    tensor: ShardTensor, grad_placements: Any, call: str = "to_local"
) -> torch.Tensor:
    """See `ShardTensor.to_local`."""
    tensor = boxed(tensor)
    if tensor._meta.varying:
        keep(tensor)
        if grad_placements is not None:
            tensor = as_value(tensor)  # type: ignore[assignment]
    local, meta = unwrap_view(landed(tensor._local)), tensor._meta
    back = None if grad_placements is None else _gradient_from(meta, grad_placements, call)
    return _in_the_graph(local, back) if local.requires_grad else local


@untransformed
def _in_the_graph(local: torch.Tensor, back: Transition | None) -> torch.Tensor:
    """The block, as a tensor of its own, through which gradients go back."""
    if not torch.is_grad_enabled():
        return local.detach()
    if back is None:
        return local.view_as(local)
    with traffic.label("to_local", "asked for"):
        return gradient_through(local, back)


def _gradient_from(meta: Meta, placements: Any, call: str) -> Transition | None:
    """The transition from gradients of local tensors, in the user's placements, to the tensor's."""
    layout, mesh = meta.layout, meta.mesh
    seen = placed_gradients(mesh, layout, placements, meta.dtype, call)
    partial = facts.partial_axes(layout)
    due = gradient_layout(layout)
    means = facts.divisor(layout, due)
    if means == 1:
        return transition_between(mesh, seen, due, partial, partial)
    # The placements are those of the value's gradient; a partial value of a mean has its share.
    return Transition(mesh, seen, due, src_varying=partial, dst_varying=partial, scale=1 / means)


def placed_gradients(
    mesh: BoundMesh, layout: Layout, placements: Any, dtype: torch.dtype, call: str
) -> Layout:
    """The layout of gradients of local tensors in the user's placements."""
    given = as_layout(mesh, layout.shape, placements, f"{call}(grad_placements)")
    one, other = strip(given), strip(layout)
    wrong = [
        f"{name}: {given.placements[axis]!r} for {layout.placements[axis]!r}"
        for axis, name in enumerate(mesh.axis_names)
        if one.on(axis) != other.on(axis)
        and (isinstance(one.on(axis), int) or isinstance(other.on(axis), int))
    ]
    if not wrong:
        wrong = [
            f"dim {dim}: sharded as {given.text()} for {layout.text()}"
            for dim in range(layout.ndim)
            if (given.cuts[dim] is not None and given.sizes_of(dim) != layout.sizes_of(dim))
            or one.dims[dim] != other.dims[dim]
        ]
    if wrong:
        raise PlacementError(
            f"{call}(grad_placements)", f"{placements!r} for a tensor {layout}",
            "where the tensor is sharded, gradients of its local tensors are sharded "
            "alike; elsewhere they are Replicate(), or Partial() of any kind", wrong,
            f"{call}(grad_placements=None)")
    seen = layout.replace(partial=[
        None if isinstance(layout.on(axis), int) else kind
        for axis, kind in enumerate(given.partial)
    ])
    seen.check_dtype(str(dtype).removeprefix("torch."))
    return seen


@untransformed
def full_tensor(tensor: ShardTensor, grad_placements: Any) -> torch.Tensor:
    """See `ShardTensor.full_tensor`."""
    if tensor._meta.mesh.here is None:
        return tensor.item()  # raises: a rank outside the mesh does not know the value
    full = Layout.replicated(tensor._meta.mesh.abstract, tensor.shape)
    whole = redistribute_to(tensor, full, "full_tensor")
    if _shares(whole._local, tensor._local):
        whole = wrap(copied_on_write(whole._local), whole._meta)
    return to_local(whole, grad_placements, "full_tensor")


def offsets(tensor: ShardTensor, mesh_dim: Any) -> Any:
    """See `ShardTensor.offsets`."""
    meta = tensor._meta
    if meta.mesh.here is None:
        return None
    box = seen(meta).box_at(meta.mesh.here)

    def of(axis: int) -> int:
        dim = meta.layout.on(axis)
        return box[dim][0] if isinstance(dim, int) else 0

    if mesh_dim is None:
        return tuple([of(axis) for axis in range(meta.mesh.ndim)])
    return of(meta.mesh.axis(mesh_dim, "offsets(mesh_dim)"))
