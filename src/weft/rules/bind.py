"""From a factor string and the shapes of a call to the rule of that call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from weft.rules.notation import LEAD, Pattern
from weft.rules.rule import FactorDims, Rule
from weft.rules.window import Shift, Table, Window, WindowText

__all__ = ["bind", "fits", "operand_places", "result_shapes"]

Shape = Sequence[int]
Along = tuple[int, ...] | None
"""The dims that an argument names, in its own order; () means all; None: no such argument."""


def operand_places(
    pattern: Pattern, num_tensors: int, counts: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Per tensor of a call, its operand in the string; None if they do not fit.

    Args:
        counts: the number of tensors for each tensor parameter of the op (see `Call`). Without
            them, tensors fill the operands in order. The tensors of a list that the string
            names one by one do so as well.
    """
    num = len(pattern.operands)
    if num == 1 and pattern.listed:
        return (0,) * num_tensors
    if not pattern.listed and any(count > 1 for count in counts or ()):
        counts = None
    if counts is None:
        more = num_tensors - (num - len(pattern.optional) - len(pattern.listed))
        counts = []
        for at in range(num):
            if at in pattern.listed:
                counts.append(max(more, 0))
                more = 0
            elif at in pattern.optional:
                counts.append(1 if more > 0 else 0)
                more -= 1 if more > 0 else 0
            else:
                counts.append(1)
    else:
        counts = (*counts, *[0] * (num - len(counts)))
    places: list[int] = []
    for at, count in zip(range(num), counts):
        if at not in pattern.listed and count != 1 and not (count == 0 and at in pattern.optional):
            return None
        places += [at] * count
    return tuple(places) if len(places) == num_tensors else None


def fits(
    pattern: Pattern, places: Sequence[int] | None, operands: Sequence[Shape],
    results: Sequence[Shape], has_along: bool,
) -> bool:
    """Whether tensors with these numbers of dims fit the string."""
    if places is None or not (pattern.lists_results or len(results) == len(pattern.results)):
        return False
    if has_along:
        return True
    given = [(pattern.operands[place], shape) for place, shape in zip(places, operands)
             if pattern.operands[place] or place not in pattern.unread]
    return all(
        len(shape) >= len(dims) - 1 if (LEAD,) in dims else len(shape) == len(dims)
        for dims, shape in (*given, *zip(pattern.results * len(results), results))
    )


def bind(
    pattern: Pattern, operands: Sequence[Shape], results: Sequence[Shape],
    along: Along = None, places: tuple[int, ...] | None = None,
    known_sizes: Mapping[str, int] | None = None,
    tables: Mapping[str, Table | Shift] = MappingProxyType({}), **more: Any,
) -> Rule:
    """The rule for tensors of these shapes.

    Args:
        along: the dims that an argument names, if the rule has such an argument.
        places: per tensor, its operand in the string; by default from `operand_places`.
        known_sizes: of factors, as given by arguments.
        tables: of factors, by which windows are given.
        more: other fields of the Rule.

    Raises:
        LayoutError: the number of tensors or dims differs from the string, or sizes of one
            factor disagree.
    """
    if places is None:
        places = operand_places(pattern, len(operands))
    if places is None or not (pattern.lists_results or len(results) == len(pattern.results)):
        raise pattern.misfit(f"{len(operands)} operands and {len(results)} results are given, the "
                             f"rule has {len(pattern.operands)} and {len(pattern.results)}")
    named = _named(pattern, places, operands, tuple(map(len, results)), results, along)
    shapes = [*operands, *results]
    dims = (*named.operands, *named.results)
    num = len(operands)
    windowed = {*named.windows, *[(num + at, name) for at, name in named.spreads]}
    sizes = _sizes(pattern, dims, shapes, pattern.has_compounds, known_sizes, windowed)
    whole = named.whole
    ones: frozenset[str] = frozenset()
    if pattern.has_compounds:
        # A factor of size 1 in a compound dim would precede the one that can be sharded.
        ones = frozenset([
            name for tensor in dims for factors in tensor if len(factors) > 1
            for name in factors if sizes[name] == 1
        ])
        whole |= ones
    bound = [
        tensor if any(at == place for place, _ in windowed)
        else _broadcast(tensor, shape, sizes, ones)
        for at, (tensor, shape) in enumerate(zip(dims, shapes))
    ]
    given: list[FactorDims | None] = [*bound[:num]]
    if pattern.unread:
        unread = [at for at, place in enumerate(places) if place in pattern.unread]
        more["unread"] = frozenset(unread)
        given = [None if at in unread and not pattern.operands[place] else dims
                 for at, (place, dims) in enumerate(zip(places, given))]
    if windowed:
        more["windows"] = {
            (at, name): tables[name] if text is None else _window(text, sizes)
            for (at, name), text in named.windows.items()
        }
        more["spreads"] = {place: _window(text, sizes) for place, text in named.spreads.items()}
    nonempty = more.pop("nonempty", frozenset()) | named.nonempty
    return Rule(
        tuple(given), tuple(bound[num:]), sizes, named.reduce, whole, nonempty=nonempty,
        finish=named.finish, beside=named.beside, **more,
    )


