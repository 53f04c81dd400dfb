"""A mesh bound to running ranks: the value, this rank's place in it, and its communicators.

One `BoundMesh` object represents a mesh on one rank; it equals its value and hashes like it. The
`World` that it was bound in (process groups, simulated, recording, a single rank) makes the
communicators. A rank outside the mesh has one too, with `here` None: it runs the same program
and takes part in no collective of that mesh.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.distributed import device_mesh

from weft.comm.collective_call import PROCESS, CollectiveCall, Switch
from weft.comm.communicator import Communicator
from weft.core import AxisName, Mesh
from weft.core.counterparts import attribute_elsewhere
from weft.errors import CommunicationError, MeshError, ShardTypeError

__all__ = ["BoundMesh", "Rows", "World", "innermost_mesh", "live_meshes"]

Rows = Callable[[], Sequence[tuple[int, ...]]]


_live: weakref.WeakValueDictionary[int, BoundMesh] = weakref.WeakValueDictionary()


def live_meshes() -> list[BoundMesh]:
    """The bound meshes in use in this process, including those of all simulated ranks."""
    return list(_live.values())


class World:
    """All the ranks that can meet, seen from one of them; by itself, a single rank.

    `debug` switches their debug mode; `communicates` is how several ranks do.
    """

    rank: int
    size: int
    debug: Switch = PROCESS
    communicates: type[Communicator] = Communicator
    global_mesh: Any = None
    """That of calls without one: of a simulated rank, or of all that are processes (`init`)."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._bound: dict[tuple[Mesh, str], BoundMesh] = {}
        self._across: dict[tuple[torch.device, tuple[int, ...]], Communicator] = {}

    def bind(
        self, mesh: Mesh, device_type: str, origin: tuple[Mesh, tuple[AxisName, ...]] | None = None
    ) -> BoundMesh:
        """The one bound mesh of this value and device type on this rank; `origin` as in
        `BoundMesh`."""
        key = (mesh.abstract, device_type)
        bound = self._bound.get(key)
        if bound is None:  # if two threads make one, both get the first
            made = BoundMesh(self, mesh.abstract, device_type)
            made.origin = origin
            bound = self._bound.setdefault(key, made)
            _live[id(bound)] = bound
        return bound

    def meant(self, mesh: Mesh, device_type: str) -> tuple[Mesh, str]:
        """The mesh and the device type that replace those that a program asks for."""
        return mesh, device_type

    def bound(self, mesh: Mesh) -> BoundMesh | None:
        """The first bound mesh of this value, of any device type; None if there is none."""
        return next((have for (value, _), have in self._bound.items() if value == mesh), None)

    def stopped(self, why: str) -> None:
        """Tell ranks that will wait for this one why it does not come."""

    def call_roll(self, ask: CollectiveCall) -> str:
        """Compare the requests of `ask.ranks` in debug mode; the error to raise on all, or ""."""
        return ""

    def agree(self, ask: CollectiveCall) -> None:
        """The same for what this rank requests now; all raise CommunicationError if they differ."""
        said = self.call_roll(ask.by_now())
        if said:
            raise CommunicationError(said)

    def connect(
        self, ranks: tuple[int, ...], names: tuple[AxisName, ...], device: torch.device, rows: Rows
    ) -> Communicator:
        """A communicator over ranks, in this order; `names` are for messages.

        `rows` lists the groups that others make at the same time, this one included.
        """
        kind = self.communicates if len(ranks) > 1 else Communicator
        return kind(self, ranks, names, device)

    def across(self, one: BoundMesh, *others: BoundMesh) -> Communicator:
        """The communicator over all ranks of several meshes, ascending, in whatever order they are
        given.

        Raises:
            MeshError: on a rank outside all of them.
        """
        ends = [mesh._value for mesh in (one, *others)]
        ranks = tuple(sorted({mesh.rank_at(at) for mesh in ends for at in range(mesh.size())}))
        key = (one.device, ranks)
        if key not in self._across:
            if self.rank not in ranks:
                raise _outside("redistribute", self.rank, " and ".join(map(repr, ends)))
            names = (" and ".join(map(str, (one, *others))),)
            self._across[key] = self.connect(ranks, names, one.device, lambda: [ranks])
        return self._across[key]

    def group(self, mesh: BoundMesh, axes: tuple[int, ...]) -> Any:
        """The torch process group of `mesh.group_ranks(axes)`."""
        raise _no_groups("get_group", mesh)

    def adopt(self, device_mesh: Any) -> BoundMesh | None:
        """The bound mesh that stands for a torch DeviceMesh; None where there is no such thing."""

    def device_mesh(self, mesh: BoundMesh) -> Any:
        """The torch DeviceMesh that `mesh` wraps."""
        raise _no_groups("device_mesh", mesh)


