"""`torch._foreach_*`: one call over lists of tensors, element by element of the lists.

In an optimizer the operands of each element (a parameter, its gradient, its state) have one
layout. Then the same call runs on lists of local tensors, with no more torch calls than on plain
tensors. Otherwise every element is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.rules import Entry
from weft.tensor.call.recipe import Function
from weft.tensor.meta import Meta, contiguous_strides, intern, is_dense
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.calls import functional_name
from weft.tensor.trace.capture import Op, Trace
from weft.tensor.trace.trees import Slot, local_of, map_tensors, slots_of
from weft.tensor.views.moved import Moved, bump_view_epoch

__all__ = ["recipe"]


def recipe(
    entry: Entry, trace: Trace, op: Op, tensors: Sequence[torch.Tensor], mesh: BoundMesh
) -> Function:
    """The recipe of a foreach call: direct where it can be, else one call an element."""
    writes = not slots_of(op.results) or op.overload._schema.name.endswith("_")
    name = functional_name(str(op.overload)).split(".")[1].removeprefix("_foreach_")
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    one_by_one = partial(_one_by_one, name, writes, type(trace.result), _parameters(op))
    if entry.lists != "blocks" or wants_grad or not _lie_alike(op, tensors, writes):
        return Function(one_by_one, as_called=True)
    return _of_blocks(one_by_one, None if writes else [
        _meta(trace.metas[slot.index], tensors[like.index], mesh)
        for slot, like in zip(slots_of(op.results), _lists(op)[0])])


def _of_blocks(one_by_one: Callable[..., Any], metas: Sequence[Meta] | None) -> Function:
    """The call itself on lists of local tensors, its results wrapped as `metas` say; None where it
    writes to the first list.

    Views whose data had to move are written one by one, because two of them may have one base.
    """
    def run(func: Any, args: Any, kwargs: Any, locals_: Any = None) -> Any:
        opened = map_tensors(local_of, args) if locals_ is None else locals_
        named = map_tensors(local_of, kwargs)
        if metas is not None:
            out = func(*opened, **named)
            return type(out)(map(wrap, out, metas))
        targets, mine = (args[0], opened[0]) if args else (kwargs["self"], named["self"])
        if Moved in map(type, mine):
            return one_by_one(func, args, kwargs)
        func(*opened, **named)
        bump_view_epoch()
        return targets

    return Function(run, as_called=True, takes_opened=True)


def _parameters(op: Op) -> list[tuple[str, bool]]:
    """The op's parameters, and which of them are lists with a part for each element."""
    return [
        (one.name, one.name == "scalars" or str(one.type).startswith("List"))
        for one in op.overload._schema.arguments
    ]


def _one_by_one(
    name: str, writes: bool, kind: type, parameters: Sequence[tuple[str, bool]],
    func: Any, args: Any, kwargs: Any,
) -> Any:
    """`_foreach_add_(xs, ys, alpha=a)` as `x.add_(y, alpha=a)` for each of the elements.

    The order matters: a tensor in two lists changes as it does in torch.
    """
    given = dict(zip([each for each, _ in parameters], args)) | kwargs
    lists = [each for each, is_list in parameters if is_list]
    outs = [
        _element(name, writes, {
            each: given[each][place] if each in lists else given[each]
            for each, _ in parameters if each in given
        })
        for place in range(len(given[lists[0]]))
    ]
    return given["self"] if writes else kind(outs)


def _element(name: str, writes: bool, given: dict[str, Any]) -> Any:
    """One element through the op that the list op stands for."""
    if name in ("norm", "powsum"):
        order, dtype = given.get("ord", 2), given.get("dtype")
        if name == "norm":
            return torch.linalg.vector_norm(given["self"], order, dtype=dtype)
        sizes = torch.abs(given["self"])
        return torch.sum(torch.pow(sizes if dtype is None else sizes.to(dtype), order))
    options = {key: given.pop(key) for key in ("alpha", "value", "memory_format") if key in given}
    if name in ("addcmul", "addcdiv") and "scalars" in given:
        value = given.pop("scalars")
        options["value"] = value.item() if isinstance(value, torch.Tensor) else value
    args = [*given.values()]
    if name in ("maximum", "minimum") and not isinstance(args[1], torch.Tensor):
        name = {"maximum": "clamp_min", "minimum": "clamp_max"}[name]
    if not writes:
        return getattr(torch, name)(*args, **options)
    in_place = getattr(torch.Tensor, f"{name}_", None)
    if in_place is not None:
        return in_place(*args, **options)
    return args[0].copy_(getattr(torch, name)(*args, **options))


def _lists(op: Op) -> list[Sequence[Slot]]:
    return [arg for arg in op.args if type(arg) in (list, tuple) and arg and type(arg[0]) is Slot]


def _lie_alike(op: Op, tensors: Sequence[torch.Tensor], writes: bool) -> bool:
    """Whether the operands of every element are ShardTensors of one layout without partial values.

    A target that shares no memory with its base is not: its own call raises. Nor are, where one is
    written, tensors with gaps, which may overlap, or whose elements share memory.
    """
    single = [arg for arg in op.args if type(arg) is Slot]
    if any(type(tensors[slot.index]) is ShardTensor for slot in single):
        return False
    for element in zip(*_lists(op)):
        operands = [tensors[slot.index] for slot in element]
        if not all(type(tensor) is ShardTensor for tensor in operands):
            return False
        metas: list[Meta] = [tensor._meta for tensor in operands]  # type: ignore[attr-defined]
        target, layout = metas[0], metas[0].layout
        if layout.is_partial or (
            writes and (target.alias is not None or not all(map(is_dense, metas)))
        ) or any(one.layout is not layout and one.layout != layout for one in metas):
            return False
    return True


def _meta(meta: torch.Tensor, like: torch.Tensor, mesh: BoundMesh) -> Meta:
    assert type(like) is ShardTensor
    strides = tuple(meta.stride())
    return intern(
        mesh, like._meta.layout, meta.dtype, like.device, False,
        None if strides == contiguous_strides(meta.shape) else strides,
    )
