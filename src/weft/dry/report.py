"""The report of a dry run: memory, bytes, operations and seconds of a step on one rank.

It ends with advice: does the step fit, how long is it, and what would change that?
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.comm import Recorded
from weft.core import Mesh
from weft.core.display import AsText
from weft.core.units import nbytes_text, number_text, seconds_text
from weft.dry.compute import Device
from weft.planner import Links
from weft.planner.links import name_of
from weft.transport.trace import trace_events, write_trace
from weft.transport.traffic import Log

__all__ = ["DryRun", "Memory"]

_USABLE = 0.9
"""The part of a device's memory that tensors can have: the allocator leaves gaps, and libraries
have buffers."""

_LESS = {
    "parameters": 'shard parameters over more axes, such as P("dp")',
    "gradients": 'shard parameters over more axes, such as P("dp")',
    "optimizer state": 'shard parameters over more axes, such as P("dp")',
    "temporary tensors of the optimizer": "foreach=False, or shard parameters over more axes",
    "activations": "torch.utils.checkpoint, fewer samples a rank, or sequences sharded",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors on one rank.

    Args:
        parameters: those of modules and of optimizers, as they are sharded.
        buffers: of modules.
        gradients: at the end of the backward, before the optimizer's step.
        state: of optimizers.
        peak: the most that is alive at once in the step that counts.
        peak_overall: likewise, in the whole program. A model that is made on every rank before it
            is distributed shows here.
        in_optimizer: whether the peak is in the optimizer's step, by its temporary tensors.
    """

    parameters: int
    buffers: int
    gradients: int
    state: int
    peak: int
    peak_overall: int
    in_optimizer: bool = False

    @property
    def activations(self) -> int:
        """The rest of the peak, beside parameters, buffers, gradients and state: activations,
        gathered parameters, temporary tensors, those of the optimizer too. (At least so much:
        gradients appear while activations go.)"""
        known = self.parameters + self.buffers + self.gradients + self.state
        return max(0, self.peak - known)


@dataclass(frozen=True, repr=False)
class DryRun(AsText):
    """What one rank holds, receives and computes in a step.

    Args:
        mesh: the mesh.
        rank: the rank whose step it is.
        links: the networks by which seconds are estimated.
        log: its collectives, as `weft.explain()` gives them; `log.summary()`.
        memory: its tensors.
        flops: floating-point operations of products, convolutions and attention (a multiplication
            with an addition counts as two).
        seconds: estimated seconds of the collectives, one after the other, without any computation.
        step: the step of the optimizer that counts, from 1 on; 0: the whole program.
        took_s: seconds that the dry run took.
        recorded: every collective as the communicators saw it.
        compute_seconds: estimated seconds of the computation; None where no rates are given.
        device: the device that was named; None where none was.
        meshes: the meshes that the program made itself.
    """

    mesh: Mesh
    rank: int
    links: Links
    log: Log
    memory: Memory
    flops: int
    seconds: float
    step: int
    took_s: float
    recorded: Sequence[Recorded] = ()
    compute_seconds: float | None = None
    device: Device | None = None
    meshes: tuple[Mesh, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of collectives and computation, one after the other."""
        return self.seconds + (self.compute_seconds or 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes that the rank receives."""
        return self.log.nbytes

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the collectives, one after the other with their estimated seconds, to a file for
        trace viewers.

        Args:
            path: the path of the file, which has the format of `weft.trace`.
        """
        write_trace(path, trace_events(self.log, self.rank))

    def __repr__(self) -> str:
        return (f"DryRun(rank {self.rank} of {self.mesh.size():,}, "
                f"peak {nbytes_text(self.memory.peak)}, {nbytes_text(self.nbytes)} received, "
                f"{seconds_text(self.step_seconds)})")

    def __str__(self) -> str:
        memory = self.memory
        sizes = ", ".join(f"{name}={size}" for name, size in zip(
            self.mesh.axis_names, self.mesh.axis_sizes))
        rows = [
            ("parameters", memory.parameters), ("buffers", memory.buffers),
            ("gradients", memory.gradients), ("optimizer state", memory.state),
            ("temporary, in the optimizer" if memory.in_optimizer else "activations and others",
             memory.activations), ("peak of the step", memory.peak if self.step else 0),
            ("peak of the program", memory.peak_overall),
        ]
        network = name_of(self.links)
        seconds = [("collectives, estimated" + (f" ({network})" if network else ""), self.seconds)]
        if self.compute_seconds is not None:
            seconds += [("computation, estimated", self.compute_seconds),
                        ("both, one after the other", self.step_seconds)]
        what = f"step {self.step}" if self.step else "the program"
        return "\n".join([
            f"rank {self.rank} of {self.mesh.size():,} ({sizes}), {what}",
            *[f"  {name:30}{nbytes_text(nbytes):>12}" for name, nbytes in rows if nbytes],
            f"  {'operations':30}{number_text(self.flops):>12}",
            *[f"  {name:30}{seconds_text(each):>12}" for name, each in seconds],
            *_advice_on_memory(self), *_advice_on_seconds(self), self.log.summary(),
        ])


def _advice_on_memory(run: DryRun) -> list[str]:
    memory, device = run.memory, run.device
    name, nbytes = max(_parts(memory).items(), key=lambda part: part[1])
    verb = "is" if name == "optimizer state" else "are"
    most = f"{name} {verb} {nbytes / max(memory.peak, 1):.0%} of the peak"
    if device is None:
        return [f"memory: {most}"]
    usable = _USABLE * device.nbytes
    size = f"{nbytes_text(device.nbytes)} of one {device.name.upper()}"
    if memory.peak > usable:
        return [f"memory: too much for the {size}, {memory.peak / device.nbytes:.0%} of them used",
                f"  {most}", f"  less: {_LESS[name]}"]
    if memory.peak_overall > usable:
        return [f"memory: a step fits into the {size}, what comes before does not",
                '  less: make the model under torch.device("meta"), and weft.nn.materialize it']
    return [f"memory: fits into the {size}, {memory.peak / device.nbytes:.0%} of them used",
            f"  {most}"]


def _parts(memory: Memory) -> dict[str, int]:
    return {"parameters": memory.parameters, "gradients": memory.gradients,
            "optimizer state": memory.state,
            "temporary tensors of the optimizer" if memory.in_optimizer else "activations":
                memory.activations}


def _advice_on_seconds(run: DryRun) -> list[str]:
    if run.compute_seconds is None or not run.step_seconds:
        return []
    share = run.seconds / run.step_seconds
    lines = [f"seconds: {seconds_text(run.step_seconds)} a step if nothing overlaps, "
             f"{share:.0%} in collectives"]
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for event in run.log.events:
        sums[",".join(event.axes), event.collective] += event.seconds or 0.0
    if sums:
        (axis, collective), seconds = max(sums.items(), key=lambda each: each[1])
        lines.append(f"  most in {collective} over {axis}: {seconds_text(seconds)}")
        if share > 0.5:
            lines.append(f"  less: more samples a rank, or fewer ranks along {axis}")
    return lines