def _window(text: WindowText, sizes: Mapping[str, int]) -> Window:
    taps = sizes[text.tap] if text.count is None else text.count
    return Window(text.stride, text.dilation, taps, text.pad)


def _broadcast(
    dims: FactorDims, shape: Shape, sizes: Mapping[str, int], ones: frozenset[str]
) -> FactorDims:
    """The dims of a tensor of this shape: () where it has length 1 and its factors do not."""
    if 1 not in shape and not ones:
        return dims
    return tuple([
        () if length == 1 and (factors == ("1",) or _product(factors, sizes) != 1)
        else factors if len(factors) == 1
        else tuple([name for name in factors if name not in ones])
        for factors, length in zip(dims, shape)
    ])


def result_shapes(pattern: Pattern, operands: Sequence[Shape]) -> list[tuple[int, ...]]:
    """The shapes of the results, from those of the operands; LayoutError if these do not fit, or do
    not determine the size of a factor."""
    places = operand_places(pattern, len(operands))
    if places is None:
        raise pattern.misfit(f"{len(operands)} operands are given, the rule has "
                             f"{len(pattern.operands)}")
    leads = max([len(shape) - len(pattern.operands[place]) + 1
                 for place, shape in zip(places, operands)
                 if (LEAD,) in pattern.operands[place]], default=0)
    ndims = tuple([len(tensor) + (leads - 1 if (LEAD,) in tensor else 0)
                   for tensor in pattern.results])
    named = _named(pattern, places, operands, ndims, (), None)
    sizes = _sizes(pattern, named.operands, operands, pattern.has_compounds)
    asked = {name for tensor in named.results for factors in tensor for name in factors}
    sizes.update({name: int(name) for name in asked if name.isdigit()})
    unknown = sorted(asked - sizes.keys())
    if unknown:
        raise pattern.misfit(f"operands of shapes {[tuple(shape) for shape in operands]} do not "
                             "tell the shapes of the results",
                             [f"{name}: no operand tells its size" for name in unknown])
    return [tuple([_product(factors, sizes) for factors in tensor]) for tensor in named.results]


