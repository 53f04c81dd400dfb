"""From two layouts to the steps between them.

Theory of operation. Without partial axes every pair is one exchange of box intersections. It
turns into a slice when nothing is missing, and into a slice and an all-gather when the axes that
cease to cut stand below those that stay: the same bytes, by the collective made for it. With
partial axes to be reduced, the target's cuts are applied as far as they go before or by the
reduction, so that terms are reduced at the smallest size; what remains to be moved moves after.
Axes that become partial do so last, locally. (The order slice, reduce-scatter, permute, gather is
that of XLA's Shardy: "Shardy: an MLIR-based tensor partitioning system", its reshard pass.)
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.layout import Layout
from weft.planner.geometry import Cut, coarser, common_depth, finer
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    Term,
)

__all__ = ["move", "search"]


def search(src: Layout, dst: Layout) -> list[Step]:
    """The steps from `src` to `dst`: layouts of one shape and mesh, without axes of size 1."""
    if 0 in src.shape:
        return [] if src == dst else [Slice(src, dst)]
    axes = range(src.mesh.ndim)
    changed = [axis for axis in axes if src.partial[axis] != dst.partial[axis]]
    reduced = [axis for axis in changed if src.partial[axis] is not None]
    made = [axis for axis in changed if dst.partial[axis] is not None]
    steps: list[Step] = _reduce(src, dst, reduced) if reduced else []
    here = steps[-1].dst if steps else src
    if not made:
        return steps + move(here, dst)
    below = _before_term(here, dst, made)
    return steps + move(here, below) + [Term(below, dst, tuple(made))]


def move(src: Layout, dst: Layout) -> list[Step]:
    """The steps between layouts with the same partial axes: exactly the missing bytes."""
    ceasing: list[int] = []
    coming: list[int] = []
    nested = True
    between: list[Cut] = []
    for dim in range(src.ndim):
        depth = common_depth(src, dst, dim)
        up, down = src.dims[dim][depth:], dst.dims[dim][depth:]
        ceasing += up
        coming += down
        nested = nested and not (up and down)
        finest = src if up else dst
        between.append((finest.dims[dim], finest.cuts[dim]))
    if 0 in src.shape:
        return [Slice(src, dst)] if ceasing or coming else []
    if not ceasing:
        return [Slice(src, dst)] if coming else []
    axes = tuple(sorted(ceasing))
    if not nested or set(ceasing) & set(coming):
        return [Exchange(src, dst, axes)]
    if not coming:
        return [AllGather(src, dst, axes)]
    middle = _cut(src, between, src.partial)
    return [Slice(src, middle), AllGather(middle, dst, axes)]


def _reduce(src: Layout, dst: Layout, reduced: list[int]) -> list[Step]:
    """Slice what the target drops, reduce-scatter what it cuts, all-reduce the rest."""
    held = {axis for axes in src.dims for axis in axes}
    free = {
        axis for axis in range(src.mesh.ndim)
        if axis not in held and (src.partial[axis] is None or axis in reduced)
    }
    cuts = [_cut_down(src, dst, dim, free) for dim in range(src.ndim)]
    scattered = [axis for axes, _ in cuts for axis in axes if axis in reduced]
    summed = [axis for axis in reduced if axis not in scattered]
    kept = [None if axis in reduced else kind for axis, kind in enumerate(src.partial)]
    last = _cut(src, cuts, kept)
    first = last.replace(cuts=last.cuts, partial=[
        src.partial[axis] if axis in summed else kind for axis, kind in enumerate(kept)
    ])
    steps: list[Step] = []
    if scattered:
        steps.append(ReduceScatter(src, first, tuple(sorted(scattered))))
    elif first.dims != src.dims:
        steps.append(Slice(src, first))
    if summed:
        steps.append(AllReduce(first, last, tuple(summed)))
    return steps


def _cut_down(src: Layout, dst: Layout, dim: int, free: set[int]) -> Cut:
    """A dim as it is held, cut further by those of the target's axes that are free for it."""
    held, target = src.dims[dim], dst.dims[dim]
    depth = common_depth(src, dst, dim)
    cut = held, src.cuts[dim]
    if depth == len(held):
        while depth < len(target) and target[depth] in free:
            depth += 1
        if depth > len(held):
            cut = coarser(dst, dim, depth)
    more = tuple(axis for axis in target if axis in free and axis not in cut[0])
    return finer(src, dim, cut, more)


def _before_term(here: Layout, dst: Layout, made: list[int]) -> Layout:
    """The layout from which axes can become partial locally: `here` itself, where it serves."""
    if all(
        set(here.dims[dim][common_depth(here, dst, dim):]) <= set(made)
        for dim in range(here.ndim)
    ):
        return here
    cuts = [
        finer(dst, dim, (dst.dims[dim], dst.cuts[dim]),
              tuple(axis for axis in here.dims[dim] if axis in made))
        for dim in range(here.ndim)
    ]
    return _cut(here, cuts, here.partial)


def _cut(layout: Layout, cuts: list[Cut], partial: Sequence[str | None]) -> Layout:
    dims, offsets = [axes for axes, _ in cuts], [cut for _, cut in cuts]
    return Layout.make(layout.mesh, layout.shape, dims, offsets, partial)
