"""`weft.sharded_factories()`: plain code's `torch.zeros(...)` follows the first ShardTensor that is
written to it.

A factory that is given no ShardTensor cannot know a layout. So what it makes inside waits
(`placing.waiting`): a write of a sharded value makes it a ShardTensor, any other use a plain
tensor. Spectra of which few modes are read wait as well (`placing.spectra`), and rows of views that
join dims stay until something asks where they stand (`placing.boxed`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from weft.core.scopes import block
from weft.tensor.placing.boxed import view
from weft.tensor.placing.spectra import STARTS, Fields, begun, waiting_for
from weft.tensor.placing.waiting import Unplaced, unplaced
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import unwatched
from weft.transport.nodes import transforms

__all__ = ["carried", "sharded_factories"]

_FACTORIES: frozenset[Any] = frozenset((torch.empty, torch.full, torch.ones, torch.zeros))
_FOLLOWED = frozenset(("device", "dtype", "fill_value", "requires_grad", "size"))


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

    Fourier layers that keep few modes send those alone. `rfftn` and its kin wait for slices, which
    say which modes are read; an inverse transform of zeros, to which blocks were written, sends the
    blocks. A slice then shares no memory with its spectrum, whose own gradient cannot be asked for
    afterwards.

    Views that join samples and tokens leave the tokens of a sharded sequence where they are
    (`x.view(-1, k)`, `flatten`). Their rows change ranks only when something asks where they stand;
    `to_local()` of such a view is a collective.

    It is a mode of the thread; with simulated ranks, enter it in the program of each rank.
    """
    with _Factories():
        yield


class _Factories(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.fields: Fields = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.keys() <= _FOLLOWED and transforms() is None:
            size, *rest = _size_first(func, args, kwargs)
            if _is_shape(size) and not kwargs.get("requires_grad") and not _is_internal():
                named = {name: kwargs[name] for name in kwargs if name != "size"}
                return _unplaced(partial(_made, func, rest, named), size, self.fields)
        elif type(kwargs.get("out")) is Unplaced:  # before its operands are asked
            return Unplaced.__torch_function__(func, types, args, kwargs)
        elif func in STARTS and args and type(args[0]) is ShardTensor and transforms() is None:
            waiting = begun(func, args, kwargs, self.fields)
            if waiting is not None:
                return waiting
        elif func in _VIEWS and args and type(args[0]) is ShardTensor and not kwargs and (
            any(args[0]._meta.layout.dims[1:]) and transforms() is None
        ):
            shape = _shape_of(func, args)
            if shape is not None:
                func, args = view, (args[0], _VIEWS[func], shape)
                return ShardTensor.__torch_function__(func, types, args)
        if func is torch.Tensor.backward:
            with self:  # torch turns a mode off while it handles a call
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


_VIEWS: dict[Any, Any] = {
    torch.Tensor.view: torch.Tensor.view, torch.Tensor.reshape: torch.Tensor.reshape,
    torch.reshape: torch.reshape, torch.Tensor.flatten: torch.Tensor.reshape,
    torch.flatten: torch.reshape,
}
"""What joins dims, and what does so by a shape."""


def _shape_of(func: Any, args: Any) -> tuple[int, ...] | None:
    """The shape that a view asks for; None of calls that are no views of a shape, or wrong."""
    x, *given = args
    if 0 in x.shape or any(type(one) is not int for one in tree_leaves(given)):
        return None
    try:
        with unwatched():
            return tuple(func(torch.empty(x.shape, device="meta"), *given).shape)
    except (IndexError, RuntimeError, TypeError):
        return None


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, inside of the context that is entered now, whenever it is called: activations
    are recomputed as they were computed."""
    mode = _entered()
    if mode is None:
        return function

    @wraps(function, updated=())
    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode if _entered() is None else nullcontext():
            return function(*args, **kwargs)

    return inside


def _entered() -> _Factories | None:
    modes = _get_current_function_mode_stack()
    return next((mode for mode in modes if isinstance(mode, _Factories)), None)


def _unplaced(
    make: Callable[[Sequence[int]], torch.Tensor], size: Sequence[int], fields: Fields
) -> torch.Tensor:
    one = make([1] * len(size))
    if type(one) is not torch.Tensor:  # a tracer's
        return make(size)
    wait = waiting_for(partial(make, size), 0 if one.is_meta else one.item(), one.dtype, fields)
    return unplaced(wait, size, one.dtype, one.device)


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
