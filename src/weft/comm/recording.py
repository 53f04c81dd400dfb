"""Collectives without data: what one of any number of ranks would do and receive.

A recording mesh needs no process group and no other rank. Its communicators return zeros of
the right size and record every collective with the bytes that this rank receives, by the
volumes of bandwidth-optimal algorithms.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.bound_mesh import BoundMesh, Rows, World
from weft.comm.communicator import Communicator
from weft.core import AxisName, Mesh

__all__ = ["Recorded", "recorded", "recording_mesh"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective, as one rank saw it."""

    op: str
    axes: tuple[AxisName, ...]
    received_nbytes: int


class RecordingWorld(World):
    """As many ranks as the mesh needs, of which one records."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.log: list[Recorded] = []

    def connect(
        self, ranks: tuple[int, ...], names: tuple[AxisName, ...], device: torch.device, rows: Rows
    ) -> Communicator:
        return RecordingCommunicator(self, ranks, names, device)


class RecordingCommunicator(Communicator):
    """Records collectives and returns zeros."""

    __slots__ = ("world",)

    def __init__(
        self, world: RecordingWorld, ranks: tuple[int, ...], axes: tuple[AxisName, ...],
        device: torch.device,
    ) -> None:
        super().__init__(ranks, ranks.index(world.rank), axes, device)
        self.world = world

    def _record(self, op: str, received_nbytes: int) -> None:
        self.world.log.append(Recorded(op, self.axes, received_nbytes))

    def _all_reduce(self, x: Tensor, kind: str) -> Tensor:
        self._record("all_reduce", 2 * x.nbytes * (self.size - 1) // self.size)
        return torch.zeros_like(x)

    def _all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        self._record("all_gather", (sum(sizes) - x.numel()) * x.element_size())
        return x.new_zeros(sum(sizes))

    def _reduce_scatter(self, x: Tensor, sizes: tuple[int, ...], kind: str) -> Tensor:
        mine = sizes[self.index]
        self._record("reduce_scatter", (self.size - 1) * mine * x.element_size())
        return x.new_zeros(mine)

    def _all_to_all(self, x: Tensor, send: tuple[int, ...], recv: tuple[int, ...]) -> Tensor:
        self._record("all_to_all", (sum(recv) - recv[self.index]) * x.element_size())
        return x.new_zeros(sum(recv))

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        self._record("broadcast", 0 if source == self.index else x.nbytes)
        return torch.zeros_like(x)

    def _scatter(
        self, x: Tensor | None, sizes: tuple[int, ...], source: int, dtype: torch.dtype
    ) -> Tensor:
        mine = torch.zeros(sizes[self.index], dtype=dtype, device=self.device)
        self._record("scatter", 0 if source == self.index else mine.nbytes)
        return mine

    def _exchange(self, value: object) -> list[object]:
        self._record("exchange", (self.size - 1) * len(pickle.dumps(value)))
        return [value] * self.size


def recording_mesh(
    axes: Mapping[str, int] | Sequence[int] | Mesh, rank: int = 0, device_type: str = "cpu"
) -> BoundMesh:
    """A mesh whose collectives are recorded instead of done, seen from `rank`.

    Args:
        axes: map axis name -> size, only sizes, or a mesh value.
        rank: the rank that records.
        device_type: where local tensors live; "meta" needs no memory.

    Returns:
        The mesh; `recorded(mesh)` is its log so far.
    """
    value = axes.abstract if isinstance(axes, Mesh) else Mesh(axes)
    return RecordingWorld(rank, value.size()).bind(value, device_type)


def recorded(mesh: BoundMesh) -> list[Recorded]:
    """The collectives of a recording mesh, and of its submeshes, in order."""
    assert isinstance(mesh.world, RecordingWorld), f"{mesh} does not record"
    return mesh.world.log
