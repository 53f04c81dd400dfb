"""What a rule says, and the strings it is written in.

A rule describes one operation as mathematics over *factors*: index ranges that tensor dims are
made of. `"m k, k n -> m n"` is a matrix product: cutting m or n over a mesh axis cuts the result,
cutting k leaves every coordinate with a term of it. What this means on many axes, what it costs
and which way is taken is no part of a rule (`weft.propagate`).

The strings:

    m k, k n -> m n      tensors apart by commas, dims by spaces; several results alike
    b (h d) -> b h d     a compound dim, major to minor; only its leading factor can be cut
    ... k, n k -> ... n  leading dims, aligned from the right; a dim of size 1 broadcasts
    b s! -> b s!         s must be whole
    b s:max -> b         the kind of a factor that no result has; without a kind it is a sum
    b, -> b              an operand without dims; "b ->" has a result without dims
    b 1 -> b             a dim that always has size 1
    b i -> b 3           a dim of a size that no operand tells; it is whole
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from weft.core import KINDS, Layout
from weft.errors import LayoutError, PlacementError, message

__all__ = ["Call", "Decision", "FactorDims", "LocalArgs", "Pattern", "Rule", "TensorArg", "parse"]

FactorDims = tuple[tuple[str, ...], ...]
"""Per dim of a tensor, its factors, major to minor; () is a dim of size 1 that broadcasts."""

LocalArgs = Callable[[tuple[int, ...]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Mesh coordinate -> (args, kwargs) of the local op, with TensorArgs where tensors stand."""


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor argument or result: its global shape, and its dtype as text ("float32")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen op with its arguments, tensors standing as TensorArg.

    `op` is the overload's name, "aten.add.Tensor"; in-place and out= overloads may come under
    their functional name or their own.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[TensorArg, ...]
    tensors: tuple[TensorArg, ...] = field(init=False)
    """The TensorArgs in order, those in lists included, positional ones first."""

    def __post_init__(self) -> None:
        found: list[TensorArg] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(self.kwargs.values(), found)
        object.__setattr__(self, "tensors", tuple(found))

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """The argument at a position, or by name, or the default."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)


def _collect(values: Iterable[Any], found: list[TensorArg]) -> None:
    for value in values:
        kind = type(value)
        if kind is TensorArg:
            found.append(value)
        elif kind is list or kind is tuple:
            _collect(value, found)


@dataclass(frozen=True, slots=True)
class Rule:
    """One operation as mathematics over factors.

    Args:
        operands: per tensor operand, per dim, its factors; None for an operand that may have any
            layout (only its metadata is read).
        results: the same per result.
        sizes: the size of every factor.
        reduce: kind of reduction of each factor that no result has.
        whole: factors that must not be cut.
        linear: sets of operands in which the op is jointly linear, so that P(sum) and P(avg) pass
            when all of a set are partial.
        added: operands that are added to what a contraction gives, of whatever dtype: where the
            contracted factor is cut, they enter as a single term.
        moves: elements only change places, so P of every kind passes through the linear sets.
        size_arg: position of the argument that says the result's shape...
        size_dims: ...or the shape of these dims of it (first, one past the last).
        offsets: factors that operands hold a stretch of, side by side: where in the factor the
            stretch of each operand begins (concatenation).
        nonempty: factors that the op refuses with length 0, so that no shard may be empty.
        op: the overload to run on the local tensors, where it is not the one that was called...
        args: ...with these positional arguments.
    """

    operands: tuple[FactorDims | None, ...]
    results: tuple[FactorDims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    added: tuple[int, ...] = ()
    moves: bool = False
    size_arg: int | None = None
    size_dims: tuple[int, int] | None = None
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    nonempty: frozenset[str] = frozenset()
    op: str | None = None
    args: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How one call is carried out.

    Where `op` or `args` is given, the local op is that ATen overload, or the one that was called,
    with those arguments; otherwise it is the very function that was called.

    Args:
        operands: the layout that each tensor operand must come to.
        results: the layouts of the results as the local op leaves them.
        args: coordinate -> (args, kwargs) of the local op; None = as called.
        op: the overload to run on the local tensors; None = the one that was called.
        chosen: per mesh axis, what it cuts or passes: a factor, "partial(sum)", or "".
        by_form: whether no cost was compared: where the layouts differ in their lengths alone,
            and their factors are the same, what the axes do is the same.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    args: LocalArgs | None = None
    op: str | None = None
    chosen: tuple[str, ...] = ()
    by_form: bool = False

    def reason(self) -> str:
        """Why the operands come to these layouts, for `weft.explain()`."""
        if not self.operands or not self.chosen:
            return "the operands stay as they are"
        names = self.operands[0].mesh.axis_names
        said = [
            f"{name} {'passes ' if what.startswith('partial(') else 'cuts '}{what}"
            for name, what in zip(names, self.chosen)
            if what
        ]
        return ", ".join(said) or "every axis is replicated"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed factor string; `bind` gives the rule for shapes."""

    text: str
    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]
    reduce: Mapping[str, str]
    whole: frozenset[str]

    def result_shapes(self, operands: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The shapes of the results, from those of the operands.

        Raises:
            LayoutError: operands that do not fit, or a factor whose size they do not tell.
        """
        self._check_numbers(len(operands), len(self.results))
        dims = [_spread(self, tensor, shape) for tensor, shape in zip(self.operands, operands)]
        sizes = _sizes(self, dims, operands)
        leads = [len(shape) - len(tensor) + 1 for tensor, shape in zip(self.operands, operands)
                 if ("...",) in tensor]
        shapes: list[tuple[int, ...]] = []
        for tensor in self.results:
            lead = tuple((f"...{more}",) for more in range(max(leads, default=0), 0, -1))
            if ("...",) in tensor:
                place = tensor.index(("...",))
                tensor = tensor[:place] + lead + tensor[place + 1 :]
            unknown = sorted({name for factors in tensor for name in factors} - sizes.keys())
            if unknown:
                raise self._misfit(f"operands of shapes {[tuple(shape) for shape in operands]} do "
                                   "not tell the shapes of the results",
                                   [f"{name}: no operand tells its size" for name in unknown])
            shapes.append(tuple(_product(factors, sizes) for factors in tensor))
        return shapes

    def _check_numbers(self, operands: int, results: int) -> None:
        if operands != len(self.operands) or results != len(self.results):
            raise self._misfit(f"{operands} operands and {results} results are given, the rule "
                               f"has {len(self.operands)} and {len(self.results)}")

    def bind(
        self,
        operands: Sequence[Sequence[int]],
        results: Sequence[Sequence[int]],
        linear: tuple[tuple[int, ...], ...] = (),
        **more: Any,
    ) -> Rule:
        """The rule for tensors of these shapes.

        Raises:
            LayoutError: another number of tensors or dims than the string has, or sizes of one
                factor that disagree.
        """
        shapes = [*operands, *results]
        named = [*self.operands, *self.results]
        self._check_numbers(len(operands), len(results))
        dims = [_spread(self, tensor, shape) for tensor, shape in zip(named, shapes)]
        sizes = _sizes(self, dims, shapes)
        # A factor of size 1 in a compound dim would stand before the one that can be cut.
        ones = {
            name for tensor in dims for factors in tensor if len(factors) != 1
            for name in factors if sizes[name] == 1
        }
        bound = tuple(
            tuple(
                () if length == 1 and (factors == ("1",) or _product(factors, sizes) != 1)
                else factors if len(factors) == 1
                else tuple(name for name in factors if name not in ones)
                for factors, length in zip(tensor, shape)
            )
            for tensor, shape in zip(dims, shapes)
        )
        return Rule(
            bound[: len(operands)], bound[len(operands) :], sizes, self.reduce,
            self.whole | ones, tuple(tuple(sorted(members)) for members in linear), **more,
        )

    def _misfit(self, facts: str, offenders: Sequence[object] = ()) -> LayoutError:
        return LayoutError(
            message(f"rule {self.text!r}", facts,
                    "a rule names every dim of every tensor operand and result, and a factor has "
                    "one size", offenders, 'weft.register_rule(op, "b i, i o -> b o")')
        )


def _product(factors: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in factors)


def _spread(pattern: Pattern, dims: FactorDims, shape: Sequence[int]) -> FactorDims:
    """The dims with "..." replaced by as many leading factors as the shape has more."""
    if ("...",) not in dims:
        if len(dims) != len(shape):
            raise pattern._misfit(f"a tensor of shape {tuple(shape)} stands where {len(dims)} dims "
                                  "are named")
        return dims
    more = len(shape) - len(dims) + 1
    if more < 0:
        raise pattern._misfit(f"a tensor of shape {tuple(shape)} stands where at least "
                              f"{len(dims) - 1} dims are named")
    place = dims.index(("...",))
    # Aligned from the right, as broadcasting is: the last one is ...1 in every tensor.
    lead = tuple((f"...{more - index}",) for index in range(more))
    return dims[:place] + lead + dims[place + 1 :]


def _sizes(
    pattern: Pattern, dims: Sequence[FactorDims], shapes: Sequence[Sequence[int]]
) -> dict[str, int]:
    pairs = [pair for tensor, shape in zip(dims, shapes) for pair in zip(tensor, shape)]
    sizes = {name: int(name) for tensor in (*pattern.operands, *pattern.results)
             for factors in tensor for name in factors if name.isdigit()}
    sizes["1"] = 1
    clash: list[str] = []
    for factors, length in pairs:
        if len(factors) != 1:
            continue
        known = sizes.get(factors[0], 1)
        if factors[0].isdigit() and factors[0] != "1":
            if length != known:
                clash.append(f"{known}: a dim of length {length}")
        elif known == 1 and factors[0] != "1":
            sizes[factors[0]] = length
        elif length not in (1, known):
            clash.append(f"{factors[0]}: {known} and {length}")
    for factors, length in pairs:
        unknown = [name for name in factors if name not in sizes]
        if len(factors) == 1 or len(unknown) > 1:
            continue
        rest = math.prod(sizes[name] for name in factors if name in sizes)
        if unknown:
            sizes[unknown[0]] = length // rest if rest else 0
        if _product(factors, sizes) != length and length != 1:
            clash.append(f"({' '.join(factors)}): {_product(factors, sizes)} and {length}")
    open_ = sorted({name for factors, _ in pairs for name in factors if name not in sizes})
    if clash or open_:
        raise pattern._misfit(f"shapes {[tuple(shape) for shape in shapes]} do not fit",
                              clash or [f"{name}: no tensor tells its size" for name in open_])
    return sizes


_TOKEN = re.compile(
    r"\(([^()]*)\)|(\.\.\.|[A-Za-z_][A-Za-z0-9_]*!?(?::[a-z]+)?|[1-9][0-9]*(?![\w!:]))|(\S)"
)


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Parse a factor string, such as `"m k, k n -> m n"` (see the head of this file).

    Raises:
        PlacementError: a string that is none, or an unknown kind.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise _malformed(text, f"it has {len(sides) - 1} arrows", [text])
    whole: set[str] = set()
    kinds: dict[str, str] = {}
    operands = _parse_side(text, sides[0], whole, kinds)
    results = _parse_side(text, sides[1], whole, kinds)
    given = {name for tensor in operands for factors in tensor for name in factors}
    kept = {name for tensor in results for factors in tensor for name in factors}
    wrong = [f"{name}:{kind}" for name, kind in kinds.items() if name in kept or kind not in KINDS]
    if wrong:
        raise _malformed(text, f"{len(wrong)} factors have a kind that means nothing", wrong)
    reduce = {name: kinds.get(name, "sum") for name in sorted(given - kept - {"1", "..."} - whole)}
    return Pattern(text, operands, results, reduce, frozenset(whole))


def _parse_side(
    text: str, side: str, whole: set[str], kinds: dict[str, str]
) -> tuple[FactorDims, ...]:
    tensors = []
    for part in side.split(","):
        dims = []
        for compound, single, wrong in _TOKEN.findall(part):
            if wrong:
                raise _malformed(text, f"{wrong!r} is no part of a factor string", [wrong])
            names = []
            for word in [single] if single else compound.split():
                word, _, kind = word.partition(":")
                if word.endswith("!"):
                    word = word[:-1]
                    whole.add(word)
                if kind:
                    kinds[word] = kind
                names.append(word)
            dims.append(tuple(names))
        named = [name for factors in dims for name in factors if name not in ("1", "...")]
        whole.update(name for name in named if name.isdigit())
        # A diagonal: cutting both of its dims alike would leave out the blocks off it.
        whole.update(name for name in named if named.count(name) > 1)
        tensors.append(tuple(dims))
    return tuple(tensors)


def _malformed(text: str, facts: str, offenders: Sequence[object]) -> PlacementError:
    return PlacementError(
        message(f"rule {text!r}", facts,
                "tensors are apart by commas, dims by spaces, operands and results by one '->'; "
                f"a factor that no result has may carry one of the kinds {', '.join(KINDS)}",
                offenders, '"b s:max (h d) -> b h"')
    )
