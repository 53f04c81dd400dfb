"""`weft.sharded_factories()`: plain code's `torch.zeros(...)` follows the first ShardTensor that is
written to it.

A factory that is given no ShardTensor cannot know a layout. So what it makes inside has no data at
first, and its class is `Unplaced`: torch calls `__torch_function__` for every use of it. A write of
a sharded value makes it a ShardTensor, any other use a plain tensor; it stays the same object. A
block, `x[2:4]`, waits as its base does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft.core import Layout
from weft.core.scopes import block
from weft.tensor.placing.construct import full
from weft.tensor.placing.in_place import exchange
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import written_by
from weft.tensor.trace.capture import shape_at
from weft.tensor.trace.trees import leaves
from weft.transport.nodes import transforms, with_gradient

__all__ = ["sharded_factories"]

_FACTORIES: frozenset[Any] = frozenset((torch.empty, torch.full, torch.ones, torch.zeros))
_FOLLOWED = frozenset(("device", "dtype", "fill_value", "requires_grad", "size"))

_set_item, _get_item = torch.Tensor.__setitem__, torch.Tensor.__getitem__
_data_of: Any = vars(torch._C.TensorBase)["data"].__get__  # pyright: ignore
_make_wrapper = torch.Tensor._make_wrapper_subclass
_KNOWN = frozenset((
    *(getattr(torch.Tensor, name).__get__ for name in (
        "device", "dtype", "grad_fn", "is_leaf", "is_meta", "layout", "ndim", "requires_grad",
        "shape")),
    *(getattr(torch.Tensor, name) for name in (
        "__len__", "dim", "is_complex", "is_floating_point", "ndimension", "numel", "size")),
))
"""What can be asked before there are data."""


@block("weft.sharded_factories()")
def sharded_factories() -> Iterator[None]:
    """Inside, what torch.zeros, ones, empty and full make is sharded as the first ShardTensor that
    is written to it.

    Outside, it is plain, and so whole on every rank: a sharded value that is written to it is
    gathered. Libraries that fill such a tensor block by block then hold the whole result (solvers
    that keep all times, Fourier layers, sliding windows).

        with weft.sharded_factories():
            states = odeint(model, x, times)

    A ShardTensor is written by `out[...] = x` or an in-place operation (`out[2:4] += x`,
    `out.index_add_(0, rows, x)`). The tensor then has the axes of that value in the dims that they
    have in common; dims of other lengths are cut evenly. It stays plain if it is used in any other
    way before, if the value is replicated, if it has no dims or requires a gradient.

    It is a mode of the thread; with simulated ranks, enter it in the program of each rank.
    """
    with _Factories():
        yield


class _Factories(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.keys() <= _FOLLOWED and transforms() is None:
            size, *rest = _size_first(func, args, kwargs)
            if _is_shape(size) and not kwargs.get("requires_grad") and not _is_internal():
                named = {name: kwargs[name] for name in kwargs if name != "size"}
                return _unplaced(partial(_made, func, rest, named), size)
        elif type(kwargs.get("out")) is Unplaced:  # before its operands are asked
            return Unplaced.__torch_function__(func, types, args, kwargs)
        elif func is torch.Tensor.backward:
            with self:  # torch turns a mode off while it handles a call
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


def _made(func: Any, rest: Any, named: dict[str, Any], size: Sequence[int]) -> torch.Tensor:
    return (torch.zeros if func is torch.empty else func)(size, *rest, **named)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, inputs: Any = None,
) -> None:
    """What `tensor.backward(...)` calls, and no mode handles."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _size_first(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The arguments of a factory, with the size as the first."""
    if "size" in kwargs or not args:
        return kwargs.get("size"), *args
    return args if func is torch.full or not isinstance(args[0], int) else (args,)


def _is_shape(size: Any) -> bool:
    """Whether a size has dims to shard, and is one that torch does not refuse."""
    return isinstance(size, (tuple, list)) and bool(size) and all(
        type(length) is int and length > 0 for length in size)


