"""Ops that change a tensor's shape but no element: views, permutations, expansion.

All of them only move elements, so partial values of every kind pass. A dim that is flattened or
unflattened is compound, and only its leading factor can be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Local
from weft.ops.nested_views import groups, nested
from weft.ops.regrouped_views import regrouped
from weft.ops.sole_holder import UNSQUEEZE, squeezed, unsqueezed
from weft.rules import Call, Decision, Rule, RuleText, op, page, rule
from weft.rules.factors import dim_list, dims, names, one_dim

__all__ = ["PAGE"]


# Dims in another order.


def _permuted(order: Callable[[Call, int], Sequence[int]]) -> RuleText:
    """`order(call, ndim)` is the source dim of each dim of the result."""

    def text(call: Call, wants_grad: Any) -> str:
        given = names(len(call.tensors[0].shape))
        made = [given[dim] for dim in order(call, len(given))]
        return f"{' '.join(given)} -> {' '.join(made)}"

    return rule(text, linear=[0], moves=True)


def _swapped(call: Call, ndim: int) -> list[int]:
    order, (one, other) = list(range(ndim)), call.args[1:3]
    if ndim:
        order[one], order[other] = order[other], order[one]
    return order


def _moved(call: Call, ndim: int) -> list[int]:
    sources, targets = call.args[1:3]
    if isinstance(sources, int):
        sources, targets = (sources,), (targets,)
    order = [-1] * ndim
    for source, target in zip(sources, targets if ndim else ()):
        order[target % ndim] = source % ndim
    rest = iter([dim for dim in range(ndim) if dim not in order])
    return [next(rest) if dim < 0 else dim for dim in order]


_LAST_TWO = rule("... a b -> ... b a", "... -> ...", linear=[0], moves=True)


# Dims that are added or removed.


def _squeeze(call: Call, wants_grad: Any) -> Rule:
    """Drops the dims of global size 1; a shard of length 1 of another dim stays."""
    source = call.tensors[0]
    ndim, given = len(source.shape), call.get("dim")
    named = () if given in ((), []) else dim_list(given, ndim)
    gone = [dim for dim in named if source.shape[dim] == 1]
    kinds = dims(ndim)
    return Rule(
        (tuple([() if dim in gone else factor for dim, factor in enumerate(kinds)]),),
        (tuple([factor for dim, factor in enumerate(kinds) if dim not in gone]),),
        dict(zip(names(ndim), source.shape)), linear=((0,),), moves=True,
        op="aten.squeeze.dims" if gone else "aten.alias.default",
        args=(source, gone) if gone else (source,),
    )


def _is_repeated_along(call: Call) -> bool:
    return call.get("dim") is not None and call.get("repeats") > 0 and (
        call.get("output_size") is None)


# Dims that are joined or split.


def _joined(shape: Sequence[int], first: int, count: int) -> tuple[str, str]:
    """The dims of this shape, and the same with `count` of them, from `first` on, as one. Of the
    joined dims, those of length 1 are no factors, as long as there is another."""
    inner = range(first, first + count)
    kept = [dim for dim in inner if shape[dim] != 1] or list(inner[:1])
    apart = [name if dim in kept or dim not in inner else "1"
             for dim, name in enumerate(names(len(shape)))]
    one = f"({' '.join([apart[dim] for dim in kept])})" if kept else "1"
    return " ".join(apart), " ".join([*apart[:first], one, *apart[first + count :]])


def _flatten(call: Call, wants_grad: Any) -> str:
    shape = call.tensors[0].shape
    first = one_dim(call.get("start_dim", 0), len(shape))
    last = one_dim(call.get("end_dim", -1), len(shape))
    return " -> ".join(_joined(shape, first, last + 1 - first if shape else 0))


def _unflatten(call: Call, wants_grad: Any) -> str:
    first = one_dim(call.get("dim"), len(call.tensors[0].shape))
    apart, joined = _joined(call.results[0].shape, first, len(call.get("sizes")))
    return f"{joined} -> {apart}"


def _by_blocks(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Decision | Local | None:
    """Several sharded dims: blocks that follow each other stay; where the leading dim is too short
    for the ranks, rows change places."""
    return nested(call, layouts) or regrouped(call, layouts)


def _bits(call: Call, wants_grad: Any) -> str:
    """`view(dtype)` reads the same bytes as another dtype; the last dim is whole if it changes."""
    same = call.tensors[0].shape == call.results[0].shape
    return "... -> ..." if same else "... s! -> ... t!"


def _view(call: Call, wants_grad: Any) -> Rule:
    """Dims of both shapes are taken from the left until their products agree. The size of a factor
    is the largest for which its offsets are offsets of both the old and the new dim."""
    source, result = call.tensors[0].shape, call.results[0].shape
    old: list[tuple[str, ...]] = [()] * len(source)
    new: list[tuple[str, ...]] = [()] * len(result)
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    end_left, end_right = _stop(source, result)
    for lefts, rights in groups(source[:end_left], result[:end_right]):
        if math.prod(source[dim] for dim in lefts) != 1 or (lefts and rights):
            _group(source, result, lefts, rights, old, new, sizes, whole)
    for shape, made, start, mark in ((source, old, end_left, "x"), (result, new, end_right, "y")):
        for dim in range(start, len(shape)):  # nothing to move
            made[dim], sizes[f"{mark}{dim}"] = (f"{mark}{dim}",), shape[dim]
            whole.add(f"{mark}{dim}")
    return Rule((tuple(old),), (tuple(new),), sizes, whole=frozenset(whole), linear=((0,),),
                moves=True, size_arg=1)


def _stop(source: Sequence[int], result: Sequence[int]) -> tuple[int, int]:
    """Where products no longer tell dims apart: the first dim without elements, if any."""
    if 0 not in source:
        return len(source), len(result)
    same = 0
    while same < min(len(source), len(result)) and source[same] == result[same]:
        same += 1
    return same, same


def _group(
    source: Sequence[int], result: Sequence[int], lefts: Sequence[int], rights: Sequence[int],
    old: list[tuple[str, ...]], new: list[tuple[str, ...]], sizes: dict[str, int], whole: set[str],
) -> None:
    """Name the factors of dims whose products agree: one that can be sharded, the others whole.

    Offsets of the leading old dim are multiples of the product of the dims after it, and likewise
    for the leading new dim; common offsets are multiples of the least common multiple.
    """
    lefts = [dim for dim in lefts if source[dim] != 1] or lefts[:1]
    rights = [dim for dim in rights if result[dim] != 1] or rights[:1]
    total = math.prod(source[dim] for dim in lefts)
    step_left = total // source[lefts[0]] if total else 1
    step_right = total // result[rights[0]] if total else 1
    step = math.lcm(step_left, step_right)
    lead = f"d{lefts[0]}"
    sizes[lead] = total // step
    if sizes[lead] == 1 and step > 1:
        whole.add(lead)
    for shape, made, (first, *others), inner, mark in (
        (source, old, lefts, step // step_left, "x"),
        (result, new, rights, step // step_right, "y"),
    ):
        rest = {f"{mark}{first}": inner} if inner > 1 else {}
        made[first] = (lead, *rest)
        for dim in others:
            made[dim], rest[f"{mark}{dim}"] = (f"{mark}{dim}",), shape[dim]
        sizes.update(rest)
        whole.update(rest)


def _check_unshuffled(x: Tensor, downscale_factor: int) -> None:
    """Check lengths of a tensor without elements; torch's meta kernel only counts elements."""
    if x.numel() or x.dim() < 3 or downscale_factor <= 0:
        return
    odd = [x.shape[dim] for dim in (-2, -1) if x.shape[dim] % downscale_factor]
    if odd:
        raise RuntimeError(
            f"pixel_unshuffle expects lengths divisible by {downscale_factor}, but got {odd}")


