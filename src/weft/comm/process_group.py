"""Collectives over torch.distributed: one code path for gloo, NCCL and other backends.

Data moves as bytes by `all_to_all_single` with split sizes, the one uneven primitive that every
backend has, and by `broadcast`. A table says what a backend does as exactly and faster by itself;
any other reduction is an exchange of terms, torch's own reduction in mesh order, and a gather, so
that gloo gives bitwise what simulated ranks give. (gloo's own MAX drops NaN, its bool sum wraps,
and its rings take longer than one exchange.)

Groups are looked up by their ranks, so that meshes share them. torch orders a group by rank; our
order is the mesh's, and `places` translates.
"""

from __future__ import annotations

import atexit
import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.asking import Ask, lines, source_line
from weft.comm.bound_mesh import BoundMesh, World
from weft.comm.communicator import Communicator, as_bytes
from weft.comm.lent import lend, settle
from weft.comm.reduction import reduce_terms
from weft.comm.roll_call import RollCall
from weft.core import AxisName, as_mesh, balanced_cuts
from weft.errors import CommunicationError, MeshError, message

__all__ = ["ProcessWorld", "backend_for", "process_world", "timeout"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
}
"""torch's reductions; the mean is the sum divided afterwards, as in every other body."""

def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = False
    return options


_REDUCE = {kind: _options(op) for kind, op in _OPS.items()}

_NATIVE = frozenset(
    [(kind, dtype) for kind in ("sum", "avg", "product") for dtype in _FLOATS]
    + [(kind, dtype) for kind in ("sum", "product", "max", "min") for dtype in _INTEGERS]
)
_EXACT: dict[str, frozenset[tuple[str, torch.dtype]]] = {"nccl": _NATIVE, "fake": _NATIVE}
"""What a backend reduces exactly by itself. Max and min of floats may lose NaN: not here.

torch's "fake" backend, on which costs are measured without a network, takes NCCL's ways.
"""

_GATHER_LIMIT_NBYTES = 1 << 20
"""Up to this many bytes gathered, one exchange of whole terms beats scatter and gather."""

_SETTLE_S = 5.0
"""How long the end of the process waits for a backend's threads, which need a few ms at most."""

_HEAD_NBYTES = 256
"""What `exchange` sends first: a length, and the pickle itself where it fits."""

