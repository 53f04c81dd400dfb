"""New ShardTensors, and copies of them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, Unpack

import torch

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.planner import gradient_layout
from weft.tensor.backward import accumulate
from weft.tensor.leaves import replace_leaf, take_hooks, track_leaf, uses_of
from weft.tensor.members import hooks
from weft.tensor.meta import NONE, Meta
from weft.tensor.placing.arguments import Where, place, shape_of
from weft.tensor.placing.boxed import boxed
from weft.tensor.placing.freed import keep, local_data, memory_of
from weft.tensor.placing.in_place import lay_state_of
from weft.tensor.placing.layouts import as_sharded, leaf
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.placing.scatter import distribute_tensor
from weft.tensor.shard_tensor import ShardTensor, attributes_of, wrap
from weft.tensor.trace.trees import local_of
from weft.tensor.versions import share_version
from weft.tensor.views.moved import unwrap_view
from weft.transport.nodes import untransformed

__all__ = [
    "arange", "deepcopy", "empty", "full", "is_in_a_graph", "ones", "set_", "set_data",
    "shallow_copy", "tell_torch", "zeros",
]


def set_data(tensor: ShardTensor, value: torch.Tensor) -> None:
    """`x.data = value`: the data, and with it layout and dtype; the leaf stays the same leaf.

    A plain value takes the tensor's layout; one of another shape is sharded over the same axes.
    A gradient keeps the layout that its tensor gives it, to which backward adds. An optimizer's
    state follows at its next step.
    """
    mesh = tensor._meta.mesh
    if tensor._meta.varying:  # gathered for its module: it becomes a shard again
        _set_gathered(tensor, value)
        return
    given = boxed(value) if type(value) is ShardTensor else redistribute_to(
        as_sharded(value, mesh), _for_shape(tensor._meta.layout, tuple(value.shape))
    )
    if getattr(tensor, "_is_gradient", False) and given.shape == tensor.shape:
        given = redistribute_to(given.detach(), tensor.sharding)
    grad = tensor.grad
    keep(given)
    data = unwrap_view(local_of(given)).detach()
    same = given._meta.mesh is mesh and (given.shape, given.dtype) == (tensor.shape, tensor.dtype)
    moves = given._meta.device.type != tensor._meta.device.type
    leaves = same and not moves and given.sharding != tensor.sharding and is_in_a_graph(tensor)
    if leaves:
        _leave_leaf(tensor, data)
    elif moves:
        # torch would make another parameter from or to the meta device; weft's stays the same.
        new = data.requires_grad_(tensor._local.requires_grad)
        take_hooks(tensor._local, new)
        tensor._local = track_leaf(new)
        if grad is not None:  # a gradient there has no values, and one here has yet to get them
            tensor._local.grad, grad = torch.zeros_like(data), None
    else:
        tensor._local.data = data
    if type(value) is ShardTensor:
        for one in (data, tensor._local):
            share_version(unwrap_view(one))
    if given.sharding != tensor.sharding:
        lay_state_of(tensor)
    tensor._meta = given._meta.replace(requires_grad=tensor._local.requires_grad)
    tensor._memo = None
    tensor._times_set += 1
    if grad is not None and grad.shape == given.shape:
        _lay_gradient(tensor, grad)
        if leaves:
            tensor._local.grad = grad._local
    tell_torch(tensor, given)


def _set_gathered(tensor: ShardTensor, value: torch.Tensor) -> None:
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise UnsupportedOpError(
            "x.data = value", f"x is a parameter of shape {tuple(tensor.shape)} and "
            f"{tensor.dtype}, gathered while its module runs; the value has "
            f"{tuple(value.shape)} and {value.dtype}",
            "shape and dtype of a parameter stay while its module runs",
            [str(tensor.sharding)],
            "set it before or after the forward of its module")
    with torch.no_grad():
        tensor.data.copy_(value)


def _for_shape(layout: Layout, shape: tuple[int, ...]) -> Layout:
    same = len(shape) == layout.ndim
    return layout.replace(shape=shape) if same else Layout.replicated(layout.mesh, shape)


def tell_torch(tensor: ShardTensor, now: ShardTensor) -> None:
    """Update the wrapper itself, from which torch's C++ reads shape, strides and dtype."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():  # type: ignore
        torch._C.TensorBase.data.__set__(tensor, wrap(now._local, now._meta))  # type: ignore


