"""Graph edges of results on a rank whose shard is empty.

torch's kernels may drop edges of empty tensors, and gradients of them may drop theirs. A transition
behind a dropped edge would leave the other ranks waiting. So the results are tied to the operands
that get a gradient on other ranks, to the same order of derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.tensor.trace.derivatives import Behind, Constant, Curved
from weft.tensor.trace.trees import flatten, map_tensors
from weft.tensor.versions import preserved

__all__ = ["tie", "tied", "tying"]


def tied(out: Any, anchor: Sequence[Sequence[int]], locals_: Sequence[torch.Tensor]) -> Any:
    """The results with graph edges, each to the operands that `anchor` names for it, and to the
    results behind it: so their gradients are complete in the order of other ranks."""
    results, done = flatten(out), dict[int, torch.Tensor]()
    for at in range(len(results)):
        _tie_result(at, results, done, anchor, locals_)
    each = iter(range(len(results)))
    return map_tensors(lambda _: done[next(each)], out)


def _tie_result(
    at: int, results: Sequence[torch.Tensor], done: dict[int, torch.Tensor],
    anchor: Sequence[Sequence[int]], locals_: Sequence[torch.Tensor],
) -> torch.Tensor:
    """No closure that calls itself: it would hold the tensors until garbage is collected."""
    if at not in done:
        behind = [
            _tie_result(one, results, done, anchor, locals_)
            for one in anchor[at] if type(one) is Behind
        ]
        ends = _ends([one for one in anchor[at] if type(one) is not Behind], locals_)
        done[at] = tie(results[at], [*ends, *behind])
    return done[at]


def tying(local: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose result gets an edge to each operand that requires a gradient."""
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [one for one in flatten((args, kwargs)) if one.requires_grad]
        return tie(local(*args, **kwargs), given)

    return run


def _ends(edges: Sequence[int], locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ends of the edges. If a gradient depends on tensors on the other ranks, so does that of a
    product here."""
    ends = {at: _end(locals_[at], at) for at in edges}
    found = list(ends.values())
    for at in edges:
        if type(at) is Curved and not at.on:
            found.append(_with_a_graph(_zero(ends[at])))
        for other in at.on if type(at) is Curved else ():
            if other == at:
                found.append(_zero(ends[at]).expm1())  # it has derivatives of any order
            elif other in ends:
                found.append(_zero(ends[at]) * _zero(ends[other]))
    return found


def _with_a_graph(zero: torch.Tensor) -> torch.Tensor:
    """The number, whose gradient has a graph in which nothing has a gradient: that of a convolution
    of which only one operand wants one. Ranks would not agree on what requires a gradient."""
    return torch.conv1d(zero.view(1, 1, 1), zero.new_ones(1, 1, 1)).view(())


def _end(local: torch.Tensor, at: int) -> torch.Tensor:
    """A tensor with an edge to the operand: where its gradient is a constant on the other ranks,
    it is one here, too, and has no gradient of its own."""
    if type(at) is not Constant:
        return local
    nothing = torch.atleast_1d(local).narrow(0, 0, 0)
    return (torch.view_as_real(nothing) if nothing.is_complex() else nothing).round()


def _zero(local: torch.Tensor) -> torch.Tensor:
    """The sum of no elements: zero whatever the elements are."""
    return torch.atleast_1d(local).narrow(0, 0, 0).sum()


def tie(one: torch.Tensor, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result with a graph edge to each of these operands."""
    if not locals_ or not (one.is_floating_point() or one.is_complex()):
        return one
    zero: Any = sum(map(_zero, locals_))
    if zero.is_complex() and not one.is_complex():
        zero = zero.real
    zero = zero.to(one.dtype)
    if one.grad_fn is None or one._is_view() or any(one is other for other in locals_):
        return one - zero  # -0.0 stays
    with preserved(one):  # a later write counts for what the op has saved of its result
        return one.sub_(zero)