_gather_even = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_even = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch renamed these two; the older names warn where the newer exist."""


def timeout() -> timedelta:
    """How long a collective may wait for other ranks: WEFT_TIMEOUT seconds, 300 by default."""
    return timedelta(seconds=float(os.environ.get("WEFT_TIMEOUT", "300")))


def backend_for(device_type: str) -> str:
    """The backend that carries a device type."""
    return _BACKENDS.get(device_type) or dist.get_default_backend_for_device(device_type)


class ProcessWorld(World):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.default = dist.group.WORLD
        self.roll = RollCall(self.rank)
        self._groups: dict[tuple[str, frozenset[int]], dist.ProcessGroup] = {}
        self._comms: weakref.WeakSet[ProcessCommunicator] = weakref.WeakSet()
        self._wrapping: weakref.WeakValueDictionary[int, BoundMesh] = weakref.WeakValueDictionary()

    def connect(self, mesh: BoundMesh, axes: tuple[int, ...]) -> Communicator:
        ranks, names = mesh.group_ranks(axes), mesh.names(axes)
        group = self.group(mesh, axes)
        comm = ProcessCommunicator(group, ranks, self.roll, names, mesh.device)
        self._comms.add(comm)
        return comm

    def group(self, mesh: BoundMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """The default group, one that a DeviceMesh brought, or a new one, kept for these ranks.

        All ranks run one program, so they make their groups in one order.

        Raises:
            CommunicationError: the other members do not come.
        """
        ranks = mesh.group_ranks(axes)
        key = (mesh.device_type, frozenset(ranks))
        if key not in self._groups:
            default = self.default
            carries = _backend_of(default, mesh.device_type) is not None
            if carries and default is not None and len(ranks) == self.size:
                self._groups[key] = default
            else:
                backend = None if carries else backend_for(mesh.device_type)
                self._groups[key] = self._new_group(mesh, axes, backend)
        return self._groups[key]

    def _new_group(
        self, mesh: BoundMesh, axes: tuple[int, ...], backend: str | None
    ) -> dist.ProcessGroup:
        """A group made by its members alone; by the whole world where the backend splits one."""
        rows = mesh.rows(axes) if self._splits() else [mesh.group_ranks(axes)]
        if self._splits() and mesh.size() < self.size:
            raise _cannot_split(mesh, self.size)
        mine: Any = None
        self._agree(mesh, axes)
        for ranks in rows:
            try:
                group = dist.new_group(
                    sorted(ranks), timeout=timeout(), backend=backend,
                    use_local_synchronization=not self._splits(),
                )
            except RuntimeError as error:
                where = f"axes ({', '.join(map(str, mesh.names(axes)))}), ranks {str(ranks)[1:-1]}"
                raise _gave_up("new_group", where, error, self.roll, ranks) from error
            mine = group if self.rank in ranks else mine
        return mine

    def _agree(self, mesh: BoundMesh, axes: tuple[int, ...]) -> None:
        """In debug mode: all that have to make a group make one."""
        if self.debug.on:
            ranks = tuple(range(self.size)) if self._splits() else mesh.group_ranks(axes)
            ask = Ask("new_group", mesh.names(axes), ranks, ())
            said = self.roll.call(ask.by_now(), timeout().total_seconds())
            if said:
                raise CommunicationError(said)

    def _splits(self) -> bool:
        """Whether new groups are split off the default one, which takes all of its ranks."""
        return getattr(self.default, "bound_device_id", None) is not None

    def adopt(self, device_mesh: DeviceMesh) -> BoundMesh:
        """The bound mesh that wraps a torch DeviceMesh and uses its groups; one per object."""
        mesh = getattr(device_mesh, "_weft_mesh", None)
        if isinstance(mesh, BoundMesh) and mesh.world is self:
            return mesh
        value = as_mesh(device_mesh)
        mesh = BoundMesh(self, value, device_mesh.device_type)
        self._wrap(mesh, device_mesh)
        if mesh.here is not None:
            for axis, group in enumerate(device_mesh.get_all_groups()):
                ranks = frozenset(mesh.group_ranks((axis,)))
                self._groups[mesh.device_type, ranks] = group
        self._bound.setdefault((value, mesh.device_type), mesh)
        return mesh

    def device_mesh(self, mesh: BoundMesh) -> DeviceMesh:
        names = tuple(map(str, mesh.axis_names))
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
        """Let go of every group, so that torch can end them. Communicators of this world raise."""
        self.roll.end()
        for comm in self._comms:
            comm.group = None
        for mesh in self._wrapping.values():
            mesh.wraps = None
        self._groups.clear()
        self.default = None


class ProcessCommunicator(Communicator):
    """Collectives over one process group."""

    __slots__ = (
        "__weakref__", "exact", "group", "in_order", "lends", "native", "places", "roll",
    )

    group: dist.ProcessGroup | None

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], roll: RollCall,
        axes: tuple[AxisName, ...], device: torch.device,
    ) -> None:
        super().__init__(ranks, ranks.index(roll.rank), axes, device)
        self.group, self.roll = group, roll
        order = dist.get_process_group_ranks(group)
        self.places = tuple(order.index(member) for member in ranks)
        self.in_order = self.places == tuple(range(self.size))
        self.exact = _EXACT.get(_backend_of(group, device.type) or "", frozenset())
        self.native = bool(self.exact) and self.in_order
        self.lends = device.type == "cpu"  # there, a backend works on threads of the process

    def _roll_call(self, ask: Ask) -> str:
        return self.roll.call(ask, timeout().total_seconds())

    def all_reduce(self, x: Tensor, kind: str) -> Tensor:
        if (kind, x.dtype) not in self.exact or x.numel() == 0:
            return super().all_reduce(x, kind)
        x = x.detach() if x.requires_grad else x
        return self._all_reduce_own(x.clone(memory_format=torch.contiguous_format), kind)

    def _all_reduce_own(self, total: Tensor, kind: str) -> Tensor:
        if (kind, total.dtype) not in self.exact or total.numel() == 0:
            return super().all_reduce(total, kind)
        if self.debug.on:
            self._agree("all_reduce", kind, total.dtype, tuple(total.shape))
        # Straight to the group: a small gradient's reduction costs less than torch's wrappers.
        group = self._alive("all_reduce")
        try:
            group.allreduce([total], _REDUCE[kind]).wait()
        except RuntimeError as error:
            raise self._gave_up("all_reduce", error) from error
        return total.div_(self.size) if kind == "avg" else total

    def _all_reduce(self, x: Tensor, kind: str) -> Tensor:
        flat = x.reshape(-1)
        if x.numel() * x.element_size() * self.size <= _GATHER_LIMIT_NBYTES:
            terms = self._all_gather(flat, (flat.numel(),) * self.size).chunk(self.size)
            return reduce_terms(terms, kind).view(x.shape)
        cuts = balanced_cuts(flat.numel(), (self.size,))
        sizes = tuple(stop - start for start, stop in pairwise(cuts))
        return self._all_gather(self._reduce_scatter(flat, sizes, kind), sizes).view(x.shape)

    def _all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        if self.native and len(set(sizes)) == 1:
            data = as_bytes(x)
            out = data.new_empty(data.numel() * self.size)
            self._issue("all_gather", _gather_even, out, data)
            return out.view(x.dtype)
        return self._all_to_all(x.repeat(self.size), (x.numel(),) * self.size, sizes)

    def _reduce_scatter(self, x: Tensor, sizes: tuple[int, ...], kind: str) -> Tensor:
        if self.native and len(set(sizes)) == 1 and (kind, x.dtype) in self.exact:
            out = x.new_empty(sizes[0])
            self._issue("reduce_scatter", _scatter_even, out, x, _OPS[kind])
            return out.div_(self.size) if kind == "avg" else out
        mine = sizes[self.index]
        terms = self._all_to_all(x, sizes, (mine,) * self.size).view(self.size, mine)
        return reduce_terms(terms.unbind(), kind)

    def _all_to_all(self, x: Tensor, send: tuple[int, ...], recv: tuple[int, ...]) -> Tensor:
        if not self.in_order:
            x, send, arriving = self._to_group(x, send), self._listed(send), self._listed(recv)
        else:
            arriving = recv
        data, width = as_bytes(x), x.element_size()
        out = data.new_empty(sum(recv) * width)
        self._issue(
            "all_to_all", dist.all_to_all_single, out, data,
            [size * width for size in arriving], [size * width for size in send],
        )
        received = out.view(x.dtype)
        if self.in_order:
            return received
        pieces = received.split(arriving)
        return torch.cat([pieces[place] for place in self.places])

    def _to_group(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Pieces in mesh order, brought into the group's order."""
        return torch.cat(self._listed(x.split(sizes)))

    def _listed(self, pieces: Sequence[Any]) -> tuple[Any, ...]:
        """What belongs to each member, listed in the group's order."""
        return tuple(piece for _, piece in sorted(zip(self.places, pieces), key=lambda p: p[0]))

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        data = as_bytes(x).clone()
        self._issue("broadcast", dist.broadcast, data, group_src=self.places[source])
        return data.view(x.dtype).view(x.shape)

    def _scatter(
        self, x: Tensor | None, sizes: tuple[int, ...], source: int, dtype: torch.dtype
    ) -> Tensor:
        given = torch.empty(0, dtype=dtype, device=self.device) if x is None else x
        send = (0,) * self.size if x is None else sizes
        recv = tuple(sizes[self.index] if i == source else 0 for i in range(self.size))
        return self._all_to_all(given, send, recv)

    def _exchange(self, value: object) -> list[object]:
        data = pickle.dumps(value)
        head = len(data).to_bytes(8, "little")
        head += data if len(data) <= _HEAD_NBYTES - 8 else b""
        heads = self._gather_bytes(head.ljust(_HEAD_NBYTES, b"\0"), (_HEAD_NBYTES,) * self.size)
        lengths = tuple(int.from_bytes(head[:8], "little") for head in heads)
        if max(lengths) <= _HEAD_NBYTES - 8:
            return [pickle.loads(head[8 : 8 + n]) for head, n in zip(heads, lengths)]
        return [pickle.loads(one) for one in self._gather_bytes(data, lengths)]

    def _gather_bytes(self, data: bytes, sizes: tuple[int, ...]) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        parts = self._all_gather(mine, sizes).cpu().split(sizes)
        return [part.numpy().tobytes() for part in parts]

    def _issue(self, op: str, call: Callable[..., Any], *args: Any, **named: Any) -> None:
        group = self._alive(op)
        if self.lends:
            args = tuple(lend(arg) if isinstance(arg, Tensor) else arg for arg in args)
        try:
            call(*args, group=group, **named)
        except BaseException as error:
            args = ()
            traceback.clear_frames(error.__traceback__)  # they keep what was lent
            if isinstance(error, RuntimeError):
                raise self._gave_up(op, error) from error
            raise

    def _alive(self, op: str) -> dist.ProcessGroup:
        """The group, while its world is; torch would take None for the default group."""
        if self.group is None:
            raise _ended(op, self.where)
        return self.group

    def _gave_up(self, op: str, error: RuntimeError) -> CommunicationError:
        try:  # how many collectives the backend has counted tells ranks in a loop apart
            count = f" (number {self.group._get_sequence_number_for_group()} of its group)"  # type: ignore[union-attr]
        except RuntimeError:
            count = ""
        return _gave_up(op + count, self.where, error, self.roll, self.ranks)


