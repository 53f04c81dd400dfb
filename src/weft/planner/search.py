"""From two layouts to the steps between them.

Theory of operation. Without partial axes a pair is one exchange of box intersections (`move`),
or one `Transfer` between two meshes. On one mesh the exchange becomes a slice if nothing is
missing. If the axes that stop sharding are below those that stay, it becomes a slice and an
all-gather: the same bytes, by the collective made for it.

With reductions there is a *family* of plans. Each slices where it can, reduces (partial axes that
become sharding axes by reduce-scatter, the rest by all-reduce), moves at the smallest size, and
gathers last. Members differ in two things: which partial axes are scattered, to their place in the
target or to a spare one, and which replicated axes are sliced temporarily, so that replicas share
the reduction. Axes that become partial do so last, locally. Between two meshes the reductions come
before the transfer. Partial values that stay partial cross as they are, or are reduced and made
again; what is to be replicated may arrive sharded and be gathered there. Members that shard over
axes which the target does not use are *detours*: they save bytes, and are worth trying where bytes
take time. One cost function chooses, by time, then by bytes, then by steps. (The order slice,
reduce-scatter, permute, gather is that of XLA's Shardy: "Shardy: an MLIR-based tensor partitioning
system", its reshard pass.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations, product

from weft.core.layout import Layout
from weft.planner.check import IDEMPOTENT, LINEAR, kept_partials
from weft.planner.cost import cheapest, seconds_of
from weft.planner.geometry import Cut, coarser, common_depth, finer, size_over
from weft.planner.links import Links
from weft.planner.overlap import missing_elements, shared_ranks
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
)

__all__ = ["family", "move", "search"]

Steps = tuple[Step, ...]

_TRIED = 4
"""The number of axes up to which every combination is tried; for more, only all or none."""


def search(src: Layout, dst: Layout, itemsize: int, links: Links) -> Steps:
    """The cheapest steps from `src` to `dst`: layouts of one shape, without axes of size 1."""
    best = cheapest(family(src, dst, links.node_size, False), itemsize, links)
    if _may_gain(src, dst, best, itemsize, links):
        return cheapest(family(src, dst, links.node_size), itemsize, links)
    return best


def _may_gain(src: Layout, dst: Layout, best: Steps, itemsize: int, links: Links) -> bool:
    """Whether detours are worth trying.

    They let replicas share a reduction, or make what moves smaller, usually at the price of another
    collective. Where the bytes take no longer than that, detours gain nothing.
    """
    reduces = any(kind not in (None, to) for kind, to in zip(src.partial, dst.partial))
    if src.mesh == dst.mesh and not reduces:
        return False
    if not (_free(src) or any(isinstance(step, (Exchange, Transfer)) for step in best)):
        return False
    return seconds_of(best, itemsize, links) - seconds_of(best, 0, links) > links.start_s


@lru_cache(maxsize=4096)
def family(src: Layout, dst: Layout, node_size: int, detours: bool = True) -> tuple[Steps, ...]:
    """The plans to choose from, first the one that follows the target's sharding.

    `detours`: include those that temporarily shard over axes which the target does not use.
    """
    if src == dst:
        return ((),)
    if 0 in src.shape:
        alone = src.mesh == dst.mesh
        return ((Slice(src, dst) if alone else Transfer(src, dst, node_size=node_size),),)
    if src.mesh != dst.mesh:
        return tuple(dict.fromkeys(_across(src, dst, node_size, detours)))
    changed = [axis for axis, kind in enumerate(src.partial) if kind != dst.partial[axis]]
    reduced = [axis for axis in changed if src.partial[axis] is not None]
    made = [axis for axis in changed if dst.partial[axis] is not None]
    out: dict[Steps, None] = {}
    for steps, here in _reductions(src, dst, reduced, detours):
        if made:
            below = _before_partial(here, dst, made)
            out[*steps, *move(here, below), MakePartial(below, dst, tuple(made))] = None
        else:
            out[*steps, *move(here, dst)] = None
    return tuple(out)


def move(src: Layout, dst: Layout) -> list[Step]:
    """The steps between layouts with the same partial axes, of a tensor that has elements: exactly
    the missing bytes."""
    ceasing: list[int] = []
    coming: list[int] = []
    nested = True
    gathered = False  # whether few ranks hold all of a dim, as of a row
    between: list[Cut] = []
    for dim in range(src.ndim):
        depth = common_depth(src, dst, dim)
        up, down = src.dims[dim][depth:], dst.dims[dim][depth:]
        ceasing += up
        coming += down
        nested = nested and not (up and down)
        gathered = gathered or (bool(up) and (src.shape[dim] == 1 or _repeats(src.cuts[dim])))
        finest = src if up else dst
        between.append((finest.dims[dim], finest.cuts[dim]))
    if not ceasing:
        return [Slice(src, dst)] if coming else []
    if gathered and not missing_elements(src, dst):
        return [Slice(src, dst)]
    axes = tuple(sorted(ceasing))
    if not nested or set(ceasing) & set(coming):
        return [Exchange(src, dst, axes)]
    if not coming:
        return [AllGather(src, dst, axes)]
    middle = _cut(src, between, src.partial)
    return [Slice(src, middle), AllGather(middle, dst, axes)]


def _repeats(cuts: tuple[int, ...] | None) -> bool:
    """Whether cuts leave shards empty."""
    return cuts is not None and len(set(cuts)) < len(cuts)


# Reductions.


def _reductions(
    src: Layout, dst: Layout, reduced: list[int], detours: bool
) -> Iterator[tuple[Steps, Layout]]:
    """Ways to reduce some axes on the source's mesh: the steps and the resulting layout.

    A target on another mesh prescribes no place there: whatever can be scattered is, below any dim.
    """
    if not reduced:
        yield (), src
        return
    alone = src.mesh == dst.mesh
    # An axis that becomes partial of another kind than a sum may not shard before that.
    free, scattering = (
        [axis for axis in axes if not alone or dst.partial[axis] in (None, "sum")]
        for axes in (_free(src), reduced)
    )
    wanted = {*scattering}
    if alone:  # of a partial sum to be made, each rank needs only a part
        sums = [axis for axis in scattering if dst.partial[axis] == "sum"]
        wanted = {*sums, *dst.sharded_axes}
    first = [axis for axis in (*free, *scattering) if axis in wanted]
    ways: Iterable[Iterable[int]] = [first]
    if detours:
        ways = [first, *_subsets([*free, *scattering])]
    elif alone and len({*first, *reduced}) > 1:
        ways = [first, *_subsets(first)]
    for chosen in dict.fromkeys(map(frozenset, ways)):
        steps = _reduce(src, dst if alone else None, reduced, chosen)
        yield steps, steps[-1].dst


def _free(layout: Layout) -> list[int]:
    return [axis for axis in layout.free_axes if layout.mesh.axis_sizes[axis] > 1]


def _subsets(axes: list[int]) -> Iterator[Iterable[int]]:
    if len(axes) > _TRIED:
        return iter(((), axes))
    sizes = range(len(axes) + 1)
    return chain.from_iterable(combinations(axes, size) for size in sizes)


def _reduce(src: Layout, dst: Layout | None, reduced: list[int], chosen: frozenset[int]) -> Steps:
    """Shard over the chosen axes, those among `reduced` by reduce-scatter; all-reduce the rest."""
    cuts: list[Cut] = list(zip(src.dims, src.cuts))
    if dst is not None:
        cuts = [_cut_down(src, dst, dim, chosen) for dim in range(src.ndim)]
    placed = {axis for axes, _ in cuts for axis in axes}
    spare = [axis for axis in sorted(chosen) if axis not in placed]
    cuts = _with_spare(src, cuts, spare, src if dst is None else dst)
    scattered = [axis for axes, _ in cuts for axis in axes if axis in reduced]
    summed = [axis for axis in reduced if axis not in scattered]
    kept = [None if axis in reduced else kind for axis, kind in enumerate(src.partial)]
    last = _cut(src, cuts, kept)
    first = last
    if summed:
        first = last.replace(partial=[
            src.partial[axis] if axis in summed else kind for axis, kind in enumerate(kept)
        ])
    steps: list[Step] = []
    if scattered:
        steps.append(ReduceScatter(src, first, tuple(sorted(scattered))))
    elif first.dims != src.dims:
        steps.append(Slice(src, first))
    if summed:
        steps.append(AllReduce(first, last, tuple(summed)))
    return tuple(steps)


def _cut_down(src: Layout, dst: Layout, dim: int, chosen: frozenset[int]) -> Cut:
    """A dim as it is held, sharded further over those of the target's axes that are chosen."""
    held, target = src.dims[dim], dst.dims[dim]
    depth = common_depth(src, dst, dim)
    cut = held, src.cuts[dim]
    if depth == len(held):
        while depth < len(target) and target[depth] in chosen:
            depth += 1
        if depth > len(held):
            cut = coarser(dst, dim, depth)
    more = tuple(axis for axis in target if axis in chosen and axis not in cut[0])
    return finer(src, cut, more)


