"""The report of a dry run: memory, bytes, operations and seconds of a step on one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from weft.comm import Recorded
from weft.core import Mesh
from weft.core.display import AsText
from weft.core.units import nbytes_text, number_text, seconds_text
from weft.dry.advice import advice
from weft.dry.devices import Device
from weft.planner import Links
from weft.transport.trace import trace_events, write_trace
from weft.transport.traffic import Log

__all__ = ["DryRun", "Memory"]


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
        seconds = [("collectives, estimated", self.seconds)]
        if self.compute_seconds is not None:
            seconds += [("computation, estimated", self.compute_seconds),
                        ("both, one after the other", self.step_seconds)]
        what = f"step {self.step}" if self.step else "the program"
        return "\n".join([
            f"rank {self.rank} of {self.mesh.size():,} ({sizes}), {what}",
            *[f"  {name:26}{nbytes_text(nbytes):>12}" for name, nbytes in rows if nbytes],
            f"  {'operations':26}{number_text(self.flops):>12}",
            *[f"  {name:26}{seconds_text(each):>12}" for name, each in seconds],
            *advice(self), self.log.summary(),
        ])