_here: ProcessWorld | None = None


def process_world() -> ProcessWorld | None:
    """The world of torch's default process group; None when there is none."""
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


def _backend_of(group: Any, device_type: str) -> str | None:
    """The backend by which a group carries a device type."""
    entries = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    return dict(entry.split(":") for entry in entries).get(device_type)


def _cannot_split(mesh: BoundMesh, world_size: int) -> MeshError:
    return MeshError(
        message(
            "making a process group",
            f"{mesh!r} has {mesh.size()} of the world's {world_size} ranks, and the default "
            "process group is bound to a device",
            "a group bound to a device is split with all its ranks taking part, and those "
            "outside a mesh take part in nothing",
            [repr(mesh)], "torch.distributed.init_process_group(...) without device_id=",
        )
    )


def _ended(op: str, where: str) -> CommunicationError:
    return CommunicationError(
        message(
            f"{op} over {where}", "the world that its mesh was bound in has ended",
            "a mesh lives as long as the default process group that it was bound under: until "
            "that is destroyed, or the process ends", [where],
            "make the mesh again, under the process group that there is now: weft.init_mesh(...)",
        )
    )


def _gave_up(
    op: str, where: str, error: RuntimeError, roll: RollCall, ranks: Sequence[int]
) -> CommunicationError:
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else "no reason"
    known = roll.last_words(ranks, f"stopped at {op} over {where}, at {source_line()}")
    return CommunicationError(
        message(
            f"{op.split()[0]} over {where}", f"rank {roll.rank} stopped waiting: {reason}",
            f"every rank of a group issues the same collectives, each within the timeout "
            f"({timeout().total_seconds():g} s), and lives until all are done", lines(known),
            "see the first error that any rank printed; WEFT_DEBUG=1 compares what the ranks ask "
            "for before they do it; if ranks merely need longer, WEFT_TIMEOUT=600",
        )
    )
