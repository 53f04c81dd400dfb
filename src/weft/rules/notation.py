"""The strings in which rules are written, and their parsed form.

A rule describes one operation as mathematics over *factors*: index ranges that tensor dims are
made of. `"m k, k n -> m n"` is a matrix product: an axis that shards m or n shards the result, and
one that shards k leaves a partial sum on every rank. What this means on many axes, its cost, and
the choice among alternatives are not part of a rule (`weft.propagate`).

Tensors, separated by commas; the same for several results:

    m k, k n -> m n      dims, separated by spaces
    b, -> b              an operand without dims; "b ->" has a result without dims
    b s, [s] -> b s      an operand that may be absent
    {... s} -> ... s     a list of tensors; without braces, those of a list one by one
    ..., * -> ...        an operand that may have any layout, because no element of it is read
    *... -> ...          such an operand, whose dims the result has, sharded as they are; other
                         operands have no dims

Dims:

    b (h d) -> b h d     a compound dim, major to minor; only its leading factor can be sharded
    ... k, n k -> ... n  leading dims, aligned from the right; a dim of size 1 broadcasts
    b 1 -> b             a dim that always has size 1
    b i -> b 3           a dim whose size no operand determines; it is whole

    2*y+v-1, k v! -> y   a window: place y reads the places 2*y+v-1, for each v, a factor of
                         another operand; `2*y+3*v-1` is one with dilation
    y+v<3-1 -> y         the same, where no operand has the number of taps
    y, v! -> 2*y+v-1     a window read backwards: the value at y is added at 2*y+v-1
    @y -> y              a window by a table: place y reads the interval that `tables=` gives,
                         or the one place at a fixed distance, be it around a ring (`Shift`)

A windowed dim belongs to the factor y: an axis that shards the dim shards y, and ranks fetch what
their shards of y read from others; or, backwards, what their shards of the result are made of.

Marks, on a factor or on `...`:

    s!                   must be whole
    s>0                  the op refuses a length of 0, so no shard may be empty
    s:max                the kind of reduction of a factor that no result has; by default a sum
    s~                   s may stay sharded in this operand, and the op's kernel combines the shards
    s~:sum               the same, and the kernel leaves partial values; partial values of the
                         operand may be scattered for it
    t~s                  the same, and axes that shard s elsewhere may shard t here: of attention,
                         queries and keys. Operands without this mark then have t whole

A result may have more dims in `...` than all operands: new leading ones, as of `expand`.

A rule with `along=` gets dims from an argument: in `"... s -> ..."`, `s` stands for these dims,
wherever they are, and `...` for the others. In `"... -> ... 1"` the result has them. Dims written
after it are the last ones: `"... s! -> ... w! i!"`.

Without braces a string may name the tensors of a list one by one. Of several strings, the first
that fits the numbers of dims of operands and results applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from weft.core import KINDS
from weft.errors import LayoutError, PlacementError
from weft.rules.rule import FactorDims
from weft.rules.window import WindowText

__all__ = ["LEAD", "Pattern", "parse"]

LEAD = "..."


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed factor string.

    Args:
        text: the string.
        operands, results: per tensor, its dims as they are written.
        reduce: the kind of reduction of each factor that operands have and results do not.
        whole, nonempty: factors with `!` and `>0`.
        finish: (operand, factor) with `~`. beside: of `t~s`, (operand, t, s).
        optional, listed: the operands in `[]` and in `{}`.
        unread: the operands with `*`.
        lists_results: whether the result is in `{}`.
        has_compounds: whether a dim has several factors.
        windows: (operand, factor) -> the window by which the operand's dim belongs to the factor;
            None where a table is the window.
        spreads: the same of results: (result, factor) -> the window, read backwards.
        lead: the prefix of the names of the dims in `...`: "d" names them d0, d1 and so on.
    """

    text: str
    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]
    reduce: Mapping[str, str]
    whole: frozenset[str]
    nonempty: frozenset[str] = frozenset()
    finish: frozenset[tuple[int, str]] = frozenset()
    beside: frozenset[tuple[int, str, str]] = frozenset()
    optional: frozenset[int] = frozenset()
    listed: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    lists_results: bool = False
    has_compounds: bool = False
    lead: str = "d"
    windows: Mapping[tuple[int, str], WindowText | None] = field(
        default_factory=dict[tuple[int, str], WindowText | None]
    )
    spreads: Mapping[tuple[int, str], WindowText] = field(
        default_factory=dict[tuple[int, str], WindowText]
    )

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.text == other.text

    @property
    def factors(self) -> set[str]:
        """The names of all factors, except `...` and numbers."""
        return {name for name in _names((*self.operands, *self.results))
                if name != LEAD and not name.isdigit()}

    def misfit(self, facts: str, offenders: Sequence[object] = ()) -> LayoutError:
        """The error for tensors that the string does not fit."""
        return LayoutError(
            f"rule {self.text!r}", facts,
            "a rule names every dim of every tensor operand and result, and a factor has "
            "one size", offenders, 'weft.register_rule(op, "b i, i o -> b o")')


