"""Backwards: partial gradients are reduced when a backward ends.

When a backward is over, the partial values that have arrived (and the loss) are reduced in as few
collectives as `all_reduce_together` allows, and accumulated in the leaves themselves, whose hooks
see the whole. A backward that did not begin at torch.autograd ends with a callback of the engine,
as DistributedDataParallel's buckets do (torch/csrc/distributed/c10d/reducer.cpp).

Gradients are reduced in the order in which the forward used the leaves, which all ranks share. They
need not arrive in this order: for an empty operand torch's own ops may make another graph, in which
two leaves get their gradients in reverse order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, is_grad_enabled
from torch._C import (  # type: ignore[attr-defined]
    _current_graph_task_id,
    _will_engine_execute_node,
)
from torch.autograd import Variable
from torch.autograd.graph import _get_grad_fn_or_grad_acc

from weft.core.scopes import setting
from weft.tensor.leaves import LEAVES, Leaf, uses_of
from weft.transport import run_together, traffic
from weft.transport.joint import Noted
from weft.transport.transition import Transition

__all__ = [
    "Backward", "Found", "Holding", "Use", "accumulate", "arrive", "completed", "has_hooks",
    "holding", "in_backward", "of_leaves", "running", "taken",
]

_engine: Any = Variable._execution_engine


class Use(Noted, Protocol):
    """A use of a leaf by computations that vary: `leaf_gradients.LeafUse`."""

    local: Tensor
    transition: Transition

    def to_reduce(self, grad: Tensor) -> Tensor: ...

    def reduced(self, total: Tensor) -> Tensor: ...


class _OfThread(threading.local):
    innermost: Backward | None = None
    holding: Holding | None = None


_OF_THREAD = _OfThread()


class Holding:
    """Gradients that stay partial over several backwards, until they are reduced on request.

    Args:
        leaves: those whose gradients stay partial.

    `leaves` are kept by id. `uses`: the gradients that have arrived, by stand-in (casts of one leaf
    together): the number, the `LeafUse`, and the holder of the gradient. `others`: holders of
    gradients that have arrived elsewhere, with their numbers.
    """

    __slots__ = ("leaves", "others", "uses")

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self.leaves = frozenset(map(id, leaves))
        self.uses: dict[Any, tuple[int, Any, Any]] = {}
        self.others: dict[Any, int] = {}

    def drop(self) -> None:
        """Forget all of it."""
        for _, _, seen in self.uses.values():
            seen.grad = None
        for other in self.others:
            other.drop()


def holding(held: Holding) -> AbstractContextManager[None]:
    """Backwards that begin inside leave gradients partial."""
    return setting(_OF_THREAD, holding=held)


class Found:
    """The findings of one graph task of the engine: uses, each with its number and its stand-in,
    and leaves with postponed hooks and the gradients held back for them."""

    __slots__ = ("creates_graph", "early", "held", "uses")

    def __init__(self, creates_graph: bool) -> None:
        self.creates_graph = creates_graph
        self.uses: list[tuple[int, Use, Tensor]] = []
        self.held: list[tuple[Tensor, Tensor | None]] = []
        self.early: list[Any] = []  # of `grad.bucketed_reduction`: those that are under way


class _Rider:
    """A value that is reduced along with the gradients: the loss."""

    __slots__ = ("note", "take", "transition", "value")
    reason = "the value of the loss, for every rank"

    def __init__(
        self, value: Tensor, transition: Transition, take: Callable[[Tensor], None]
    ) -> None:
        self.value, self.transition, self.take = value, transition, take
        self.note = traffic.note()


class Backward:
    """Around a call of the engine: its gradients are reduced at the end, or dropped if it fails.

    One backward may run within another (in a hook, in a reentrant checkpoint).

    Args:
        captures: the engine returns the gradients instead of accumulating them.
    """

    def __init__(self, captures: bool = False) -> None:
        self.captures, self.holding = captures, _OF_THREAD.holding
        self.found: dict[int, Found] = {}
        self.riders: list[_Rider] = []
        self.to_reduce: list[Callable[[], Any]] = []
        self.at_end: list[Callable[[], Any]] = []
        self.failed: list[Callable[[], Any]] = []
        self.late: list[tuple[Tensor, Tensor | None]] = []
        """Of leaves whose hooks wait, parts of the gradient; None where they alone wait."""

    def __enter__(self) -> Backward:
        self.outer = _OF_THREAD.innermost
        _OF_THREAD.innermost = self
        _RUNNING.append(self)
        return self

    def __exit__(self, *failed: Any) -> None:
        _OF_THREAD.innermost = self.outer
        _RUNNING.remove(self)
        if failed and failed[0] is not None:
            for call in self.failed:
                call()
        # What a backward had found when it failed is not a gradient of anything.
        for found in self.found.values():
            for _, _, seen in found.uses:
                seen.grad = None

    def of_task(self) -> Found:
        """The findings of the engine's current task."""
        task = _current_graph_task_id()
        found = self.found.get(task)
        if found is None:
            found = self.found[task] = Found(is_grad_enabled())
            if self is _RUNNING[0]:  # nobody says when it is over
                _engine.queue_callback(lambda: self.finish(task))
        return found

    def when_over(self, call: Callable[[], Any]) -> None:
        """Call `call` once all gradients are there."""
        if self is _RUNNING[0]:  # nobody says when
            _engine.queue_callback(call)
        else:
            self.at_end.append(call)

    def when_found(self, call: Callable[[], Any], failed: Callable[[], Any]) -> None:
        """Call `call` when the engine is done, for gradients that are yet to be reduced; `failed`
        if the backward fails."""
        if self is _RUNNING[0]:
            _engine.queue_callback(call)
        else:
            self.to_reduce.append(call)
            self.failed.append(failed)

    def ride(
        self, value: Tensor, transition: Transition, take: Callable[[Tensor], None]
    ) -> None:
        """Reduce `value` with the gradients; `take` gets the result."""
        with traffic.label("backward"):
            self.riders.append(_Rider(value, transition, take))

    def flush(self) -> None:
        """The engine is done: reduce its gradients, then call whoever waits for the end."""
        while self.found:
            self.finish(next(iter(self.found)))
        if self.riders:
            self.reduce([])
        while self.to_reduce:
            self.to_reduce.pop(0)()
        self.call_hooks()
        while self.at_end:
            self.at_end.pop(0)()

    def call_hooks(self) -> None:
        """Hooks that have waited see the whole gradient, once."""
        late, self.late = self.late, []
        for local, whole in _joined(late):
            accumulate(local, whole, whole is not None and whole.requires_grad)

    def finish(self, task: int) -> None:
        """The end of a task."""
        found = self.found.pop(task)
        found.uses.sort()  # the numbers differ
        uses, reduced = self.reduce(found.uses)
        for early in found.early:
            uses, reduced = [*early.uses, *uses], [*early.land(), *reduced]
        waiting = {id(local) for local, _ in found.held}
        if found.held:
            self.late += found.held
            if self is _RUNNING[0]:
                _engine.queue_callback(self.call_hooks)
        for local, whole in of_leaves(uses, reduced):
            if id(local) in waiting:
                self.late.append((local, whole))
            else:
                accumulate(local, whole, found.creates_graph)

    def reduce(
        self, arrived: Sequence[tuple[int, Use, Tensor]]
    ) -> tuple[Sequence[Use], Sequence[Tensor]]:
        """Reduce the gradients of these uses (number, use, stand-in), and the riders.

        Returns the uses that have a gradient, and the reduced gradients.
        """
        riders, self.riders = self.riders, []
        uses, grads = taken(arrived)
        moves = [use.transition.reverse for use in uses]
        if riders:
            moves += [rider.transition for rider in riders]
            grads += [rider.value for rider in riders]
        totals = run_together(moves, grads, (*uses, *riders))
        for rider, total in zip(riders, totals[len(uses):]):
            rider.take(total)
        return uses, [use.reduced(total) for use, total in zip(uses, totals)]


