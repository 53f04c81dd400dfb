"""Gradients of replicated leaves, reduced together at the end of a backward.

A replicated leaf that a varying op uses (I -> R) needs the sum of what the ranks find. An autograd
node that reduces costs more than the small ops around it, and each node reduces by itself. So such
a use sees a leaf of its own, `LeafUse.seen`: it shares the memory of the tensor, its gradient is
this rank's partial value, and torch's own C++ accumulates all uses in it. When the backward is
over, the partial values of all leaves are reduced together (`tensor.backward`).

It serves leaves that weft made (`track_leaf`): a user's own plain leaf may be asked for by
`torch.autograd.grad`, which would find nothing behind it. Leaves that have hooks go by a node,
because a hook sees one gradient per backward, the sum over all uses. A hook that is registered when
the leaf is in use already is deferred: what the engine has found for the leaf itself waits until
the backward is over, and joins the gradients of its uses, with which the hook sees it.

Who holds whom: a graph holds `seen`, its hook the `LeafUse`, that the leaf. A `LeafUse` holds
`seen` weakly, else none of them would ever be freed: torch shows no cycle through a hook to
Python's collector.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id  # type: ignore[attr-defined]
from torch.utils.weak import TensorWeakRef

from weft.tensor.backward import Backward, accumulate, has_hooks, of_leaves, running
from weft.tensor.leaves import LEAVES, Leaf, track_leaf
from weft.transport import run_together, traffic
from weft.transport.nodes import counting, dense
from weft.transport.transition import Transition

__all__ = [
    "LeafUse", "borrow", "defer_hook", "disable_for", "is_put_off", "reduce_held", "stand_for",
    "summed", "use_of", "uses_of",
]

_MADE = itertools.count()


class LeafUse:
    """A leaf as those computations see it that vary over the axes of `transition`, an I -> R.

    It serves while the leaf's memory is where it was: `seen` has the same memory (or is zero, on
    axes over which it becomes a partial value that another coordinate keeps).

    Args:
        operand: what computations have in the leaf's place: a cast (see `borrow`), or itself.
        dtype: in which gradients are reduced; None: the leaf's.
    """

    __slots__ = (
        "__weakref__", "_seen", "address", "dtype", "leaf", "local", "note", "number", "operand",
        "transition",
    )

    def __init__(
        self, leaf: Leaf, local: Tensor, transition: Transition, seen: Tensor,
        operand: Tensor | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        self.leaf, self.local, self.transition = leaf, local, transition
        self.operand = local if operand is None else operand
        self.dtype = dtype or local.dtype
        self.address: int | None = self.operand.data_ptr()
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

    def to_reduce(self, grad: Tensor) -> Tensor:
        """A gradient of what stands for the leaf, in the dtype of the reduction: it may be seen as
        a cast."""
        return dense(grad) if grad.dtype is self.dtype else dense(grad).to(self.dtype)

    def reduced(self, total: Tensor) -> Tensor:
        """The leaf's gradient, of what was reduced."""
        return total if self.dtype is self.local.dtype else total.to(self.local.dtype)

    def arrived(self, seen: Tensor) -> None:
        """The hook of `seen`: its gradient in this backward is complete."""
        backward = running()
        holding = backward.holding
        if holding is not None and id(self.local) in holding.leaves:
            if self.operand is self.local:
                holding.uses[id(seen)] = self.number, self, seen
            else:  # each forward casts anew
                key = id(self.local), self.transition
                _, _, total = holding.uses.setdefault(key, (self.number, self, _Sum()))
                grad, seen.grad = seen.grad, None
                if grad is not None:
                    total.add(self.to_reduce(grad))
            return
        found = backward.found.get(_current_graph_task_id()) or backward.of_task()
        found.uses.append((self.number, self, seen))


class _Sum:
    """Gradients of several backwards, in the place of what stands for a leaf."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Any = None

    def add(self, grad: Tensor) -> None:
        self.grad = grad if self.grad is None else self.grad + grad


def borrow(
    copy: Tensor, local: Tensor, dtype: torch.dtype,
    move: Callable[[Transition], Transition | None],
) -> None:
    """Say that `copy`, a leaf of its own, is a leaf seen in another dtype or as R. Where further
    axes vary its uses are uses of that leaf, whose gradient is reduced in `dtype`: over all axes at
    once. `move` gives the transition from the leaf to what a transition makes of the copy."""
    LEAVES[copy] = leaf = Leaf()
    leaf.owner = local, dtype, move


def stand_for(local: Tensor, transition: Transition, seen: Tensor) -> LeafUse:
    """Say that `seen`, a leaf of its own, is what `local` becomes by a transition.

    Whoever made it sees to its gradient; `torch.autograd.grad` finds it.
    """
    leaf = LEAVES.get(track_leaf(local)) or Leaf()
    use = LeafUse(leaf, local, transition, seen)
    leaf.uses[:] = [ref for ref in leaf.uses if ref() is not None]
    leaf.uses.append(weakref.ref(use))
    return use


def use_of(local: Tensor, transition: Transition) -> tuple[LeafUse, Tensor] | None:
    """A new use of a leaf and what it is seen as; None where only an autograd node will do."""
    if not transition.reduces_only_in_backward:
        return None
    leaf = LEAVES.get(local)
    if leaf is None:
        return None
    owner, dtype, whole = local, None, transition
    if leaf.owner is not None:
        owner, dtype, move = leaf.owner
        leaf, whole = LEAVES.get(owner), move(transition)
        if leaf is None or whole is None or not whole.reduces_only_in_backward:
            return None
    if has_hooks(owner):
        return None
    seen = counting(transition(local.detach()), local).detach().requires_grad_()
    use = LeafUse(leaf, owner, whole, seen, local, dtype)
    seen.register_post_accumulate_grad_hook(use.arrived)
    leaf.uses[:] = [ref for ref in leaf.uses if ref() is not None]
    leaf.uses.append(weakref.ref(use))
    return use, seen


def uses_of(local: Tensor) -> list[LeafUse]:
    """What stands for this leaf in the graphs that are alive."""
    leaf = LEAVES.get(local)
    return [] if leaf is None else leaf.in_graphs()


def disable_for(local: Tensor) -> None:
    """This leaf has hooks from now on: the next forward goes by nodes."""
    for use in uses_of(local):
        use.address = None


def is_put_off(local: Tensor) -> bool:
    """Whether hooks of this leaf wait for the end of the backward, when its uses are reduced."""
    leaf = LEAVES.get(local)
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


def summed(
    found: Sequence[Tensor | None], uses: Sequence[Sequence[LeafUse]]
) -> list[Tensor | None]:
    """The gradients of leaves, from those of the leaves themselves and then of all their uses."""
    totals = list(found[: len(uses)])
    owners = [(at, use) for at, of_leaf in enumerate(uses) for use in of_leaf]
    reduced = run_together(
        [use.transition.reverse for _, use in owners],
        [None if one is None else use.to_reduce(one)
         for (_, use), one in zip(owners, found[len(uses):])],
        [use for _, use in owners],
    )
    for (at, use), part in zip(owners, reduced):
        if part is not None:
            part, total = use.reduced(part), totals[at]
            totals[at] = part if total is None else dense(total) + part
    return totals


def reduce_held(uses: Iterable[tuple[int, LeafUse, Tensor]]) -> None:
    """Reduce and accumulate what has arrived of these uses in several backwards."""
    arrived, totals = Backward().reduce(sorted(uses, key=lambda one: one[0]))
    for local, whole in of_leaves(arrived, totals):
        accumulate(local, whole, False)
