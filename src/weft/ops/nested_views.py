"""Views that join or split several sharded dims, if each shard stays one stretch.

A batch with one sample a rank, and sharded rows: joined, the ranks' blocks follow each other, so
the joined dim is sharded over both axes and nothing moves. A rule can shard only the leading factor
of a compound dim, so it cannot express this, which depends on the sizes of the axes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from weft.core import Layout
from weft.rules import Call, Decision

__all__ = ["Placed", "groups", "nested", "viewed"]

Placed = tuple[tuple[int, ...], tuple[int, ...] | None]
"""The axes that shard a dim, and its cuts."""


def groups(
    source: Sequence[int], result: Sequence[int]
) -> Iterator[tuple[range, range]]:
    """Dims of both shapes, taken from the left until their products agree."""
    left = right = 0
    while left < len(source) or right < len(result):
        first, second = left, right
        one = source[left] if left < len(source) else 1
        other = result[right] if right < len(result) else 1
        left, right = min(left + 1, len(source)), min(right + 1, len(result))
        while one != other:
            if one < other:
                one *= source[left]
                left += 1
            else:
                other *= result[right]
                right += 1
        yield range(first, left), range(second, right)


def nested(call: Call, layouts: Sequence[Layout]) -> Decision | None:
    """Where several sharded dims are joined, or split from one, and blocks remain stretches,
    nothing moves; None where there are none such, or where a block would be torn."""
    layout, source, result = layouts[0], call.tensors[0], call.results[0]
    if 0 in source.shape or sum(map(len, layout.dims)) < 2:
        return None  # one axis stays in one dim
    placed: list[Placed] = [((), None)] * len(result.shape)
    several = False
    for lefts, rights in groups(source.shape, result.shape):
        if len(lefts) == len(rights) == 1:
            placed[rights[0]] = layout.dims[lefts[0]], layout.cuts[lefts[0]]
            continue
        sharded = [dim for dim in lefts if layout.dims[dim]]
        if not sharded:
            continue
        cuts = _stretches(layout, lefts, sharded)
        axes = tuple([axis for dim in sharded for axis in layout.dims[dim]])
        sizes = [layout.mesh.axis_sizes[axis] for axis in axes]
        lengths = [result.shape[dim] for dim in rights]
        made = _boxes(cuts, axes, sizes, lengths) if cuts else None
        if not made:
            return None
        placed[rights.start : rights.stop] = made
        several = several or len(sharded) > 1 or sum(bool(own) for own, _ in made) > 1
    if not several:
        return None  # a rule says it
    out = Layout.make(layout.mesh, result.shape, [axes for axes, _ in placed],
                      [cuts for _, cuts in placed], layout.partial)
    return viewed(call, layout, out)


def viewed(call: Call, layout: Layout, result: Layout) -> Decision:
    """The view of each block in the shape that the result gives it."""
    source = call.tensors[0]

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (source, list(result.local_shape_at(coordinate))), {}

    return Decision((layout,), (result,), args, _OPS.get(call.base))


_OPS = {
    "flatten": "aten.reshape.default", "ravel": "aten.reshape.default",
    **dict.fromkeys(("unflatten", "squeeze", "unsqueeze"), "aten.view.default"),
}
"""What runs on the blocks, where it is not the op."""


def _stretches(
    layout: Layout, dims: Sequence[int], sharded: Sequence[int]
) -> tuple[int, ...] | None:
    """The cuts of these dims as one, where every shard is a stretch: of the sharded dims all but
    the last have one element a shard, and the others before the last have one element."""
    *leading, last = sharded
    for dim in dims:
        length = layout.shape[dim]
        if dim < last and (length != 1 or dim in leading) and (
            dim not in leading or layout.cuts_of(dim) != tuple(range(length + 1))
        ):
            return None
    step = math.prod([layout.shape[dim] for dim in dims if dim > last])
    inner = [cut * step for cut in layout.cuts_of(last)]
    times = math.prod([layout.shape[dim] for dim in leading])
    return (0, *[at * inner[-1] + cut for at in range(times) for cut in inner[1:]])


def _boxes(
    cuts: Sequence[int], axes: tuple[int, ...], sizes: Sequence[int], lengths: Sequence[int]
) -> list[Placed] | None:
    """How dims of these lengths are sharded whose joined dim these axes cut so; None where a shard
    would be no box."""
    if not axes:
        return list[Placed]([((), None)] * len(lengths))
    if not lengths:
        return None
    length, rest = lengths[0], lengths[1:]
    step = math.prod(rest)
    if length > 1 and all(cut % step == 0 for cut in cuts):
        own = tuple([cut // step for cut in cuts])
        return [(axes, own), *[((), None)] * len(rest)]
    products = list(accumulate(sizes, operator.mul, initial=1))
    if length not in products:
        return None
    taken = products.index(length)
    each = math.prod(sizes[taken:])
    inner = tuple(cuts[: each + 1])
    if any(cuts[at * each + place] != at * step + cut
           for at in range(length) for place, cut in enumerate(inner)):
        return None
    behind = _boxes(inner, axes[taken:], sizes[taken:], rest)
    return None if behind is None else [
        (axes[:taken], tuple(range(length + 1)) if taken else None), *behind]
