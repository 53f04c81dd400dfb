"""A layout: mesh + global shape + how every dim is sharded + which axes are partial.

Internally axes are numbers (positions in the mesh's order of axes) and the form is canonical:
explicit cuts that equal the default are stored as None, so equality and hash are those of what the
layout denotes. The index box of a rank is computed here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from weft.core import encoding, hlo
from weft.core.cuts import (
    default_interval,
    default_is_flat,
    finer_cuts,
    flat_cuts,
    known_default_cuts,
)
from weft.core.display import AsPicture
from weft.core.dtypes import check_carries
from weft.core.encoding import Cuts
from weft.core.integers import lengths_of
from weft.core.mesh import Mesh, as_mesh
from weft.core.names import PLACEMENTS, also_called
from weft.core.partition_spec import P
from weft.core.placement import Placement
from weft.core.torch_strided import check_torch_strided
from weft.errors import LayoutError

__all__ = ["Box", "Dims", "Layout"]

Dims = tuple[tuple[int, ...], ...]
"""Per tensor dim, the mesh axes (numbers) that shard it, major to minor."""

Box = tuple[tuple[int, int], ...]
"""Per tensor dim, (start, stop) of global indices."""


class Layout(AsPicture):
    """Which part of a global tensor each position of a mesh holds.

    Args:
        mesh: the mesh, abstract or bound, or a torch DeviceMesh.
        shape: the global shape, in elements.
        placements: a partition spec, or one placement per mesh axis (weft's or torch's); None
            replicates.
        sizes: map tensor dim -> its shard sizes in elements, in shard order, or the name of a way
            to cut it: "flat" (one ceiling over all axes, as in XLA), "balanced" (sizes differ by at
            most one), "default".

    Raises:
        MeshError: an unknown axis.
        PlacementError: a repeated axis, a dim out of range, a number of placements different from
            that of axes, kinds that do not mix, a torch `_StridedShard` that is no order of axes.
        LayoutError: sizes that do not fit the shape, a negative length.
        ShardTypeError: an argument of the wrong type.

    What reads a layout is for everybody: `placements`, `spec`, `box`, `local_shape`, `sizes_of`,
    `hlo_sharding` and others. What makes a layout of parts, or of another one, is for code that
    extends weft: `make`, `replace`, `resized`, `recut`, `gathered`, `take`, `insert` and others
    take axes by number and check nothing.

    >>> layout = Layout(Mesh({"dp": 2, "tp": 2}), (5, 6), P(("dp", "tp")))
    >>> layout.sizes_of(0), layout.box(3)
    ((2, 1, 1, 1), ((4, 5), (0, 6)))
    >>> print(layout.text("float32"))
    f32[5@(dp,tp), 6]
    """

    __slots__ = ("mesh", "shape", "dims", "cuts", "partial", "_hash")

    mesh: Mesh
    shape: tuple[int, ...]
    dims: Dims
    cuts: Cuts
    partial: tuple[str | None, ...]
    is_stretched = False
    """Whether ranks hold no boxes: see `stretched`."""

    @also_called(device_mesh="mesh", global_shape="shape", **PLACEMENTS)
    def __init__(
        self,
        mesh: Mesh,
        shape: Iterable[int],
        placements: P | Sequence[Placement] | None = None,
        sizes: encoding.Sizes | None = None,
    ) -> None:
        self._place(as_mesh(mesh, "Layout(mesh)").abstract, lengths_of(shape), placements, sizes,
                    "Layout(placements)")

    @classmethod
    def placed(
        cls, mesh: Mesh, shape: Iterable[int], placements: Any, call: str, sizes: Any = None
    ) -> Layout:
        """The same for the placements that another public call was given, which errors name."""
        self = object.__new__(cls)
        self._place(mesh.abstract, tuple(shape), placements, sizes, call)
        return self

    def _place(
        self, mesh: Mesh, shape: tuple[int, ...], placements: Any, sizes: Any, call: str
    ) -> None:
        decoded = encoding.decode(mesh, len(shape), placements, call)
        if sizes or decoded.sizes:
            cuts = encoding.check_sizes(
                mesh, shape, decoded.dims, sizes or {}, decoded.sizes,
                "Layout(sizes=)" if sizes else call)
        else:
            cuts = (None,) * len(shape)
        self._fill(mesh, shape, decoded.dims, cuts, decoded.partial)
        if decoded.torch_strided:
            check_torch_strided(mesh, shape, decoded.dims, decoded.torch_strided)

    def _fill(self, mesh: Mesh, shape: Any, dims: Any, cuts: Any, partial: Any) -> None:
        self.mesh, self.shape, self.dims, self.partial = mesh, shape, dims, partial
        if any(cuts):
            cuts = tuple(
                cut and (None if cut == known_default_cuts(length, _sizes(mesh, axes)) else cut)
                for cut, length, axes in zip(cuts, shape, dims)
            )
        self.cuts = cuts
        self._hash = hash((mesh, shape, dims, cuts, partial))

    @classmethod
    def make(
        cls,
        mesh: Mesh,
        shape: Iterable[int],
        dims: Iterable[Iterable[int]],
        cuts: Iterable[tuple[int, ...] | None] | None = None,
        partial: Iterable[str | None] | None = None,
    ) -> Layout:
        """A layout from parts that are known to fit (the library's own constructor).

        The parts are those of the attributes of the same names; nothing is checked.
        """
        self = object.__new__(cls)
        shape = tuple(shape)
        dims = tuple(map(tuple, dims))
        cuts = (None,) * len(shape) if cuts is None else tuple(cuts)
        partial = (None,) * mesh.ndim if partial is None else tuple(partial)
        self._fill(mesh.abstract, shape, dims, cuts, partial)
        return self

    @classmethod
    def replicated(cls, mesh: Mesh, shape: Iterable[int]) -> Layout:
        """Every position holds the whole tensor."""
        shape = tuple(shape)
        return cls.make(mesh, shape, ((),) * len(shape))

    def replace(self, **parts: Any) -> Layout:
        """This layout with `shape`, `dims`, `cuts` or `partial` replaced.

        New `shape` or `dims` without `cuts` take default cuts in the dims that changed.
        """
        shape: tuple[int, ...] = tuple(parts.get("shape", self.shape))
        dims: tuple[tuple[int, ...], ...] = tuple(map(tuple, parts.get("dims", self.dims)))
        cuts = parts.get("cuts")
        if cuts is None:
            same = len(shape) == len(self.shape)
            cuts = [
                self.cuts[dim] if same and (length, axes) == (self.shape[dim], self.dims[dim])
                else None
                for dim, (length, axes) in enumerate(zip(shape, dims))
            ]
        return Layout.make(self.mesh, shape, dims, cuts, parts.get("partial", self.partial))

    def resized(self, shape: tuple[int, ...], cuts: Cuts) -> Layout:
        """The same sharded dims and partial axes with other lengths; `cuts` are taken as by `make`.
        """
        new = object.__new__(Layout)
        new.mesh, new.shape, new.dims, new.partial = self.mesh, shape, self.dims, self.partial
        new.cuts = cuts
        new._hash = hash((self.mesh, shape, self.dims, cuts, self.partial))
        return new

    # Layouts derived from this one. Axes of a dim that is dropped, or becomes whole, replicate.

    def without_partial(self, axes: Iterable[int] | None = None) -> Layout:
        """The same layout with partial axes reduced: all of them, or those given."""
        if not self.is_partial:
            return self
        return self.with_partial(range(self.mesh.ndim) if axes is None else axes, None)

    def with_partial(self, axes: Iterable[int], kind: str | None = "sum") -> Layout:
        """The same layout, partial over these axes, all with one kind."""
        partial = list(self.partial)
        for axis in axes:
            partial[axis] = kind
        return self.replace(partial=partial)

    def gathered(self, dims: Iterable[int]) -> Layout:
        """The same layout with these dims whole."""
        whole = set(dims)
        return self.replace(
            dims=[() if dim in whole else axes for dim, axes in enumerate(self.dims)]
        )

    def divided(self, dim: int, axes: Iterable[int]) -> Layout:
        """The same layout with `dim` sharded by these axes as well, each shard by default cuts."""
        axes, dims, cuts = tuple(axes), list(self.dims), list(self.cuts)
        dims[dim] = (*dims[dim], *axes)
        own = cuts[dim]
        cuts[dim] = None if own is None else finer_cuts(own, _sizes(self.mesh, axes))
        return self.replace(dims=dims, cuts=cuts)

    def recut(self, dim: int, length: int, cuts: tuple[int, ...] | None = None) -> Layout:
        """The same layout with another length of one dim, over the same axes with these cuts."""
        shape, new = list(self.shape), list(self.cuts)
        shape[dim], new[dim] = length, cuts
        return self.replace(shape=shape, cuts=new)

    def take(self, dims: Iterable[int]) -> Layout:
        """The layout of these dims, in this order; other dims are dropped."""
        dims = tuple(dims)
        return Layout.make(
            self.mesh, [self.shape[dim] for dim in dims], [self.dims[dim] for dim in dims],
            [self.cuts[dim] for dim in dims], self.partial,
        )

    def insert(self, at: int, other: Layout) -> Layout:
        """This layout with all dims of another one inserted before dim `at` (or at the end).

        The other layout's axes must be free here. Partial axes are those of this layout.
        """
        return Layout.make(
            self.mesh, self.shape[:at] + other.shape + self.shape[at:],
            self.dims[:at] + other.dims + self.dims[at:],
            self.cuts[:at] + other.cuts + self.cuts[at:], self.partial,
        )

    def fitted(self, shape: Sequence[int]) -> Layout:
        """The layout of an operand of this shape, which broadcasts to this layout: sharded alike.

        It is not partial. Dims of another length are whole.
        """
        skip = self.ndim - len(shape)
        other = [dim for dim, length in enumerate(shape) if length != self.shape[skip + dim]]
        tail = self.take(range(skip, self.ndim)).without_partial()
        return tail.gathered(other).replace(shape=shape)

    # What each axis does.

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def on(self, axis: int) -> int | str | None:
        """What mesh axis `axis` does: the tensor dim that it shards, a partial kind, or None."""
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

    @property
    def free_axes(self) -> tuple[int, ...]:
        """The axes over which the tensor is replicated."""
        return tuple(axis for axis in range(self.mesh.ndim) if self.on(axis) is None)

    @property
    def plain(self) -> Layout:
        """The layout itself, where ranks hold boxes."""
        return self

    @property
    def apart(self) -> Layout:
        """The same memory as boxes: the layout itself, where ranks hold such."""
        return self

    # The box that each position holds.

    def num_shards(self, dim: int) -> int:
        """The number of shards of a dim; 1 if no axis shards it."""
        return math.prod(_sizes(self.mesh, self.dims[dim]))

    def cuts_of(self, dim: int) -> tuple[int, ...]:
        """All offsets of a dim, `(0, ..., n)`; `(0, n)` if no axis shards it."""
        explicit = self.cuts[dim]
        if explicit is not None:
            return explicit
        return known_default_cuts(self.shape[dim], _sizes(self.mesh, self.dims[dim]))

    def sizes_of(self, dim: int) -> tuple[int, ...]:
        """Shard sizes of a dim in elements, in shard order.

        Args:
            dim: the tensor dim.
        """
        cuts = self.cuts_of(dim)
        return tuple(stop - start for start, stop in pairwise(cuts))

    @property
    def has_empty_shards(self) -> bool:
        """Whether some rank of the mesh holds no element."""
        return any(0 in self.sizes_of(dim) for dim, axes in enumerate(self.dims) if axes)

    def shard_index(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which shard of a dim a mesh coordinate holds."""
        return self.mesh.place_along(self.dims[dim], coordinate)

    def interval(self, dim: int, index: int) -> tuple[int, int]:
        """(start, stop) of shard `index` of a dim."""
        explicit = self.cuts[dim]
        if explicit is not None:
            return explicit[index], explicit[index + 1]
        digits: list[tuple[int, int]] = []
        for size in reversed(_sizes(self.mesh, self.dims[dim])):
            index, digit = divmod(index, size)
            digits.append((size, digit))
        return default_interval(self.shape[dim], reversed(digits))

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """The box that a mesh coordinate holds."""
        sizes = self.mesh.axis_sizes
        box: list[tuple[int, int]] = []
        for dim, axes in enumerate(self.dims):
            if not axes:
                box.append((0, self.shape[dim]))
            elif self.cuts[dim] is None:
                digits = [(sizes[axis], coordinate[axis]) for axis in axes]
                box.append(default_interval(self.shape[dim], digits))
            else:
                box.append(self.interval(dim, self.shard_index(dim, coordinate)))
        return tuple(box)

    def box(self, rank: int) -> Box:
        """The box that a rank holds: ((start, stop), ...) of global indices per dim.

        Args:
            rank: a device id of the mesh.

        Raises:
            LayoutError: the device id is not in the mesh.
        """
        return self.box_at(self._coordinate(rank, "box"))

    def _coordinate(self, rank: int, call: str) -> tuple[int, ...]:
        at = self.mesh.coordinate_of_rank(rank)
        if at is None:
            raise LayoutError(
                f"Layout.{call}(rank)", f"rank {rank} is not among the {self.mesh.size()} "
                f"devices of {self.mesh}", "only a rank of the mesh holds a box", [rank],
                f"layout.{call}({self.mesh.rank_at(0)})")
        return at

    def local_shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a mesh coordinate holds, in elements."""
        return tuple(stop - start for start, stop in self.box_at(coordinate))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds, in elements.

        Args:
            rank: a device id of the mesh.

        Raises:
            LayoutError: the device id is not in the mesh.
        """
        return self.local_shape_at(self._coordinate(rank, "local_shape"))

    # The other spellings.

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis; every layout has exactly one such spelling."""
        return encoding.encode_placements(self)

    @property
    def spec(self) -> P:
        """The partition spec; it does not include cuts."""
        return encoding.encode_spec(self)

    @property
    def tile_assignment(self) -> hlo.TileAssignment:
        """XLA's view: tiles, their devices, and the replicas of each.

        Raises:
            PlacementError: partial axes, or cuts that are not flat.
        """
        return hlo.tile_assignment(self)

    def hlo_sharding(self, version: int = 2) -> str:
        """XLA's op-sharding string: version 1 lists the devices, version 2 is the iota form.

        The run time of version 2 does not grow with the number of devices. Axes of size 1 do not
        appear.

        Args:
            version: 1 or 2.

        Raises:
            PlacementError: partial axes; cuts that are not flat; version 2 for device ids that
                are not a transposed iota.

        >>> Layout(Mesh((2, 4)), (8, 8), P(1)).hlo_sharding()
        '{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}'
        """
        return self.tile_assignment.text(version)

    @classmethod
    def from_hlo(cls, text: str, mesh: Mesh, shape: Iterable[int]) -> Layout:
        """The layout that an op-sharding string (version 1 or 2) denotes over named axes.

        Args:
            text: the string.
            mesh: the mesh whose axes shard the tensor.
            shape: the global shape, in elements.

        Raises:
            PlacementError: a sharding that is not a layout (maximal, manual, tuples), or tiles that
                do not consist of whole axes of `mesh`.
        """
        mesh = as_mesh(mesh, "Layout.from_hlo(mesh)").abstract
        shape = lengths_of(shape)
        dims = hlo.read(text, mesh, len(shape))
        cuts = [
            None if default_is_flat(length, _sizes(mesh, axes))
            else flat_cuts(length, _sizes(mesh, axes))
            for length, axes in zip(shape, dims)
        ]
        return cls.make(mesh, shape, dims, cuts)

    def text(self, dtype: str | None = None) -> str:
        """The canonical text, `f32[8@dp, 16@(tp,sp)] partial(sum@cp)`, with sizes in braces."""
        return encoding.text(self, dtype, self.explicit_sizes)

    # What a layout requires of dtypes and shapes.

    def check_dtype(self, dtype: str) -> None:
        """Refuse a dtype that a partial kind of this layout cannot carry exactly.

        Raises:
            LayoutError: avg of integers or bools, max or min of complex numbers, bitwise kinds
                of floats, logical kinds of anything but bools, sums of dtypes without a zero.
        """
        check_carries(str(self), self.kinds, dtype)

    @property
    def kinds(self) -> dict[str, str]:
        """The partial axes: "sum@tp" -> "sum"."""
        return {
            f"{kind}@{name}": kind for kind, name in zip(self.partial, self.mesh.axis_names) if kind
        }

    @property
    def explicit_sizes(self) -> dict[int, tuple[int, ...]]:
        """Map tensor dim -> its shard sizes, where its cuts are not the default."""
        return {dim: self.sizes_of(dim) for dim, cut in enumerate(self.cuts) if cut is not None}

    def __eq__(self, other: object) -> bool:
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

    def __reduce__(self) -> tuple[Any, ...]:
        # The stored hash is valid only in this process (text hashes are salted): not pickled.
        return Layout, (self.mesh, self.shape, self.spec, self.explicit_sizes)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        sizes = f", sizes={self.explicit_sizes!r}" if any(self.cuts) else ""
        return f"Layout({self.mesh!r}, {self.shape}, {self.spec!r}{sizes})"


@lru_cache(maxsize=65536)
def _sizes(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(mesh.axis_sizes[axis] for axis in axes)
