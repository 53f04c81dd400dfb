"""A plan: the steps from one layout to another, and their cost.

`plan(src, dst)` finds them; equal arguments give the same plan object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from weft.core.arguments import HasLayout, Placements
from weft.core.cover import Cover
from weft.core.display import AsPicture
from weft.core.dtypes import dtype_name
from weft.core.dtypes import itemsize as itemsize_of
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.names import also_called
from weft.core.partition_spec import P
from weft.core.placement import is_placements
from weft.core.stretched import as_boxes
from weft.core.units import nbytes_text, seconds_text
from weft.errors import LayoutError, ShardTypeError
from weft.planner.check import check
from weft.planner.cost import (
    halo_elements,
    nbytes_of,
    peak_elements,
    seconds_of,
    step_nbytes,
    step_nbytes_at,
    step_seconds,
)
from weft.planner.geometry import strip
from weft.planner.holders import crossing
from weft.planner.links import Links, as_links, name_of
from weft.planner.overlap import missing_elements
from weft.planner.search import family, search
from weft.planner.steps import Fetch, Fold, Step

__all__ = [
    "Plan", "fetching", "folding", "forget_plans", "gradient_layout", "kept_plans", "plan",
    "planned",
]

_LISTED = 16
"""The number of ranks up to which the text of a plan has a figure for each."""

_SAMPLED = 256
"""Ranks that its summary looks at, evenly spaced."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan(AsPicture):
    """Steps that lead from `src` to `dst`; `itemsize` is the number of bytes per element.

    With `cover`, ranks end with the boxes that they read beside `dst`. With `folds`, they begin
    with partial values of such boxes beside `src`.

    A plan is a value of its own: two plans are equal only when they are one object.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    itemsize: int = 4
    links: Links | None = None
    cover: Cover | None = None
    folds: Cover | None = None

    def bytes_received(self, rank: int) -> int:
        """Bytes that device id `rank` receives from others.

        Args:
            rank: a device id of either mesh.

        Raises:
            LayoutError: `rank` is in neither mesh.
        """
        meshes = [self.src.mesh] + [self.dst.mesh] * (self.dst.mesh != self.src.mesh)
        if all(mesh.position_of_rank(rank) is None for mesh in meshes):
            raise LayoutError(
                "plan.bytes_received(rank)", f"rank {rank} is not among the "
                + " or the ".join(f"{mesh.size()} devices of {mesh}" for mesh in meshes),
                "only a rank of the mesh takes part", [rank],
                f"plan.bytes_received({self.dst.mesh.rank_at(0)})")
        total = 0
        for step in self.steps:
            at = step.dst.mesh.coordinate_of_rank(rank)
            if at is not None:
                total += step_nbytes_at(step, at, self.itemsize)
        return total

    @property
    def total_bytes(self) -> int:
        """Bytes received by all ranks together."""
        return nbytes_of(self.steps, self.itemsize)

    @property
    def lower_bound(self) -> int:
        """The fewest bytes, over all ranks, that any plan needs.

        Without partial axes: the bytes of the target boxes that the ranks lack. With them: those
        of the best of the family that the plan was chosen from, which may take more steps. Of
        halos: those of the plan.
        """
        if self.cover is not None or self.folds is not None:
            return self.total_bytes
        before, after = _boxes(self.src, self.dst)
        src, dst = strip(before), strip(after)
        if src.is_partial or dst.is_partial:
            node_size = as_links(self.links, "plan.lower_bound").node_size
            found = family(src, dst, node_size)
            return min(nbytes_of(steps, self.itemsize) for steps in (*found, self.steps))
        return self.itemsize * missing_elements(src, dst)

    @property
    def seconds(self) -> float:
        """Estimated time in seconds over the links for which the plan was made."""
        return seconds_of(self.steps, self.itemsize, self.links)

    @property
    def peak_elements(self) -> int:
        """The most elements that a rank holds at once, source and target included."""
        return peak_elements(self.src, self.steps)

    def transpose(self) -> Plan:
        """The plan of the gradient: from the dual of the target to the dual of the source.

        Neither dual is partial, so the plan moves exactly what is missing: a gather becomes a
        slice, a reduce-scatter a gather, an exchange its own reverse, and an all-reduce nothing.
        A halo that was read is summed, and the other way round.
        """
        folds = None if self.folds is None else replace(self.folds, fill=0.0)
        return planned(gradient_layout(self.dst), gradient_layout(self.src), folds, self.cover,
                       self.itemsize, self.links)

    def __str__(self) -> str:
        """Layouts, steps, and their cost, one item per line."""
        src, dst = self.src, self.dst
        alone = src.mesh == dst.mesh
        places = f" on {src.mesh}" if alone else f", from {src.mesh} to {dst.mesh}"
        lines = [f"{src} -> {dst}{places}"]
        for number, step in enumerate(self.steps, 1):
            nbytes = step_nbytes(step, self.itemsize)
            seconds = step_seconds(step, self.itemsize, self.links)
            cost = "nothing is sent"
            if nbytes:
                cost = f"{nbytes_text(nbytes)}, {seconds_text(seconds)}"
            lines.append(f"  {number}. {step}: {cost}")
        if not self.steps:
            lines.append("  nothing to do")
        total, bound = self.total_bytes, self.lower_bound
        ratio = f", {total / bound:.2f}x" if bound else ""
        network = name_of(self.links)
        lines += [
            f"  received: {nbytes_text(total)}; lower bound {nbytes_text(bound)}{ratio}",
            f"  per rank: {_by_rank(self)}",
            f"  memory:   {nbytes_text(self.peak_elements * self.itemsize)} at once, at most",
            f"  time:     {seconds_text(self.seconds)}, estimated"
            + (f" for {network}" if network else ""),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        steps = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        return f"Plan({self.src} -> {self.dst}, {steps}, {nbytes_text(self.total_bytes)})"


@also_called(source="src", target="dst")
def plan(
    src: Layout | HasLayout,
    dst: Layout | Placements,
    itemsize: int | None = None,
    *,
    dtype: object = None,
    links: Links | str | None = None,
) -> Plan:
    """The cheapest steps from one layout to another of the same global shape.

    Args:
        src: the layout that the tensor has, or the tensor.
        dst: the layout to come to, on the same mesh or another; or placements on the same.
        itemsize: bytes per element; None takes those of a tensor, else 4.
        dtype: "float32", torch.float32, ..., instead of `itemsize`.
        links: the network, `weft.Links`, "gloo" or "nccl"; None uses that of `weft.set_links`.

    Returns:
        The plan. Equal arguments give the same object.

    Raises:
        LayoutError: different global shapes, kinds of reduction that do not mix or that the dtype
            does not carry, a row that the table of transitions lacks, or an unknown dtype.
        ShardTypeError: an argument that is not a layout, an itemsize below 1 or different from the
            dtype's, or invalid links.
    """
    if not (isinstance(src, Layout) and isinstance(dst, Layout)):
        if dtype is None and itemsize is None:
            dtype = getattr(src, "dtype", None)
        src, dst = _ends(src, dst)
    if dtype is not None:
        name = dtype_name(str(dtype), "plan(dtype)")
        nbytes = itemsize_of(name)
        for layout in (src, dst):
            layout.check_dtype(name)
        if itemsize is not None and itemsize != nbytes:
            raise ShardTypeError(
                "plan(itemsize, dtype)", f"itemsize is {itemsize!r}, {dtype} has {nbytes} "
                "bytes", "both say how large an element is, so one is enough",
                [f"itemsize={itemsize!r}"], f"plan(src, dst, dtype={str(dtype)!r})")
        itemsize = nbytes
    elif itemsize is None:
        itemsize = 4
    given: Any = itemsize
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ShardTypeError(
            "plan(itemsize)", f"itemsize is {itemsize!r}",
            "an element has a whole number of bytes, at least 1", [repr(itemsize)],
            'plan(src, dst, itemsize=4), or dtype="float32"')
    return _plan(src, dst, itemsize, as_links(links, "plan(links)"))


def _ends(src: Any, dst: Any) -> tuple[Layout, Layout]:
    """The layouts of a tensor that has one, and of placements on the mesh of `src`."""
    ends = [one if isinstance(one, Layout) else getattr(one, "sharding", one) for one in (src, dst)]
    first, last = ends
    if isinstance(first, Layout) and (isinstance(last, P) or is_placements(last)):
        ends[1] = Layout.placed(first.mesh, first.shape, last, "plan(dst)")
    wrong = [repr(one) for one in ends if not isinstance(one, Layout)]
    if wrong:
        raise ShardTypeError(
            "plan(src, dst)", f"{len(wrong)} of 2 arguments are no layouts",
            "a plan leads from one weft.Layout to another, or from a tensor or layout to "
            "placements", wrong,
            "plan(Layout(mesh, shape, P('dp')), Layout(mesh, shape, P(None, 'dp')))")
    return ends[0], ends[1]


@lru_cache(maxsize=4096)
def _plan(src: Layout, dst: Layout, itemsize: int, links: Links) -> Plan:
    check(src, dst)
    before, after = _boxes(src, dst)
    steps = search(strip(before), strip(after), itemsize, links)
    return Plan(src, dst, steps, itemsize, links)


def _boxes(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    """Both ends as boxes, between which the steps lead."""
    found = as_boxes(src, dst)
    if found is None:
        raise LayoutError(
            "plan(src, dst)", f"{src} and {dst} shard a dim of stretches in two ways",
            "a step moves boxes; of such a dim, ranks hold a part of each stretch",
            [src, dst], "reshape the tensor to the dims that were joined, and redistribute that")
    return found


@lru_cache(maxsize=4096)
def fetching(src: Layout, dst: Layout, cover: Cover, itemsize: int = 4) -> Plan:
    """From the shards of `src` to the boxes that ranks read beside `dst`: one exchange, where the
    same axes shard both, in any dims."""
    check(src, dst)
    owned = _owned(src, dst)
    first = plan(src, owned, itemsize)
    last = Fetch(owned, dst, _axes(owned, dst, cover), cover)
    return Plan(src, dst, (*first.steps, last), itemsize, first.links, cover=cover)


@lru_cache(maxsize=4096)
def folding(src: Layout, cover: Cover, dst: Layout, itemsize: int = 4) -> Plan:
    """From partial values of the boxes that ranks read beside `src` to the shards of `dst`."""
    check(src, dst)
    owned = _owned(dst, src)
    rest = plan(owned, dst, itemsize)
    first = Fold(src, owned, _axes(owned, src, cover), cover)
    return Plan(src, dst, (first, *rest.steps), itemsize, rest.links, folds=cover)


def planned(
    src: Layout, dst: Layout, cover: Cover | None, folds: Cover | None, itemsize: int = 4,
    links: Links | None = None,
) -> Plan:
    """The plan between layouts, or to boxes that ranks read, or from boxes that are summed."""
    if cover is not None:
        return fetching(src, dst, cover, itemsize)
    if folds is not None:
        return folding(src, folds, dst, itemsize)
    return plan(src, dst, itemsize, links=links)


def _owned(shards: Layout, boxes: Layout) -> Layout:
    """The layout of shards that boxes are read of, or summed to, by one exchange."""
    same = shards.mesh == boxes.mesh and (shards.sharded_axes, shards.partial) == (
        boxes.sharded_axes, boxes.partial)
    return shards if same else boxes


def _axes(shards: Layout, boxes: Layout, cover: Cover) -> tuple[int, ...]:
    """The axes over which boxes are read of shards."""
    return tuple(sorted({
        axis for dim, both in enumerate(zip(shards.dims, boxes.dims)) for axes in both
        for axis in axes
        if cover.reads[dim] is not None or shards.cuts[dim] != boxes.cuts[dim]
        or shards.dims[dim] != boxes.dims[dim]
    }))


def kept_plans() -> tuple[int, int, int | None, int]:
    """Hits, misses, maxsize and currsize of the cache of plans."""
    return _plan.cache_info()


def forget_plans() -> None:
    """Search anew from now on."""
    for kept in (
        _plan, fetching, folding, family, missing_elements, halo_elements, crossing, strip
    ):
        kept.cache_clear()


def gradient_layout(layout: Layout, varying: frozenset[int] = frozenset()) -> Layout:
    """The layout of a gradient: S for S, I for I and P, and P(sum) for a varying axis."""
    value = layout.without_partial()
    return value.with_partial(varying) if varying else value


def _by_rank(plan: Plan) -> str:
    meshes = [plan.src.mesh] + [plan.dst.mesh] * (plan.dst.mesh != plan.src.mesh)
    count = sum(mesh.size() for mesh in meshes)
    ranks = sorted({rank for mesh in meshes for rank in _some(mesh, _SAMPLED // len(meshes))})
    nbytes = [plan.bytes_received(rank) for rank in ranks]
    if len(ranks) <= _LISTED:
        return _listed(ranks, nbytes)
    of = f"{len(ranks)} of {count} ranks" if count > _SAMPLED else f"{len(ranks)} ranks"
    nbytes.sort()
    least, median, most = map(nbytes_text, (nbytes[0], nbytes[(len(nbytes) - 1) // 2], nbytes[-1]))
    return f"min {least}, median {median}, max {most} ({of})"


def _some(mesh: Mesh, most: int) -> list[int]:
    size = mesh.size()
    count = min(size, most)
    return [mesh.rank_at(place * size // count) for place in range(count)]


def _listed(ranks: Sequence[int], nbytes: Sequence[int]) -> str:
    """Ranks that receive equal amounts are listed together."""
    groups: dict[str, list[int]] = {}
    for count, rank in sorted(zip(nbytes, ranks)):
        groups.setdefault(nbytes_text(count), []).append(rank)
    if len(groups) == 1:
        return f"{nbytes_text(nbytes[0])} each"
    return "; ".join(f"{text} on {','.join(map(str, sorted(its)))}" for text, its in groups.items())