def _names(tensors: Sequence[FactorDims]) -> Iterator[str]:
    return (name for tensor in tensors for factors in tensor for name in factors)


_TOKEN = re.compile(
    r"\(([^()]*)\)|(\S*\+\S*|@\S*)|((?:\.\.\.|[A-Za-z_][A-Za-z0-9_]*)(?:>0|!|~[A-Za-z0-9_]*|:[a-z]+)*"
    r"|[1-9][0-9]*(?![\w!:~>]))|(\S)"
)
_NAME = r"([A-Za-z_][A-Za-z0-9_]*)"
_TABLE = re.compile(rf"@{_NAME}")
_WINDOW = re.compile(rf"(?:(\d+)\*)?{_NAME}\+(?:(\d+)\*)?{_NAME}(?:<(\d+))?([-+]\d+)?")
_MARK = re.compile(r">0|!|~[A-Za-z0-9_]*|:[a-z]+")


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Parse a factor string, such as `"m k, k n -> m n"` (see the head of this file)."""
    sides = text.split("->")
    if len(sides) != 2:
        raise _malformed(text, f"it has {len(sides) - 1} arrows", [text])
    marks = _Marks(text)
    operands, optional, listed = marks.tensors(sides[0], given=True)
    results, absent, lists_results = marks.tensors(sides[1], given=False)
    if absent or (lists_results and len(results) > 1):
        raise _malformed(text, "a result stands in brackets", [sides[1].strip()])
    given, kept = set(_names(operands)), set(_names(results))
    wrong = [f"{name}:{kind}" for name, kind in marks.kinds.items()
             if name in kept or kind not in KINDS]
    if wrong:
        raise _malformed(text, f"{len(wrong)} factors have a kind that means nothing", wrong)
    stays = [at for at in marks.unread if operands[at]]
    moves = [at for at, dims in enumerate(operands) if dims and at not in marks.unread]
    if stays and (len(stays) > 1 or moves):
        raise _malformed(text, "an operand that stays as it is stands beside others that have dims",
                         [sides[0].strip()])
    alone = sorted(f"{name}~{other}" for _, name, other in marks.beside if other not in kept)
    if alone:
        raise _malformed(text, "no result has the factor that another is sharded beside", alone)
    finished = {name for _, name in marks.finish}
    reduced = given - kept - {"1", LEAD} - marks.whole - finished
    reduce = dict.fromkeys(sorted(reduced), "sum") | marks.kinds
    wrong = [window.tap for window in (*marks.windows.values(), *marks.spreads.values())
             if window is not None and window.count is None and window.tap not in given]
    if wrong:
        raise _malformed(text, f"{len(wrong)} windows have taps whose number nothing tells", wrong)
    clash = any(re.fullmatch(r"d\d+", name) for name in given | kept)
    return Pattern(
        text, operands, results, reduce, frozenset(marks.whole), frozenset(marks.nonempty),
        frozenset(marks.finish), frozenset(marks.beside), optional, listed,
        frozenset(marks.unread), bool(lists_results),
        any(len(factors) > 1 for tensor in (*operands, *results) for factors in tensor),
        LEAD if clash else "d", marks.windows, marks.spreads,
    )


class _Marks:
    """Collects the marks of one string while its tensors are read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.whole: set[str] = set()
        self.nonempty: set[str] = set()
        self.kinds: dict[str, str] = {}
        self.finish: set[tuple[int, str]] = set()
        self.beside: set[tuple[int, str, str]] = set()
        self.unread: list[int] = []
        self.windows: dict[tuple[int, str], WindowText | None] = {}
        self.spreads: dict[tuple[int, str], WindowText] = {}

    def tensors(
        self, side: str, given: bool
    ) -> tuple[tuple[FactorDims, ...], frozenset[int], frozenset[int]]:
        """The tensors of one side of the arrow, and which stand in `[]` and in `{}`; `given` on the
        side of the operands."""
        tensors: list[FactorDims] = []
        optional, listed = set[int](), set[int]()
        for at, part in enumerate(side.split(",")):
            part = part.strip()
            for pair, found in (("[]", optional), ("{}", listed)):
                if part[:1] == pair[0] and part[-1:] == pair[1]:
                    found.add(at)
                    part = part[1:-1]
            if part[:1] == "*" and given:
                self.unread.append(at)
                part = part[1:]
            dims: list[tuple[str, ...]] = []
            for compound, window, single, wrong in _TOKEN.findall(part):
                if wrong:
                    raise _malformed(self.text, f"{wrong!r} is no part of a factor string", [wrong])
                if window:
                    single = self._window(window, at, given)
                words = [single] if single else compound.split()
                dims.append(tuple([self._word(word, at, given) for word in words]))
            named = [name for factors in dims for name in factors if name not in ("1", LEAD)]
            self.whole.update(name for name in named if name.isdigit())
            # A diagonal: sharding both of its dims alike would omit the blocks beside it.
            self.whole.update(name for name in named if named.count(name) > 1)
            tensors.append(tuple(dims))
        return tuple(tensors), frozenset(optional), frozenset(listed)

    def _window(self, word: str, at: int, given: bool) -> str:
        """The factor to which a windowed dim belongs."""
        table = _TABLE.fullmatch(word)
        if table is not None and given:
            self.windows[at, table[1]] = None
            return table[1]
        found = _WINDOW.fullmatch(word)
        if found is None:
            raise _malformed(self.text, f"{word!r} is no window", [word])
        stride, name, dilation, tap, count, shift = found.groups()
        (self.windows if given else self.spreads)[at, name] = WindowText(
            int(stride or 1), int(dilation or 1), tap, None if count is None else int(count),
            -int(shift or 0),
        )
        return name

    def _word(self, word: str, at: int, given: bool) -> str:
        found = _MARK.search(word)
        if found is None:
            return word
        name, marks = word[: found.start()], _MARK.findall(word)
        if "".join(marks) != word[found.start() :] or (
            not given and any(mark[0] == "~" for mark in marks)
        ):
            raise _malformed(self.text, f"{word!r} has marks that mean nothing there", [word])
        for mark in marks:
            match mark:
                case "!":
                    self.whole.add(name)
                case ">0":
                    self.nonempty.add(name)
                case _ if mark[0] == "~":
                    self.finish.add((at, name))
                    if mark[1:]:
                        self.beside.add((at, name, mark[1:]))
                case _:
                    self.kinds[name] = mark[1:]
        return name


def _malformed(text: str, facts: str, offenders: Sequence[object]) -> PlacementError:
    return PlacementError(
        f"rule {text!r}", facts,
        "tensors are apart by commas, dims by spaces, operands and results by one '->'; "
        f"a factor that no result has may carry one of the kinds {', '.join(KINDS)}",
        offenders, '"b s:max (h d) -> b h"')
