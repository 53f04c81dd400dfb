"""Ops that change a tensor's shape and no element: views, permutations, expansion, repetition.

All of them move elements, so P of every kind passes. A dim that is flattened or unflattened is
compound, and only its leading factor can be cut; its size is the largest for which the borders of
the factor are borders of both the old and the new dim.

Source of the grouping: dims of both shapes are taken from the left until their products agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weft.rules.factors import IDENTITY, dim_list, dims, names, one_dim
from weft.rules.notation import Call, FactorDims, Rule

__all__ = ["RULES", "regroup"]


def regroup(
    source: Sequence[int], result: Sequence[int]
) -> tuple[FactorDims, FactorDims, dict[str, int], frozenset[str]]:
    """Factors of both shapes of a view: (source dims, result dims, sizes, whole factors)."""
    old: list[tuple[str, ...]] = [()] * len(source)
    new: list[tuple[str, ...]] = [()] * len(result)
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left = right = 0
    end_left, end_right = _stop(source, result)
    while left < end_left or right < end_right:
        first, second = left, right
        one = source[left] if left < end_left else 1
        other = result[right] if right < end_right else 1
        left, right = min(left + 1, end_left), min(right + 1, end_right)
        while one != other:
            if one < other:
                one *= source[left]
                left += 1
            else:
                other *= result[right]
                right += 1
        if one != 1 or (first < left and second < right):
            _group(source, result, range(first, left), range(second, right), old, new, sizes, whole)
    _tail(source, result, end_left, end_right, old, new, sizes, whole)
    return tuple(old), tuple(new), sizes, frozenset(whole)


def _stop(source: Sequence[int], result: Sequence[int]) -> tuple[int, int]:
    """Where products stop telling dims apart: the first dim without elements, if there is one."""
    if 0 not in source:
        return len(source), len(result)
    same = 0
    while same < min(len(source), len(result)) and source[same] == result[same]:
        same += 1
    return same, same


def _tail(
    source: Sequence[int], result: Sequence[int], left: int, right: int,
    old: list[tuple[str, ...]], new: list[tuple[str, ...]], sizes: dict[str, int], whole: set[str],
) -> None:
    """The dims of an empty tensor that do not correspond: all whole, there is nothing to move."""
    for dims_, names_, start, mark in ((source, old, left, "x"), (result, new, right, "y")):
        for dim in range(start, len(dims_)):
            name = f"{mark}{dim}"
            names_[dim], sizes[name] = (name,), dims_[dim]
            whole.add(name)


def _group(
    source: Sequence[int], result: Sequence[int], lefts: Sequence[int], rights: Sequence[int],
    old: list[tuple[str, ...]], new: list[tuple[str, ...]], sizes: dict[str, int], whole: set[str],
) -> None:
    """Name the factors of dims whose products agree: one that can be cut, the others whole.

    Borders of the leading old dim lie at multiples of the product of the dims after it, those of
    the leading new dim likewise; common borders at multiples of the least common multiple.
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
    for dims_, names_, group, inner, mark in (
        (source, old, lefts, step // step_left, "x"),
        (result, new, rights, step // step_right, "y"),
    ):
        for dim in group:
            rest = f"{mark}{dim}"
            length = inner if dim == group[0] else dims_[dim]
            if dim == group[0]:
                names_[dim] = (lead, rest) if inner > 1 else (lead,)
            else:
                names_[dim] = (rest,)
            if dim != group[0] or inner > 1:
                sizes[rest] = length
                whole.add(rest)


def _view(size_arg: int | None = 1) -> Callable[[Call], Rule]:
    def rule(call: Call) -> Rule:
        old, new, sizes, whole = regroup(call.tensors[0].shape, call.results[0].shape)
        return Rule((old,), (new,), sizes, whole=whole, linear=IDENTITY, moves=True,
                    size_arg=size_arg)

    return rule


def _view_or_bits(call: Call) -> Rule:
    """`view(dtype)` reads the same bytes as another dtype: the last dim whole if it changes."""
    source, result = call.tensors[0], call.results[0]
    if not isinstance(call.arg(1, "dtype"), (list, tuple)):
        kinds, factors = dims(len(source.shape)), names(len(source.shape))
        last = frozenset() if source.shape == result.shape else frozenset(factors[-1:])
        out = kinds if not last else (*kinds[:-1], ("bits",))
        sizes = dict(zip(factors, source.shape))
        sizes["bits"] = result.shape[-1] if last else 1
        return Rule((kinds,), (out,), sizes, whole=last | {"bits"})
    return _SHAPED(call)


_SHAPED = _view()


def _unflatten(call: Call) -> Rule:
    source, result = call.tensors[0].shape, call.results[0].shape
    dim, count = one_dim(call.arg(1, "dim"), len(source)), len(call.arg(2, "sizes"))
    old, new, sizes, whole = _regroup_some(source, result, dim, 1, count)
    return Rule((old,), (new,), sizes, whole=whole, linear=IDENTITY, moves=True, size_arg=2,
                size_dims=(dim, dim + count))


def _flatten(call: Call) -> Rule:
    source, result = call.tensors[0].shape, call.results[0].shape
    ndim = len(source)
    first = one_dim(call.arg(1, "start_dim", 0), ndim) if ndim else 0
    count = one_dim(call.arg(2, "end_dim", -1), ndim) + 1 - first if ndim else 0
    old, new, sizes, whole = _regroup_some(source, result, first, count, 1)
    return Rule((old,), (new,), sizes, whole=whole, linear=IDENTITY, moves=True)


def _regroup_some(
    source: Sequence[int], result: Sequence[int], first: int, before: int, after: int
) -> tuple[FactorDims, FactorDims, dict[str, int], frozenset[str]]:
    """`regroup` of the dims from `first` on: so many `before` are so many `after`, which the others
    stay beside. Lengths do not tell that of dims of length 1, one of which may be cut."""
    old, new, sizes, whole = regroup(source[first : first + before], result[first : first + after])
    head = tuple((f"b{dim}",) for dim in range(first))
    tail = tuple((f"a{dim}",) for dim in range(first + before, len(source)))
    for dims_, at in ((head, 0), (tail, first + before)):
        sizes.update({name: source[at + dim] for dim, (name,) in enumerate(dims_)})
    return (*head, *old, *tail), (*head, *new, *tail), sizes, whole


def _moved(order: Callable[[Call, int], Sequence[int]]) -> Callable[[Call], Rule]:
    """A permutation of the dims: `order(call, ndim)` is the source dim of every result dim."""

    def rule(call: Call) -> Rule:
        source = call.tensors[0]
        kinds = dims(len(source.shape))
        return Rule(
            (kinds,), (tuple(kinds[dim] for dim in order(call, len(kinds))),),
            dict(zip(names(len(kinds)), source.shape)), linear=IDENTITY, moves=True,
        )

    return rule


def _swap(ndim: int, one: int, other: int) -> list[int]:
    order = list(range(ndim))
    if ndim:
        order[one], order[other] = order[other], order[one]
    return order


def _movedim(call: Call, ndim: int) -> list[int]:
    moved, target = call.arg(1, "source"), call.arg(2, "destination")
    if not ndim:
        return []
    if isinstance(moved, int):
        moved, target = (moved,), (target,)
    order = [-1] * ndim
    for dim, place in zip(moved, target):
        order[place % ndim] = dim % ndim
    rest = iter(dim for dim in range(ndim) if dim not in order)
    return [next(rest) if dim < 0 else dim for dim in order]


def _squeeze(call: Call) -> Rule:
    """Drops the dims of global size 1; a shard of another dim that has length 1 stays."""
    source, result = call.tensors[0], call.results[0]
    ndim = len(source.shape)
    given = call.arg(1, "dim")
    named = () if given in ((), []) else dim_list(given, ndim)
    gone = [dim for dim in named if source.shape[dim] == 1]
    kinds = dims(ndim)
    assert len(result.shape) == ndim - len(gone)
    return Rule(
        (tuple(() if dim in gone else factor for dim, factor in enumerate(kinds)),),
        (tuple(factor for dim, factor in enumerate(kinds) if dim not in gone),),
        dict(zip(names(ndim), source.shape)), linear=IDENTITY, moves=True,
        op="aten.squeeze.dims" if gone else "aten.alias.default",
        args=(source, gone) if gone else (source,),
    )


def _unsqueeze(call: Call) -> Rule:
    source = call.tensors[0]
    kinds = dims(len(source.shape))
    place = call.arg(1, "dim") % (len(kinds) + 1)
    return Rule(
        (kinds,), ((*kinds[:place], (), *kinds[place:]),),
        dict(zip(names(len(kinds)), source.shape)), linear=IDENTITY, moves=True,
    )


def _stretched(source: Sequence[int], result: Sequence[int]) -> tuple[FactorDims, FactorDims]:
    """Dims of an expansion: a stretched dim is a factor that only the result has."""
    skip = len(result) - len(source)
    kinds = dims(len(result))
    given = tuple(
        kinds[skip + dim] if length == result[skip + dim] else ()
        for dim, length in enumerate(source)
    )
    return given, kinds


def _expand(call: Call) -> Rule:
    source, result = call.tensors[0], call.results[0]
    given, kinds = _stretched(source.shape, result.shape)
    return Rule((given,), (kinds,), dict(zip(names(len(kinds)), result.shape)), linear=IDENTITY,
                moves=True, size_arg=1)


def _expand_as(call: Call) -> Rule:
    source, other = call.tensors
    given, kinds = _stretched(source.shape, other.shape)
    return Rule((given, kinds), (kinds,), dict(zip(names(len(kinds)), other.shape)),
                linear=IDENTITY, moves=True)


def _broadcast_tensors(call: Call) -> Rule:
    shape = call.results[0].shape
    given = tuple(_stretched(tensor.shape, shape)[0] for tensor in call.tensors)
    kinds = dims(len(shape))
    everything = tuple(range(len(given)))
    return Rule(given, (kinds,) * len(given), dict(zip(names(len(kinds)), shape)),
                linear=(everything,), moves=True)


def _repeat(call: Call) -> Rule:
    """A dim that is repeated is whole; the others pass."""
    source, result = call.tensors[0], call.results[0]
    skip = len(result.shape) - len(source.shape)
    kinds = dims(len(source.shape))
    sizes = dict(zip(names(len(kinds)), source.shape))
    whole: set[str] = set()
    out: list[tuple[str, ...]] = [(f"r{dim}",) for dim in range(skip)]
    sizes.update({f"r{dim}": result.shape[dim] for dim in range(skip)})
    for dim, length in enumerate(source.shape):
        if result.shape[skip + dim] == length:
            out.append(kinds[dim])
            continue
        sizes[f"y{dim}"] = result.shape[skip + dim]
        whole.update((f"d{dim}", f"y{dim}"))
        out.append((f"y{dim}",))
    return Rule((kinds,), (tuple(out),), sizes, whole=frozenset(whole), linear=IDENTITY, moves=True)


def _repeat_interleave(call: Call) -> Rule | None:
    """`repeat_interleave(x, n, dim)`: the dim becomes `(dim n)`, cut where x is cut."""
    times, dim = call.arg(1, "repeats"), call.arg(2, "dim")
    source = call.tensors[0]
    if not isinstance(times, int) or dim is None or len(call.tensors) != 1 or times < 1:
        return None
    if call.kwargs.get("output_size") is not None:
        return None
    dim = one_dim(dim, len(source.shape))
    kinds = dims(len(source.shape))
    sizes = dict(zip(names(len(kinds)), source.shape), times=times)
    inner = () if times == 1 else ("times",)
    # The leading factor of a compound dim has more than one element; a size of 1 stays whole.
    lead = source.shape[dim] != 1 or not inner
    out = (*kinds[:dim], (*kinds[dim], *inner) if lead else inner, *kinds[dim + 1 :])
    given = kinds if lead else (*kinds[:dim], (), *kinds[dim + 1 :])
    return Rule((given,), (out,), sizes, linear=IDENTITY, moves=True)


def _complex_pair(call: Call) -> Rule:
    """`view_as_real` appends a dim of 2, `view_as_complex` takes it away."""
    source, result = call.tensors[0].shape, call.results[0].shape
    kinds = dims(min(len(source), len(result)))
    sizes = dict(zip(names(len(kinds)), source), parts=2)
    pair = (*kinds, ("parts",))
    return Rule((pair if len(source) > len(result) else kinds,),
                (pair if len(result) > len(source) else kinds,), sizes,
                whole=frozenset({"parts"}), linear=IDENTITY)


_transpose = _moved(lambda call, ndim: _swap(ndim, call.arg(1, "dim0"), call.arg(2, "dim1")))
_last_two = _moved(lambda call, ndim: _swap(ndim, -1, -2) if ndim > 1 else [0] * ndim)
_reverse = _moved(lambda call, ndim: range(ndim)[::-1])
_permute = _moved(lambda call, ndim: [dim % ndim for dim in call.arg(1, "dims")])

def _at_least(call: Call) -> Rule:
    """`atleast_2d`, `atleast_3d` of one tensor or of each of several: new dims before a single one,
    behind two; said dim by dim, since lengths of 1 do not tell which is new."""
    operands: list[FactorDims] = []
    results: list[FactorDims] = []
    sizes: dict[str, int] = {}
    for at, (tensor, result) in enumerate(zip(call.tensors, call.results)):
        shape, ndim = tensor.shape, len(result.shape)
        own = names(len(shape)) if at == 0 else [f"{name}of{at}" for name in names(len(shape))]
        kinds: FactorDims = tuple([(name,) for name in own])
        made: FactorDims = ((),) * (1 if len(shape) == 1 and ndim > 1 else 0) + kinds
        operands.append(kinds)
        results.append(made + ((),) * (ndim - len(made)))
        sizes.update(zip(own, shape))
    every = tuple(range(len(operands)))
    return Rule(tuple(operands), tuple(results), sizes, linear=(every,), moves=True)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "aten.view": _view_or_bits, "aten.reshape": _view(), "aten._unsafe_view": _view(),
    "aten._reshape_alias": _view(), "aten.view_copy": _view_or_bits,
    "aten.flatten": _flatten, "aten.ravel": _view(None), "aten.unflatten": _unflatten,
    "aten.transpose": _transpose, "aten.swapaxes": _transpose, "aten.swapdims": _transpose,
    "aten.t": _last_two, "aten.mT": _last_two, "aten.mH": _last_two, "aten.adjoint": _last_two,
    "aten.numpy_T": _reverse, "aten.matrix_H": _last_two, "aten.permute": _permute,
    "aten.movedim": _moved(_movedim), "aten.moveaxis": _moved(_movedim),
    "aten.squeeze": _squeeze, "aten.unsqueeze": _unsqueeze,
    "aten.expand": _expand, "aten.broadcast_to": _expand, "aten.expand_as": _expand_as,
    "aten.broadcast_tensors": _broadcast_tensors,
    "aten.repeat": _repeat, "aten.tile": _repeat,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.view_as_real": _complex_pair, "aten.view_as_complex": _complex_pair,
    **{f"aten.atleast_{num}d": _at_least for num in (1, 2, 3)},
}
