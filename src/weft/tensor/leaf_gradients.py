"""Gradients of replicated leaves, reduced together at the end of a backward.

A replicated leaf that a varying op uses (I -> R) needs the sum of what the ranks find. An autograd
node that reduces costs more than the small ops around it, and each node reduces by itself. So such
a use sees a leaf of its own, `LeafUse.seen`: it shares the memory of the tensor, its gradient is
this rank's partial value, and torch's own C++ accumulates all uses in it. When the backward is
over, the partial values of all leaves (and the loss) are reduced in as few collectives as
`all_reduce_together` allows, and accumulated in the leaves themselves, whose hooks see the whole. A
backward that did not begin at torch.autograd ends with a callback of the engine, as
DistributedDataParallel's buckets do (torch/csrc/distributed/c10d/reducer.cpp).

It serves leaves that weft made (`track_leaf`): a user's own plain leaf may be asked for by
`torch.autograd.grad`, which would find nothing behind it. Leaves that have hooks go by a node,
because a hook sees one gradient per backward, the sum over all uses. A hook that is registered when
the leaf is in use already is deferred: what the engine has found for the leaf itself waits until
the backward is over, and joins the gradients of its uses, with which the hook sees it.

Gradients are reduced in the order in which the forward made the uses, which all ranks share. They
need not arrive in it: of an operand without elements torch's own ops may make another graph, in
which the gradients of two leaves come the other way round.

Who holds whom: a graph holds `seen`, its hook the `LeafUse`, that the leaf. A `LeafUse` holds
`seen` weakly, else none of them would ever be freed: torch shows no cycle through a hook to
Python's collector. Nothing is written on the leaf itself, which users pickle and copy.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (  # type: ignore[attr-defined]
    _current_graph_task_id,
    _will_engine_execute_node,
)
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from weft.tensor import held
from weft.transport import run_together, traffic
from weft.transport.nodes import counting, dense
from weft.transport.transition import Transition

__all__ = [
    "Backward", "LeafUse", "accumulate", "arrive", "before", "completed", "defer_hook",
    "disable_for", "is_put_off", "reduce_held", "replace_leaf", "running", "stand_for", "summed",
    "track_leaf", "use_of", "uses_of",
]

_engine: Any = torch.autograd.Variable._execution_engine


class _Leaf:
    """What is known of a leaf: its uses, the backward that has its whole gradient, and the leaf
    that its tensor was in graphs made before it was laid anew."""

    __slots__ = ("before", "complete_in", "uses")

    def __init__(self) -> None:
        self.uses: list[weakref.ref[LeafUse]] = []
        self.complete_in: Backward | None = None
        self.before: TensorWeakRef | None = None


_LEAVES: Any = WeakTensorKeyDictionary()

_MADE = itertools.count()


class LeafUse:
    """A leaf as those computations see it that vary over the axes of `transition`, an I -> R.

    It serves while the leaf's memory is where it was: `seen` has the same memory (or is zero, on
    axes over which it becomes a partial value that another coordinate keeps).
    """

    __slots__ = ("__weakref__", "_seen", "address", "leaf", "local", "note", "number", "transition")

    def __init__(
        self, leaf: _Leaf, local: Tensor, transition: Transition, seen: Tensor
    ) -> None:
        self.leaf, self.local, self.transition = leaf, local, transition
        self.address: int | None = local.data_ptr()
        self.note = traffic.note()
        self.number = next(_MADE)
        self._seen = TensorWeakRef(seen)

    @property
    def seen(self) -> Tensor | None:
        """What stands for the leaf; None once no graph and no tensor holds it."""
        return self._seen()

    @property
    def reason(self) -> str:
        """Why it is reduced, for the log."""
        return f"gradient of {self.transition.text}"

    def in_own_dtype(self, grad: Tensor) -> Tensor:
        """A gradient of what stands for the leaf, as one of the leaf: it may be seen as a cast."""
        return dense(grad) if grad.dtype is self.local.dtype else dense(grad).to(self.local.dtype)

    def arrived(self, seen: Tensor) -> None:
        """The hook of `seen`: its gradient in this backward is complete."""
        backward = _OF_THREAD.innermost or _RUNNING[-1]
        holding = backward.holding
        if holding is not None and id(self.local) in holding.leaves:
            holding.uses[id(seen)] = self.number, self, seen
            return
        found = backward.found.get(_current_graph_task_id()) or backward.of_task()
        found.uses.append((self.number, self, seen))


def stand_for(local: Tensor, transition: Transition, seen: Tensor) -> LeafUse:
    """Say that `seen`, a leaf of its own, is what `local` becomes by a transition.

    Whoever made it sees to its gradient; `torch.autograd.grad` finds it.
    """
    leaf = _LEAVES.get(track_leaf(local)) or _Leaf()
    use = LeafUse(leaf, local, transition, seen)
    leaf.uses[:] = [ref for ref in leaf.uses if ref() is not None]
    leaf.uses.append(weakref.ref(use))
    return use


def track_leaf(local: Tensor) -> Tensor:
    """Say that no user holds this leaf but through its ShardTensor."""
    if local.requires_grad and local.is_leaf and local not in _LEAVES:
        _LEAVES[local] = _Leaf()
    return local


def use_of(local: Tensor, transition: Transition) -> tuple[LeafUse, Tensor] | None:
    """A new use of a leaf and what it is seen as; None where only an autograd node will do."""
    if not transition.reduces_only_in_backward:
        return None
    if _has_hooks(local):
        return None
    leaf = _LEAVES.get(local)
    if leaf is None:
        return None
    seen = counting(transition(local.detach()), local).detach().requires_grad_()
    use = LeafUse(leaf, local, transition, seen)
    seen.register_post_accumulate_grad_hook(use.arrived)
    leaf.uses[:] = [ref for ref in leaf.uses if ref() is not None]
    leaf.uses.append(weakref.ref(use))
    return use, seen


def uses_of(local: Tensor) -> list[LeafUse]:
    """What stands for this leaf in the graphs that are alive."""
    leaf = _LEAVES.get(local)
    if leaf is None:
        return []
    found = [ref() for ref in leaf.uses]
    return [use for use in found if use is not None and use.seen is not None]


def replace_leaf(old: Tensor, new: Tensor) -> None:
    """The new leaf stands for a tensor that the old one stands for in the graphs that are there."""
    _LEAVES[new].before = TensorWeakRef(old)


def before(local: Tensor) -> list[Tensor]:
    """What stood for this leaf's tensor, as far as graphs that are alive hold it."""
    found = []
    leaf = _LEAVES.get(local)
    while leaf is not None and leaf.before is not None and (old := leaf.before()) is not None:
        found.append(old)
        leaf = _LEAVES.get(old)
    return found