class BoundMesh(Mesh):
    """A mesh on the ranks of a world. `init_mesh` and `as_bound_mesh` make it.

    It has the methods of torch's DeviceMesh, with axis names or numbers for `mesh_dim`.
    `here` is this rank's coordinate (None outside the mesh), `rank` its number in the world,
    `device` where its local tensors live.
    `origin`: for a mesh first made as some axes of another mesh, that mesh and the axes.
    """

    here: tuple[int, ...] | None
    rank: int
    device_type: str
    device: torch.device
    cache: dict[Any, Any]
    origin: tuple[Mesh, tuple[AxisName, ...]] | None = None

    _flatten = attribute_elsewhere(
        "_flatten", 'P(("dp", "tp")), which shards over both; mesh.size(), of all ranks; '
        'mesh.device_mesh["dp", "tp"]._flatten(), for a process group')
    _is_current_rank_part_of_mesh, _sym_get_coordinate = (
        attribute_elsewhere(name, "mesh.device_mesh, which DTensor's own calls take")
        for name in ("_is_current_rank_part_of_mesh", "_sym_get_coordinate"))

    def __init__(self, world: World, value: Mesh, device_type: str) -> None:
        for slot in Mesh.__slots__:
            setattr(self, slot, getattr(value, slot))
        self.world, self.rank, self.device_type = world, world.rank, device_type
        self.device = _device(device_type)
        self.here = value.coordinate_of_rank(world.rank)
        self.cache = {}
        self.wraps: Any = None  # the torch DeviceMesh, once there is one
        self._value = value
        self._comms: dict[tuple[int, ...], Communicator] = {}
        self._lines: dict[tuple[int, ...], Communicator] = {}

    @property
    def kernel_type(self) -> str:
        """The type of device whose kernels and autocast count. Of tensors without memory it is the
        CPU, and inside CUDA's autocast CUDA."""
        if self.device_type != "meta":
            return self.device_type
        return "cuda" if torch.is_autocast_enabled("cuda") else "cpu"

    @property
    def abstract(self) -> Mesh:
        return self._value

    def comm(self, axes: tuple[int, ...]) -> Communicator:
        """The communicator over the ranks with this rank's coordinates on all other axes.

        Its ranks are in mesh order, whatever the order of `axes` (numbers).

        Raises:
            MeshError: on a rank outside the mesh.
        """
        comm = self._comms.get(axes)
        if comm is None:
            comm = self._comms[axes] = self.line(tuple(sorted(set(self.axes(axes, "comm")))))
        return comm

    def everyone(self) -> Communicator:
        """The communicator over all ranks of the mesh, in mesh order."""
        return self.comm(tuple(range(self.ndim)))

    def line(self, axes: tuple[int, ...]) -> Communicator:
        """As `comm`, with its ranks in the order of shards of a dim over these axes: the first of
        them is the major one."""
        comm = self._lines.get(axes)
        if comm is None:
            ranks, names = self._ranks_along(axes, self._inside("comm")), self.names(axes)
            comm = self._lines[axes] = self.world.connect(
                ranks, names, self.device, lambda: self.rows(axes))
        return comm

    def _ranks_along(self, axes: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
        return tuple([self.rank_at(self.position(place)) for place in self.along(axes, at)])

    def names(self, axes: Iterable[int]) -> tuple[AxisName, ...]:
        return tuple(self.axis_names[axis] for axis in axes)

    def group_ranks(self, axes: Sequence[int], at: Sequence[int] | None = None) -> tuple[int, ...]:
        """The ranks with this rank's coordinates (or those of `at`) on all axes except `axes`.

        In mesh order.

        Raises:
            MeshError: on a rank outside, unless `at` is given.
        """
        return self._ranks_along(sorted(axes), self._inside("comm") if at is None else at)

    def rows(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The groups over `axes` of all ranks of the mesh, in mesh order; this rank's is one."""
        others = [axis for axis in range(self.ndim) if axis not in axes]
        return [self.group_ranks(axes, at) for at in self.along(others, [0] * self.ndim)]

    def _inside(self, call: str) -> tuple[int, ...]:
        if self.here is None:
            raise _outside(call, self.rank, repr(self._value))
        return self.here

    # DeviceMesh's methods that the value does not have.

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate, one digit per axis; None outside the mesh."""
        return self.here

    def get_rank(self) -> int:
        """This rank's number in the world."""
        return self.rank

    def get_local_rank(self, mesh_dim: AxisName | None = None) -> int:
        """This rank's coordinate along one axis.

        Args:
            mesh_dim: the axis, by name or number; may be omitted if there is only one.

        Raises:
            MeshError: no such axis, or a rank outside the mesh.
        """
        return self._inside("get_local_rank")[self._one_axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: AxisName | None = None) -> Any:
        """The torch process group of one axis.

        Args:
            mesh_dim: the axis, by name or number; may be omitted if there is only one.

        Raises:
            MeshError: there are no process groups (simulated ranks): use `comm`.
        """
        return self.world.group(self, (self._one_axis(mesh_dim, "get_group"),))

    def get_all_groups(self) -> list[Any]:
        """The torch process group of every axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as a tensor of the mesh's shape."""
        ranks = range(self.size()) if self.ranks is None else self.ranks
        return torch.tensor(ranks, dtype=torch.int).view(self.axis_sizes)

    @property
    def device_mesh(self) -> Any:
        """The torch DeviceMesh of this mesh, over the same groups. A collective on first use.

        Raises:
            MeshError: there are no process groups.
        """
        return self.world.device_mesh(self) if self.wraps is None else self.wraps

    def __getitem__(self, names: AxisName | tuple[AxisName, ...]) -> BoundMesh:
        """The mesh of some axes, in the given order, at this rank's coordinates on the others.

        A rank outside gets the one at coordinate 0 of the others, and is outside of it too.
        """
        names = names if isinstance(names, tuple) else (names,)
        value = self._value.submesh(names, self.here)
        if value == self._value:
            return self
        root, axes = self.origin or (self._value, self.axis_names)
        kept = tuple(axes[axis] for axis in self.axes(names, "mesh[...]"))
        return self.world.bind(value, self.device_type, (root, kept))

    def _one_axis(self, mesh_dim: AxisName | None, call: str) -> int:
        if mesh_dim is None and self.ndim != 1:
            raise MeshError(
                call, f"mesh_dim is None and {self} has {self.ndim} axes",
                "mesh_dim may be left out on a mesh of one axis", ["mesh_dim=None"],
                f"mesh.{call}({self.axis_names[0]!r})" if self.ndim else "Mesh((1,))")
        return self.axis(0 if mesh_dim is None else mesh_dim, call)

    # The default mesh of the thread.

    def __enter__(self) -> Self:
        _defaults.stack.append((self, len(_torch_stack())))
        return self

    def __exit__(self, *_: object) -> None:
        _defaults.stack.pop()

    # One object per rank: copies of a mesh share it. (Pickles contain the value.)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self


class _Defaults(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[BoundMesh, int]] = []  # and how many of torch's there were


_defaults = _Defaults()


def _torch_stack() -> list[Any]:
    """The DeviceMeshes of the `with` statements around this point in this thread."""
    found: Any = getattr(device_mesh, "_mesh_resources", None)  # none without torch.distributed
    return [] if found is None else found.mesh_stack


def innermost_mesh() -> Any:
    """The mesh, weft's or a torch DeviceMesh, of the innermost `with mesh:` of this thread."""
    theirs = _torch_stack()
    if _defaults.stack:
        mesh, depth = _defaults.stack[-1]
        if len(theirs) <= depth:
            return mesh
    return theirs[-1] if theirs else None


def _device(device_type: str) -> torch.device:
    """The device that this rank computes on."""
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    check_device_type(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def check_device_type(
    device_type: str, call: str = "init_mesh(device_type)",
    fix: str = 'weft.init_mesh(axes, "cpu")',
) -> None:
    """Raise ShardTypeError for what is no type of device, and MeshError where torch finds no device
    of it."""
    if device_type in ("cpu", "meta"):
        return
    try:
        text = isinstance(device_type, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        found = torch.device(device_type) if text else None
    except RuntimeError:
        found = None
    if found is None or found.index is not None:
        kind = "cuda" if found is None else found.type
        raise ShardTypeError(
            call, f"{device_type!r} is no type of device",
            "a type is cpu, cuda or another that torch knows; each rank has its own device "
            "of it", [repr(device_type)], f"weft.init_mesh(axes, {kind!r})")
    if not getattr(torch.get_device_module(device_type), "is_available", lambda: True)():
        raise MeshError(
            call, f"it is {device_type!r}, and torch {torch.__version__} finds "
            "no such device", "each rank has a device of the type of its mesh", [device_type],
            f"{fix}; weft doctor says what torch finds")


def _outside(call: str, rank: int, where: str) -> MeshError:
    return MeshError(
        call, f"rank {rank} is outside {where}",
        "a rank outside a mesh takes part in no collective of that mesh",
        [rank], "if mesh.here is not None: ...")


def _no_groups(call: str, mesh: BoundMesh) -> MeshError:
    return MeshError(
        call, f"{mesh} lives in a {type(mesh.world).__name__}, which has no process groups",
        "torch's process groups exist only over torch.distributed", [call],
        f"weft run -n {mesh.size()} script.py, for what needs torch's groups; "
        "weft.distribute_module and mesh.comm((axis,)) need none")
