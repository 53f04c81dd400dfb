"""Views whose data had to move: they follow their base, and their base follows them.

A view op that cannot leave its data in place (one element of a sharded dim is sent to every
rank) makes a tensor that shares no memory with its base. It is a view nevertheless: a `View` knows
the base and the call. The local tensor of the result is of the class `Moved`, so torch calls
`__torch_function__` for every use of it, as for a tensor in flight:

- before a use, a view whose base has been written to since is read from the base again, in place,
  so that version counters and graphs are those of a view in torch;
- after a use that wrote to it, its content is written to the base, by the inverse of the call.

A tensor that shares memory with a moved view is one too, with the same `View`. All ranks run the
same program, so they find the same views out of date at the same call, and communicate together.
Other tensors never pay for this.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.autograd.graph import increment_version

from weft.tensor.meta import Meta, expanded_dims
from weft.tensor.shard_tensor import ShardTensor, version_of, wrap
from weft.tensor.torch_collectives import beneath
from weft.tensor.trace.calls import written_by
from weft.tensor.trace.trees import flatten, local_of, map_tensors
from weft.tensor.versions import counted_version, with_own_version
from weft.tensor.views.cast_weight import gathered
from weft.tensor.views.inverse import write
from weft.transport.nodes import with_gradient
from weft.transport.order import full_order, laid

__all__ = [
    "Moved", "attach_to_base", "bump_versions", "bump_view_epoch", "stands_for", "unwrap_view",
    "written_to",
]

_SEVERAL = frozenset((torch.broadcast_tensors, torch.functional.broadcast_tensors, torch.meshgrid,
                      torch.functional.meshgrid))
"""Functions of which every result is a view of another argument."""


class Moved(torch.Tensor):
    """A local tensor of a view whose data had to move. `_weft_view` is its View, `_weft_plain`
    the plain tensor with the same memory that is in autograd's graph."""

    _weft_view: View
    _weft_plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        met: dict[int, Moved] = {}
        opened: list[Tensor] = []  # keeps the ids valid

        def open_(tensor: Tensor) -> Tensor:
            if type(tensor) is not Moved:
                return tensor
            one = unwrap_view(tensor)
            if id(one) not in met:
                opened.append(one)
            met[id(one)] = tensor
            return one

        args, kwargs = map_tensors(open_, args), map_tensors(open_, kwargs or {})
        before = [counted_version(one._weft_plain) for one in met.values()]
        out = func(*args, **kwargs)
        for known, one, state in zip(opened, met.values(), before):
            if counted_version(one._weft_plain) != state or (  # tensors of inference count none
                state is None and any(found is known for found in written_by(func, args, kwargs))
            ):
                one._weft_view.write_back(one._weft_plain.requires_grad)
        return map_tensors(lambda tensor: _as_moved(tensor, met), out)


def _as_moved(tensor: Tensor, met: dict[int, Moved]) -> Tensor:
    """A result of a local op; if it shares memory with a moved view it is one."""
    known = met.get(id(tensor))
    if known is not None:
        return known
    if type(tensor) is Tensor:
        storage = tensor.untyped_storage()._cdata
        for one in met.values():
            if one._weft_plain.untyped_storage()._cdata == storage:
                return _moved(tensor, one._weft_view)
    return tensor


def _moved(tensor: Tensor, view: View) -> Moved:
    # A view of it, not itself: graphs hold the plain tensor, and no base with it.
    with torch.set_grad_enabled(tensor.requires_grad):
        out: Any = tensor.view_as(tensor)
    out.__class__ = Moved
    out._weft_view, out._weft_plain = view, tensor
    return out


def unwrap_view(local: Tensor) -> Tensor:
    """The local tensor; for a moved view the plain one, up to date."""
    if type(local) is not Moved:
        return gathered(local)
    local._weft_view.update()
    with torch._C.DisableTorchFunctionSubclass():
        if local.requires_grad and not local._weft_plain.requires_grad:
            # A node of autograd, a transition, has returned it: the graph is its own.
            local._weft_plain = local.view_as(local)
    return local._weft_plain