def disable_for(local: Tensor) -> None:
    """This leaf has hooks from now on: the next forward goes by nodes."""
    for use in uses_of(local):
        use.address = None


def is_put_off(local: Tensor) -> bool:
    """Whether hooks of this leaf wait for the end of the backward, when its uses are reduced."""
    leaf = _LEAVES.get(local)
    return leaf is not None and leaf.complete_in is not running() and bool(uses_of(local))


def defer_hook(local: Tensor, grad: Tensor | None) -> Tensor | None:
    """Keep what the engine has found for a leaf itself until its uses are reduced.

    Gives what is accumulated meanwhile: nothing, in the words of a tensor hook. `grad` is None
    where the gradient has been accumulated and hooks alone wait.
    """
    backward = running()
    if backward.captures:  # `summed` gets it from the engine
        return None
    held = backward.of_task().held
    if any(one is local for one, _ in held):  # by another hook of the leaf
        return None
    held.append((local, grad))
    return None if grad is None else torch.zeros_like(grad)


@contextmanager
def completed(local: Tensor) -> Iterator[None]:
    """Inside, hooks of this leaf see its whole gradient."""
    leaf = _LEAVES.get(local) or _Leaf()
    before, leaf.complete_in = leaf.complete_in, running()
    try:
        yield
    finally:
        leaf.complete_in = before


def summed(
    found: Sequence[Tensor | None], uses: Sequence[Sequence[LeafUse]]
) -> list[Tensor | None]:
    """The gradients of leaves, from those of the leaves themselves and then of all their uses."""
    totals = list(found[: len(uses)])
    owners = [(at, use) for at, of_leaf in enumerate(uses) for use in of_leaf]
    reduced = run_together(
        [use.transition.reverse for _, use in owners],
        [None if one is None else use.in_own_dtype(one)
         for (_, use), one in zip(owners, found[len(uses):])],
        [use for _, use in owners],
    )
    for (at, _), part in zip(owners, reduced):
        if part is not None:
            total = totals[at]
            totals[at] = part if total is None else dense(total) + part
    return totals


def reduce_held(uses: Iterable[tuple[int, LeafUse, Tensor]]) -> None:
    """Reduce and accumulate what has arrived of these uses in several backwards."""
    arrived, totals = Backward()._reduce(sorted(uses, key=lambda one: one[0]))
    for local, whole in _of_leaves(arrived, totals):
        accumulate(local, whole, False)


class _OfThread(threading.local):
    innermost: Backward | None = None


_OF_THREAD = _OfThread()


