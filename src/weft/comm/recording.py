"""Collectives without data: what one of any number of ranks would do and receive.

A recording mesh needs no process group and no other rank. Its communicators return zeros of
the right size and record every collective with the bytes that this rank receives, by the
volumes of bandwidth-optimal algorithms.

Of tensors without memory values may be known. What others have is then taken from what this rank
has. Reductions and gathers are those of equal values: a mask of ones has no zero on any rank. In an
all-to-all, what comes from the rank k places before this one is what this rank sends to the rank k
places after it. A mask of another length begins as this rank's does.

While `recording(world)` is open, the thread is in that world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.bound_mesh import BoundMesh, World
from weft.comm.collective_call import Switch
from weft.comm.communicator import Communicator
from weft.comm.crew import Crew
from weft.comm.watching import received_nbytes
from weft.core import AxisName, Mesh, as_mesh
from weft.core.scopes import setting

__all__ = ["Recorded", "RecordingWorld", "current_recording_world", "recorded", "recording"]


_FEW = 64
"""In a group of more ranks, what each sends is not asked for."""

_MASKS = (torch.bool, torch.uint8)
"""The dtypes of masks, and of their bits."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective, as one rank saw it."""

    op: str
    axes: tuple[AxisName, ...]
    received_nbytes: int
    ranks: tuple[int, ...] = ()
    """Who takes part, where the axes do not say it: of a message, which both ends record, who sends
    it and who receives it."""


class RecordingCommunicator(Communicator):
    """Records collectives and returns zeros."""

    __slots__ = ()
    world: RecordingWorld

    def _record(self, op: str, *args: Any) -> None:
        self.world.record(Recorded(op, self.axes, received_nbytes(self, op, args)))

    def _made(self, make: Callable[..., Tensor], *args: Any) -> Tensor:
        """What the collective brings."""
        with setting(self.world, at_work=True):
            return make(*args)

    def _all_reduce(self, x: Tensor, kind: str, own: bool) -> Tensor:
        self._record("all_reduce", x, kind)
        return self._made(_of_equal, x, kind, self.size) if x.is_meta else torch.zeros_like(x)

    def _all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        self._record("all_gather", x, sizes)
        if x.is_meta and len(set(sizes)) == 1:
            return self._made(x.repeat, self.size)
        if x.is_meta and x.dtype in _MASKS and x.numel() and self.size <= _FEW:
            return self._made(lambda: torch.cat([_repeated(x, size) for size in sizes]))
        return self._made(_blank, x, sum(sizes))

    def _reduce_scatter(self, x: Tensor, sizes: tuple[int, ...], kind: str) -> Tensor:
        mine = sizes[self.index]
        self._record("reduce_scatter", x, sizes)
        return self._made(_blank, x, mine)

    def _all_to_all(self, x: Tensor, send: tuple[int, ...], recv: tuple[int, ...]) -> Tensor:
        self._record("all_to_all", x, send, recv)
        like = [(2 * self.index - other) % self.size for other in range(self.size)]
        if x.is_meta and self.size <= _FEW and all(
            received == send[other] for received, other in zip(recv, like)
        ):
            parts = x.split(send)
            return self._made(torch.cat, [parts[other] for other in like])
        if x.is_meta and x.dtype in _MASKS and x.numel():
            return self._made(_repeated, x, sum(recv))
        return self._made(_blank, x, sum(recv))

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        self._record("broadcast", x, source)
        return self._made(x.clone) if x.is_meta else torch.zeros_like(x)

    def _exchange(self, value: object) -> list[object]:
        self._record("exchange", value)
        return [value] * self.size


class RecordingWorld(World):
    """As many ranks as the mesh needs, of which one records.

    Meshes with the axes of `mesh`, whatever their sizes, stand for it.
    """

    communicates = RecordingCommunicator

    def __init__(self, rank: int, mesh: Mesh) -> None:
        super().__init__(rank, mesh.size())
        self.mesh, self.debug = mesh, Switch(False)
        self.log: list[Recorded] = []
        self.heard: Callable[[Recorded, bool], None] | None = None
        """Called with each collective, and whether the program has asked torch for it."""
        self.known: Callable[[Tensor], Tensor | None] = lambda _: None
        self.learn: Callable[[Tensor, Tensor], None] = lambda *_: None
        """The values of a tensor, where they are known, and where a tensor gets some."""
        self.crew: Crew | None = None
        """Who sends this rank messages."""
        self.registry: Any = None
        """torch's process groups."""
        self.at_work = False
        """Whether what runs now is part of a collective."""
        self.made: dict[Mesh, None] = {}
        """The meshes that the program has made itself."""

    def meant(self, mesh: Mesh, device_type: str) -> tuple[Mesh, str]:
        alike = mesh.ranks is None and set(mesh.axis_names) == set(self.mesh.axis_names)
        if alike and mesh.axis_names != tuple(range(mesh.ndim)):
            sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes))
            mesh = Mesh({str(name): sizes[name] for name in mesh.axis_names})
        self.made[mesh] = None
        return mesh, "meta"

    def adopt(self, device_mesh: Any) -> BoundMesh:
        return self.bind(*self.meant(as_mesh(device_mesh), "meta"))

    def record(self, one: Recorded, of_torch: bool = False) -> None:
        """Add a collective."""
        self.log.append(one)
        if self.heard is not None:
            self.heard(one, of_torch)

    def group(self, mesh: BoundMesh, axes: tuple[int, ...]) -> Any:
        if self.registry is None:
            return super().group(mesh, axes)
        return self.registry.group(mesh.group_ranks(axes), mesh.names(axes))


def _blank(x: Tensor, numel: int) -> Tensor:
    return x.new_empty(numel) if x.is_meta else x.new_zeros(numel)


def _repeated(x: Tensor, numel: int) -> Tensor:
    return x.repeat(-(-numel // x.numel()))[:numel]


def _of_equal(x: Tensor, kind: str, size: int) -> Tensor:
    """The reduction of as many equal values."""
    if kind == "sum":
        return x.clone() if x.dtype is torch.bool else x * size
    return x**size if kind == "product" and x.dtype is not torch.bool else x.clone()


class _Local(threading.local):
    world: RecordingWorld | None = None


_local = _Local()


def current_recording_world() -> RecordingWorld | None:
    """The world of the innermost `recording` of this thread, or None."""
    return _local.world


def recording(world: RecordingWorld) -> AbstractContextManager[None]:
    """Inside, this thread is in the recording world, as the rank that it records."""
    return setting(_local, world=world)


def recorded(mesh: BoundMesh) -> list[Recorded]:
    """The collectives of a recording mesh, and of its submeshes, in order."""
    assert isinstance(mesh.world, RecordingWorld), f"{mesh} does not record"
    return mesh.world.log
