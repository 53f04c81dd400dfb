"""What an algorithm is: more than a rule, less than a special case in the dispatcher.

A `Composite` is ordinary torch code on global tensors, captured once, so its gradient, its
transitions and its layouts come from the ops that it consists of. A `Local` is a function of
local tensors between a decision's layouts, for what no composition of torch ops says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.comm import BoundMesh
from weft.core import Layout
from weft.rules import Call, Decision

__all__ = ["Algorithm", "Composite", "Local", "Lookup", "replicated", "where_cut"]


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


Algorithm = Composite | Local
Lookup = Callable[[Call, Sequence[Layout], Sequence[bool]], Algorithm | Decision | None]


def replicated(call: Call, layouts: Sequence[Layout]) -> Decision:
    """Everything replicated: right for any op, and free when it is so already."""
    mesh = layouts[0].mesh
    return Decision(
        tuple(Layout.replicated(mesh, layout.shape) for layout in layouts),
        tuple(Layout.replicated(mesh, result.shape) for result in call.results),
    )


def where_cut(
    function: Callable[..., Any], serves: Callable[[Call], bool] = lambda call: True
) -> Lookup:
    """Finds the Composite of a function for calls that it `serves`, of which an operand is cut or
    partial; others are their own local call. The function's docstring stands in `docs/ops.md`.
    """
    def lookup(
        call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
    ) -> Composite | None:
        if all(layout.is_replicated for layout in layouts) or not serves(call):
            return None
        return Composite(function)

    lookup.__doc__ = function.__doc__
    return lookup
