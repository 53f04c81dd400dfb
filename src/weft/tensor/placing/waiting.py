"""Tensors without data, which become plain or sharded ones at the first use that needs data.

Their class is `Unplaced`: torch calls `__torch_function__` for every use of one. What waits says
itself which uses it serves without data (`Wait.used`); any other use gives it its data, as does
C++ code. It stays the same object. A block, `x[2:4]`, waits as its base does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weft.core import Layout
from weft.tensor.placing.construct import full
from weft.tensor.placing.in_place import exchange
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import written_by
from weft.tensor.trace.capture import shape_at, unwatched
from weft.tensor.trace.trees import leaves
from weft.transport.nodes import with_gradient

__all__ = [
    "LIKE", "Placed", "Unplaced", "Wait", "become", "get_item", "items_of", "layout_of_write",
    "like", "set_item", "unplaced",
]

Placed = tuple[Any, Layout]
"""A bound mesh, and a layout on it."""

set_item, get_item = torch.Tensor.__setitem__, torch.Tensor.__getitem__
_data_of: Any = vars(torch._C.TensorBase)["data"].__get__  # pyright: ignore
_make_wrapper = torch.Tensor._make_wrapper_subclass


def _properties(*names: str) -> frozenset[Any]:
    return frozenset([getattr(torch.Tensor, name).__get__ for name in names])


_KNOWN = _properties("device", "dtype", "is_meta", "layout", "ndim", "shape") | frozenset([
    getattr(torch.Tensor, name) for name in (
        "__len__", "dim", "is_complex", "is_floating_point", "ndimension", "numel", "size")])
"""What can be asked before there are data."""

_OF_LEAVES = _properties("grad_fn", "is_leaf", "requires_grad")
"""What can be asked besides of a tensor that no graph leads to."""
(_requires_grad,) = _properties("requires_grad")


LIKE: dict[Any, int] = {
    torch.zeros_like: 0, torch.empty_like: 0, torch.ones_like: 1,
    torch.Tensor.new_zeros: 0, torch.Tensor.new_empty: 0, torch.Tensor.new_ones: 1,
}
"""Functions that make a tensor as another one is, and the number of which it is full."""


@dataclass(slots=True)
class Wait:
    """How a tensor without data gets them.

    Args:
        make: makes the plain tensor, or the block of a base that is there; None of other kinds,
            which say in `made` how they are made.
        number: of which a factory's is full.
        block_in: the base of a block, and its index. blocks: those that wait with this base.
    """

    make: Callable[[], torch.Tensor] | None
    number: Any = None
    block_in: tuple[Unplaced, Any] | None = None
    blocks: list[weakref.ref[Unplaced]] = field(default_factory=list["weakref.ref[Unplaced]"])

    @property
    def is_leaf(self) -> bool:
        """Whether no graph leads to the tensor."""
        return True

    @property
    def is_sharded(self) -> bool:
        """Whether it is known to become a ShardTensor."""
        return False

    def used(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a call, whose first argument waits so, without its data; NotImplemented if
        they are needed."""
        if func is get_item and items_of(args[0].shape, args[1]) is not None:
            return _block_of(args[0], args[1])
        return like(func, args, kwargs) if func in LIKE else NotImplemented

    def writing(self, func: Any, args: Sequence[Any]) -> None:
        """A call is about to write to the tensor; an error where that cannot be right."""

    def made(self, dtype: torch.dtype, placed: Placed | None) -> torch.Tensor:
        """The tensor with its data: in a layout, or as it is without one."""
        if placed is None:
            assert self.make is not None
            return self.make()
        mesh, layout = placed
        return full(layout.shape, self.number, dtype=dtype, mesh=mesh, placements=layout)


class Unplaced(torch.Tensor):
    """A tensor without data, which knows how to become a plain or a sharded one."""

    _wait: Wait

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN or (func in _OF_LEAVES and args[0]._wait.is_leaf):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _requires_grad:
            return True
        if func == _data_of and args[0]._wait.is_leaf:
            return _block_of(args[0], ..., _data_of)
        if args and type(args[0]) is Unplaced:
            out = args[0]._wait.used(func, args, kwargs)
            if out is not NotImplemented:
                return out
        written = {id(one) for one in written_by(func, args, kwargs)}
        for one in leaves((args, kwargs), Unplaced):
            if type(one) is not Unplaced:  # it has become another one's base
                continue
            placed = None
            if id(one) in written:
                one._wait.writing(func, args)
                placed = _followed(one, func, args, kwargs)
            become(one, placed)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What only ShardTensors have, of one that is to be one."""
        if not name.startswith("_") and self._wait.is_sharded and hasattr(ShardTensor, name):
            become(self, None)
            return getattr(self, name)
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A use that passes by `__torch_function__`: of C++ code, or `torch.tensor(x)`."""
        for one in leaves((args, kwargs), Unplaced):
            become(one, None)
        return func(*args, **kwargs or {})


