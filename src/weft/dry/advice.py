"""The advice of a dry run: does the step fit, how long is it, and what would change that?"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from weft.core.units import nbytes_text, seconds_text

if TYPE_CHECKING:
    from weft.dry.report import DryRun, Memory

__all__ = ["advice", "largest_collective"]

USABLE = 0.9
"""The part of a device's memory that tensors can have: the allocator leaves gaps, and libraries
have buffers."""

_LESS = {
    "parameters": 'shard parameters over more axes, such as P("dp")',
    "gradients": 'shard parameters over more axes, such as P("dp")',
    "optimizer state": 'shard parameters over more axes, such as P("dp")',
    "temporary tensors of the optimizer": "foreach=False, or shard parameters over more axes",
    "activations": "torch.utils.checkpoint, fewer samples a rank, or sequences sharded",
}


def advice(run: DryRun) -> list[str]:
    """Sentences, one on each line."""
    return [*_of_memory(run), *_of_seconds(run)]


def _of_memory(run: DryRun) -> list[str]:
    memory, device = run.memory, run.device
    name, nbytes = max(_parts(memory).items(), key=lambda part: part[1])
    verb = "is" if name == "optimizer state" else "are"
    most = f"{name} {verb} {nbytes / max(memory.peak, 1):.0%} of the peak"
    if device is None:
        return [f"memory: {most}"]
    usable = USABLE * device.nbytes
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


def _of_seconds(run: DryRun) -> list[str]:
    if run.compute_seconds is None or not run.step_seconds:
        return []
    share = run.seconds / run.step_seconds
    lines = [f"seconds: {seconds_text(run.step_seconds)} a step if nothing overlaps, "
             f"{share:.0%} in collectives"]
    largest = largest_collective(run)
    if largest is not None:
        axis, collective, seconds = largest
        lines.append(f"  most in {collective} over {axis}: {seconds_text(seconds)}")
        if share > 0.5:
            lines.append(f"  less: more samples a rank, or fewer ranks along {axis}")
    return lines


def largest_collective(run: DryRun) -> tuple[str, str, float] | None:
    """Axes, collective and seconds of the kind of event that takes longest in all."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for event in run.log.events:
        sums[",".join(event.axes), event.collective] += event.seconds or 0.0
    if not sums:
        return None
    (axis, collective), seconds = max(sums.items(), key=lambda each: each[1])
    return axis, collective, seconds
