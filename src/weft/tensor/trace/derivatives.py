"""Which tensors get a gradient from which results of an op, found on meta tensors.

This takes backward passes, also of backward passes, so the result is kept by op and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.tensor.meta import kept
from weft.tensor.takeover import twin_of
from weft.tensor.trace.capture import Op, meta_like, unsaved, unwatched
from weft.tensor.trace.trees import Slot, flatten, replaced, slots_of

__all__ = ["EDGES", "Behind", "Constant", "Curved", "differentiated", "edges"]

EDGES: dict[Any, tuple[tuple[int, ...], ...]] = {}
"""What was asked of ops, with their tensors numbered in order: the same on all simulated ranks."""

MAX_EDGES = 1024

_GRAD: Any = twin_of(torch.autograd.grad)  # type: ignore[arg-type]


def differentiated(
    op: Op, tensors: Sequence[torch.Tensor], wanted: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Per result, which of the `wanted` slots get a gradient from it, at global shape, and which
    other results are `Behind` it."""
    slots = list(dict.fromkeys(slot.index for slot in slots_of((op.args, op.kwargs))))
    numbers = {slot: number for number, slot in enumerate(slots)}
    args, kwargs = replaced((op.args, op.kwargs), Slot, lambda slot: Slot(numbers[slot.index]))
    op = Op(op.overload, args, kwargs, op.results)
    given = [tensors[slot] for slot in slots]
    asked = [numbers[slot] for slot in wanted]
    about = op.overload, repr((args, kwargs)), *asked, *[(one.shape, one.dtype) for one in given]
    found = kept(EDGES, about, lambda: _differentiated(op, given, asked), MAX_EDGES)
    return tuple([tuple([_renumbered(one, slots) for one in mine]) for mine in found])


def _renumbered(edge: int, slots: Sequence[int]) -> int:
    if type(edge) is Behind:
        return edge
    if type(edge) is Curved:
        return Curved.make(slots[edge], [slots[one] for one in edge.on])
    return Constant(slots[edge]) if type(edge) is Constant else slots[edge]


def _differentiated(
    op: Op, tensors: Sequence[torch.Tensor], wanted: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    behind: list[tuple[int, ...]] = []

    def call(given: Callable[[int], torch.Tensor]) -> Any:
        args, kwargs = replaced((op.args, op.kwargs), Slot, lambda slot: given(slot.index))
        out = op.overload(*args, **kwargs)
        behind.extend(_behind([one.grad_fn for one in flatten(out)]))
        return out

    def contiguous_like(index: int) -> torch.Tensor:  # strides do not change the answer
        return torch.empty_like(meta_like(tensors[index]), memory_format=torch.contiguous_format)

    with unwatched():
        try:
            found = edges(call, contiguous_like, wanted)
            return tuple([mine + others for mine, others in zip(found, behind)])
        except (RuntimeError, ZeroDivisionError):
            # Meta tensors do not know its derivative (that of nothing, or it reads a number, as
            # that of a complex svd): all may have one.
            return (tuple(wanted),) * len(slots_of(op.results))


def _behind(nodes: Sequence[Any]) -> list[tuple[int, ...]]:
    """Per result of an op, by the nodes that made them, the other results whose gradient is
    complete no sooner: those that it was made of, and later ones of the same node."""
    if sum(node is not None for node in nodes) < 2:
        return [()] * len(nodes)
    found: list[tuple[int, ...]] = []
    for at, node in enumerate(nodes):
        seen, todo = {node}, [node]
        while todo:
            last = todo.pop()
            more = [] if last is None else [one for one, _ in last.next_functions]
            todo += [one for one in more if one not in seen]
            seen.update(more)
        found.append(tuple([
            Behind(other) for other, one in enumerate(nodes)
            if one is not None and one in seen and (one is not node or other > at)
        ]))
    return found


class Behind(int):
    """The number of a result whose gradient comes from another one, too."""


class Constant(int):
    """The number of a tensor whose gradient does not depend on the result's: as that of `sign`."""


class Curved(int):
    """The number of a tensor whose gradient depends on tensors, too, and so has derivatives itself.

    Attributes:
        on: the numbers of these tensors.
    """

    on: tuple[int, ...]

    @classmethod
    def make(cls, index: int, on: Sequence[int]) -> Curved:
        made = cls(index)
        made.on = tuple(on)
        return made


def edges(
    call: Callable[[Callable[[int], torch.Tensor]], Any],
    sample: Callable[[int], torch.Tensor], wanted: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Per result, which of the `wanted` tensors get a gradient from what `call` makes of samples;
    as `Constant` where that is the same whatever comes back, as `Curved` where it depends on them.

    `sample` makes the one of a number, `call` is given a function that says it.
    """
    known: dict[int, torch.Tensor] = {}

    def given(index: int) -> torch.Tensor:
        if index not in known:
            known[index] = sample(index)
        return known[index].view_as(known[index])  # in-place ops write to no leaf

    leaves = [known.setdefault(index, sample(index)).requires_grad_() for index in wanted]

    def behind(out: torch.Tensor) -> tuple[int, ...]:
        if not out.requires_grad:
            return ()
        grads = _GRAD(
            out, leaves, torch.empty_like(out), retain_graph=True, allow_unused=True
        )
        has = [grad is not None for grad in grads]
        if not any(has):
            return ()
        back = torch.empty_like(out).requires_grad_()
        linear, curved = _again(out, leaves, back), _again(out, leaves, back.detach())
        return tuple(
            _edge(index, again, on, leaves, wanted)
            for index, again, on, mine in zip(wanted, linear, curved, has) if mine
        )

    quietly = torch.autograd.set_detect_anomaly(False)
    with torch.enable_grad(), quietly, unsaved(), unwatched():
        return tuple(map(behind, flatten(call(given))))


def _edge(
    index: int, again: torch.Tensor | None, grad: torch.Tensor | None,
    leaves: Sequence[torch.Tensor], wanted: Sequence[int],
) -> int:
    """The kind of an edge, by the gradient of what has one itself, and of what has none."""
    if again is None or not again.requires_grad:
        return Constant(index)
    if grad is None or not grad.requires_grad:
        return index
    found = _again(grad, leaves, torch.empty_like(grad), create_graph=False)
    return Curved.make(index, [one for one, more in zip(wanted, found) if more is not None])


def _again(
    out: torch.Tensor, leaves: Sequence[torch.Tensor], back: torch.Tensor,
    create_graph: bool = True,
) -> Sequence[torch.Tensor | None]:
    """Gradients that may be differentiated; those of nothing can be where torch knows none."""
    try:
        return _GRAD(
            out, leaves, back, retain_graph=True, create_graph=create_graph, allow_unused=True)
    except (RuntimeError, ZeroDivisionError):
        return [back] * len(leaves)  # nothing can ask for the gradient of this gradient
