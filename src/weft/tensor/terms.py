"""Gradient terms of leaves, reduced together at the end of a backward.

A replicated leaf that a varying op uses (I -> R) needs the sum of what the ranks find. An autograd
node that reduces costs more than the small ops around it, and each node reduces by itself. So such
a use sees a leaf of its own, `Term.seen`: it shares the memory of the tensor, its gradient is
this rank's term, and torch's own C++ accumulates all uses in it. When the backward is over, the
terms of all leaves (and the loss) are reduced in as few collectives as `all_reduce_together`
allows, and accumulated in the leaves themselves, whose hooks see the whole. That the engine calls
back at the end of a backward is how DistributedDataParallel finishes its buckets, too
(torch/csrc/distributed/c10d/reducer.cpp).

It serves leaves that weft made (`own`): a user's own plain leaf may be asked for by
`torch.autograd.grad`, which would find nothing behind it. Leaves that have hooks go by a node,
because a hook sees one gradient per backward, the sum over all uses.

All ranks run the same graph, so terms arrive in the same order everywhere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id  # type: ignore[attr-defined]

from weft.comm import this_world
from weft.errors import UnsupportedOpError, message
from weft.transport import run_together, traffic
from weft.transport.transition import Transition

__all__ = [
    "Term", "discard", "fired", "flush_riders", "own", "retire", "ride", "summed",
    "term_of", "terms_of",
]

_TERMS, _FIRED = "_weft_terms", "_weft_fired"
_engine: Any = torch.autograd.Variable._execution_engine


class Term:
    """A leaf as those computations see it that vary over the axes of `transition`, an I -> R.

    It serves while the leaf's memory is where it was: `seen` has the same memory (or is zero, on
    axes over which it becomes a term that another coordinate keeps).
    """

    __slots__ = ("__weakref__", "address", "local", "note", "seen", "transition")

    def __init__(self, local: Tensor, transition: Transition) -> None:
        self.local, self.transition = local, transition
        self.address: int | None = local.data_ptr()
        self.note = traffic.note()
        self.seen = transition(local.detach()).detach().requires_grad_()
        self.seen.register_post_accumulate_grad_hook(self._arrived)

    @property
    def reason(self) -> str:
        """Why it is reduced, for the log."""
        return f"gradient of {self.transition.text}"

    def _arrived(self, _: Tensor) -> None:
        task = _current_graph_task_id()
        arrived = _ARRIVED.get(task)
        if arrived is None:
            arrived = _ARRIVED[task] = []
            _engine.queue_callback(lambda: _finish(task))
        arrived.append(self)


_ARRIVED: dict[int, list[Term]] = {}
"""The terms that each running backward (torch's number of it) has found."""


def own(local: Tensor) -> Tensor:
    """Say that no user holds this leaf but through its ShardTensor."""
    if local.requires_grad and local.is_leaf and not hasattr(local, _TERMS):
        setattr(local, _TERMS, [])
    return local


def term_of(local: Tensor, transition: Transition) -> Term | None:
    """A new term of a leaf; None where only an autograd node will do."""
    made = getattr(local, _TERMS, None)
    if made is None or not transition.enters or local._backward_hooks:  # type: ignore[attr-defined]
        return None
    if local._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        return None
    term = Term(local, transition)
    made[:] = [ref for ref in made if ref() is not None]
    made.append(weakref.ref(term))
    return term


def terms_of(local: Tensor) -> list[Term]:
    """What stands for this leaf in the graphs that are alive."""
    found = [ref() for ref in getattr(local, _TERMS, ())]
    return [term for term in found if term is not None]


def retire(local: Tensor) -> None:
    """This leaf has hooks from now on: the next forward goes by nodes."""
    for term in terms_of(local):
        term.address = None


def summed(
    found: Sequence[Tensor | None], terms: Sequence[Sequence[Term]]
) -> list[Tensor | None]:
    """The gradients of leaves, from those of the leaves themselves and then of all their terms."""
    totals = list(found[: len(terms)])
    owners = [(at, term) for at, of_leaf in enumerate(terms) for term in of_leaf]
    reduced = run_together(
        [term.transition.reverse for _, term in owners], found[len(terms):],
        [term for _, term in owners],
    )
    for (at, _), part in zip(owners, reduced):
        if part is not None:
            total = totals[at]
            totals[at] = part if total is None else total + part
    return totals


class _Rider:
    """A value that is reduced along with the gradients: the loss."""

    __slots__ = ("note", "take", "transition", "value")
    reason = "the value of the loss, for every rank"

    def __init__(
        self, value: Tensor, transition: Transition, take: Callable[[Tensor], None]
    ) -> None:
        self.value, self.transition, self.take = value, transition, take
        self.note = traffic.note()


class _Riders(threading.local):
    def __init__(self) -> None:
        self.waiting: list[_Rider] = []


_RIDERS = _Riders()


def ride(value: Tensor, transition: Transition, take: Callable[[Tensor], None]) -> None:
    """Reduce `value` with what the next backward of this thread reduces; `take` gets the result."""
    _RIDERS.waiting.append(_Rider(value, transition, take))


def flush_riders() -> None:
    """The backward had no terms to reduce."""
    if _RIDERS.waiting:
        _reduce([])


def fired(local: Tensor) -> None:
    """A hook of this leaf has seen the gradient of a use that does not vary."""
    setattr(local, _FIRED, _current_graph_task_id())


def discard() -> None:
    """A backward of this rank has failed: what it had found is not a gradient of anything."""
    _RIDERS.waiting.clear()
    world = this_world()
    for task, arrived in list(_ARRIVED.items()):
        if arrived[0].transition.mesh.world is world:
            for term in _ARRIVED.pop(task):
                term.seen.grad = None


def _finish(task: int) -> None:
    """The end of a backward."""
    arrived = [term for term in _ARRIVED.pop(task) if term.seen.grad is not None]
    late = [term for term in arrived if getattr(term.local, _FIRED, None) == task]
    if late:
        raise UnsupportedOpError(
            message("backward", f"{len(late)} leaves have hooks that were registered between "
                    "forward and backward, and uses both varying and not over a mesh axis",
                    "a hook sees the sum of the gradients of all uses, once",
                    [f"a leaf {term.transition.src}" for term in late],
                    "register hooks before the forward")
        )
    _reduce(arrived)


def _reduce(arrived: Sequence[Term]) -> None:
    riders, _RIDERS.waiting = _RIDERS.waiting, []
    found: list[Any] = []
    for term in arrived:
        found.append(term.seen.grad)
        term.seen.grad = None
    moves = [term.transition.reverse for term in arrived]
    if riders:
        moves += [rider.transition for rider in riders]
        found += [rider.value for rider in riders]
    totals = run_together(moves, found, (*arrived, *riders))
    for term, total in zip(arrived, totals):
        _accumulate(term.local, total)
    for rider, total in zip(riders, totals[len(arrived):]):
        rider.take(total)


def _accumulate(local: Tensor, total: Tensor) -> None:
    """What torch's AccumulateGrad does, whose way is longer and copies what Python holds."""
    grad = local.grad
    if (
        local._use_count() > 1  # type: ignore[attr-defined]  # somebody may have hooked that node
        or local._backward_hooks or local._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        or total.requires_grad or (grad is not None and grad.requires_grad)
        or total.stride() != local.stride()
    ):
        graph = total.requires_grad
        _engine.run_backward(
            (local,), (total,), graph, graph, (), allow_unreachable=True, accumulate_grad=True
        )
    elif grad is None:
        local.grad = total
    else:
        grad.add_(total)
