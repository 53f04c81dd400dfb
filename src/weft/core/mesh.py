"""A mesh: an ordered map from axis name to size, as a plain value.

A mesh has *axes* (a tensor has *dims*). The value needs no process group and may have any
size; `weft.comm` binds it to running ranks. A *position* is an index into the mesh's device
list, row-major over the axes; a *coordinate* is the position written with one digit per axis.
Devices 0, 1, ..., size - 1 in order are stored as None, so a large mesh takes no memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, cast

from weft.core.integers import integers, listed
from weft.core.names import also_called
from weft.errors import MeshError, ShardTypeError

__all__ = ["AxisName", "Mesh", "as_mesh", "row_major"]

AxisName = str | int

_FIX = 'Mesh({"dp": 2, "tp": 4})'
# Names must stay readable in the text of a layout: no spaces, commas, brackets or "@".
_VALID_NAME = re.compile(r"[^\W\d][\w.:/-]*")


class Mesh:
    """Axes with their sizes, and the device ids on them.

    Args:
        axes: map axis name -> size, or (name, size) pairs, or only sizes (the axes are then
            numbered from 0).
        ranks: device ids in row-major order, in any order and any subset of the world; None means
            0, 1, ..., size - 1.

    Raises:
        MeshError: a repeated or malformed name, a size below 1, device ids that are repeated or
            negative, or whose number differs from the size.
        ShardTypeError: sizes or device ids that are not whole numbers.

    >>> mesh = Mesh({"dp": 2, "tp": 4})
    >>> mesh.size(), mesh.size("tp"), mesh.coordinate(6)
    (8, 4, (1, 2))
    >>> mesh["dp"]
    Mesh({'dp': 2}, ranks=(0, 4))
    """

    __slots__ = ("axis_names", "axis_sizes", "axis_strides", "ranks", "_hash", "_positions")

    axis_names: tuple[AxisName, ...]
    axis_sizes: tuple[int, ...]
    axis_strides: tuple[int, ...]
    ranks: tuple[int, ...] | None
    # Device id -> position; None for evenly spaced device ids.
    _positions: range | dict[int, int]

    @also_called(dict.fromkeys(("mesh_shape", "axis_names", "mesh_dim_names", ""), _FIX),
                 device_ids="ranks", devices="ranks")
    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]] | Sequence[int] | int,
        ranks: Iterable[int] | None = None,
        *more: Any,
    ) -> None:
        if more or any(isinstance(rank, str) for rank in listed(ranks) or ()):
            raise _names_apart(axes, ranks, *more)
        names, sizes = _parse_axes(axes)
        self.axis_names, self.axis_sizes = names, sizes
        self.axis_strides = row_major(sizes)
        self.ranks = None if ranks is None else self._check_ranks(ranks)
        self._hash = hash((names, sizes, self.ranks))
        self._positions = _positions(self.ranks, math.prod(sizes))

    def _check_ranks(self, ranks: Iterable[int]) -> tuple[int, ...] | None:
        size = math.prod(self.axis_sizes)
        if isinstance(ranks, range) and ranks == range(size):
            return None
        ids = integers(ranks, "Mesh(ranks=)", "device ids", f"ranks=range({size})")
        different = len(set(ids))
        wrong = [f"{rank} {count} times" for rank, count in Counter(ids).items() if count > 1]
        wrong += [f"{rank} is negative" for rank in ids if rank < 0]
        if wrong or len(ids) != size:
            raise MeshError(
                "Mesh(ranks=)", f"{len(ids)} device ids, {different} of them different, "
                f"for a mesh of {size}",
                "a mesh holds each device once, has as many as the product of its axes, "
                "and ids are at least 0", wrong or [f"{len(ids)} ids"],
                f"Mesh({self._axes_repr()}, ranks=range({size}))")
        return None if ids == tuple(range(size)) else ids

    @property
    def abstract(self) -> Mesh:
        """The plain value, which layouts hold. A bound mesh returns the value it was bound from."""
        return self

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axis_sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """As DeviceMesh: the axis sizes."""
        return self.axis_sizes

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """As DeviceMesh: the axis names, or None when the axes are numbered."""
        if self.axis_names == tuple(range(self.ndim)):
            return None
        return tuple(str(name) for name in self.axis_names)

    def size(self, mesh_dim: AxisName | None = None) -> int:
        """The number of devices, or of those along one axis.

        Args:
            mesh_dim: an axis, by name or number; None counts all devices.

        Raises:
            MeshError: no such axis.
        """
        if mesh_dim is None:
            return math.prod(self.axis_sizes)
        return self.axis_sizes[self.axis(mesh_dim)]

    def axis(self, name: AxisName, call: str = "Mesh") -> int:
        """The number of the axis called `name` (negative numbers count from the end)."""
        return self.axes((name,), call)[0]

    def axes(self, names: Iterable[AxisName], call: str = "Mesh") -> tuple[int, ...]:
        """The numbers of several axes.

        Raises:
            MeshError: names of no axis; lists all of them.
        """
        names = tuple(names)
        found = tuple(map(self._find, names))
        unknown = [repr(name) for name, axis in zip(names, found, strict=True) if axis is None]
        if unknown:
            count = f"{len(unknown)} of {len(names)} names fit none of the {self.ndim} axes"
            facts = f"{unknown[0]} is no axis" if len(names) == 1 else count
            raise MeshError(
                call, f"{facts} of {self}",
                "an axis is named as the mesh names it, or by its number", unknown,
                f"one of {', '.join(map(repr, self.axis_names))}{self._how_to_name()}")
        return found  # type: ignore[return-value]  # no None is left

    def _how_to_name(self) -> str:
        """How an error explains axes that have numbers in place of names."""
        if any(isinstance(name, str) for name in self.axis_names):
            return ""
        named = dict(zip(("dp", "tp", "pp", "cp"), self.axis_sizes))
        return f"; or a mesh whose axes have names: {named}"

    def _find(self, name: AxisName) -> int | None:
        if isinstance(name, str):
            return self.axis_names.index(name) if name in self.axis_names else None
        whole = isinstance(name, int) and not isinstance(name, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        return name % self.ndim if whole and -self.ndim <= name < self.ndim else None

    def coordinate(self, position: int) -> tuple[int, ...]:
        """The coordinate of a position: one digit per axis, major to minor.

        Args:
            position: an index into the mesh's device list.
        """
        return tuple(
            position // stride % size for stride, size in zip(self.axis_strides, self.axis_sizes)
        )

    def along(self, axes: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, ...]]:
        """The coordinates that differ from one only in some axes, itself included.

        Args:
            axes: numbers of axes; the first of them is the major one.
            coordinate: one digit per axis.
        """
        out = [tuple(coordinate)]
        for axis in axes:
            out = [
                (*place[:axis], digit, *place[axis + 1 :])
                for place in out for digit in range(self.axis_sizes[axis])
            ]
        return out

    def place_along(self, axes: Iterable[int], coordinate: Sequence[int]) -> int:
        """The place of a coordinate among those that differ only in some axes, the first of which
        is the major one."""
        place = 0
        for axis in axes:
            place = place * self.axis_sizes[axis] + coordinate[axis]
        return place

    def position(self, coordinate: Sequence[int]) -> int:
        """The position of a coordinate."""
        return sum(digit * stride for digit, stride in zip(coordinate, self.axis_strides))

    def position_of_rank(self, rank: int) -> int | None:
        """The position of device id `rank` in the device list; None if it is not in the mesh."""
        positions = self._positions
        if isinstance(positions, range):
            return positions.index(rank) if rank in positions else None
        return positions.get(rank)

    def coordinate_of_rank(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of device id `rank`; None if it is not in the mesh."""
        position = self.position_of_rank(rank)
        return None if position is None else self.coordinate(position)

    @property
    def rank_range(self) -> range | None:
        """The device ids in order, if they are evenly spaced and ascending."""
        return self._positions if isinstance(self._positions, range) else None

    @property
    def rank_span(self) -> tuple[int, int]:
        """The lowest device id, and one more than the highest."""
        ids = self._positions
        return (ids[0], ids[-1] + 1) if isinstance(ids, range) else (min(ids), max(ids) + 1)

    def rank_at(self, position: int) -> int:
        """The device id at a position."""
        return position if self.ranks is None else self.ranks[position]

    def submesh(self, names: Iterable[AxisName], at: Sequence[int] | None = None) -> Mesh:
        """The mesh of some axes, in the given order, through one coordinate of this mesh.

        Args:
            names: the axes to keep.
            at: a coordinate of this mesh (default: that of the first device). Its digits on the
                omitted axes select the devices.

        Raises:
            MeshError: an unknown or repeated axis.
        """
        names = tuple(names)
        axes = self.axes(names, f"{self}[...]")
        repeated = [
            repr(self.axis_names[axis]) for axis, count in Counter(axes).items() if count > 1
        ]
        if repeated:
            raise MeshError(
                f"{self}[...]", f"{len(names)} names for {len(set(axes))} axes",
                "a slice names each axis once", repeated,
                f"mesh[{', '.join(repr(self.axis_names[a]) for a in dict.fromkeys(axes))}]")
        sizes = tuple(self.axis_sizes[axis] for axis in axes)
        strides = tuple(self.axis_strides[axis] for axis in axes)
        kept = set(axes)
        first = 0 if at is None else self.position(
            [0 if axis in kept else digit for axis, digit in enumerate(at)]
        )
        all_names = self.mesh_dim_names
        named = sizes if all_names is None else {all_names[axis]: self.axis_sizes[axis]
                                                 for axis in axes}
        if self.ranks is None and first == 0 and strides == row_major(sizes):
            return Mesh(named)
        digits = [range(0, size * stride, stride) for size, stride in zip(sizes, strides)]
        return Mesh(
            named, ranks=[self.rank_at(first + sum(offsets)) for offsets in product(*digits)]
        )

    def __getitem__(self, names: AxisName | tuple[AxisName, ...]) -> Mesh:
        """`mesh["tp"]`, `mesh["dp", "tp"]`: those axes, through the mesh's first device."""
        return self.submesh(names if isinstance(names, tuple) else (names,))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.axis_names, self.axis_sizes, self.ranks) == (
            other.axis_names, other.axis_sizes, other.ranks,
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The stored hash is valid only in this process (text hashes are salted): not pickled.
        return Mesh, (self._axes_value(), self.ranks)

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes))
        return f"Mesh({axes})"

    def __repr__(self) -> str:
        ranks = "" if self.ranks is None else f", ranks={self.ranks}"
        return f"Mesh({self._axes_repr()}{ranks})"

    def _axes_value(self) -> dict[str, int] | tuple[int, ...]:
        names = self.mesh_dim_names
        return self.axis_sizes if names is None else dict(zip(names, self.axis_sizes))

    def _axes_repr(self) -> str:
        return repr(self._axes_value())