def taken(arrived: Iterable[tuple[int, Use, Tensor]]) -> tuple[list[Use], list[Any]]:
    """Those of these uses that have a gradient, and the gradients, which their stand-ins lose."""
    uses, grads = [], []
    for _, use, seen in arrived:
        grad = seen.grad
        if grad is not None:
            uses.append(use)
            grads.append(use.to_reduce(grad))
            seen.grad = None
    return uses, grads


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return _current_graph_task_id() != -1


def running() -> Backward:
    """The running backward. On a GPU the engine's own threads ask, too, and get the last one."""
    return _OF_THREAD.innermost or _RUNNING[-1]


_RUNNING = [Backward()]
"""All that run, after one for tasks of the engine that nobody has announced."""


def of_leaves(
    uses: Sequence[Use], totals: Sequence[Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    """One gradient per leaf, so that hooks see the sum over all uses once."""
    return _joined(zip([use.local for use in uses], totals))  # type: ignore[return-value]


def _joined(
    parts: Iterable[tuple[Tensor, Tensor | None]]
) -> list[tuple[Tensor, Tensor | None]]:
    """One gradient per leaf; None where hooks alone wait."""
    whole: dict[int, tuple[Tensor, Tensor | None]] = {}
    for local, part in parts:
        _, known = whole.get(id(local), (local, None))
        if part is not None and known is not None:
            part = known + part
        whole[id(local)] = local, known if part is None else part
    return list(whole.values())


def completed(local: Tensor) -> AbstractContextManager[None]:
    """Inside, hooks of this leaf see its whole gradient."""
    return setting(LEAVES.get(local) or Leaf(), complete_in=running())


def arrive(local: Tensor, total: Tensor) -> None:
    """Accumulate gradients that were reduced beside the engine. Where a leaf has hooks, and the
    engine or another group has a part of its gradient as well, they wait for the end of the
    backward."""
    backward = running()
    is_announced = backward is not _RUNNING[0]
    if has_hooks(local) and (is_announced or in_backward()) and (
        _is_to_come(local) or len(uses_of(local)) > 1
        or any(one is local for one, _ in backward.late)
    ):
        backward.late.append((local, total))
        if not is_announced:
            _engine.queue_callback(backward.call_hooks)
    else:
        accumulate(local, total, False)


def _is_to_come(local: Tensor) -> bool:
    """Whether the engine, if it runs, gives the leaf a gradient of its own, or has done so."""
    return in_backward() and _will_engine_execute_node(_get_grad_fn_or_grad_acc(local))


def has_hooks(local: Any) -> bool:
    """Whether hooks see the gradient of this leaf, or its arrival."""
    return bool(local._backward_hooks or local._post_accumulate_grad_hooks)


def accumulate(local: Tensor, total: Tensor | None, creates_graph: bool) -> None:
    """Accumulate as torch's AccumulateGrad does, which takes longer and copies what Python
    holds."""
    if total is None:
        with completed(local):
            for hook in tuple(local._post_accumulate_grad_hooks.values()):  # type: ignore
                hook(local)
        return
    grad = local.grad
    if (
        local._use_count() > 1  # type: ignore[attr-defined]  # somebody may have hooked that node
        or has_hooks(local)
        or creates_graph or (grad is not None and grad.requires_grad)
        or total.stride() != local.stride()
    ):
        if local.requires_grad:  # as it did in the forward
            with completed(local):
                _engine.run_backward(
                    (local,), (total,), creates_graph, creates_graph, (), allow_unreachable=True,
                    accumulate_grad=True,
                )
    elif not local.requires_grad:
        return
    elif grad is None:
        # Several totals may be views of one buffer; gradients have nothing in common.
        local.grad = total.data if total._is_view() else total
    else:
        grad.add_(total)
