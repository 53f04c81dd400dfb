"""A process group as collectives use it: the order of its ranks, starting a call, waiting, failing.

torch orders a group by rank; weft's order is the mesh's, and `places` translates.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collective_call import lines, timeout
from weft.comm.communicator import Communicator, Home, Wait
from weft.comm.debug_compare import DebugCompare
from weft.comm.pending_buffers import lend
from weft.comm.point_to_point import UnderWay
from weft.comm.source import source_line
from weft.core import AxisName
from weft.errors import CommunicationError

__all__ = ["GroupCalls", "ProcessHome", "backend_of", "gave_up"]


class ProcessHome(Home, Protocol):
    """A world of processes, as the communicators of its groups see it."""

    roll: DebugCompare
    under_way: UnderWay


class GroupCalls(Communicator):
    """A communicator over one process group, except its collectives."""

    group: dist.ProcessGroup | None
    world: ProcessHome

    def __init__(
        self, world: ProcessHome, group: dist.ProcessGroup, ranks: tuple[int, ...],
        axes: tuple[AxisName, ...], device: torch.device,
    ) -> None:
        super().__init__(world, ranks, axes, device)
        self.group = group
        order = dist.get_process_group_ranks(group)
        self.places = tuple(order.index(member) for member in ranks)
        self.in_order = self.places == tuple(range(self.size))
        self.lends = device.type == "cpu"  # there, a backend works on threads of the process

    def _start(self, op: str, call: Callable[..., Any], *args: Any) -> Wait:
        """Start something that can be waited for."""
        if self.lends:
            args = tuple(lend(arg) if isinstance(arg, Tensor) else arg for arg in args)
        work: Any = None
        try:
            work = call(*args)
        except BaseException as error:
            args = ()
            self._tell(op, error)
            raise
        args = ()

        def wait() -> None:
            nonlocal work
            try:
                work.wait()
            except BaseException as error:
                work = None
                self._tell(op, error)
                raise

        return wait

    def _listed(self, pieces: Sequence[Any]) -> tuple[Any, ...]:
        """What belongs to each member, listed in the group's order."""
        return tuple(piece for _, piece in sorted(zip(self.places, pieces), key=lambda p: p[0]))

    def _tell(self, op: str, error: BaseException) -> None:
        """Raise weft's error for torch's; the traceback releases lent buffers."""
        traceback.clear_frames(error.__traceback__)
        if not isinstance(error, RuntimeError):
            return
        with suppress(RuntimeError):  # its count of collectives distinguishes ranks in a loop
            op += f" (number {self.group._get_sequence_number_for_group()} of its group)"  # type: ignore[union-attr]
        raise gave_up(op, self.where, error, self.world.roll, self.ranks) from error

    def _alive(self, op: str) -> dist.ProcessGroup:
        """The group, while its world exists; torch would take None for the default group."""
        if self.group is None:
            raise CommunicationError(
                f"{op} over {self.where}", "the world that its mesh was bound in has ended",
                "a mesh lives as long as the default process group that it was bound under: until "
                "that is destroyed, or the process ends", [self.where],
                "make the mesh again, under the process group that there is now: "
                "weft.init_mesh(...)")
        return self.group


def backend_of(group: Any, device_type: str) -> str | None:
    """The backend by which a group carries a device type."""
    entries = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    return dict(entry.split(":") for entry in entries).get(device_type)


def gave_up(
    op: str, where: str, error: RuntimeError, roll: DebugCompare, ranks: Sequence[int]
) -> CommunicationError:
    """The error of a rank whose peers did not come."""
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else "no reason"
    known = roll.last_words(ranks, f"stopped at {op} over {where}, at {source_line()}")
    return CommunicationError(
        f"{op.split()[0]} over {where}", f"rank {roll.rank} stopped waiting: {reason}",
        f"every rank of a group issues the same collectives, each within the timeout "
        f"({timeout().total_seconds():g} s), and lives until all are done", lines(known),
        "see the first error that any rank printed; no `if rank == 0:` around what "
        "communicates; WEFT_DEBUG=1 compares what the ranks ask for before they do it (without "
        "it, numbers read before this error may be wrong, too); if ranks merely need longer, "
        "WEFT_TIMEOUT=600")