def as_mesh(value: Any, call: str = "mesh") -> Mesh:
    """A mesh, from one of weft's or torch's own DeviceMesh, recognized by its type and fields; else
    ShardTypeError."""
    if isinstance(value, Mesh):
        return value
    kind = cast(type[object], type(value))
    if kind.__name__ == "DeviceMesh" and kind.__module__.startswith("torch."):
        sizes = tuple(value.shape)
        axes = zip(value.mesh_dim_names, sizes) if value.mesh_dim_names else sizes
        return Mesh(axes, ranks=value.mesh.flatten().tolist())
    raise ShardTypeError(
        call, f"{value!r}, of type {kind.__name__}, is no mesh",
        "a mesh is a weft.Mesh or a torch DeviceMesh", [repr(value)], _FIX)


def _parse_axes(axes: Any) -> tuple[tuple[AxisName, ...], tuple[int, ...]]:
    call = "Mesh(axes)"
    pairs: list[Any] | None = None
    if isinstance(axes, Mapping):
        pairs = list(cast(Mapping[Any, Any], axes).items())
    elif isinstance(axes, int):
        pairs = [axes]
    elif isinstance(axes, Iterable) and not isinstance(axes, str):
        pairs = list(cast(Iterable[Any], axes))
    if pairs is None or not any(isinstance(pair, (tuple, list)) for pair in pairs):
        sizes = integers(axes if pairs is None else pairs, call, "axis sizes", _FIX)
        names: tuple[AxisName, ...] = tuple(range(len(sizes)))
    else:
        malformed = [repr(pair) for pair in pairs if len(listed(pair) or ()) != 2]
        if malformed:
            raise ShardTypeError(
                call, f"{len(malformed)} of {len(pairs)} axes are no (name, size) pair",
                "axes are all named or all numbered", malformed, _FIX)
        names = tuple(name for name, _ in pairs)
        sizes = integers([size for _, size in pairs], call, "axis sizes", _FIX)
        _check_names(names)
    small = [f"{name}={size}" for name, size in zip(names, sizes) if size < 1]
    if small:
        raise MeshError(
            call, f"{len(small)} of {len(sizes)} axes have a size below 1",
            "every mesh axis has at least one device", small, 'Mesh({"dp": 1})')
    return names, sizes


