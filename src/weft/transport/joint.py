"""Several transitions at once: one node of autograd's graph, joint reductions.

A Python node costs more than the small operations around it, and on a real network each
reduction costs its latency. The gradients of a weight and of its bias arrive at the same time
and are reduced as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]
from torch._C import _is_any_autocast_enabled as is_autocast_enabled

from weft.comm import Communicator, joined, parts
from weft.transport.nodes import REDUCTIONS, dense, transforms
from weft.transport.traffic import STATE, Note, moving, note, resume
from weft.transport.transition import Transition

__all__ = ["Noted", "move_together", "run_together", "start_together"]


class Noted(Protocol):
    """The call that a transition serves, for the log."""

    @property
    def note(self) -> Note | None: ...

    @property
    def reason(self) -> str: ...


def move_together(transitions: Sequence[Transition], xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """`[transition(x, read_only_use=True) for ...]`, for tensors that require grad while autograd
    records."""
    if len(xs) == 1 or transforms() is not None or any(
        transition.is_special for transition in transitions
    ):
        return [transition(x, read_only_use=True) for transition, x in zip(transitions, xs)]
    if REDUCTIONS.on and any(one.communicates and one.src.is_partial for one in transitions):
        REDUCTIONS.thread.passing()
    return _apply(transitions, *xs)


def run_together(
    transitions: Sequence[Transition], xs: list[Any], noted: Sequence[Noted] = ()
) -> Sequence[Any]:
    """`[transition(x) for ...]` (None stays None); all-reduces of one group are one collective.

    The list gets the results: nothing keeps a tensor that has moved.
    """
    if is_autocast_enabled():  # a backward inside of it: `cat` joins buffers
        with _DisableAutocast():
            return run_together(transitions, xs, noted)
    if transitions and transitions[0].reduction is not None and not STATE.on:
        first = transitions[0].reduction
        for transition, x in zip(transitions, xs):
            if x is None or x.requires_grad or transition.reduction != first:
                break
        else:  # the usual case, without the bookkeeping below
            del x
            return first[0].all_reduce_together(xs, first[1])
    for (comm, kind, _), places in _reductions(transitions, xs, noted).items():
        with _told(transitions, noted, places) if STATE.on else nullcontext():
            together = [xs[place] for place in places]
            for place in places:
                xs[place] = None
            for place, total in zip(places, comm.all_reduce_together(together, kind)):
                xs[place] = total
    return xs


def start_together(
    transitions: Sequence[Transition], xs: Sequence[Tensor], noted: Sequence[Noted]
) -> Callable[[], list[Tensor]]:
    """`run_together` for tensors without history, proceeding until the returned function is called.

    All-reduces of one group, kind and dtype are one collective, whatever their size.
    """
    out = list(xs)
    with _DisableAutocast(), torch.no_grad():
        under_way = []
        for (comm, kind, _), places in _reductions(transitions, out, noted).items():
            flat = joined([xs[place] for place in places])
            with _told(transitions, noted, places) if STATE.on else nullcontext():
                under_way.append((places, comm.start_all_reduce(flat, kind, len(places) > 1)))

    def finished() -> list[Tensor]:
        for places, finish in under_way:
            like = [xs[place] for place in places]
            for place, x, part in zip(places, like, parts(finish(), like)):
                # A copy: as a part it would keep the buffer, in a memory order of no parameter.
                out[place] = torch.empty_like(x).copy_(part)
        return out

    return finished


def _reductions(
    transitions: Sequence[Transition], xs: list[Any], noted: Sequence[Noted]
) -> dict[tuple[Communicator, str, torch.dtype], list[int]]:
    """The places of tensors that one group reduces, by group, kind and dtype. All other transitions
    are carried out here: the list gets their results."""
    joint: dict[tuple[Communicator, str, torch.dtype], list[int]] = {}
    for place, (transition, x) in enumerate(zip(transitions, xs)):
        if x is None:
            continue
        with _resumed(noted, place):
            if transition.reduction is None or x.requires_grad:
                xs[place] = transition(x)
                continue
            if STATE.on:
                transition.report(x.element_size())
        joint.setdefault((*transition.reduction, x.dtype), []).append(place)
    return joint


@contextmanager
def _told(
    transitions: Sequence[Transition], noted: Sequence[Noted], places: Sequence[int]
) -> Iterator[None]:
    """In debug mode, a joint collective counts for the first of its calls and for all
    transitions."""
    texts = [f"{one.text}: {one.src} -> {one.dst}" for one in map(transitions.__getitem__, places)]
    with _resumed(noted, places[0]), moving("; ".join(texts)):
        yield


def _resumed(noted: Sequence[Noted], place: int) -> AbstractContextManager[None]:
    """Moves inside are those of one call."""
    if not (noted and STATE.on):
        return nullcontext()
    return resume(noted[place].note, noted[place].reason)


class _Together(torch.autograd.Function):
    """Transitions as one node; its backward is the reverse transitions, in order."""

    @staticmethod
    def forward(ctx: Any, transitions: Sequence[Transition], *xs: Tensor) -> Any:
        ctx.transitions = transitions
        ctx.note = note()
        ctx.set_materialize_grads(False)
        return tuple([
            transition.as_node(x, read_only_use=True) for transition, x in zip(transitions, xs)
        ])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        transitions = [transition._reverse or transition.reverse for transition in ctx.transitions]
        dense_grads = [None if grad is None else dense(grad) for grad in grads]
        if STATE.on:
            with resume(ctx.note, f"gradient of {ctx.transitions[0].text}"):
                return None, *run_together(transitions, dense_grads)
        return None, *run_together(transitions, dense_grads)


_apply: Any = super(torch.autograd.Function, _Together).apply  # type: ignore[misc]
"""As in `transition`: a run refuses the tensors of functorch transforms."""