def _view_copy_result(x: Tensor, size: Any) -> Tensor | None:
    """Of any strides: torch's meta kernel refuses those of which there is no view."""
    if x.is_contiguous():
        return None
    return torch.empty_like(x.reshape(size), memory_format=torch.contiguous_format)


PAGE = page(
    op("t t_copy mT mH adjoint matrix_H", _LAST_TWO),
    op("transpose transpose_copy swapaxes swapdims", _permuted(_swapped)),
    op("permute permute_copy", _permuted(lambda call, ndim: [at % ndim for at in call.args[1]])),
    op("numpy_T", _permuted(lambda call, ndim: range(ndim)[::-1])),
    op("movedim moveaxis", _permuted(_moved)),
    op("squeeze", rule(_squeeze), layouts=squeezed),
    op("squeeze_copy", rule(_squeeze)),
    op("unsqueeze", UNSQUEEZE, layouts=unsqueezed, floats_flow=True),
    op("unsqueeze_copy", UNSQUEEZE),
    op("expand expand_copy broadcast_to",
       rule("... -> ...", linear=[0], moves=True, sizes="size")),
    op("expand_as", rule("..., ... -> ...", linear=[0], moves=True)),
    op("repeat_interleave.self_int",
       rule("... s -> ... (s n)", along="dim", serves=_is_repeated_along, linear=[0], moves=True)),
    op("view_as_real view_as_real_copy", rule("... -> ... 2", linear=[0])),
    op("view_as_complex view_as_complex_copy", rule("... 2 -> ...", linear=[0]), widens=True),
    op("flatten ravel", rule(_flatten, linear=[0], moves=True), layouts=_by_blocks),
    op("unflatten", rule(_unflatten, along="dim", linear=[0], moves=True, sizes="sizes"),
       layouts=_by_blocks),
    op("view.dtype view_copy.dtype", rule(_bits), widens=True),
    op("view reshape _unsafe_view _reshape_alias", rule(_view), layouts=_by_blocks),
    op("view_copy", rule(_view), result=_view_copy_result),
    op("pixel_unshuffle", result=_check_unshuffled),
)
