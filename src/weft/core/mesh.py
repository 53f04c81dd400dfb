"""A mesh: an ordered map from axis name to size, as a plain value.

A mesh has *axes* (a tensor has *dims*). The value needs no process group and may have any
size; `weft.comm` binds it to ranks that run. A *position* is an index into the mesh's device
list, row-major over the axes; a *coordinate* is the position written with one digit an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.errors import MeshError, message

__all__ = ["AxisName", "Mesh"]

AxisName = str | int


class Mesh:
    """Axes with their sizes, and the device ids that lie on them.

    Args:
        axes: map axis name -> size, or sizes alone (the axes are then numbered from 0).
        ranks: device ids in row-major order; None means 0, 1, ..., size - 1.

    Raises:
        MeshError: a size below 1, or device ids that are repeated or of another number.
    """

    __slots__ = ("axis_names", "axis_sizes", "ranks", "_hash", "_strides", "_positions")

    axis_names: tuple[AxisName, ...]
    axis_sizes: tuple[int, ...]
    ranks: tuple[int, ...] | None

    def __init__(
        self,
        axes: Mapping[str, int] | Sequence[int] | int,
        ranks: Iterable[int] | None = None,
    ) -> None:
        if isinstance(axes, int):
            axes = (axes,)
        if isinstance(axes, Mapping):
            names: tuple[AxisName, ...] = tuple(axes)
            sizes = tuple(int(size) for size in axes.values())
        else:
            sizes = tuple(int(size) for size in axes)
            names = tuple(range(len(sizes)))
        bad = [f"{name}={size}" for name, size in zip(names, sizes) if size < 1]
        if bad:
            raise MeshError(
                message(
                    "Mesh(axes)", f"{len(bad)} of {len(sizes)} axes have a size below 1",
                    "every mesh axis has at least one device", bad, 'Mesh({"dp": 1})',
                )
            )
        self.axis_names, self.axis_sizes = names, sizes
        self.ranks = self._check_ranks(ranks)
        self._hash = hash((names, sizes, self.ranks))
        self._strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        self._positions: dict[int, int] | None = None

    def _check_ranks(self, ranks: Iterable[int] | None) -> tuple[int, ...] | None:
        if ranks is None:
            return None
        ranks = tuple(int(rank) for rank in ranks)
        size = math.prod(self.axis_sizes)
        repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(
            set(ranks)
        ) < len(ranks) else []
        if len(ranks) != size or repeated:
            raise MeshError(
                message(
                    "Mesh(ranks=)",
                    f"{len(ranks)} device ids, {len(set(ranks))} of them different, for a mesh "
                    f"of {size}",
                    "a mesh holds each device once and has as many as the product of its axes",
                    repeated or [len(ranks)],
                    f"Mesh({dict(zip(self.axis_names, self.axis_sizes))!r}, ranks=range({size}))",
                )
            )
        return None if ranks == tuple(range(size)) else ranks

    @property
    def abstract(self) -> Mesh:
        """The plain value: what layouts hold. A bound mesh returns the value it was bound from."""
        return self

    @property
    def ndim(self) -> int:
        return len(self.axis_sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.axis_sizes

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """As DeviceMesh: the axis names, or None when the axes are numbered."""
        return None if self.axis_names == tuple(range(self.ndim)) else self.axis_names  # type: ignore

    def size(self, mesh_dim: AxisName | None = None) -> int:
        """Number of devices, or of those along one axis."""
        if mesh_dim is None:
            return math.prod(self.axis_sizes)
        return self.axis_sizes[self.axis(mesh_dim)]

    def axis(self, name: AxisName, call: str = "Mesh") -> int:
        """The number of the axis called `name` (a number counts from the end when negative)."""
        if name in self.axis_names and isinstance(name, str):
            return self.axis_names.index(name)
        if isinstance(name, int) and -self.ndim <= name < self.ndim:
            return name % self.ndim
        raise MeshError(
            message(
                call, f"{name!r} is no axis of {self}",
                "an axis is named as the mesh names it, or by its number",
                [repr(name)], f"one of {', '.join(map(repr, self.axis_names))}",
            )
        )

    def coordinate(self, position: int) -> tuple[int, ...]:
        """The coordinate of a position: one digit an axis, major to minor."""
        return tuple(
            position // stride % size for stride, size in zip(self._strides, self.axis_sizes)
        )

    def position(self, coordinate: Sequence[int]) -> int:
        """The position of a coordinate."""
        return sum(digit * stride for digit, stride in zip(coordinate, self._strides))

    def position_of_rank(self, rank: int) -> int | None:
        """Where device id `rank` stands in the device list; None when it is not in the mesh."""
        if self.ranks is None:
            return rank if 0 <= rank < self.size() else None
        if self._positions is None:
            self._positions = {device: place for place, device in enumerate(self.ranks)}
        return self._positions.get(rank)

    def rank_at(self, position: int) -> int:
        """The device id at a position."""
        return position if self.ranks is None else self.ranks[position]

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.axis_names, self.axis_sizes, self.ranks) == (
            other.axis_names, other.axis_sizes, other.ranks,
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes))
        return f"Mesh({axes})"

    def __repr__(self) -> str:
        axes = (
            repr(dict(zip(self.axis_names, self.axis_sizes)))
            if self.mesh_dim_names
            else repr(self.axis_sizes)
        )
        return f"Mesh({axes})" if self.ranks is None else f"Mesh({axes}, ranks={self.ranks})"