class View:
    """The base of a moved view, and the call.

    Args:
        base: the tensor that the call viewed.
        func, args, kwargs: the call.
        place: the number of this result.
        out: the result, whose local tensor is the plain one.
        own: what that is expanded from, else itself.
        is_one_of_several: whether the call returns a list of views; torch records no writes to
            these.
    """

    __slots__ = ("__weakref__", "args", "base", "buffer", "func", "grad", "is_one_of_several",
                 "kwargs", "meta", "own", "place", "seen", "storage")

    def __init__(
        self, base: Tensor, func: Any, args: Any, kwargs: Any, place: int, out: ShardTensor,
        own: Tensor, is_one_of_several: bool,
    ) -> None:
        self.base: Tensor | None = base
        self.func, self.args, self.kwargs, self.place = func, args, kwargs, place
        self.buffer, self.own, self.meta = out._local, own, out._meta
        self.grad, self.is_one_of_several = torch.is_grad_enabled(), is_one_of_several
        self.storage = _memory(base)
        self.seen = _version(base)

    def update(self) -> None:
        """Read the view again if its base has been written to."""
        base = self.base
        if base is None:
            return
        now = _version(base)
        if now == self.seen:
            return
        if _memory(base)._cdata != self.storage._cdata:  # `base.data = other`: torch leaves views
            self.base = None
            return
        inference = torch.inference_mode(self.buffer.is_inference())
        with beneath(), inference, torch.set_grad_enabled(self.grad):
            again: Any = flatten(self.func(*self.args, **self.kwargs))[self.place]
            if again._meta.layout != self.meta.layout:  # whether a gradient is wanted has changed
                again = again.redistribute(placements=self.meta.layout)
            self.seen = now
            self.own.copy_(_shown_once(unwrap_view(again._local), self.meta))

    def check_recorded(self, recorded: bool) -> None:
        """Raise if torch does not permit a view to be changed in place."""
        base = self.base
        if torch.is_grad_enabled() and not self.grad and base is not None and base.requires_grad:
            raise RuntimeError(_NO_GRAD_VIEW)
        if self.is_one_of_several and recorded:
            raise RuntimeError(_ONE_OF_SEVERAL)

    def write_back(self, recorded: bool) -> None:
        """Write the view's content to its base.

        `recorded`: whether autograd recorded the write to the view. It does not if the view was
        detached, or shows the bits as another dtype.
        """
        if self.base is None:
            return
        self.seen = None  # out of date, in case the base refuses the write
        self.check_recorded(recorded and torch.is_grad_enabled())
        value = wrap(self.buffer, self.meta.replace(requires_grad=self.buffer.requires_grad))
        with beneath(), torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
            write(self.func, self.args, self.kwargs, self.place, self.base, value)
        self.seen = _version(self.base)


_NO_GRAD_VIEW = (  # torch's own words
    "A view was created in no_grad mode and is being modified inplace with grad mode enabled. "
    "Given that this use case is ambiguous and error-prone, it is forbidden. You can clarify your "
    "code by moving both the view and the inplace either both inside the no_grad block (if you "
    "don't want the inplace to be tracked) or both outside (if you want the inplace to be tracked)."
)


_ONE_OF_SEVERAL = (  # torch's own words
    "This view is the output of a function that returns multiple views. Such functions do not "
    "allow the output views to be modified inplace. You should replace the inplace operation by an "
    "out-of-place one."
)


