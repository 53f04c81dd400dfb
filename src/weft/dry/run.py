"""`weft.dry_run`: a program as one rank of any number, without data, memory or other ranks.

`dry_classes`: as one of each class of ranks that are equal.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from weft.comm import (
    BoundMesh,
    Recorded,
    RecordingWorld,
    check_takes_mesh,
    recording,
)
from weft.comm.alone import alone
from weft.comm.crew import Crew
from weft.core import Mesh
from weft.core.names import also_called
from weft.dry.compute import Compute, device_named
from weft.dry.kernels import fused_kernels
from weft.dry.report import DryRun, Memory
from weft.dry.stand_ins import Devices, stand_ins
from weft.dry.tensors import DryTensors
from weft.errors import MeshError, ShardTypeError
from weft.planner import Links
from weft.planner.links import as_links
from weft.tensor.trace.trees import flatten, local_of
from weft.tensor.views.moved import unwrap_view
from weft.transport import traffic

__all__ = ["dry_classes", "dry_run"]


class _Enough(BaseException):
    """Ends a program after its steps. Not an Exception, so that user code passes it on."""


@also_called({"device_type": 'device="h100"'}, device_mesh="mesh")
def dry_run(
    fn: Callable[[BoundMesh], Any], mesh: Mapping[str, int] | Sequence[int] | Mesh,
    links: Links | str | None = None, *, compute: Compute | None = None, steps: int | None = 2,
    rank: int = 0, reads: float = 0.0, device: str | None = None,
) -> DryRun:
    """Run `fn(mesh)` as one rank of a mesh of any size, without data, memory or other ranks.

    The program is the same that runs on real ranks. Every tensor that it makes is a meta tensor,
    whatever device it names. Collectives are recorded. The result says what this rank would hold,
    receive and compute.

    Args:
        fn: the program. If it makes meshes with the same axes itself, they get the sizes of `mesh`.
        mesh: map axis -> size, only sizes, or a mesh value.
        links: the networks by which seconds are estimated: `weft.Links`, a name such as "h100", or
            None for those of the device, or those that are set.
        compute: the rates of a device, by which seconds of computation are estimated: what
            `weft.measure_compute` measured, or `weft.Compute`; None for those of the device.
        steps: the program ends after so many steps of an optimizer. The last one counts, from the
            end of the step before. A program with fewer steps counts as a whole; with None every
            program does.
        rank: which rank it is. With even or default sizes none holds more than rank 0.
        reads: the value that the program gets when it reads one that depends on data, such as a
            loss.
        device: "a100", "h100", "b200" or "gb200"; its data sheet gives links, rates and memory.

    Returns:
        What a step costs: memory, collectives, bytes, operations, seconds.

    Raises:
        MeshError: no such rank.
        ShardTypeError: no step, no links, or no device.
        Exception: whatever the program raises.
    """
    check_takes_mesh("dry_run", fn)
    value = mesh.abstract if isinstance(mesh, Mesh) else Mesh(mesh)
    if not 0 <= rank < value.size():
        raise MeshError(
            "dry_run(rank)", f"rank is {rank}, and {value!r} has {value.size()} ranks",
            "a dry run is that of one rank of the mesh", [rank],
            "dry_run(fn, mesh, rank=0)")
    if steps is not None and steps < 1:
        raise ShardTypeError(
            "dry_run(steps)", f"steps is {steps!r}", "a program ends after a step or more, "
            "or by itself", [steps], "steps=2, steps=None")
    kind = device_named(device)
    networks = as_links(device if links is None else links, "dry_run(links)")
    if compute is None and kind is not None:
        compute = kind.compute
    world = RecordingWorld(rank, value)
    start = time.perf_counter()
    tensors = DryTensors(reads, world, compute)

    def other(number: int) -> None:
        """A rank that sends this one what it waits for; nothing of it counts."""
        there = RecordingWorld(number, value)
        there.crew = crew
        with _as_rank(there, DryTensors(reads, there)):
            fn(there.bind(value, "meta"))

    crew = world.crew = Crew(rank, other, [_Script()])
    with traffic.record() as log, fused_kernels(), stand_ins(), _as_rank(world, tensors):
        clock = _Clock(log, value, networks)
        world.heard = clock.heard
        counted = _Counted(tensors, log, world, clock, steps)
        with counted.hooks(), suppress(_Enough), crew.running(), _says_what_was_read(tensors):
            fn(world.bind(value, "meta"))
        found = counted.result(value, rank, networks, start)
        return replace(found, device=kind, meshes=tuple(world.made))


def dry_classes(
    fn: Callable[[BoundMesh], Any], mesh: Mapping[str, int] | Sequence[int] | Mesh,
    links: Links | str | None = None, *, ranks: Sequence[int] | None = None, **options: Any,
) -> list[DryRun]:
    """Dry runs of several ranks, one for each class of ranks with equal reports.

    Ranks differ where shards are uneven, and in the stages of a pipeline.

    Args:
        fn: the program, as for `weft.dry_run`.
        mesh: the mesh, as for `weft.dry_run`.
        links: the network, as for `weft.dry_run`.
        ranks: which ranks; None: those that are first, in the middle or last along each axis. The
            first hold the most with default sizes, and those in the middle have neighbours on both
            sides. Stages of a pipeline have to be named.
        options: the other arguments of `weft.dry_run`, except `rank`.

    Returns:
        The first of each class, the highest peak of memory first, then the most bytes received.

    Raises:
        MeshError: no such rank.
        Exception: whatever `weft.dry_run` raises.
    """
    value = mesh.abstract if isinstance(mesh, Mesh) else Mesh(mesh)
    if ranks is None:
        ends = [sorted({0, size // 2, size - 1}) for size in value.axis_sizes]
        steps = [math.prod(value.axis_sizes[axis + 1:]) for axis in range(value.ndim)]
        ranks = [sum(map(math.prod, zip(at, steps))) for at in itertools.product(*ends)]
    found: dict[Any, DryRun] = {}
    for rank in ranks:
        one = dry_run(fn, value, links, rank=rank, **options)
        found.setdefault((one.memory, one.flops, tuple(one.log.events)), one)
    return sorted(found.values(), key=lambda one: (-one.memory.peak, -one.nbytes))


@contextmanager
def _as_rank(world: RecordingWorld, tensors: DryTensors) -> Iterator[None]:
    """Inside, this thread is the world's rank, and its tensors have no data."""
    world.known, world.learn = tensors.known, tensors.learn
    with recording(world), alone(world), Devices(tensors), tensors:
        yield


