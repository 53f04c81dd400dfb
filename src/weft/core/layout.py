"""A layout: mesh + global shape + how every dim is cut + which axes are partial.

Inside, axes are numbers (positions in the mesh's order of axes) and the form is canonical:
explicit cuts that equal the default are stored as None, so equality and hash are of what the
layout denotes. The index box that a rank holds is computed here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from weft.core import encoding
from weft.core.cuts import cuts_from_sizes, default_cuts, default_interval
from weft.core.mesh import Mesh
from weft.core.partition_spec import P
from weft.core.placement import Placement
from weft.errors import LayoutError, message

__all__ = ["Box", "Dims", "Layout"]

Dims = tuple[tuple[int, ...], ...]
"""Per tensor dim, the mesh axes (numbers) that cut it, major to minor."""

Box = tuple[tuple[int, int], ...]
"""Per tensor dim, (start, stop) of global indices."""


class Layout:
    """Which part of a global tensor each position of a mesh holds.

    Args:
        mesh: the mesh, abstract or bound.
        shape: the global shape.
        placements: a partition spec, or one placement per mesh axis; None replicates.
        sizes: map tensor dim -> explicit shard sizes, in shard order.

    Raises:
        MeshError: an unknown axis. PlacementError: a repeated axis, a dim out of range, another
        number of placements than axes. LayoutError: sizes that do not fit the shape.
    """

    __slots__ = ("mesh", "shape", "dims", "cuts", "partial", "_hash")

    mesh: Mesh
    shape: tuple[int, ...]
    dims: Dims
    cuts: tuple[tuple[int, ...] | None, ...]
    partial: tuple[str | None, ...]

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        placements: P | Sequence[Placement] | None = None,
        sizes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        shape = tuple(int(length) for length in shape)
        decoded = encoding.decode(mesh, len(shape), placements)
        explicit = dict(decoded.sizes)
        explicit.update({int(dim): tuple(given) for dim, given in (sizes or {}).items()})
        cuts = encoding.check_sizes(mesh, shape, decoded.dims, explicit)
        self._fill(mesh.abstract, shape, decoded.dims, cuts, decoded.partial)

    def _fill(self, mesh: Mesh, shape: Any, dims: Any, cuts: Any, partial: Any) -> None:
        self.mesh, self.shape, self.dims, self.partial = mesh, shape, dims, partial
        self.cuts = tuple(
            None if cut is None or cut == _default(length, _sizes(mesh, axes)) else cut
            for cut, length, axes in zip(cuts, shape, dims)
        )
        self._hash = hash((mesh, shape, dims, self.cuts, partial))

    @classmethod
    def make(
        cls,
        mesh: Mesh,
        shape: Iterable[int],
        dims: Iterable[Iterable[int]],
        cuts: Iterable[tuple[int, ...] | None] | None = None,
        partial: Iterable[str | None] | None = None,
    ) -> Layout:
        """A layout from parts that are known to fit (the library's own constructor)."""
        self = object.__new__(cls)
        shape = tuple(shape)
        dims = tuple(map(tuple, dims))
        cuts = (None,) * len(shape) if cuts is None else tuple(cuts)
        partial = (None,) * mesh.ndim if partial is None else tuple(partial)
        self._fill(mesh.abstract, shape, dims, cuts, partial)
        return self

    @classmethod
    def replicated(cls, mesh: Mesh, shape: Iterable[int]) -> Layout:
        """Every position holds all of it."""
        shape = tuple(shape)
        return cls.make(mesh, shape, ((),) * len(shape))

    def replace(self, **parts: Any) -> Layout:
        """This layout with `shape`, `dims`, `cuts` or `partial` exchanged.

        New `shape` or `dims` without `cuts` take default cuts in the dims that changed.
        """
        shape = tuple(parts.get("shape", self.shape))
        dims = tuple(map(tuple, parts.get("dims", self.dims)))
        cuts = parts.get("cuts")
        if cuts is None:
            same = len(shape) == len(self.shape)
            cuts = [
                self.cuts[dim] if same and (length, axes) == (self.shape[dim], self.dims[dim])
                else None
                for dim, (length, axes) in enumerate(zip(shape, dims))
            ]
        return Layout.make(self.mesh, shape, dims, cuts, parts.get("partial", self.partial))

    # What each axis does.

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def on(self, axis: int) -> int | str | None:
        """What mesh axis `axis` does: the tensor dim that it cuts, a partial kind, or None."""
        kind = self.partial[axis]
        if kind is not None:
            return kind
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return dim
        return None

    @property
    def is_replicated(self) -> bool:
        return not any(self.dims) and not self.is_partial

    @property
    def is_partial(self) -> bool:
        return any(kind is not None for kind in self.partial)

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        return tuple(sorted(axis for axes in self.dims for axis in axes))

    # Which box each position holds.

    def num_shards(self, dim: int) -> int:
        return math.prod(_sizes(self.mesh, self.dims[dim]))

    def cuts_of(self, dim: int) -> tuple[int, ...]:
        """All offsets of a dim, `(0, ..., n)`; `(0, n)` when no axis cuts it."""
        explicit = self.cuts[dim]
        if explicit is not None:
            return explicit
        return _default(self.shape[dim], _sizes(self.mesh, self.dims[dim]))

    def sizes_of(self, dim: int) -> tuple[int, ...]:
        """Shard sizes of a dim, in shard order."""
        cuts = self.cuts_of(dim)
        return tuple(stop - start for start, stop in zip(cuts, cuts[1:]))

    def shard_index(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which shard of a dim a mesh coordinate holds: mixed radix over the dim's axes."""
        index = 0
        for axis in self.dims[dim]:
            index = index * self.mesh.axis_sizes[axis] + coordinate[axis]
        return index

    def interval(self, dim: int, index: int) -> tuple[int, int]:
        """(start, stop) of shard `index` of a dim."""
        explicit = self.cuts[dim]
        if explicit is not None:
            return explicit[index], explicit[index + 1]
        return default_interval(self.shape[dim], _sizes(self.mesh, self.dims[dim]), index)

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """The box that a mesh coordinate holds."""
        return tuple(
            self.interval(dim, self.shard_index(dim, coordinate)) if axes else (0, length)
            for dim, (axes, length) in enumerate(zip(self.dims, self.shape))
        )

    def box(self, rank: int) -> Box:
        """The box that device id `rank` holds: ((start, stop), ...) of global indices."""
        position = self.mesh.position_of_rank(rank)
        if position is None:
            raise LayoutError(
                message("Layout.box(rank)", f"rank {rank} is not among the {self.mesh.size()} "
                        f"devices of {self.mesh}", "only a rank of the mesh holds a box", [rank],
                        f"layout.box({self.mesh.rank_at(0)})")
            )
        return self.box_at(self.mesh.coordinate(position))

    def local_shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box_at(coordinate))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what device id `rank` holds."""
        return tuple(stop - start for start, stop in self.box(rank))

    # The other spellings.

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis. Raises PlacementError where there is no such spelling."""
        return encoding.encode_placements(self.mesh, self.dims, self._explicit(), self.partial)

    @property
    def spec(self) -> P:
        """The partition spec; cuts are not part of it."""
        return encoding.encode_spec(self.mesh, self.dims, self.partial)

    def _explicit(self) -> dict[int, tuple[int, ...]]:
        return {dim: self.sizes_of(dim) for dim, cut in enumerate(self.cuts) if cut is not None}

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self._hash == other._hash and (
            (self.shape, self.dims, self.cuts, self.partial, self.mesh)
            == (other.shape, other.dims, other.cuts, other.partial, other.mesh)
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return encoding.text(self.mesh, self.shape, self.dims, self._explicit(), self.partial)

    def __repr__(self) -> str:
        sizes = f", sizes={self._explicit()!r}" if any(self.cuts) else ""
        return f"Layout({self.mesh!r}, {self.shape}, {self.spec!r}{sizes})"


@lru_cache(maxsize=65536)
def _sizes(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(mesh.axis_sizes[axis] for axis in axes)


@lru_cache(maxsize=65536)
def _default(length: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return default_cuts(length, sizes)