def attach_to_base(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a view call; those of its tensors whose data moved follow their base."""
    tensors = flatten((args, kwargs))
    several = type(result) is not ShardTensor and func not in _SEVERAL
    for place, out in enumerate(flatten(result)):
        if type(out) is not ShardTensor or out._meta.alias is None:
            continue
        base = tensors[place if func in _SEVERAL else 0]
        if type(base) is ShardTensor and base._meta.alias is not None:
            continue  # what cannot be written to has no writable views
        meta = out._meta = out._meta.replace(alias=None)
        local = out._local
        has_data = _memory(base)._cdata == local.untyped_storage()._cdata  # already on this rank
        overlaps = local.dim() == len(meta.shape) and 0 in meta.stride()  # else outside the mesh
        # Where some shard is empty all ranks copy: autograd drops edges of empty views that are
        # written to, and the ranks would have different graphs in a second backward.
        if overlaps:
            one = _shown_once(local, meta)
            own = laid(one, full_order(meta.shape, meta.stride()))
            own = one.clone() if own is one else own
            with _force_original_view_tracking(True):  # `as_strided` has no gradient of nothing
                out._local = own.expand(local.shape)
        elif has_data or meta.layout.has_empty_shards:
            own = out._local = _copied(local)
        else:  # what the base has become for this call counts the writes to it
            own = out._local = with_own_version(local, unwrap_view(local_of(base)))
        view = View(base, func, args, kwargs, place, out, own, several)
        out._local = _moved(out._local, view)
        if type(base) is ShardTensor:
            _followers(base).add(view)
    return result


def _copied(local: Tensor) -> Tensor:
    """A copy; of windows that overlap, of the line of memory that they are views of. To autograd it
    is no view: each window would take the gradients of all that it shares elements with."""
    shape, strides = local.shape, local.stride()
    span = 1 + sum([(length - 1) * step for length, step in zip(shape, strides)])
    if local.numel() <= max(span, 0):
        return local.clone()

    def copy(windows: Tensor) -> Tensor:
        line = windows.as_strided((span,), (1,), windows.storage_offset()).clone()
        return line.as_strided(shape, strides, 0).detach()

    return with_gradient(local, copy, lambda grad: grad)


def _shown_once(local: Tensor, meta: Meta) -> Tensor:
    """Of elements that share memory in the global tensor, one of those on this rank, which the
    others follow; a write to elements that are on several ranks is refused."""
    if local.dim() == len(meta.shape):  # else outside the mesh
        for dim in expanded_dims(meta):
            local = local.narrow(dim, 0, min(1, local.shape[dim]))
    return local


def _followers(base: ShardTensor) -> weakref.WeakSet[View]:
    found = getattr(base, "_followers", None)
    if found is None:
        found = base._followers = weakref.WeakSet()
    return found


def bump_versions(tensor: Tensor) -> None:
    """Count a change of shape as torch does: as a write to the tensor and its bases.

    No element changes, so views of the existing elements still show them.
    """
    bump_view_epoch()
    was = _version(tensor)
    local = local_of(tensor)
    if type(local) is Moved:
        if local._weft_view.base is not None:
            bump_versions(local._weft_view.base)
        local = local._weft_plain
    if not local.is_inference():
        increment_version(local)
    now = _version(tensor)
    for view in getattr(tensor, "_followers", None) or ():
        if view.seen == was:
            view.seen = now


def stands_for(before: ShardTensor, tensor: ShardTensor) -> None:
    """The tensor changes its shape: its views become those of `before`, which is unchanged."""
    views = list(_followers(tensor)) if getattr(tensor, "_followers", None) else ()
    for view in views:
        view.args, view.kwargs = map_tensors(
            lambda one: before if one is tensor else one, (view.args, view.kwargs))
        view.base = before
        _followers(before).add(view)
    tensor._followers = None


class _Writes(threading.local):
    count = 0


_WRITES = _Writes()


def bump_view_epoch() -> None:
    """Called by in-place writes, because inference tensors count no versions."""
    if torch.is_inference_mode_enabled():
        _WRITES.count += 1


def written_to(tensor: ShardTensor) -> None:
    """The tensor has been written to: what its uses have moved is old, and a gradient may be wanted
    of it now."""
    bump_view_epoch()
    if tensor._memo is not None:
        tensor._memo.clear()
    requires_grad = tensor._local.requires_grad
    if tensor._meta.requires_grad != requires_grad:
        tensor._meta = tensor._meta.replace(requires_grad=requires_grad)


def _version(tensor: Tensor) -> Any:
    """A value that changes with every write to the tensor."""
    local = local_of(tensor)
    if type(local) is Moved:
        local._weft_view.update()
        local = local._weft_plain
    if local.is_inference():
        return -1 - _WRITES.count
    return version_of(tensor) if type(tensor) is ShardTensor else local._version


def _memory(tensor: Tensor) -> Any:
    local = local_of(tensor)
    if type(local) is Moved:
        local = local._weft_plain
    return local.untyped_storage()
