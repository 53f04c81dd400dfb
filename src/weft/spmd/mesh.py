"""torch_xla's Mesh: device ids in a logical shape. It is a weft mesh and can be used as one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weft.comm import get_global_mesh, hybrid_ranks, set_global_mesh, this_world
from weft.core import AxisName, P
from weft.core import Layout as _Layout
from weft.core import Mesh as _Mesh
from weft.core.integers import integers
from weft.core.names import also_called
from weft.errors import MeshError, PlacementError, ShardTypeError
from weft.spmd.sharding import OpSharding

__all__ = [
    "HybridMesh", "Mesh", "as_spec", "get_1d_mesh", "get_global_mesh", "set_global_mesh",
]


class Mesh(_Mesh):
    """Devices in a logical shape, with names for its axes.

    Unlike torch_xla's it need not hold all devices. `shape` is a method here, as in torch_xla.

    Args:
        device_ids: the ranks, in row-major order of the logical shape; an array of any shape.
        mesh_shape: the length of each axis.
        axis_names: a name for each axis; None numbers them.

    Raises:
        MeshError: ids that repeat, or whose number differs from the shape; names that repeat,
            or whose number differs from that of the axes.
    """

    @also_called(mesh_dim_names="axis_names")
    def __init__(
        self,
        device_ids: Iterable[int] | np.ndarray,
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        ids = integers(
            np.asarray(device_ids).reshape(-1).tolist(), "Mesh(device_ids=)", "device ids",
            "range(8)",
        )
        sizes = integers(mesh_shape, "Mesh(mesh_shape=)", "lengths", "(2, 4)")
        if axis_names is not None and len(axis_names) != len(sizes):
            raise MeshError(
                "Mesh(axis_names=)", f"there are {len(axis_names)} names for "
                f"{len(sizes)} axes", "each axis has one name", list(axis_names),
                f"axis_names={tuple('abcdefgh'[: len(sizes)])}")
        named: Any = sizes if axis_names is None else list(zip(axis_names, sizes))
        super().__init__(named, ids)

    @property
    def abstract(self) -> _Mesh:
        return _Mesh(self._axes_value(), self.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        ids = self.device_ids.tolist()
        return _again, (type(self), ids, self.mesh_shape, self.mesh_dim_names, vars(self))

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self.axis_sizes

    @property
    def device_ids(self) -> np.ndarray:
        """The ranks in row-major order."""
        return np.array([self.rank_at(place) for place in range(self.size())])

    def shape(self) -> OrderedDict[AxisName, int]:  # type: ignore[override]
        """Map axis name (or number, if it has none) -> length."""
        return OrderedDict(zip(self.axis_names, self.axis_sizes))

    def get_logical_mesh(self) -> np.ndarray:
        """The ranks in the logical shape."""
        return self.device_ids.reshape(self.axis_sizes)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of the axis with this name; None if there is none.

        Args:
            name: the name of an axis.
        """
        return self.axis_names.index(name) if name in self.axis_names else None

    def get_op_sharding(self, partition_spec: P | Sequence[Any]) -> OpSharding:
        """XLA's op-sharding of a spec with one entry per tensor dim.

        Args:
            partition_spec: see `mark_sharding`.
        """
        spec = as_spec(partition_spec)
        num_dims = len(spec.entries if isinstance(partition_spec, P) else partition_spec)
        whole = (self.size(),) * num_dims  # a length that all axes together divide
        return OpSharding.of(_Layout(self.abstract, whole, spec))


class HybridMesh(Mesh):
    """A mesh whose axes are divided over a slow network first and a fast one within.

    Args:
        ici_mesh_shape: the length of each axis over the fast network, by rising need of bandwidth.
        dcn_mesh_shape: the length of each axis over the slow one, between hosts; None means 1 each.
        axis_names: a name for each axis; None numbers them.
        more: the arguments of `weft.hybrid_mesh` about hosts and the fast network's torus.

    Attributes:
        ici_mesh_shape, dcn_mesh_shape: the lengths over each network (1 for the slow one, if None
            was given).

    Raises:
        MeshError: lengths that do not fit the world, its hosts or the torus.
    """

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        none = (1,) * len(ici_mesh_shape)
        slow = tuple(dcn_mesh_shape) if dcn_mesh_shape else none
        if len(slow) != len(ici_mesh_shape):
            raise MeshError(
                "HybridMesh(dcn_mesh_shape=)", f"it has {len(slow)} lengths, "
                f"ici_mesh_shape {len(ici_mesh_shape)}",
                "each axis has a length on both networks", [slow, tuple(ici_mesh_shape)],
                f"dcn_mesh_shape={none}")
        ranks = hybrid_ranks(ici_mesh_shape, slow, **more)
        sizes = [fast * outer for fast, outer in zip(ici_mesh_shape, slow)]
        super().__init__(ranks, sizes, axis_names)
        self.ici_mesh_shape, self.dcn_mesh_shape = tuple(ici_mesh_shape), slow


def _again(
    kind: type[Mesh], ids: list[int], sizes: tuple[int, ...], names: Any, more: dict[str, Any]
) -> Mesh:
    """The copy of a mesh."""
    made = kind.__new__(kind)
    Mesh.__init__(made, ids, sizes, names)
    vars(made).update(more)
    return made


def as_spec(partition_spec: Any, num_dims: int | None = None) -> P:
    """A spec as torch_xla writes it: names, axis numbers, tuples of them, None."""
    if isinstance(partition_spec, P):
        return partition_spec
    if isinstance(partition_spec, str) or not isinstance(partition_spec, Sequence):
        raise ShardTypeError(
            "partition_spec", f"{partition_spec!r} is a {type(partition_spec).__name__}",
            "a spec has an entry for each dim", [repr(partition_spec)], '("dp", None)')
    if num_dims is not None and len(partition_spec) > num_dims:
        raise PlacementError(
            "partition_spec", f"{partition_spec!r} has {len(partition_spec)} entries, and "
            f"the tensor {num_dims} dims", "a spec has at most an entry for each dim",
            [repr(entry) for entry in partition_spec[num_dims:]],
            repr(tuple(partition_spec[:num_dims])))
    return P(*partition_spec)


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All ranks in a row.

    Args:
        axis_name: the name of its axis; None numbers it.
    """
    size = this_world().size
    return Mesh(range(size), (size,), None if axis_name is None else (axis_name,))