def _with_spare(layout: Layout, cuts: list[Cut], axes: Sequence[int], dst: Layout) -> list[Cut]:
    """Cuts with some more axes, each below all others of the dim that it divides best.

    Dims that are sharded as in the target come first, so that these axes can be gathered.
    """
    cuts = list(cuts)
    for axis in axes if cuts else ():
        size = layout.mesh.axis_sizes[axis]

        def rank(dim: int, size: int = size) -> tuple[bool, bool, int]:
            length = -(-layout.shape[dim] // size_over(layout, cuts[dim][0]))
            return cuts[dim][0] == dst.dims[dim], length % size == 0, length

        best = max(range(len(cuts)), key=rank)
        cuts[best] = finer(layout, cuts[best], (axis,))
    return cuts


# Partial values.


def _before_partial(here: Layout, dst: Layout, made: list[int]) -> Layout:
    """The layout from which axes can become partial locally: `here` itself if possible."""
    if all(
        set(here.dims[dim][common_depth(here, dst, dim):]) <= set(made)
        for dim in range(here.ndim)
    ):
        return here
    cuts = [
        finer(dst, (dst.dims[dim], dst.cuts[dim]),
              tuple(axis for axis in here.dims[dim] if axis in made))
        for dim in range(here.ndim)
    ]
    return _cut(here, cuts, here.partial)


def _cut(layout: Layout, cuts: list[Cut], partial: Sequence[str | None]) -> Layout:
    dims, offsets = [axes for axes, _ in cuts], [cut for _, cut in cuts]
    return Layout.make(layout.mesh, layout.shape, dims, offsets, partial)


# Two meshes.


def _across(src: Layout, dst: Layout, node_size: int, detours: bool) -> Iterator[Steps]:
    for crossing in _crossing_partials(src, dst):
        reduced = [axis for axis, kind in enumerate(src.partial) if kind and axis not in crossing]
        made = [axis for axis, kind in enumerate(dst.partial)
                if kind and axis not in crossing.values()]
        ways = product(_reductions(src, dst, reduced, detours), _landings(src, dst, made, detours))
        for (before, here), (landing, after) in ways:
            yield *before, Transfer(here, landing, node_size=node_size), *after


def _crossing_partials(src: Layout, dst: Layout) -> Iterator[dict[int, int]]:
    """Source axis -> target axis of the partial axes that cross: all that can, or all that must."""
    kept = kept_partials(src, dst)
    yield kept
    if kept:
        # A sum can be reduced and made again, a mean cannot. (Means and sums may occur together.)
        kinds = {src.partial[axis] for axis in kept}
        if kinds <= IDEMPOTENT | {"sum", "product"}:
            yield {}
        elif kinds <= LINEAR:
            yield {s: d for s, d in kept.items() if src.partial[s] == "avg"}


def _landings(
    src: Layout, dst: Layout, made: list[int], detours: bool
) -> Iterator[tuple[Layout, Steps]]:
    """Layouts to arrive at on the target's mesh, and the steps from there."""
    kinds = [None if axis in made else kind for axis, kind in enumerate(dst.partial)]
    cuts: list[Cut] = list(zip(dst.dims, dst.cuts))
    # Each element of a partial sum is needed on one rank only.
    cuts = _with_spare(dst, cuts, [axis for axis in made if dst.partial[axis] == "sum"], dst)
    below = _cut(dst, cuts, kinds)
    last: Steps = (MakePartial(below, dst, tuple(made)),) if made else ()
    yield below, last
    if not detours:
        return
    free = [axis for axis in _free(dst) if axis not in made]
    if free and dst.ndim and next(shared_ranks(src.mesh, dst.mesh), None) is None:
        # Every element crosses once, and is distributed there.
        finest = _cut(dst, _with_spare(below, cuts, free, below), kinds)
        yield finest, (*move(finest, below), *last)
