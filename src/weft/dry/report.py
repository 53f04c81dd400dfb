"""What a dry run says: memory, bytes, operations and seconds of a step on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.comm import Recorded
from weft.core import Mesh
from weft.core.units import nbytes_text, number_text, seconds_text
from weft.planner import Links
from weft.transport.traffic import Log

__all__ = ["DryRun", "Memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors on one rank.

    Args:
        parameters: of modules and of optimizers, as they are sharded.
        buffers: of modules.
        gradients: at the end of the backward, before the optimizer's step.
        state: of optimizers.
        peak: the most that is alive at once in the step that counts.
        peak_overall: likewise, in the whole program. A model that is made on every rank before it
            is distributed shows here.
    """

    parameters: int
    buffers: int
    gradients: int
    state: int
    peak: int
    peak_overall: int

    @property
    def activations(self) -> int:
        """What is alive at the peak beside parameters, buffers, gradients and state: activations,
        gathered parameters, temporary tensors. (At the least: gradients come while activations
        go.)"""
        known = self.parameters + self.buffers + self.gradients + self.state
        return max(0, self.peak - known)


@dataclass(frozen=True)
class DryRun:
    """What one rank holds, receives and computes in a step.

    Args:
        mesh: the mesh.
        rank: whose view it is.
        links: the networks by which seconds are estimated.
        log: its collectives, as `weft.explain()` gives them; `log.summary()`.
        memory: its tensors.
        flops: floating-point operations of products, convolutions and attention (a multiplication
            with an addition counts as two).
        seconds: estimated seconds of the collectives, one after the other, without any computation.
        num_steps: steps of the optimizer that have run. The last one is what counts.
        took_s: seconds that the dry run took.
        recorded: every collective as the communicators saw it.
    """

    mesh: Mesh
    rank: int
    links: Links
    log: Log
    memory: Memory
    flops: int
    seconds: float
    num_steps: int
    took_s: float
    recorded: Sequence[Recorded] = field(repr=False, default=())

    @property
    def nbytes(self) -> int:
        """Bytes that the rank receives."""
        return self.log.nbytes

    def __str__(self) -> str:
        memory = self.memory
        sizes = ", ".join(f"{name}={size}" for name, size in zip(
            self.mesh.axis_names, self.mesh.axis_sizes))
        rows = [
            ("parameters", memory.parameters), ("buffers", memory.buffers),
            ("gradients", memory.gradients), ("optimizer state", memory.state),
            ("activations and others", memory.activations), ("peak of the step", memory.peak),
            ("peak of the program", memory.peak_overall),
        ]
        what = f"step {self.num_steps}" if self.num_steps else "the program"
        return "\n".join([
            f"rank {self.rank} of {self.mesh.size():,} ({sizes}), {what}",
            *[f"  {name:26}{nbytes_text(nbytes):>12}" for name, nbytes in rows if nbytes],
            f"  {'operations':26}{number_text(self.flops):>12}",
            f"  {'collectives, estimated':26}{seconds_text(self.seconds):>12}",
            self.log.summary(),
        ])