def _is_internal() -> bool:
    """Whether torch or weft themselves call the factory: for a buffer of a collective, say."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in ("torch", "weft")


@dataclass(slots=True)
class _Wait:
    """How a tensor without data gets them.

    Args:
        make: makes the plain tensor, or the block of a base that is there.
        number: of which a factory's is full.
        block_in: the base of a block, and its index. blocks: those that wait with this base.
    """

    make: Callable[[], torch.Tensor]
    number: Any = None
    block_in: tuple[Unplaced, Any] | None = None
    blocks: list[weakref.ref[Unplaced]] = field(default_factory=list)


class Unplaced(torch.Tensor):
    """A tensor without data, which knows how to become a plain or a sharded one."""

    _wait: _Wait

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is _get_item and type(args[0]) is Unplaced and _is_block(args[1]):
            return _block_of(*args)
        if func == _data_of:
            return _block_of(args[0], ..., _data_of)
        written = {id(one) for one in written_by(func, args, kwargs)}
        for one in leaves((args, kwargs), Unplaced):
            if type(one) is Unplaced:  # it may have become another one's base
                _become(one, _followed(one, func, args, kwargs) if id(one) in written else None)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A use that passes by `__torch_function__`: of C++ code, or `torch.tensor(x)`."""
        for one in leaves((args, kwargs), Unplaced):
            _become(one, None)
        return func(*args, **kwargs or {})


def _unplaced(make: Callable[[Sequence[int]], torch.Tensor], size: Sequence[int]) -> torch.Tensor:
    one = make([1] * len(size))
    if type(one) is not torch.Tensor:  # a tracer's
        return make(size)
    out: Any = _make_wrapper(Unplaced, size, dtype=one.dtype, device=one.device)
    out._wait = _Wait(partial(make, size), 0 if one.is_meta else one.item())
    return out


def _is_block(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(item is Ellipsis or type(item) in (int, slice) for item in items)


def _block_of(base: Unplaced, index: Any, by: Callable[..., Any] | None = None) -> torch.Tensor:
    """`base[index]`, or all of it by another function."""
    out: Any = _make_wrapper(
        Unplaced, shape_at(base.shape, index), dtype=base.dtype, device=base.device)
    make = partial(_get_item, base, index) if by is None else partial(by, base)
    out._wait = _Wait(make, block_in=(base, index))
    base._wait.blocks.append(weakref.ref(out))
    return out


def _become(tensor: Any, layout: tuple[Any, Layout] | None) -> None:
    """Give the tensor its data, in the layout if there is one, else as a plain tensor; and so what
    it is a block of, and its blocks."""
    if type(tensor) is not Unplaced:
        return
    wait = tensor._wait
    if wait.block_in is not None:
        _become(wait.block_in[0], layout)
        return
    if layout is None:
        made = wait.make()
    else:
        mesh, placed = layout
        made = full(placed.shape, wait.number, dtype=tensor.dtype, mesh=mesh, placements=placed)
    _fill(tensor, made)


def _fill(tensor: Any, made: torch.Tensor) -> None:
    blocks = tensor._wait.blocks
    if tensor.requires_grad:  # a user's Function has returned it
        made = with_gradient(tensor, lambda _, given=made: given, lambda grad: grad)
    exchange(tensor, made)
    for name, value in vars(made).items():
        if name != "_wait":
            setattr(tensor, name, value)
    for ref in blocks:
        one: Any = ref()
        if one is not None:
            _fill(one, one._wait.make())


def _followed(
    target: Unplaced, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Layout] | None:
    """The mesh of the value that is written, and the layout that the whole target gets from it;
    None if it stays plain."""
    index: Any = ...
    values = leaves((args, kwargs), ShardTensor)
    if func is _set_item:
        _, index, *given = args
        values = leaves(given, ShardTensor) if _is_block(index) else []
    if not values:
        return None
    block = shape_at(target.shape, index)
    dims = _dims_of(target.shape, index)
    while target._wait.block_in is not None:
        target, index = target._wait.block_in
        dims = [_dims_of(target.shape, index)[dim] for dim in dims]
    values.sort(key=lambda value: value.ndim != len(dims))
    for value in values:
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
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    return [dim for dim, item in enumerate(items) if type(item) is slice]