def _names_apart(axes: Any, *given: Any) -> ShardTypeError:
    """For names beside sizes, or beside an array of devices, where JAX and torch_xla have them."""
    names = [name for name in listed(given[-1]) or () if isinstance(name, str)]
    sizes = _lengths(given[0] if len(given) > 1 else axes)
    if len(names) == 1 < len(sizes):  # a list of devices
        sizes = [len(sizes)]
    fits = len(sizes) == len(names) > 0
    meant = dict(zip(names, sizes)) if fits else {"dp": 2, "tp": 4}
    return ShardTypeError(
        "Mesh(axes)", f"{len(names)} names of axes stand apart from their sizes",
        "a mesh is a map axis name -> size; device ids in row-major order are ranks=",
        list(map(repr, names)), f"Mesh({meant}), or Mesh({meant}, ranks=...)")


def _lengths(array: Any) -> list[int]:
    """The sizes that are given, or the shape of an array of devices."""
    if hasattr(array, "shape"):
        return list(array.shape)
    rows = listed(array) or ()
    row = listed(rows[0]) if rows else None
    return list(rows) if row is None else [len(rows), len(row)]


def _check_names(names: tuple[Any, ...]) -> None:
    wrong = [repr(name) for name in names
             if not isinstance(name, str) or not _VALID_NAME.fullmatch(name)]
    wrong += [f"{name!r} {count} times" for name, count in Counter(names).items() if count > 1]
    if wrong:
        raise MeshError(
            "Mesh(axes)", f"{len(wrong)} of {len(names)} axis names will not do",
            "axis names are different, start with a letter, and go on with letters, "
            "digits and _ . : / -", wrong, f"{_FIX}; sizes alone number the axes")


def _positions(ranks: tuple[int, ...] | None, size: int) -> range | dict[int, int]:
    if ranks is None:
        return range(size)
    step = ranks[1] - ranks[0] if size > 1 else 1
    even = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    if len(even) == size and ranks == tuple(even):
        return even
    return {device: place for place, device in enumerate(ranks)}


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of axes of these sizes, the last of them the fastest."""
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
