"""The world of torch.distributed: its process groups, and meshes that wrap torch's own.

Groups are looked up by their ranks, so that meshes share them.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.bound_mesh import BoundMesh, Rows, World
from weft.comm.collective_call import CollectiveCall, timeout
from weft.comm.communicator import Communicator
from weft.comm.debug_compare import DebugCompare
from weft.comm.group_calls import backend_of, gave_up
from weft.comm.last_words import prepare
from weft.comm.pending_buffers import settle
from weft.comm.point_to_point import UnderWay
from weft.comm.process_group import ProcessCommunicator
from weft.core import AxisName, Mesh, as_mesh
from weft.core.scopes import setting
from weft.errors import MeshError

__all__ = ["ProcessWorld", "backend_for", "process_world"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_SETTLE_S = 5.0
"""How long the end of the process waits for a backend's threads, which need at most a few ms."""


def backend_for(device_type: str) -> str:
    """The backend that carries a device type."""
    return _BACKENDS.get(device_type) or dist.get_default_backend_for_device(device_type)


class ProcessWorld(World):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.default = dist.group.WORLD
        self.roll = DebugCompare(self.rank)
        prepare(self.rank)
        self.under_way = UnderWay()
        self._groups: dict[tuple[str, frozenset[int]], dist.ProcessGroup] = {}
        self._comms: weakref.WeakSet[ProcessCommunicator] = weakref.WeakSet()
        self._wrapping: weakref.WeakValueDictionary[int, BoundMesh] = weakref.WeakValueDictionary()

    def connect(
        self, ranks: tuple[int, ...], names: tuple[AxisName, ...], device: torch.device, rows: Rows
    ) -> Communicator:
        if len(ranks) == 1:
            return super().connect(ranks, names, device, rows)
        group = self._group_of(ranks, names, device.type, rows)
        comm = ProcessCommunicator(self, group, ranks, names, device)
        self._comms.add(comm)
        return comm

    def call_roll(self, ask: CollectiveCall) -> str:
        return self.roll.call(ask, timeout().total_seconds())

    def stopped(self, why: str) -> None:
        self.roll.stopped(why)

    def group(self, mesh: BoundMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
        ranks, names = mesh.group_ranks(axes), mesh.names(axes)
        return self._group_of(ranks, names, mesh.device_type, lambda: mesh.rows(axes))

    def _group_of(
        self, ranks: tuple[int, ...], names: tuple[AxisName, ...], device_type: str, rows: Rows
    ) -> dist.ProcessGroup:
        """The default group, one that a DeviceMesh brought, or a new one, cached for these ranks.
        All ranks run one program, so they make their groups in one order."""
        key = (device_type, frozenset(ranks))
        if key not in self._groups:
            default = self.default
            carries = backend_of(default, device_type) is not None
            if carries and default is not None and len(ranks) == self.size:
                self._groups[key] = default
            else:
                backend = None if carries else backend_for(device_type)
                self._groups[key] = self._new_group(ranks, names, rows, backend)
        return self._groups[key]

    def _new_group(
        self, ranks: tuple[int, ...], names: tuple[AxisName, ...], rows: Rows, backend: str | None
    ) -> dist.ProcessGroup:
        """A group made by its members alone; by the whole world if the backend splits one."""
        splits = self._splits()
        groups = rows() if splits else [ranks]
        if splits and sum(map(len, groups)) < self.size:
            raise _cannot_split(groups, self.size)
        mine: Any = None
        if self.debug.on:  # that all members make the group
            everyone = tuple(range(self.size)) if splits else ranks
            self.agree(CollectiveCall("new_group", names, everyone, ()))
        for members in groups:
            try:
                with nullcontext() if splits else _named(members, backend):
                    group = dist.new_group(
                        sorted(members), timeout=timeout(), backend=backend,
                        use_local_synchronization=not splits,
                    )
            except RuntimeError as error:
                where = f"axes ({', '.join(map(str, names))}), ranks {str(members)[1:-1]}"
                raise gave_up("new_group", where, error, self.roll, members) from error
            mine = group if self.rank in members else mine
        return mine

    def _splits(self) -> bool:
        """Whether new groups are split off the default one, which requires all of its ranks."""
        return getattr(self.default, "bound_device_id", None) is not None

    def adopt(self, device_mesh: DeviceMesh) -> BoundMesh:
        """The bound mesh that wraps a torch DeviceMesh and uses its groups; one per object."""
        mesh = getattr(device_mesh, "_weft_mesh", None)
        if isinstance(mesh, BoundMesh) and mesh.world is self:
            return mesh
        value = as_mesh(device_mesh)
        mesh = BoundMesh(self, value, device_mesh.device_type)
        mesh.origin = _origin(device_mesh)
        self._wrap(mesh, device_mesh)
        if mesh.here is not None:
            for axis, group in enumerate(device_mesh.get_all_groups()):
                ranks = frozenset(mesh.group_ranks((axis,)))
                self._groups[mesh.device_type, ranks] = group
        self._bound.setdefault((value, mesh.device_type), mesh)
        return mesh

    def device_mesh(self, mesh: BoundMesh) -> DeviceMesh:
        names = tuple(map(str, mesh.axis_names))
        if mesh.here is None:  # a rank outside is in no group of the mesh
            made = DeviceMesh(
                mesh.device_type, mesh.mesh, mesh_dim_names=names, _init_backend=False
            )
        else:
            made = DeviceMesh.from_group(
                mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh_dim_names=names
            )
        self._wrap(mesh, made)
        return made

    def _wrap(self, mesh: BoundMesh, device_mesh: DeviceMesh) -> None:
        mesh.wraps = device_mesh
        device_mesh._weft_mesh = mesh  # type: ignore[attr-defined]
        self._wrapping[id(mesh)] = mesh

    def close(self) -> None:
        """Release every group, so that torch can end them. Communicators of this world then raise.
        """
        self.under_way.end()
        self.roll.end(self.debug.on)
        for comm in self._comms:
            comm.group = None
        for mesh in self._wrapping.values():
            mesh.wraps = None
        self._groups.clear()
        self.default = None


def _origin(device_mesh: DeviceMesh) -> tuple[Mesh, tuple[AxisName, ...]] | None:
    """The mesh whose axes this DeviceMesh was made from, and the axes; None if there is none."""
    root = device_mesh._get_root_mesh()
    if root is device_mesh or not device_mesh.mesh_dim_names:
        return None
    return as_mesh(root), device_mesh.mesh_dim_names


@contextmanager
def _named(members: tuple[int, ...], backend: str | None) -> Iterator[None]:
    """A group that is made inside is named by its members alone.

    By this name the members find each other. torch would add the number of groups that a rank is
    in, so ranks with different other groups would never meet; a rank outside a mesh is in fewer.
    """
    numbers = ",".join(map(str, sorted(members)))
    name = "weft " + hashlib.sha1(f"{backend} {numbers}".encode()).hexdigest()
    with _naming, setting(distributed_c10d, _process_group_name=lambda *_, **__: name):
        yield


_naming = threading.Lock()
_here: ProcessWorld | None = None


def process_world() -> ProcessWorld | None:
    """The world of torch's default process group; None if there is none."""
    global _here
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if _here is None:
        atexit.register(_at_exit)
    if _here is None or _here.default is not dist.group.WORLD:
        _let_go()
        _here = ProcessWorld()
    return _here


def _at_exit() -> None:
    settle(_SETTLE_S)
    _let_go()


def _let_go() -> None:
    if _here is not None:
        _here.close()


def _cannot_split(groups: Sequence[tuple[int, ...]], world_size: int) -> MeshError:
    num_ranks = sum(map(len, groups))
    return MeshError(
        "making a process group",
        f"{num_ranks} of the world's {world_size} ranks take part, and the default process "
        "group is bound to a device",
        "a group bound to a device is split with all its ranks taking part, and those "
        "outside a mesh take part in nothing",
        [f"ranks {ranks}" for ranks in groups],
        "torch.distributed.init_process_group(...) without device_id=")