@contextmanager
def _says_what_was_read(tensors: DryTensors) -> Iterator[None]:
    """An error of the program says that values which it had read are not those of a run."""
    try:
        yield
    except Exception as error:
        if tensors.num_guessed:
            error.add_note(
                f"  in a dry run, where data have no values: {tensors.num_guessed} reads had "
                f"{tensors.reads} instead (reads= is another value)")
        raise


class _Script:
    """What a script takes for its own: its module, and its number in the environment."""

    def get_state(self) -> tuple[Any, str | None]:
        return sys.modules.get("__main__"), os.environ.get("RANK")

    def set_state(self, state: tuple[Any, str | None]) -> None:
        module, number = state
        sys.modules["__main__"] = module
        if number is not None:
            os.environ["RANK"] = number


class _Clock:
    """Estimated seconds: of all collectives, and of each event of the log.

    An event is reported before its collective. One collective may serve several (gradients that
    are reduced together): each has its share by bytes.
    """

    def __init__(self, log: traffic.Log, mesh: Mesh, links: Links) -> None:
        self.log, self.mesh, self.links = log, mesh, links
        self.names = [str(name) for name in mesh.axis_names]
        self.seconds, self.seen = 0.0, 0
        self.waiting: list[int] = []
        self.served: dict[tuple[str, ...], list[int]] = {}

    def heard(self, collective: Recorded, of_torch: bool) -> None:
        if of_torch and collective.op != "send":  # a message counts where it arrives
            with traffic.label(f"torch.distributed.{collective.op}"):
                traffic.emit("", tuple(map(str, collective.axes)), collective.op,
                             collective.received_nbytes)
        names = tuple(map(str, collective.axes))
        seconds = 0.0 if collective.op == "send" else self._seconds(collective)
        self.seconds += seconds
        events = self.log.events
        self.waiting += range(self.seen, len(events))
        self.seen = len(events)
        mine = [at for at in self.waiting if events[at].axes == names]
        if mine:
            self.served[names] = mine
            self.waiting = [at for at in self.waiting if at not in mine]
        mine = self.served.get(names, [])
        total = sum(events[at].nbytes for at in mine)
        for at in mine:
            share = events[at].nbytes / total if total else 1 / len(mine)
            events[at] = replace(events[at], seconds=(events[at].seconds or 0.0) + share * seconds)

    def _seconds(self, collective: Recorded) -> float:
        names = [str(name) for name in collective.axes if str(name) in self.names]
        mesh, axes = self.mesh, [self.names.index(name) for name in names]
        if collective.ranks:
            mesh, axes = Mesh({(*names, "ranks")[0]: len(collective.ranks)}, collective.ranks), [0]
        passes = 2 if collective.op == "all_reduce" else 1
        return self.links.seconds_over(
            mesh, axes or range(mesh.ndim), collective.received_nbytes, passes)