def unplaced(
    wait: Wait, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor that waits so."""
    out: Any = _make_wrapper(Unplaced, size, dtype=dtype, device=device)
    out._wait = wait
    return out


def like(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any],
    wait: Callable[[Callable[[], torch.Tensor], torch.dtype], Wait] | None = None,
) -> Any:
    """What a function of LIKE makes of a tensor that waits: another one that does, NotImplemented
    of other calls. `wait` takes what makes a plain one, and its dtype."""
    given, *rest = args
    if not kwargs.keys() <= {"dtype", "device"}:
        return NotImplemented
    with unwatched():
        empty = torch.empty(given.shape, dtype=given.dtype, device="meta")
        one = func(empty, *rest, **{**kwargs, "device": "meta"})
    if not one.dim() or not one.numel():
        return NotImplemented
    device, number = torch.device(kwargs.get("device") or given.device), LIKE[func]
    make = partial(torch.full, one.shape, number, dtype=one.dtype, device=device)
    return unplaced(
        Wait(make, number) if wait is None else wait(make, one.dtype), one.shape, one.dtype, device)


def items_of(shape: Sequence[int], index: Any) -> list[int | slice] | None:
    """The integer or slice of each dim in an index; None if it has others."""
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(item is not Ellipsis and type(item) not in (int, slice) for item in items):
        return None
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    return items


def _block_of(base: Unplaced, index: Any, by: Callable[..., Any] | None = None) -> torch.Tensor:
    """`base[index]`, or all of it by another function."""
    make = partial(get_item, base, index) if by is None else partial(by, base)
    out: Any = unplaced(
        Wait(make, block_in=(base, index)), shape_at(base.shape, index), base.dtype, base.device)
    base._wait.blocks.append(weakref.ref(out))
    return out


def become(tensor: Any, placed: Placed | None) -> None:
    """Give the tensor its data, in the layout if there is one, else as a plain tensor; and so what
    it is a block of, and its blocks."""
    if type(tensor) is not Unplaced:
        return
    wait = tensor._wait
    if wait.block_in is not None:
        become(wait.block_in[0], placed)
        return
    _fill(tensor, wait.made(tensor.dtype, placed))


def _fill(tensor: Any, made: torch.Tensor) -> None:
    blocks = tensor._wait.blocks
    with torch._C.DisableTorchFunctionSubclass():
        has_graph = tensor.requires_grad
    if has_graph:  # a user's Function has returned it
        made = with_gradient(tensor, lambda _, given=made: given, lambda grad: grad)
    exchange(tensor, made)
    vars(tensor).update({name: one for name, one in vars(made).items() if name != "_wait"})
    for ref in blocks:
        one: Any = ref()
        if one is not None:
            _fill(one, one._wait.made(one.dtype, None))


def _followed(
    target: Unplaced, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Placed | None:
    """Where a tensor comes to be that a call writes to; None if it stays plain."""
    index, given = (args[1], args[2:]) if func is set_item else (..., (args, kwargs))
    if items_of(target.shape, index) is None:
        return None
    return layout_of_write(target, index, leaves(given, ShardTensor))


def layout_of_write(
    target: Unplaced, index: Any, values: Sequence[ShardTensor]
) -> Placed | None:
    """The mesh of the value that is written to `target[index]`, and the layout that the whole
    target gets from it; None if it stays plain."""
    block = shape_at(target.shape, index)
    dims = _dims_of(target.shape, index)
    while target._wait.block_in is not None:
        target, index = target._wait.block_in
        dims = [_dims_of(target.shape, index)[dim] for dim in dims]
    for value in sorted(values, key=lambda value: value.ndim != len(dims)):
        layout = _laid_as(value._meta.layout, block, target.shape, dims)
        is_there = value.is_meta or value.device.type == target.device.type  # meta: in a dry run
        if layout is not None and is_there:
            return value._meta.mesh, layout
    return None


def _laid_as(
    value: Layout, block: Sequence[int], shape: Sequence[int], dims: Sequence[int]
) -> Layout | None:
    """The layout of this shape with the axes of a value that is written to a block of it, which has
    these dims. None if there are none, or if a value of fewer dims does not fit."""
    first = len(block) - value.ndim
    own = [dim for dim, axes in enumerate(value.dims) if axes]
    if first < 0 or not own or (
        first and any(value.shape[dim] != block[first + dim] for dim in own)
    ):
        return None
    axes: list[Any] = [()] * len(shape)
    cuts: list[Any] = [None] * len(shape)
    for dim in own:
        at = dims[first + dim]
        axes[at] = value.dims[dim]
        cuts[at] = value.cuts[dim] if value.shape[dim] == shape[at] else None
    return Layout.make(value.mesh, tuple(shape), axes, cuts)


def _dims_of(shape: Sequence[int], index: Any) -> list[int]:
    """The dims of a tensor that its block has."""
    return [dim for dim, item in enumerate(items_of(shape, index) or ()) if type(item) is slice]
