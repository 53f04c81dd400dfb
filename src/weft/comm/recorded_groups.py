"""torch's process groups over a recording world: `torch.distributed` as one rank of many.

Every collective that the program itself asks torch for is recorded with what the rank receives, and
moves no data; as in `recording`, what others have is taken from what this rank has. Messages from
rank to rank come from the ranks that send them (`crew`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.crew import Route
from weft.comm.recording import Recorded, RecordingWorld
from weft.core import AxisName
from weft.errors import CommunicationError

__all__ = ["RecordedGroup", "Registry"]


@dataclass(eq=False)
class Registry:
    """What torch keeps of process groups, for one rank: the attributes of its `_World`."""

    world: RecordingWorld
    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)
    pg_config_info: list[Any] = field(default_factory=list)
    groups: dict[tuple[int, ...], RecordedGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        self.default_pg = self.group(tuple(range(world.size)), world.mesh.axis_names)

    def group(self, ranks: tuple[int, ...], axes: tuple[AxisName, ...] = ()) -> RecordedGroup:
        """The one group of these ranks. `axes` are what it runs over, for the record."""
        ranks = tuple(sorted(ranks))
        made = self.groups.get(ranks)
        if made is None:
            name = f"recorded {len(self.groups)}"
            made = self.groups[ranks] = RecordedGroup(self.world, ranks, axes, name)
            self.pg_map[made] = ("gloo", None)
            self.pg_names[made] = name
            self.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
            self.pg_backend_config[made] = "cpu:gloo,cuda:gloo"
        return made

    def new_group(
        self, ranks: Sequence[int] | None = None, *_: Any, group_desc: str | None = None, **__: Any
    ) -> Any:
        """torch's `new_group`. A DeviceMesh says in `group_desc` for which axis it is."""
        chosen = range(self.world.size) if ranks is None else ranks
        if self.world.rank not in chosen:
            return dist.GroupMember.NON_GROUP_MEMBER
        axis = (group_desc or "").removeprefix("mesh_")
        return self.group(tuple(chosen), (axis,) if axis in self.world.mesh.axis_names else ())

    def named(self, name: str) -> Any:
        return next(one for one, given in self.pg_names.items() if given == name)


class _Done(dist.Work):
    """What is over, or is when it is waited for. It keeps the tensors, as torch's does."""

    def __init__(self, kept: Any = (), finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.kept, self.finish = kept, finish

    def wait(self, *_: Any) -> bool:  # type: ignore[override]
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return True


class RecordedGroup(dist.ProcessGroup):
    """The ranks of a group, seen from one of them."""

    def __init__(
        self, world: RecordingWorld, ranks: tuple[int, ...], axes: tuple[AxisName, ...], name: str
    ) -> None:
        super().__init__(ranks.index(world.rank), len(ranks))  # type: ignore[call-arg]
        self.world, self.ranks, self.named = world, ranks, name
        more = ", ..." * (len(ranks) > 4)
        self.axes = axes or (f"ranks {', '.join(map(str, ranks[:4]))}{more}",)
        self.has_axes = bool(axes)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.named

    def rank(self) -> int:
        return self.ranks.index(self.world.rank)

    def size(self) -> int:
        return len(self.ranks)

    def getBackendName(self) -> str:
        return "gloo"

    def _get_backend(self, device: Any) -> Any:
        """Also for meta tensors: torch 2.14 asks whether the backend joins messages."""
        return self

    def _record(self, op: str, nbytes: int, kept: Any = (), between: tuple[int, ...] = ()) -> _Done:
        ranks = between or (() if self.has_axes else self.ranks)
        self.world.record(Recorded(op, self.axes, nbytes, ranks), of_torch=True)
        return _Done(kept)

    def _learn(self, target: Tensor, parts: Sequence[Tensor], make: Callable[..., Tensor]) -> None:
        """The values of a result, where those of all that it is made of are known."""
        known = [self.world.known(one) for one in parts]
        if all(value is not None for value in known):
            with _disable_current_modes():
                self.world.learn(target, make(*known).reshape(target.shape).to(target.dtype))

    # Collectives: bytes as of bandwidth-optimal algorithms, as in `watching`.

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        g, kind = self.size(), None if opts is None else opts.reduceOp
        for one in tensors:
            if kind is None or kind == dist.ReduceOp.SUM:
                self._learn(one, [one], lambda value: value * g)
        return self._record(
            "all_reduce", sum(2 * one.nbytes * (g - 1) // g for one in tensors), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Any:
        received = (self.size() - 1) * tensors[0].nbytes if opts.rootRank == self.rank() else 0
        return self._record("reduce", received, tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        received = 0 if opts.rootRank == self.rank() else sum(one.nbytes for one in tensors)
        return self._record("broadcast", received, tensors)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        for one in outs[0]:
            self._learn(one, ins, lambda value: value.clone())
        return self._record("all_gather", self._of_others(outs[0]), (outs, ins))

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        g = self.size()
        self._learn(out, [x], lambda value: value.reshape(-1).repeat(g))
        return self._record("all_gather", (g - 1) * x.nbytes, (out, x))

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._record("reduce_scatter", (self.size() - 1) * outs[0].nbytes, (outs, ins))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self._record("reduce_scatter", (self.size() - 1) * out.nbytes, (out, x))

    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        mine = outs[0] if opts.rootRank == self.rank() else []
        for one in mine:
            self._learn(one, ins, lambda value: value.clone())
        return self._record("gather", self._of_others(mine), (outs, ins))

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        received = 0 if opts.rootRank == self.rank() else outs[0].nbytes
        return self._record("scatter", received, (outs, ins))

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._record("all_to_all", self._of_others(outs), (outs, ins))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> Any:
        g, at = self.size(), self.rank()
        own = received[at] / max(len(out), 1) if received else 1 / g
        return self._record("all_to_all", round(out.nbytes * (1 - own)), (out, x))

    def barrier(self, opts: Any = None) -> Any:
        return _Done()

    def _of_others(self, parts: Sequence[Tensor]) -> int:
        return sum(one.nbytes for place, one in enumerate(parts) if place != self.rank())

    # Messages.

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        [x] = tensors
        value = self.world.known(x)
        with _disable_current_modes():
            value = None if value is None else value.clone()
        if self.world.crew is not None:
            self.world.crew.send(self._route(self.rank(), target, tag), (x.nbytes, value))
        return self._record("send", 0, tensors, (self.world.rank, self.ranks[target]))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        [x] = tensors
        between = self.ranks[source], self.world.rank
        done = self._record("recv", x.nbytes, tensors, between)
        if self.world.crew is not None:
            take = self.world.crew.ask(self._route(source, self.rank(), tag))
            done.finish = lambda: self._receive(x, take(), between)
        return done

    def _route(self, source: int, target: int, tag: int) -> Route:
        return Route(self.ranks, self.ranks[source], self.ranks[target], tag)

    def _receive(
        self, x: Tensor, sent: tuple[int, Tensor | None], between: tuple[int, int]
    ) -> None:
        nbytes, value = sent
        if nbytes != x.nbytes:
            raise CommunicationError(
                "torch.distributed.recv", f"rank {between[0]} sends {nbytes} bytes, and "
                f"rank {between[1]} receives {x.nbytes}",
                "a message has one size at both ends", [tuple(x.shape)],
                "a tensor of the shape and dtype of what is sent")
        if value is not None:
            with _disable_current_modes():
                value = value.reshape(x.shape)
            self.world.learn(x, value)