class _Counted:
    """The counts of a program, of the last of its steps."""

    def __init__(
        self, tensors: DryTensors, log: traffic.Log, world: RecordingWorld, clock: _Clock,
        steps: int | None,
    ) -> None:
        self.tensors, self.log, self.world, self.steps = tensors, log, world, steps
        self.clock = clock
        self.num_steps = self.gradients = self.peak_before_step = self.peak_before = 0
        self.before: Sequence[Any] = (0,) * len(self._amounts())
        """The amounts when the step that counts began."""
        self.thread = threading.get_ident()
        self.modules: dict[int, torch.nn.Module] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Hook the modules and the optimizers."""
        handles = [
            register_module_forward_pre_hook(self._entered),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        if id(module) not in self.modules and self._is_here():
            self.modules.update((id(part), part) for part in module.modules())

    def _is_here(self) -> bool:
        """Whether this thread's rank counts."""
        return threading.get_ident() == self.thread

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._is_here():
            return
        self.optimizers.setdefault(id(optimizer), optimizer)
        found = [
            one.grad for group in optimizer.param_groups for one in group["params"]
            if one.grad is not None
        ]
        self.gradients = max(self.gradients, _nbytes(found))
        self.peak_before_step = self.tensors.meter.peak

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not self._is_here() or optimizer is not next(iter(self.optimizers.values())):
            return
        self.num_steps += 1
        if self.num_steps == self.steps:
            raise _Enough
        if self.steps is not None and self.num_steps == self.steps - 1:
            self._begin()

    def _begin(self) -> None:
        """Count from here on, if the program goes on for a step."""
        meter = self.tensors.meter
        self.before, self.peak_before = self._amounts(), meter.peak
        meter.peak = meter.live

    def _amounts(self) -> Sequence[Any]:
        """Events, collectives, operations, seconds of collectives and of computation so far."""
        return (len(self.log.events), len(self.world.log), self.tensors.flops, self.clock.seconds,
                self.tensors.seconds)

    def result(self, mesh: Mesh, rank: int, links: Links, start: float) -> DryRun:
        """The counts, as a report."""
        before, peak, log = self.before, self.tensors.meter.peak, self.log
        overall = max(self.peak_before, peak)
        step = self.num_steps if self.num_steps == self.steps else 0
        if not step:
            before, peak = (0,) * len(before), overall
        _, _, flops, seconds, computing = (
            now - then for now, then in zip(self._amounts(), before))
        log.events = log.events[before[0]:]
        return DryRun(
            mesh, rank, links, log, self._memory(peak, overall), flops, seconds, step,
            time.perf_counter() - start, self.world.log[before[1]:],
            None if self.tensors.compute is None else computing,
        )

    def _memory(self, peak: int, overall: int) -> Memory:
        parameters = [one for part in self.modules.values() for one in part._parameters.values()]
        buffers = [one for part in self.modules.values() for one in part._buffers.values()]
        trained = [
            one for optimizer in self.optimizers.values() for group in optimizer.param_groups
            for one in group["params"]
        ]
        state = [
            one for optimizer in self.optimizers.values()
            for one in flatten(list(optimizer.state.values()))
        ]
        return Memory(
            _nbytes([*parameters, *trained]), _nbytes(buffers), self.gradients, _nbytes(state),
            peak, overall, bool(self.optimizers) and peak > self.peak_before_step,
        )


def _nbytes(tensors: Sequence[Any]) -> int:
    """Bytes of local tensors; each storage counts once."""
    storages = {}
    for one in tensors:
        if one is not None:
            storage = unwrap_view(local_of(one)).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
