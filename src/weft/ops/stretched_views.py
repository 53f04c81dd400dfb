"""Views that join dims of which an inner one is sharded, and those that split them again.

`x.view(-1, k)` of a sequence that is sharded, of fewer samples than ranks: a rank keeps the rows of
its tokens, a part of each sample (`core.stretched`), and nothing moves. Ops that treat every row
alike leave such a layout (`tensor.call.stretches`). So it is inside of `weft.sharded_factories()`;
outside, a view leaves boxes, for which rows change ranks (`regrouped_views`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.core import Layout, in_stretches
from weft.ops.nested_views import groups, viewed
from weft.rules import Call, Decision

__all__ = ["stretched"]

_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "ravel", "unflatten")


def stretched(call: Call, layouts: Sequence[Layout]) -> Decision | None:
    """A view of dims that are joined or split, where its operand or its result has dims in
    stretches; None for others, and where a stretch would be torn."""
    if call.base not in _VIEWS or call.op == "aten.view.dtype":
        return None
    x, result = layouts[0], call.results[0].shape
    given = x.apart
    if x.is_stretched and given.shape == tuple(result):
        return viewed(call, x, given)
    if 0 in given.shape or not any(given.dims):
        return None
    found = _placed(given, result, x.is_stretched)
    if found is None:
        return None
    dims, cuts, counts = found
    rows = Layout.make(given.mesh, result, dims, cuts, given.partial)
    return viewed(call, x, in_stretches(rows, counts))


def _placed(
    given: Layout, result: Sequence[int], was_stretched: bool
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...] | None], list[int]] | None:
    """Axes of the result's dims, cuts of rows in the order of ranks, and how many stretches."""
    dims: list[tuple[int, ...]] = [()] * len(result)
    cuts: list[tuple[int, ...] | None] = [None] * len(result)
    counts, is_due = [1] * len(result), was_stretched
    for lefts, rights in groups(given.shape, result):
        sharded = [dim for dim in lefts if given.dims[dim]]
        if not sharded:
            continue
        if len(sharded) > 1:
            return None
        (dim,) = sharded
        before = math.prod([given.shape[at] for at in lefts if at < dim])
        step = math.prod([given.shape[at] for at in lefts if at > dim])
        places = [cut * step for cut in given.cuts_of(dim)]
        to = _target(result, rights, before, places)
        if to is None:
            return None
        at, count, unit = to
        dims[at], counts[at] = given.dims[dim], count
        cuts[at] = tuple([place // unit * count for place in places])
        is_due = is_due or (count > 1 and before < given.num_shards(dim))
    return (dims, cuts, counts) if is_due else None


def _target(
    result: Sequence[int], rights: range, before: int, places: Sequence[int]
) -> tuple[int, int, int] | None:
    """The dim of the result that is sharded, in how many stretches, and how many elements each of
    its places has: the dim with the fewest stretches."""
    best, leading, behind = None, 1, math.prod([result[at] for at in rights])
    for at in rights:
        behind //= result[at]
        count = before // leading
        if before % leading == 0 and result[at] * behind == count * places[-1] and not any(
            place % behind for place in places
        ) and (best is None or count < best[1]):
            best = at, count, behind
        leading *= result[at]
    return best
