"""What carries out an op that the op itself cannot carry out on the local tensors.

A `Kernel` runs instead of the op where a dim with `~` is sharded. A `Composite` is ordinary torch
code on global tensors, captured once, so its gradient, its transitions and its layouts come from
the ops that it consists of. A `Local` is a function of local tensors between the layouts of a
decision, for what neither says: reads and writes by index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.comm import BoundMesh
from weft.core import Layout
from weft.rules import Call, Decision

__all__ = ["Algorithm", "Composite", "Kernel", "Local", "Lookup", "replicated"]


@dataclass(frozen=True, slots=True)
class Composite:
    """`function` takes the op's arguments, schema order, all defaults filled in.

    Of lengths it may branch on 0 and 1 alone. Numbers that it computes from lengths are noticed,
    because they are others where the length is: by sums, products and quotients, that is, and not
    by a maximum over lengths.

    One that `writes` changes operands, running statistics, in place: it takes the tensors as they
    are, under autocast too.
    """

    function: Callable[..., Any]
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """`bind(mesh)` gives a function of the local tensors, in the order of the call's tensors.

    `communicates`: the mesh axes over which that function itself communicates.
    `writes` is the same for a call in place: the function then writes to the local target itself.
    """

    decision: Decision
    bind: Callable[[BoundMesh], Callable[..., Any]]
    communicates: tuple[int, ...] = ()
    writes: Callable[[BoundMesh], Callable[..., Any]] | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """`function(shards, *args, **kwargs)` runs in the op's place on the local tensors that the
    decision gives; the arguments are those of the op. `axes` are those of the shards that it
    finishes.
    """

    decision: Decision
    function: Callable[..., Any]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, decision: Decision, function: Callable[..., Any]) -> Kernel:
        """The kernel over the axes that shard what the decision leaves to it."""
        axes = {axis for operand, dim in decision.finish
                for axis in decision.operands[operand].dims[dim]}
        return cls(decision, function, tuple(sorted(axes)))


Algorithm = Composite | Local | Kernel
Lookup = Callable[[Call, Sequence[Layout], Sequence[bool]], Algorithm | Decision | None]


def replicated(call: Call, layouts: Sequence[Layout]) -> Decision:
    """Everything replicated: right for any op, and free when it is so already."""
    mesh = layouts[0].mesh
    return Decision(
        tuple(Layout.replicated(mesh, layout.shape) for layout in layouts),
        tuple(Layout.replicated(mesh, result.shape) for result in call.results),
    )
