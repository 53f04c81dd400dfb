"""Sets of ranks in few words, without listing them.

The ranks that hold one block differ only in some axes of the mesh, so they are sums of *digits*:
(count, stride) pairs, major to minor. This names 65,536 ranks as fast as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from weft.core import Mesh
from weft.core.hlo import Digits, merged

__all__ = ["LISTED", "RankSet", "nth", "rank_set", "ranks_text"]

_FEW = 6
"""The number of runs up to which they are named one by one."""

LISTED = 4096
"""The number of ranks up to which they are sorted, if that requires listing them."""


class RankSet(NamedTuple):
    """Ranks in ascending order, as runs (first, last) of consecutive ones.

    `run` gives a run by its number; None if there are too many to sort.
    """

    num_ranks: int
    num_runs: int
    run: Callable[[int], tuple[int, int]] | None

    def texts(self) -> list[str]:
        """Names of the ranks, from the longest text to the shortest: `0-3,8-11`."""
        if self.run is None:
            return [f"{self.num_ranks:,} ranks"]
        out: list[str] = []
        if self.num_runs <= _FEW:
            out.append(",".join(_run_text(self.run(each)) for each in range(self.num_runs)))
        if self.num_runs > 3:
            ends = [_run_text(self.run(each)) for each in (0, 1, self.num_runs - 1)]
            out += [f"{ends[0]},{ends[1]},…,{ends[2]}", f"{ends[0]},…,{ends[2]}"]
        return out


def rank_set(mesh: Mesh, bases: Sequence[int], digits: Iterable[tuple[int, int]]) -> RankSet:
    """The device ids at the positions that are a base plus a sum of `digits`."""
    digits = merged(sorted(digits, key=lambda digit: -digit[1]))
    count = math.prod(size for size, _ in digits)
    if mesh.ranks is None and len(bases) == 1:
        return _arithmetic(bases[0], digits, count)
    if mesh.ranks is None and len(bases) * count > LISTED:
        return RankSet(len(bases) * count, 0, None)
    runs = _runs(sorted(
        mesh.rank_at(base + nth(digits, number)) for base in bases for number in range(count)
    ))
    return RankSet(len(bases) * count, len(runs), runs.__getitem__)


def _arithmetic(base: int, digits: Digits, count: int) -> RankSet:
    # Nothing is listed: the minor digit is a run if its stride is 1.
    length = digits[-1][0] if digits and digits[-1][1] == 1 else 1
    above = digits[:-1] if length > 1 else digits

    def run(number: int) -> tuple[int, int]:
        first = base + nth(above, number)
        return first, first + length - 1

    return RankSet(count, count // length, run)


def nth(digits: Digits, number: int) -> int:
    """The sum of digits whose mixed radix, major to minor, is `number`."""
    total = 0
    for size, stride in reversed(digits):
        number, digit = divmod(number, size)
        total += digit * stride
    return total


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for _, same in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):
        members = [rank for _, rank in same]
        found.append((members[0], members[-1]))
    return found


def _run_text(run: tuple[int, int]) -> str:
    first, last = run
    if first == last:
        return str(first)
    return f"{first},{last}" if last == first + 1 else f"{first}-{last}"


def ranks_text(ranks: Iterable[int]) -> str:
    """A few words for any ranks: `0-3,8-11`."""
    runs = _runs(sorted(ranks))
    return RankSet(0, len(runs), runs.__getitem__).texts()[0]