class Found:
    """What one graph task of the engine has found: uses, with the number and what stands for each,
    and leaves whose hooks are put off, with what was held back."""

    __slots__ = ("creates_graph", "early", "held", "uses")

    def __init__(self, creates_graph: bool) -> None:
        self.creates_graph = creates_graph
        self.uses: list[tuple[int, LeafUse, Tensor]] = []
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
    """Around a call of the engine: what it finds is reduced at its end, or dropped if it fails.

    One backward may run within another (in a hook, in a reentrant checkpoint).

    Args:
        captures: the engine gives the gradients back instead of accumulating them.
    """

    __slots__ = (
        "__weakref__", "at_end", "captures", "failed", "found", "holding", "late", "outer",
        "riders", "to_reduce",
    )

    def __init__(self, captures: bool = False) -> None:
        self.captures, self.holding = captures, held.current()
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
        """What the task of the engine that runs now has found."""
        task = _current_graph_task_id()
        found = self.found.get(task)
        if found is None:
            found = self.found[task] = Found(is_grad_enabled())
            if self is _RUNNING[0]:  # nobody says when it is over
                _engine.queue_callback(lambda: self.finish(task))
        return found

    def when_over(self, call: Callable[[], Any]) -> None:
        """Have `call` called once all gradients are there."""
        if self is _RUNNING[0]:  # nobody says when
            _engine.queue_callback(call)
        else:
            self.at_end.append(call)

    def when_found(self, call: Callable[[], Any], failed: Callable[[], Any]) -> None:
        """Have `call` called when the engine is done, for gradients that it has yet to reduce;
        `failed` where the backward fails."""
        if self is _RUNNING[0]:
            _engine.queue_callback(call)
        else:
            self.to_reduce.append(call)
            self.failed.append(failed)

    def ride(
        self, value: Tensor, transition: Transition, take: Callable[[Tensor], None]
    ) -> None:
        """Reduce `value` with the gradients; `take` gets the result."""
        self.riders.append(_Rider(value, transition, take))

    def flush(self) -> None:
        """The engine is done: what it has found is reduced, then comes who waits for the end."""
        while self.found:
            self.finish(next(iter(self.found)))
        if self.riders:
            self._reduce([])
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
        uses, reduced = self._reduce(found.uses)
        for early in found.early:
            uses, reduced = [*early.uses, *uses], [*early.land(), *reduced]
        waiting = {id(local) for local, _ in found.held}
        if found.held:
            self.late += found.held
            if self is _RUNNING[0]:
                _engine.queue_callback(self.call_hooks)
        for local, whole in _of_leaves(uses, reduced):
            if id(local) in waiting:
                self.late.append((local, whole))
            else:
                accumulate(local, whole, found.creates_graph)

    def _reduce(
        self, arrived: Sequence[tuple[int, LeafUse, Tensor]]
    ) -> tuple[Sequence[LeafUse], Sequence[Tensor]]:
        riders, self.riders = self.riders, []
        grads: list[Any] = []
        uses: list[LeafUse] = []
        for _, use, seen in arrived:
            grad = seen.grad
            if grad is not None:
                uses.append(use)
                grads.append(use.in_own_dtype(grad))
                seen.grad = None
        moves = [use.transition.reverse for use in uses]
        if riders:
            moves += [rider.transition for rider in riders]
            grads += [rider.value for rider in riders]
        totals = run_together(moves, grads, (*uses, *riders))
        for rider, total in zip(riders, totals[len(uses):]):
            rider.take(total)
        return uses, totals


def running() -> Backward:
    """The backward that runs. On a GPU the engine's own threads ask, too: theirs is the last."""
    return _OF_THREAD.innermost or _RUNNING[-1]


_RUNNING = [Backward()]
"""All that run, after one for tasks of the engine that nobody has announced."""


def _of_leaves(
    uses: Sequence[LeafUse], totals: Sequence[Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    """One gradient per leaf: hooks see the sum over all uses, once."""
    leaves = {id(use.local): use.local for use in uses}
    if len(leaves) == len(uses):
        return zip(leaves.values(), totals)
    whole: dict[int, Tensor] = {}
    for use, total in zip(uses, totals):
        known = whole.get(id(use.local))
        whole[id(use.local)] = total if known is None else known + total
    return zip(leaves.values(), whole.values())


def _joined(
    parts: Sequence[tuple[Tensor, Tensor | None]]
) -> list[tuple[Tensor, Tensor | None]]:
    """One gradient per leaf; None where hooks alone wait."""
    whole: dict[int, tuple[Tensor, Tensor | None]] = {}
    for local, part in parts:
        _, known = whole.get(id(local), (local, None))
        if part is not None and known is not None:
            part = part + known
        whole[id(local)] = local, known if part is None else part
    return list(whole.values())


def arrive(local: Tensor, total: Tensor) -> None:
    """Accumulate what was reduced beside the engine. Where a leaf has hooks, and the engine or
    another group has a part of its gradient as well, they wait for the end of the backward."""
    backward = running()
    is_announced = backward is not _RUNNING[0]
    if _has_hooks(local) and (is_announced or _current_graph_task_id() != -1) and (
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
    running = _current_graph_task_id() != -1
    return running and _will_engine_execute_node(_get_grad_fn_or_grad_acc(local))


def _has_hooks(local: Any) -> bool:
    return bool(local._backward_hooks or local._post_accumulate_grad_hooks)


def accumulate(local: Tensor, total: Tensor | None, creates_graph: bool) -> None:
    """What torch's AccumulateGrad does, whose way is longer and copies what Python holds."""
    if total is None:
        with completed(local):
            for hook in tuple(local._post_accumulate_grad_hooks.values()):  # type: ignore
                hook(local)
        return
    grad = local.grad
    if (
        local._use_count() > 1  # type: ignore[attr-defined]  # somebody may have hooked that node
        or _has_hooks(local)
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