def is_in_a_graph(tensor: ShardTensor) -> bool:
    """Whether a graph may lead to this leaf: its node holds it, or leaf uses of it are alive."""
    local = tensor._local
    if not (local.is_leaf and local.requires_grad):
        return False
    return local._use_count() > 1 or bool(uses_of(local))  # type: ignore[attr-defined]


def _leave_leaf(tensor: ShardTensor, data: torch.Tensor) -> None:
    """Give the tensor another leaf for future graphs.

    Existing graphs return gradients in the old layout: their leaf passes them on.
    """
    old, meta, of = tensor._local, tensor._meta, weakref.ref(tensor)
    new = data.requires_grad_()
    take_hooks(old, new)
    old.grad = None
    tensor._local = track_leaf(new)
    replace_leaf(old, new)

    def pass_on(leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        found = of()
        if found is not None and grad is not None:
            _check_hooks(found, meta)
            whole = hooks.autograd.wrap_cotangent(meta, grad)
            total = hooks.autograd.local_cotangent(found._meta, whole)
            accumulate(found._local, total, torch.is_grad_enabled())

    old.register_post_accumulate_grad_hook(pass_on)


def _check_hooks(tensor: ShardTensor, before: Meta) -> None:
    new: Any = tensor._local
    if new._backward_hooks or new._post_accumulate_grad_hooks:
        raise UnsupportedOpError(
            "backward", f"x, which has hooks, was {before.layout} when this graph was "
            f"made, and `x.data = ` has made it {tensor.sharding}",
            "a hook sees the gradients of all uses at once, but the two graphs give theirs "
            "one after the other", [str(tensor.sharding)],
            "run the forward again, or set x.data after the backward")


def set_(tensor: ShardTensor, source: Any = None, *args: Any, **kwargs: Any) -> ShardTensor:
    """`x.set_(source)`: x shares the memory of a tensor with its shape and dtype."""
    same = type(source) is ShardTensor and source._meta.mesh == tensor._meta.mesh and (
        (source.shape, source.dtype) == (tensor.shape, tensor.dtype)
    )
    if not same or args or kwargs:
        raise UnsupportedOpError(
            "set_()", f"x is {tensor.sharding.text(str(tensor.dtype))}, the source "
            f"{getattr(source, 'sharding', type(source).__name__)}",
            "set_ takes a ShardTensor of the same shape, dtype and mesh: others would "
            "change the shape in place", ["set_"], "x.data = source, or x.copy_(source)")
    set_data(tensor, source)
    return tensor


def _lay_gradient(tensor: ShardTensor, grad: ShardTensor) -> None:
    """Reshard the existing gradient to the gradient layout of the tensor's new layout."""
    layout, grad = gradient_layout(tensor.sharding), boxed(grad)
    if layout != grad.sharding:
        with torch.no_grad():
            moved = redistribute_to(grad.detach(), layout)
        grad._is_gradient = False
        set_data(grad, moved)
        grad._is_gradient = True


def deepcopy(tensor: ShardTensor, memo: dict[int, Any]) -> ShardTensor:
    """A leaf with its own memory, on the same mesh."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    local = _copied(local_data(tensor).detach(), memo)
    local = track_leaf(local.requires_grad_(tensor.requires_grad))
    out = wrap(local, tensor._meta.replace(varying=NONE))
    memo[id(tensor)] = out
    is_parameter = getattr(tensor, "_is_param", False)
    if tensor._local.grad is not None and not is_parameter:  # as torch does
        out._local.grad = tensor._local.grad.detach().clone()
    vars(out).update(attributes_of(tensor))
    return out


def _copied(local: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy; as for plain tensors, tensors that share memory still do when copied together."""
    shares_until_written_to = torch._C._is_cow_tensor(local)  # type: ignore[attr-defined]
    if shares_until_written_to or memory_of(local) is not None:
        return local.clone()
    return copy.deepcopy(local, memo)


def shallow_copy(tensor: ShardTensor) -> ShardTensor:
    """`copy.copy`: a leaf that shares the memory."""
    local = tensor.detach()._local.requires_grad_(tensor.requires_grad)
    out = wrap(track_leaf(local), tensor._meta)
    vars(out).update(attributes_of(tensor))
    return out


def full(
    size: Sequence[int] | int, fill_value: Any, *, dtype: torch.dtype | None = None,
    requires_grad: bool = False, **where: Unpack[Where],
) -> ShardTensor:
    """A tensor filled with one value; each rank makes its block. As `zeros`, which says the rest.

    Args:
        size: the global shape, in elements.
        fill_value: a number.
        dtype: None derives it from the number.
    """
    return _filled("weft.full", (size,), fill_value, dtype, requires_grad, where)


def zeros(
    *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False,
    **where: Unpack[Where],
) -> ShardTensor:
    """Zeros of a global shape: `weft.zeros(4, 5, mesh=mesh, placements=P("dp"))`.

    Args:
        size: the global shape, as lengths or as one sequence.
        dtype: None is torch's default dtype.
        requires_grad: whether the result, a leaf, requires a gradient.
        where: `mesh` (None: the current one) and `placements` (None replicates), also accepted as
            `device_mesh` and `spec`; `layout`, torch's own, is torch.strided.

    Raises:
        ShardTypeError: an invalid length; something given by two names.
        UnsupportedOpError: a `layout` that is not dense.
        MeshError: no mesh is given, none is set.
    """
    return _filled("weft.zeros", size, 0.0, dtype, requires_grad, where)


def ones(
    *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False,
    **where: Unpack[Where],
) -> ShardTensor:
    """Ones of a global shape. As `zeros`, which says the rest.

    Args:
        size: the global shape, as lengths or as one sequence.
    """
    return _filled("weft.ones", size, 1.0, dtype, requires_grad, where)


def empty(
    *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False,
    **where: Unpack[Where],
) -> ShardTensor:
    """A tensor whose values have no meaning yet (they are zero). As `zeros`, which says the rest.

    Args:
        size: the global shape, as lengths or as one sequence.
    """
    return _filled("weft.empty", size, 0.0, dtype, requires_grad, where)


@untransformed
def arange(
    start: int | float, end: int | float | None = None, step: int | float = 1, *,
    dtype: torch.dtype | None = None, requires_grad: bool = False, **where: Unpack[Where],
) -> ShardTensor:
    """The numbers from `start` (0) to `end`, excluded, by `step`; each rank keeps its block.

    The other arguments, and the errors, are those of `zeros`.

    Args:
        start: the first number; where it is the only one given, the end.
        end: the number before which the sequence stops.
        step: the distance from number to number.
        dtype: None derives it from the numbers, as in torch.
    """
    first, last = (0, start) if end is None else (start, end)
    length = torch.arange(first, last, step, dtype=dtype, device="meta").shape
    bound, layout = place("weft.arange", length, where)
    values = torch.arange(first, last, step, dtype=dtype, device=bound.device)
    made = distribute_tensor(values, bound, layout, src_data_rank=None)
    return made.requires_grad_() if requires_grad else made


@untransformed
def _filled(
    call: str, size: tuple[Any, ...], value: Any, dtype: torch.dtype | None, requires_grad: bool,
    where: Where,
) -> ShardTensor:
    bound, layout = place(call, shape_of(call, size), where)
    local_shape = (0,) if bound.here is None else layout.local_shape_at(bound.here)
    local = torch.full(local_shape, value, dtype=dtype, device=bound.device)
    return leaf(local, bound, layout, requires_grad)
