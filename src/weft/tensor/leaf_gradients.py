"""Gradients of replicated leaves, reduced together at the end of a backward.

If a varying op uses a replicated leaf (I -> R), the leaf needs the sum of the ranks' gradients. An
autograd node that reduces costs more than the small ops around it, and each node reduces by itself.
So such a use gets a leaf of its own, `LeafUse.seen`: it shares the memory of the tensor, its
gradient is this rank's partial value, and torch's own C++ accumulates all uses in it. When the
backward is over, the partial values of all leaves are reduced together (`tensor.backward`).

This is done for leaves that weft made (`track_leaf`). A user's own plain leaf may be passed to
`torch.autograd.grad`, which would find no graph behind it. Leaves with hooks use a node, because a
hook sees one gradient per backward, the sum over all uses. A hook that is registered while the leaf
is in use is deferred: the engine's gradient of the leaf itself waits until the backward is over,
and is added to the gradients of its uses; the hook sees the sum.

References: a graph holds `seen`, the hook of `seen` holds the `LeafUse`, and that holds the leaf. A
`LeafUse` holds `seen` weakly. Otherwise none of them would ever be freed, because Python's
collector does not see a cycle through a torch hook.
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
from weft.tensor.leaves import LEAVES, Leaf, track_leaf, uses_of
from weft.transport import run_together, traffic
from weft.transport.nodes import counting, dense
from weft.transport.transition import Transition

__all__ = [
    "LeafUse", "borrow", "defer_hook", "disable_for", "is_put_off", "reduce_held", "stand_for",
    "summed", "use_of",
]

_MADE = itertools.count()


class LeafUse:
    """A use of a leaf by computations that vary over the axes of `transition`, an I -> R.

    It is valid while the leaf keeps its memory: `seen` has the same memory (or is zero, where
    another coordinate keeps the partial value).

    Args:
        operand: the tensor that computations use in the leaf's place: a cast (see `borrow`), or the
            leaf.
        dtype: the dtype in which gradients are reduced; None: the leaf's.
    """

    __slots__ = (
        "__weakref__", "_seen", "address", "dtype", "local", "note", "number", "operand",
        "transition",
    )

    def __init__(
        self, leaf: Leaf, local: Tensor, transition: Transition, seen: Tensor,
        operand: Tensor | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        self.local, self.transition = local, transition
        self.operand = local if operand is None else operand
        self.dtype = dtype or local.dtype
        self.address: int | None = self.operand.data_ptr()
        self.note = traffic.note()
        self.number = next(_MADE)
        self._seen = TensorWeakRef(seen)
        leaf.uses[:] = [*[ref for ref in leaf.uses if ref() is not None], weakref.ref(self)]

    @property
    def seen(self) -> Tensor | None:
        """The stand-in of the leaf; None once no graph and no tensor holds it."""
        return self._seen()

    @property
    def reason(self) -> str:
        """The reason of the reduction, for the log."""
        return f"gradient of {self.transition.text}"

    def to_reduce(self, grad: Tensor) -> Tensor:
        """A gradient of the stand-in, in the dtype of the reduction: the stand-in may be a cast."""
        return dense(grad) if grad.dtype is self.dtype else dense(grad).to(self.dtype)

    def reduced(self, total: Tensor) -> Tensor:
        """The leaf's gradient, from the reduced one."""
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
    """Gradients of several backwards, in the place of a leaf's stand-in."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Any = None

    def add(self, grad: Tensor) -> None:
        self.grad = grad if self.grad is None else self.grad + grad


def borrow(
    copy: Tensor, local: Tensor, dtype: torch.dtype,
    move: Callable[[Transition], Transition | None],
) -> None:
    """Register `copy`, a leaf of its own, as a leaf in another dtype or as R. If further axes vary,
    its uses count as uses of that leaf, and the gradient is reduced in `dtype` over all axes at
    once. `move` returns the transition from the leaf to the moved copy."""
    LEAVES[copy] = leaf = Leaf()
    leaf.owner = local, dtype, move


def stand_for(local: Tensor, transition: Transition, seen: Tensor) -> LeafUse:
    """Register `seen`, a leaf of its own, as the result of a transition of `local`.

    Its maker takes care of its gradient; `torch.autograd.grad` finds it.
    """
    leaf = LEAVES.get(track_leaf(local)) or Leaf()
    return LeafUse(leaf, local, transition, seen)


def use_of(local: Tensor, transition: Transition) -> tuple[LeafUse, Tensor] | None:
    """A new use of a leaf and its stand-in; None if an autograd node is needed."""
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
    return use, seen


def disable_for(local: Tensor) -> None:
    """This leaf has hooks from now on: the next forward uses nodes."""
    for use in uses_of(local):
        use.address = None


def is_put_off(local: Tensor) -> bool:
    """Whether hooks of this leaf wait for the end of the backward, when its uses are reduced."""
    leaf = LEAVES.get(local)
    return leaf is not None and leaf.complete_in is not running() and bool(uses_of(local))


def defer_hook(local: Tensor, grad: Tensor | None) -> Tensor | None:
    """Keep the engine's gradient of a leaf itself until its uses are reduced.

    Returns the gradient to accumulate meanwhile, as a tensor hook does: zero. `grad` is None if the
        gradient has been accumulated and only hooks wait.
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
    """Reduce and accumulate the gradients of these uses from several backwards."""
    arrived, totals = Backward().reduce(sorted(uses, key=lambda one: one[0]))
    for local, whole in of_leaves(arrived, totals):
        accumulate(local, whole, False)
