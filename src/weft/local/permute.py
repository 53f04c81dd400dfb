"""Blocks sent from rank to rank by pairs: the only collective that is no change of layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from weft.comm import Communicator
from weft.core.integers import listed
from weft.errors import LayoutError, ShardTypeError
from weft.ops.all_to_all import AllToAll

__all__ = ["Permute", "as_pairs"]

Pairs = tuple[tuple[int, int], ...]
"""(from, to), positions in a group."""


def as_pairs(perm: Sequence[tuple[int, int]], size: int) -> Pairs:
    """The pairs, checked: of positions that exist, each at most once on a side."""
    given: Any = perm
    if isinstance(given, Mapping) or any(len(listed(pair) or ()) != 2 for pair in given):
        raise ShardTypeError(
            "ppermute(perm)", f"{perm!r} is of type {type(perm).__name__}",
            "it is a list of pairs (from, to) of places", [repr(perm)],
            f"[(i, (i + 1) % {size}) for i in range({size})]")
    pairs = tuple((int(source), int(target)) for source, target in perm)
    outside = [pair for pair in pairs if not all(0 <= place < size for place in pair)]
    twice = [
        pair for side in (0, 1) for pair in pairs
        if sum(other[side] == pair[side] for other in pairs) > 1
    ]
    if outside or twice:
        raise LayoutError(
            "ppermute(perm)", f"{len(outside)} pairs name no place of 0 to {size - 1}, "
            f"{len(set(twice))} name a place that another pair names on the same side",
            "each place sends to one place at most and receives from one at most",
            [*outside, *dict.fromkeys(twice)],
            f"[(i, (i + 1) % {size}) for i in range({size})]")
    return pairs


@dataclass(frozen=True)
class Permute(AllToAll):
    """Sends blocks by pairs of positions in a group."""

    what: ClassVar[str] = "blocks by pairs"
    of_gradient: ClassVar[str] = "gradient of ppermute"

    comm: Communicator

    def __call__(self, x: Tensor, pairs: Pairs, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """What comes to this rank; zeros like `x` where nothing does. `shapes` are those of all
        ranks' tensors."""
        me, size = self.comm.index, self.comm.size
        send, recv = [0] * size, [0] * size
        made, flat = shapes[me], x.reshape(-1)[:0]
        for source, target in pairs:
            if source == me:
                flat = x.reshape(-1)
                send[target] = flat.numel()
            if target == me:
                made, recv[source] = shapes[source], math.prod(shapes[source])
        got = self.send(flat, send, recv)
        if any(target == me for _, target in pairs):
            return got.view(made)
        return x.new_zeros(made) + got.sum().to(x.dtype)  # all ranks take part in the backward
