"""What cuts cost: elements that ranks lack, and shards that are larger than others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["Held", "busiest", "fairest", "nearest", "sole_shard"]

Held = Sequence[tuple[tuple[int, ...], float]]
"""The cuts that operands have, each with the bytes of a row."""


def busiest(cuts: tuple[int, ...], held: Held) -> float:
    """What the busiest rank lacks of operands held by these cuts."""
    loads = [0.0] * (len(cuts) - 1)
    for own, row in held:
        for shard, (start, stop) in enumerate(pairwise(cuts)):
            inside = max(0, min(stop, own[-1]) - max(start, own[0]))
            kept = max(0, min(stop, own[shard + 1]) - max(start, own[shard]))
            loads[shard] += (inside - kept) * row
    return max(loads)


def fairest(options: Sequence[tuple[int, ...]], held: Held) -> tuple[int, ...]:
    """The cuts of a result that cost least: what the busiest rank lacks, and what the largest shard
    has above an equal share. A result of which one rank has nearly all is as good as whole."""
    largest = max([row for _, row in held], default=0.0)

    def cost(cuts: tuple[int, ...]) -> tuple[float, float]:
        most = max([stop - start for start, stop in pairwise(cuts)])
        equal = -(-(cuts[-1] - cuts[0]) // (len(cuts) - 1))
        lacks = busiest(cuts, held)
        return lacks + (most - equal) * largest, lacks

    return min(options, key=cost)


def sole_shard(cuts: tuple[int, ...]) -> int | None:
    """The shard, of several, that alone has something to share: two places or more."""
    holder = cuts.index(cuts[-1]) - 1
    return holder if len(cuts) > 2 and cuts[-1] > 1 and cuts[holder] == 0 else None


def nearest(cut: int, inner: int) -> int:
    """A cut in units of a factor, rounded half up (default cuts give the first shard more)."""
    return cut if inner == 1 else (2 * cut + inner) // (2 * inner) if inner else 0