def _product(factors: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod([sizes[name] for name in factors])


# Names for all dims: what `...`, and the dims along which an op works, stand for.


def _named(
    pattern: Pattern, places: tuple[int, ...], operands: Sequence[Shape],
    result_ndims: tuple[int, ...], results: Sequence[Shape], along: Along,
) -> Pattern:
    """The pattern of these tensors, with a name for every dim."""
    try:
        return _name(pattern, places, tuple(map(len, operands)), result_ndims, along)
    except _Misfit as misfit:
        shapes = [tuple(shape) for shape in (*operands, *results) if len(shape) == misfit.ndim]
        shape = shapes[0] if shapes else f"of {misfit.ndim} dims"
        raise pattern.misfit(f"a tensor of shape {shape} stands where {misfit}") from None


class _Misfit(Exception):
    """A tensor has `ndim` dims where the string names a different number."""

    def __init__(self, ndim: int, said: str) -> None:
        super().__init__(said)
        self.ndim = ndim


@lru_cache(maxsize=8192)
def _name(
    pattern: Pattern, places: tuple[int, ...], ndims: tuple[int, ...],
    result_ndims: tuple[int, ...], along: Along,
) -> Pattern:
    operands = [pattern.operands[place] for place in places]
    results = pattern.results * len(result_ndims) if pattern.lists_results else pattern.results
    expansion = _Expansion(pattern, [*operands, *results], [*ndims, *result_ndims], along)
    given = [expansion.tensor(tensor, ndim) if tensor or place not in pattern.unread else ()
             for place, tensor, ndim in zip(places, operands, ndims)]
    made = [expansion.tensor(tensor, ndim, True) for tensor, ndim in zip(results, result_ndims)]
    of = expansion.names_of
    return replace(
        pattern, operands=tuple(given), results=tuple(made),
        reduce={name: kind for word, kind in pattern.reduce.items() for name in of(word)},
        whole=frozenset([name for word in pattern.whole for name in of(word)]),
        nonempty=frozenset([name for word in pattern.nonempty for name in of(word)]),
        finish=frozenset([
            (at, name) for at, place in enumerate(places)
            for operand, word in pattern.finish if operand == place for name in of(word)
        ]),
        beside=frozenset([
            (at, name, of(other)[0]) for at, place in enumerate(places)
            for operand, word, other in pattern.beside if operand == place for name in of(word)
        ]),
        windows={
            (at, name): text for at, place in enumerate(places)
            for (operand, name), text in pattern.windows.items() if operand == place
        },
    )


class _Expansion:
    """What `...`, and the factor beside it where a rule has `along=`, stand for in one call."""

    def __init__(
        self, pattern: Pattern, tensors: Sequence[FactorDims], ndims: Sequence[int], along: Along
    ) -> None:
        self.along: tuple[int, ...] | None = None
        self.beside: set[tuple[str, ...]] = set()
        leading = [(tensor, ndim) for tensor, ndim in zip(tensors, ndims) if (LEAD,) in tensor]
        if along is None:
            positions: Sequence[int] = range(max(
                [ndim - len(tensor) + 1 for tensor, ndim in leading], default=0))
        else:
            num = self.num_dims = max(
                [ndim - _beyond(tensor) for tensor, ndim in leading], default=0)
            for dim in along if leading else ():  # some meta kernels take any
                if not -max(num, 1) <= dim < max(num, 1):
                    raise IndexError(
                        f"Dimension out of range (expected to be in range of [{-max(num, 1)}, "
                        f"{max(num, 1) - 1}], but got {dim})")
            dims = {dim % num for dim in along} if num and along else set(range(num))
            self.along = tuple(sorted(dims))
            self.beside = {
                tensor[at + 1] for tensor in (*pattern.operands, *pattern.results)
                for at, factors in enumerate(tensor[:-1]) if factors == (LEAD,)
            }
            positions = [dim for dim in range(num) if dim not in dims]
        self.leads: FactorDims = tuple([(f"{pattern.lead}{at}",) for at in positions])
        self.words: dict[str, list[str]] = {LEAD: [factors[0] for factors in self.leads]}

    def names_of(self, word: str) -> Sequence[str]:
        """The factors that a word of the string stands for."""
        return self.words.get(word, (word,))

    def tensor(self, dims: FactorDims, ndim: int, is_result: bool = False) -> FactorDims:
        """The dims of a tensor of `ndim` dims, each with factors."""
        if self.along is not None and any(factors in self.beside for factors in dims):
            return self._with_beside(dims, ndim)
        if (LEAD,) not in dims:
            if len(dims) != ndim:
                raise _Misfit(ndim, f"{len(dims)} dims are named")
            return dims
        place, more = dims.index((LEAD,)), ndim - len(dims) + 1
        if self.along and is_result and more == self.num_dims:  # keepdim
            body: list[tuple[str, ...]] = list(self.leads)
            for dim in self.along:
                body.insert(dim, ())
            return (*dims[:place], *body, *dims[place + 1 :])
        if not 0 <= more <= len(self.leads):
            raise _Misfit(ndim, f"at least {len(dims) - 1} dims are named")
        # Aligned from the right, as broadcasting is.
        return (*dims[:place], *self.leads[len(self.leads) - more :], *dims[place + 1 :])

    def _with_beside(self, dims: FactorDims, ndim: int) -> FactorDims:
        """The dims of a tensor that has those which the argument names."""
        assert self.along is not None
        beside = next(factors for factors in dims if factors in self.beside)
        named = self._named(beside)
        if (LEAD,) not in dims:
            if len(dims) == 1 and ndim <= 1 and not (ndim and self.num_dims):
                return dims[:ndim]  # torch takes a 0-d tensor as a 1-D tensor of one element
            place = dims.index(beside)
            found = (*dims[:place], *named, *dims[place + 1 :])
            if len(found) != ndim:
                raise _Misfit(ndim, f"{len(found)} dims are named")
            return found
        place = dims.index((LEAD,))
        if dims[place + 1 :][:1] != (beside,):
            raise _Misfit(ndim, "the dims that an argument names stand behind `...`")
        behind = dims[place + 2 :]
        size = ndim - place - len(behind)
        num_leads = size - len(named)
        positions = [dim - self.num_dims + size for dim in self.along]
        if not 0 <= num_leads <= len(self.leads) or min(positions, default=0) < 0:
            raise _Misfit(ndim, f"at least {place + len(named)} dims are named")
        body: list[tuple[str, ...]] = list(self.leads[len(self.leads) - num_leads :])
        for position, factors in zip(positions, named):
            body.insert(position, factors)
        return (*dims[:place], *body, *behind)

    def _named(self, beside: tuple[str, ...]) -> FactorDims:
        """Factors for each dim that the argument names."""
        assert self.along is not None
        num = len(self.along)
        if num == 1:
            return (beside,)
        if len(beside) > 1:
            raise _Misfit(self.num_dims, f"({' '.join(beside)}) stands for one of {num} dims")
        word = next(iter(beside))
        self.words[word] = [f"{word}{at}" for at in range(num)]
        return tuple([(name,) for name in self.words[word]])


def _beyond(tensor: FactorDims) -> int:
    """How many dims come before `...` and after the factor beside it."""
    return len(tensor) - len(tensor[tensor.index((LEAD,)) :][:2])


# Sizes.


def _sizes(
    pattern: Pattern, dims: Sequence[FactorDims], shapes: Sequence[Shape], has_compounds: bool,
    known_sizes: Mapping[str, int] | None = None, windowed: Collection[tuple[int, str]] = (),
) -> dict[str, int]:
    """The size of every factor; windowed dims give none."""
    sizes: dict[str, int] = {"1": 1, **(known_sizes or {})}
    clash: list[str] = []
    for at, (tensor, shape) in enumerate(zip(dims, shapes)):
        for factors, length in zip(tensor, shape):
            if len(factors) != 1:
                continue
            (name,) = factors
            if windowed and (at, name) in windowed:
                continue
            known = int(name) if name.isdigit() else sizes.get(name, 1)
            if known == length:
                sizes[name] = length
            elif name.isdigit():
                clash.append(f"{name}: a dim of length {length}")
            elif known == 1:
                sizes[name] = length
            elif length != 1:
                clash.append(f"{name}: {known} and {length}")
    if has_compounds:
        _compound_sizes(dims, shapes, sizes, clash)
    if clash:
        raise pattern.misfit(f"shapes {[tuple(shape) for shape in shapes]} do not fit", clash)
    unknown = sorted({name for tensor in dims[: len(shapes)] for factors in tensor
                      for name in factors if name not in sizes}) if has_compounds else ()
    if unknown:
        raise pattern.misfit(f"shapes {[tuple(shape) for shape in shapes]} do not fit",
                             [f"{name}: no tensor tells its size" for name in unknown])
    return sizes


def _compound_sizes(
    dims: Sequence[FactorDims], shapes: Sequence[Shape], sizes: dict[str, int], clash: list[str]
) -> None:
    for tensor, shape in zip(dims, shapes):
        for factors, length in zip(tensor, shape):
            for name in factors:
                if name.isdigit():
                    sizes[name] = int(name)
            unknown = [name for name in factors if name not in sizes]
            if len(factors) == 1 or len(unknown) > 1:
                continue
            rest = _product([name for name in factors if name in sizes], sizes)
            if unknown:
                sizes[unknown[0]] = length // rest if rest else 0
            if _product(factors, sizes) != length and length != 1:
                clash.append(f"({' '.join(factors)}): {_product(factors, sizes)} and {length}")
