"""Changes of shape in place: `t_`, `transpose_`, `swapaxes_`, `squeeze_`, `unsqueeze_`.

A ShardTensor refers to a local tensor. A change in place makes it refer to the out-of-place result:
a view of the same memory (or, where a sharded dim of length 1 is removed, a view that had to move
and follows it, see `views.moved`). The old local tensor stays behind its other views. Autograd sees
the op, not a write. The version counter grows as after a write, as in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._autograd import (  # type: ignore[attr-defined]
    CreationMeta,
    _get_creation_meta,
)
from torch._C._autograd import _unsafe_set_version_counter as _set_version  # type: ignore

from weft.errors import UnsupportedOpError
from weft.rules import op, page
from weft.tensor.leaves import take_hooks, track_leaf, uses_of
from weft.tensor.placing.construct import is_in_a_graph, tell_torch
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.views.moved import Moved, bump_versions, stands_for, unwrap_view

__all__ = ["PAGE"]

Show = Callable[[Any], Any]


def _reshape(name: str, tensor: Any, show: Show) -> None:
    _check_as_torch(tensor)
    if _changes_nothing(tensor, show):
        bump_versions(tensor)
        return
    _check(name, tensor)
    before = wrap(tensor._local, tensor._meta)
    before._memo = tensor._memo
    if before._local.requires_grad and before._local.is_leaf:  # in no_grad mode
        with torch.enable_grad():
            shown = show(before.detach())
        local = _other_leaf(name, tensor, shown._local)
    else:
        shown = show(before)
        local = shown._local
    stands_for(before, tensor)
    bump_versions(before)
    # A moved view counts by itself.
    if type(local) is Moved and not (moved := unwrap_view(local)).is_inference():
        _set_version((moved,), (unwrap_view(before._local)._version,))
    tensor._local = local
    tensor._meta = shown._meta.replace(requires_grad=local.requires_grad)
    tensor._memo = None
    tensor._grad_view = tensor._known = tensor._node = None
    tell_torch(tensor, shown)


def _changes_nothing(tensor: ShardTensor, show: Show) -> bool:
    """Whether the result has the same dims in memory: `transpose_(0, 0)`, `squeeze_` of no dim."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    shown = show(torch.empty_strided(shape, strides, device="meta"))
    return (tuple(shown.shape), shown.stride()) == (shape, strides)


def _check_as_torch(tensor: ShardTensor) -> None:
    """Raise where torch raises."""
    local = unwrap_view(tensor._local)
    recorded = torch.is_grad_enabled() and local.requires_grad
    if type(tensor._local) is Moved:
        tensor._local._weft_view.check_recorded(recorded)
    if local.is_inference() and not torch.is_inference_mode_enabled():
        local.transpose_(0, 0)  # raises torch's own error
    if recorded and local._is_view() and _get_creation_meta(local) is not CreationMeta.DEFAULT:
        local.transpose_(0, 0)
    base = local._base
    if recorded and (local.is_leaf or (base is not None and base.is_leaf)):
        kind = "leaf Variable" if local.is_leaf else "view of a leaf Variable"
        raise RuntimeError(f"a {kind} that requires grad is being used in an in-place operation.")


def _check(name: str, tensor: ShardTensor) -> None:
    """Raise where a gradient that there is would have another shape."""
    local = unwrap_view(tensor._local)
    recorded = torch.is_grad_enabled() and local.requires_grad
    if getattr(tensor, "_is_gradient", False):
        _refuse(name, tensor, "it is the gradient of a tensor, which keeps its shape",
                "y = x.grad.clone(), then change y")
    if local.requires_grad and (local.grad is not None if local.is_leaf else local.retains_grad):
        _refuse(name, tensor, "it has, or retains, a gradient of the shape that it has now",
                "x.grad = None first, or change x.detach()")
    if local.requires_grad and not recorded and not local.is_leaf:
        _refuse(name, tensor, "it has a history, and no_grad mode would not record the change",
                "change it outside no_grad, or change x.detach()")


def _other_leaf(name: str, tensor: ShardTensor, local: Tensor) -> Tensor:
    """The leaf that a leaf becomes, in no_grad mode: of the same memory, with its hooks.

    Graphs that are there hold the leaf that it was, to which no gradient may come any more.
    """
    if type(local) is Moved:
        _refuse(name, tensor, "it is a leaf that requires grad, and its data have to move",
                "x.data = x.data.squeeze(dim)")
    old, new = tensor._local, track_leaf(local.detach().requires_grad_())
    take_hooks(old, new)
    if is_in_a_graph(tensor):
        refuse = _refusing(name, tensor)
        for leaf in (old, *(use.seen for use in uses_of(old))):
            if leaf is not None:
                leaf.register_hook(refuse)
    return new


def _refusing(name: str, tensor: ShardTensor) -> Callable[[Tensor], NoReturn]:
    before, of = tensor._meta.layout, weakref.ref(tensor)  # the graph holds the hook

    def refuse(grad: Tensor) -> NoReturn:
        found = of()
        now = "another shape" if found is None else str(found.sharding)
        raise UnsupportedOpError(
            "backward", f"x, which requires grad, was {before} when this graph was made, "
            f"and {name} has made it {now}",
            "a gradient has the shape of its tensor", [str(before)],
            "run the forward again after the change")

    return refuse


def _refuse(name: str, tensor: ShardTensor, fact: str, fix: str) -> NoReturn:
    raise UnsupportedOpError(
        name, f"x is {tensor.sharding}; {fact}",
        "a shape changes in place where no gradient is left behind in the old one",
        [str(tensor.sharding)], fix)


def _in_place(name: str) -> Callable[..., None]:
    show = getattr(Tensor, name)

    def reshape(tensor: Any, *args: Any) -> None:
        """Make the ShardTensor refer to the out-of-place result of the op."""
        _reshape(f"aten.{name}_", tensor, lambda one: show(one, *args))

    return reshape


PAGE = page(*[
    op(f"{name}_", compose=_in_place(name), each_call=True)
    for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")
])
