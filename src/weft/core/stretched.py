"""Layouts of dims that were joined from several, of which an inner one is sharded.

Of `x.view(-1, k)`, for x of shape (2, 64, k) whose dim 1 is sharded, a rank has the rows of its
tokens of both samples: two stretches of the 128. torch's DTensor writes `_StridedShard(0,
split_factor=2)`. A view makes such a layout, so that nothing has to move. It is the layout of the
tensor before the dims were joined (`apart`), and memory is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from weft.core.layout import Box, Layout
from weft.core.placement import Placement, StridedShard
from weft.errors import LayoutError

__all__ = ["StretchedLayout", "as_boxes", "in_stretches"]


class StretchedLayout(Layout):
    """A layout in which some dims consist of equal stretches, each sharded by the same axes.

    Args:
        apart: the layout of the tensor with each of these dims as two: the stretches, which are
            whole, and the places of one.
        stretches: per dim, how many it consists of; 1 for a dim that is no such.
    """

    __slots__ = ("_apart", "stretches")

    stretches: tuple[int, ...]
    is_stretched = True

    def __init__(self, apart: Layout, stretches: Sequence[int]) -> None:
        shape: list[int] = []
        dims: list[tuple[int, ...]] = []
        cuts: list[tuple[int, ...] | None] = []
        at = 0
        for count in stretches:
            at += count > 1
            shape.append(count * apart.shape[at])
            dims.append(apart.dims[at])
            cuts.append(tuple([count * cut for cut in apart.cuts_of(at)])
                        if apart.dims[at] else None)
            at += 1
        self._fill(apart.mesh, tuple(shape), tuple(dims), tuple(cuts), apart.partial)
        self._apart, self.stretches = apart, tuple(stretches)
        self._hash = hash((self._hash, self.stretches))

    @property
    def apart(self) -> Layout:
        return self._apart

    @property
    def plain(self) -> Layout:
        """The layout of the rows in the order of the ranks that hold them: for what does not ask
        where a row stands."""
        return Layout.make(self.mesh, self.shape, self.dims, self.cuts, self.partial)

    def replace(self, **parts: Any) -> Layout:
        """As of a Layout, with other partial axes."""
        if parts.keys() != {"partial"}:
            self._refuse("replace")
        return StretchedLayout(self.apart.replace(**parts), self.stretches)

    @property
    def has_empty_shards(self) -> bool:
        return self.apart.has_empty_shards

    def local_shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        held = iter(self.apart.local_shape_at(coordinate))
        return tuple([next(held) * (next(held) if count > 1 else 1) for count in self.stretches])

    @property
    def placements(self) -> tuple[Placement, ...]:
        found = list(self.plain.placements)
        for dim, (axes, count) in enumerate(zip(self.dims, self.stretches)):
            for axis in axes if count > 1 else ():
                found[axis] = StridedShard(dim, count, self._sizes_in_stretch(dim))
        return tuple(found)

    def _sizes_in_stretch(self, dim: int) -> tuple[int, ...] | None:
        at = dim + sum(count > 1 for count in self.stretches[: dim + 1])
        return self.apart.sizes_of(at) if self.apart.cuts[at] else None

    def text(self, dtype: str | None = None) -> str:
        """As of a Layout; joined dims are products: `[2*64@x, 32]`."""
        prefix, _, rest = self.apart.text(dtype).partition("[")
        apart, _, kinds = rest.partition("]")
        held = iter(apart.split(", "))
        dims = ["*".join([next(held) for _ in range(1 + (count > 1))]) for count in self.stretches]
        return f"{prefix}[{', '.join(dims)}]{kinds}"

    def __repr__(self) -> str:
        return f"StretchedLayout({self.apart!r}, {self.stretches})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StretchedLayout, (self.apart, self.stretches)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, StretchedLayout)
            and (self.stretches, self.apart) == (other.stretches, other.apart))

    def __hash__(self) -> int:
        return self._hash

    def sizes_of(self, dim: int) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in pairwise(super().cuts_of(dim))])

    # What only a box has.

    def _refuse(self, what: str) -> NoReturn:
        places = [f"dim {dim}: {count} stretches"
                  for dim, count in enumerate(self.stretches) if count > 1]
        raise LayoutError(
            f"Layout.{what}", f"the layout is {self}",
            "a rank has a part of each stretch of a dim that was joined, which is no box", places,
            f"the tensor as {self.apart}, before the dims were joined")

    def cuts_of(self, dim: int) -> tuple[int, ...]:
        if self.stretches[dim] > 1:
            self._refuse("cuts_of")
        return super().cuts_of(dim)

    def interval(self, dim: int, index: int) -> tuple[int, int]:
        if self.stretches[dim] > 1:
            self._refuse("interval")
        return super().interval(dim, index)

    def box_at(self, coordinate: Sequence[int]) -> Box:
        self._refuse("box")

    def take(self, dims: Any) -> Layout:
        self._refuse("take")

    def insert(self, at: int, other: Layout) -> Layout:
        self._refuse("insert")

    def resized(self, shape: Any, cuts: Any) -> Layout:
        self._refuse("resized")


def in_stretches(layout: Layout, counts: Sequence[int]) -> Layout:
    """A layout, whose rows are in the order of ranks (`plain`), with dims in so many stretches."""
    if max(counts, default=1) == 1:
        return layout
    return StretchedLayout(_split(layout, counts), counts)


def as_boxes(src: Layout, dst: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts with their dims in stretches as two; None if one of them shards such a dim
    otherwise. Memory is the same."""
    if not (src.is_stretched or dst.is_stretched):
        return src, dst
    ones = (1,) * src.ndim
    both = [one.stretches if isinstance(one, StretchedLayout) else ones for one in (src, dst)]
    counts = tuple(map(max, *both))
    for layout, own in ((src, both[0]), (dst, both[1])):
        if any(mine != count and (mine > 1 or layout.dims[dim])
               for dim, (mine, count) in enumerate(zip(own, counts))):
            return None
    return _split(src.plain, counts), _split(dst.plain, counts)


def _split(layout: Layout, counts: Sequence[int]) -> Layout:
    """The layout, whose rows are in the order of ranks, with so many stretches as a dim each."""
    shape: list[int] = []
    dims: list[tuple[int, ...]] = []
    cuts: list[tuple[int, ...] | None] = []
    for dim, count in enumerate(counts):
        own, axes = layout.cuts[dim], layout.dims[dim]
        if count > 1:
            shape.append(count)
            dims.append(())
            cuts.append(None)
            own = tuple([cut // count for cut in layout.cuts_of(dim)]) if axes else None
        shape.append(layout.shape[dim] // count)
        dims.append(axes)
        cuts.append(own)
    return Layout.make(layout.mesh, shape, dims, cuts, layout.partial)
