"""Replacements for ops that cannot run on the local tensors themselves.

A `Kernel` runs instead of the op where a dim with `~` is sharded. A `Composite` is ordinary torch
code on global tensors. It is captured once, so its gradient, transitions and layouts come from
the ops that it consists of. A `Local` is a function of local tensors between the layouts of a
decision. It is for ops that need neither of the others: reads and writes by index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.comm import BoundMesh
from weft.core import Layout
from weft.core.dtypes import itemsize
from weft.planner import plan
from weft.rules import Call, Decision

__all__ = ["Algorithm", "Composite", "Kernel", "Local", "Lookup", "received", "replicated"]


@dataclass(frozen=True, slots=True)
class Composite:
    """`function` takes the op's arguments in schema order, with all defaults filled in.

    It may branch on lengths only if they are 0 or 1. It may compute numbers from lengths only by
    sums, products and quotients, which are traced and computed anew for another length. A maximum
    of lengths is not traced.

    With `each_call` it is not recorded: it runs at each call and takes the tensors as they are,
    under autocast too. One that `writes` is an in-place op that changes its target itself.
    """

    function: Callable[..., Any]
    each_call: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """`bind(mesh)` gives a function of the local tensors, in the order of the call's tensors.

    `communicates` are the mesh axes over which that function itself communicates.
    `writes` is the same for an in-place call: its function writes to the local target itself.
    `why` tells those who ask for the traffic what is sent, where there is something to say.
    """

    decision: Decision
    bind: Callable[[BoundMesh], Callable[..., Any]]
    communicates: tuple[int, ...] = ()
    writes: Callable[[BoundMesh], Callable[..., Any]] | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """`function(shards, *args, **kwargs)` runs in place of the op on the local tensors of the
    decision, with the op's arguments. `axes` are the axes of the shards that it combines.
    """

    decision: Decision
    function: Callable[..., Any]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, decision: Decision, function: Callable[..., Any]) -> Kernel:
        """The kernel over the axes that shard the dims in `decision.finish`."""
        axes = {axis for operand, dim in decision.finish
                for axis in decision.operands[operand].dims[dim]}
        return cls(decision, function, tuple(sorted(axes)))


Algorithm = Composite | Local | Kernel
Lookup = Callable[[Call, Sequence[Layout], Sequence[bool]], Algorithm | Decision | None]


def replicated(call: Call, layouts: Sequence[Layout]) -> Decision:
    """Everything replicated: right for any op, and free where it already is."""
    mesh = layouts[0].mesh
    return Decision(
        tuple(Layout.replicated(mesh, layout.shape) for layout in layouts),
        tuple(Layout.replicated(mesh, result.shape) for result in call.results),
    )


def received(
    call: Call, layouts: Sequence[Layout], decision: Decision, returns: Sequence[bool]
) -> int:
    """Bytes that all ranks receive when the operands come to the layouts of a decision; those that
    return, as gradients or as the target of a write, count twice."""
    return sum([
        plan(have, due, itemsize(one.dtype)).total_bytes * (2 if back else 1)
        for one, have, due, back in zip(call.tensors, layouts, decision.operands, returns)
    ])
