"""`torch._foreach_*`: one call over lists of tensors, element by element of the lists.

Where all operands of each element lie alike, which they do in an optimizer (a parameter, its
gradient, its state), the very call runs on lists of local tensors: no more torch calls than on
plain tensors. Otherwise every element is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.tensor.calls import functional_name, overload_named, slots_of
from weft.tensor.capture import Op, Slot, Trace, map_tensors
from weft.tensor.meta import Meta, contiguous_strides, intern
from weft.tensor.recipe import Function, Recipe
from weft.tensor.shard_tensor import ShardTensor, hooks, wrap_all
from weft.tensor.trees import fill, flatten, local_of

__all__ = ["recipe"]

_REDUCTIONS = ("aten._foreach_norm", "aten._foreach_max", "aten._foreach_powsum")


def recipe(
    func: Any, trace: Trace, op: Op, tensors: Sequence[torch.Tensor], mesh: BoundMesh
) -> Recipe:
    """The recipe of a foreach call: direct where it can be, else one call an element."""
    writes = not slots_of(op.results) or op.overload._schema.name.endswith("_")
    if str(op.overload).startswith(_REDUCTIONS) or not _lie_alike(op, tensors):
        return Function(_one_by_one(op, writes))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return Function(_one_by_one(op, writes))
    if writes:
        return InPlace()
    return OutOfPlace(
        [_meta(trace.metas[slot.index], _first(op, tensors, place), mesh)
         for place, slot in enumerate(slots_of(op.results))]
    )


class InPlace(Recipe):
    """The call itself on lists of local tensors, which it writes to."""

    __slots__ = ()
    as_called = True

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        func(*map_tensors(local_of, args), **map_tensors(local_of, kwargs))
        return args[0]

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        func(*locals_)
        return args[0]


class OutOfPlace(Recipe):
    """The call itself on lists of local tensors, its results wrapped."""

    __slots__ = ("metas",)
    as_called = True

    def __init__(self, metas: Sequence[Meta]) -> None:
        self.metas = metas

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*map_tensors(local_of, args), **map_tensors(local_of, kwargs))
        return wrap_all(out, self.metas)

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        return wrap_all(func(*locals_), self.metas)


def _lists(op: Op) -> list[Sequence[Slot]]:
    return [arg for arg in op.args if type(arg) in (list, tuple) and arg and type(arg[0]) is Slot]


def _first(op: Op, tensors: Sequence[torch.Tensor], place: int) -> torch.Tensor:
    return tensors[_lists(op)[0][place].index]


def _lie_alike(op: Op, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element's operands are ShardTensors of one finished layout."""
    single = [arg for arg in op.args if type(arg) is Slot]
    if any(type(tensors[slot.index]) is ShardTensor for slot in single):
        return False
    for element in zip(*_lists(op)):
        operands = [tensors[slot.index] for slot in element]
        if not all(type(tensor) is ShardTensor for tensor in operands):
            return False
        layout = operands[0]._meta.layout  # type: ignore[attr-defined]
        if layout.is_partial or any(
            tensor._meta.layout is not layout and tensor._meta.layout != layout  # type: ignore[attr-defined]
            for tensor in operands
        ):
            return False
    return True


def _meta(meta: torch.Tensor, like: torch.Tensor, mesh: BoundMesh) -> Meta:
    assert type(like) is ShardTensor
    strides = tuple(meta.stride())
    return intern(
        mesh, like._meta.layout, meta.dtype, like.device, False,
        None if strides == contiguous_strides(meta.shape) else strides,
    )


def _one_by_one(op: Op, writes: bool) -> Callable[[Any, Any, Any], Any]:
    """`_foreach_add_(xs, ys, alpha=a)` as `[x.add_(y, alpha=a) for x, y in zip(xs, ys)]`."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        filled = fill(op.args, tensors)
        count = len(filled[0])
        out = [
            _element(op, [_at(arg, index, count) for arg in filled], kwargs)
            for index in range(count)
        ]
        if not writes:
            return out
        for target, value in zip(filled[0], out):
            if value is not target:
                target.copy_(value)
        return args[0] if str(op.overload).endswith("_") else None

    return run


def _at(arg: Any, index: int, count: int) -> Any:
    return arg[index] if type(arg) in (list, tuple) and len(arg) == count else arg


def _element(op: Op, args: Sequence[Any], kwargs: Any) -> Any:
    """One element through the op that the list op stands for."""
    name = functional_name(str(op.overload)).split(".")[1].removeprefix("_foreach_")
    if name == "norm":
        dtype = op.kwargs.get("dtype") or (args[2] if len(args) > 2 else None)
        return torch.linalg.vector_norm(args[0], args[1], dtype=dtype)
    if name == "copy":
        return args[1]
    if name in ("addcmul", "addcdiv") and len(args) > 3:
        kwargs, args = {"value": args[3]}, args[:3]
    packet = getattr(torch, name, None) or getattr(torch.Tensor, name)
    if overload_named(f"aten.{name}.default") is None and name in ("maximum", "minimum"):
        args = [args[0], torch.as_tensor(args[1])]
    if any(type(arg) is ShardTensor for arg in args):
        return hooks.call(packet, tuple(args), dict(kwargs))
    return packet(*args, **kwargs)
