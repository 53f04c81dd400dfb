"""Partial operands that one call had to reduce: later calls use the reduced value.

A partial tensor passes through whatever is linear without communication. Once a call needs its
value, that call's transition reduces it. From then on other calls get the reduced value, as if the
program had redistributed the tensor there. So a residual stream is reduced once, for its norm and
for the next addition; else its partial values would go on, and be reduced again at the next norm.

The tensor itself stays as it is, and so does its layout. The reduced value is kept in the tensor's
`OperandCache` until the tensor is written to or a backward has passed. `Meta.as_reduced` marks the
tensor, so that calls which find the mark pay for the look-up and others do not. Views and writes go
to the tensor itself. All ranks run the same program, so they agree on what was reduced. A call of
several ops decides as a whole, or op by op inside `disabled`, so that ranks outside the mesh come
to the same. A checkpoint runs in a `scope` of its own, because it runs again, and has to do the
same ops then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import is_grad_enabled

from weft.core import Layout
from weft.core.scopes import setting
from weft.tensor.call.decide import Builder
from weft.tensor.call.program import Program
from weft.tensor.call.recipe import Function, Recipe
from weft.tensor.meta import Meta
from weft.tensor.placing.operand_cache import cache_of
from weft.tensor.placing.operands import Caller, NamedCaller, move_operands, varying_axes
from weft.tensor.placing.transitions import order_in_memory, transition_between
from weft.tensor.shard_tensor import ShardTensor, version_of, wrap
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import Trace
from weft.tensor.trace.trees import flatten, local_of, slots_of, substitute
from weft.tensor.views.moved import unwrap_view

__all__ = [
    "UsingReduced", "disabled", "has_reduced", "is_read_only", "reducing_once", "scope",
    "unmarked",
]

Targets = Sequence[tuple[int, Layout]]
"""Which of a call's tensors come to which layouts."""

Run = Callable[[Any, Any, Any], Any]


class _Thread(threading.local):
    disabled = False
    scope: object = None


_thread = _Thread()


def disabled() -> AbstractContextManager[None]:
    """Calls inside leave partial operands as they are, as the steps of a program do."""
    return setting(_thread, disabled=True)


def scope() -> AbstractContextManager[None]:
    """Values that were reduced before are not used inside, nor those from inside after it."""
    return setting(_thread, scope=object())


def reducing_once(
    made: Recipe, builder: Builder, decide: Callable[[Targets], tuple[Recipe, bool]]
) -> tuple[Recipe, bool]:
    """The recipe of one op, or one that first reduces operands for later calls; and whether floats
    flow through the call that follows, if there is one.

    `decide` gives the recipe of the call with operands in other layouts.
    """
    decision = builder.decision
    if decision is None or builder.target is not None:
        return made, True
    targets = [
        (at, target) for at, layout, target in zip(
            builder.slots, builder.layouts, decision.operands
        )
        if type(builder.tensors[at]) is ShardTensor
        and layout.is_partial and not target.is_partial
    ]
    if not targets or builder.shares():
        return made, True
    if all(_is_value(builder, at, target) for at, target in targets):
        if builder.mesh.here is None:
            return Function(_keeping(made, targets)), True
        if isinstance(made, Program):
            (step,) = made.steps
            due = dict(targets)
            step.reductions = Reductions({
                move: due[at] for at, move in step.operands if at in due
            })
            return made, True
    cause = NamedCaller(builder.name, decision.reason())
    then, flow = decide(targets)
    return Function(_reducing_first(made, targets, cause, then)), flow


def _is_value(builder: Builder, at: int, target: Layout) -> bool:
    """Whether the call reduces this operand to a value that others can use: not R, whose gradient
    is partial."""
    decision = builder.decision
    assert decision is not None
    varying = varying_axes((*decision.operands, *decision.results))
    place = builder.slots.index(at)
    layout = builder.layouts[place]
    sizes = layout.mesh.axis_sizes
    if any(decision.reads) and decision.reads[place] is not None:
        return False  # a box, and no shard
    is_summed = any(kind and size > 1 for kind, size in zip(layout.partial, sizes))
    stays = not builder.wants[place] or all(target.on(axis) is not None for axis in varying)
    return is_summed and stays and builder.slots.count(at) == 1


class Reductions(dict[Any, Layout]):
    """The transitions of a step that reduce an operand, with the resulting layouts."""

    def mark(
        self, tensors: Sequence[Any], moves: Sequence[tuple[int, Any]], locals_: Sequence[Any]
    ) -> None:
        """The operands have been moved: keep the reduced ones."""
        if _thread.disabled:
            return
        for place, move in moves:
            layout = self.get(move)
            if layout is not None:
                _keep(tensors[place], locals_[place], layout)


def _keeping(made: Recipe, targets: Targets) -> Run:
    """Outside the mesh: `made`, which then reduces what the ranks inside reduce on their way."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        out = made.run(func, args, kwargs)
        if not _thread.disabled:
            tensors: list[Any] = flatten((args, kwargs) if kwargs else args)
            for at, target in targets:
                _keep(tensors[at], local_of(tensors[at]), target)
        return out

    return run


def _reducing_first(made: Recipe, targets: Targets, cause: Caller, then: Recipe) -> Run:
    """Reduce operands, then carry out the call with the reduced ones.

    `made` reduces them by itself, and `then` serves where they are reduced; `targets` says which of
    the call's tensors come to which layout; `cause` is the op, for messages and the log.
    """

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if _thread.disabled:
            return made.run(func, args, kwargs)
        tensors: list[Any] = flatten((args, kwargs) if kwargs else args)
        locals_ = [local_of(tensor) for tensor in tensors]
        moves = []
        for at, target in targets:
            meta = tensors[at]._meta
            move = transition_between(
                meta.mesh, meta.layout, target, order=order_in_memory(tensors[at])
            )
            if move is not None and meta.mesh.here is not None:
                moves.append((at, move))
        move_operands(tensors, moves, locals_, cause)
        for at, target in targets:
            tensor, local = tensors[at], locals_[at]
            meta = tensor._meta.replace(layout=target, requires_grad=local.requires_grad)
            tensors[at] = wrap(local, meta)
            _keep(tensor, tensors[at], target)
        args, kwargs = substitute((args, kwargs), iter(tensors))
        return then.run(func, args, kwargs)

    return run


def _keep(tensor: ShardTensor, became: torch.Tensor, layout: Layout) -> None:
    """Keep the reduced value (or its local tensor, which is wrapped on demand), if writes to the
    tensor can be seen."""
    mine = unwrap_view(tensor._local)
    if not mine.is_inference():
        cache_of(tensor).was_reduced = mine, version_of(tensor), became, layout, _thread.scope
        tensor._meta = tensor._meta.as_reduced()


def has_reduced(key: Sequence[Any]) -> bool:
    """Whether a call's key has a tensor that was reduced."""
    for item in key:  # noqa: SIM110  (each miss asks, and a generator takes twice the time)
        if type(item) is Meta and item.was_reduced:
            return True
    return False


def unmarked(key: Sequence[Any]) -> list[Any]:
    """The key of the same call, no tensor of which was reduced."""
    return [
        item.replace() if type(item) is Meta and item.was_reduced else item for item in key
    ]


class UsingReduced(Recipe):
    """A call with tensors that were reduced: it takes the reduced values.

    Args:
        key: of the call.
        reads: whether it only reads its tensors (see `is_read_only`); others take them as they are.
        find: the recipe of the call with what they became.
    """

    __slots__ = ("find", "known", "reads")

    def __init__(
        self, key: Sequence[Any], reads: bool, find: Callable[[Any, Any, Any], Recipe]
    ) -> None:
        self.reads, self.find = reads, find
        self.known: dict[Any, Recipe] | None = None if float in key else {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs) if kwargs else args)
        if self.reads and not _thread.disabled:
            tensors = [*map(_taken, tensors)]
            feed = iter(tensors)
            args, kwargs = substitute(args, feed), kwargs and substitute(kwargs, feed)
        if self.known is None:  # the recipe may depend on the call's floats
            return self.find(func, args, kwargs).run(func, args, kwargs)
        metas = tuple([one._meta for one in tensors if type(one) is ShardTensor])
        recipe = self.known.get(metas)
        if recipe is None:
            recipe = self.known[metas] = self.find(func, args, kwargs)
        return recipe.run(func, args, kwargs)


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """The reduced value; the tensor itself, no longer marked, if that is out of date."""
    if type(tensor) is not ShardTensor or not tensor._meta.was_reduced:
        return tensor
    views = tensor._memo
    kept = None if views is None else views.was_reduced
    if views is not None and kept is not None:
        mine, version, out, layout, where = kept
        lacks_graph = mine.requires_grad and is_grad_enabled() and not out.requires_grad
        same = mine is unwrap_view(tensor._local) and version == version_of(tensor)
        if same and where is _thread.scope and not lacks_graph:
            if type(out) is not ShardTensor:
                meta = tensor._meta.replace(layout=layout, requires_grad=out.requires_grad)
                out = wrap(out, meta)
                views.was_reduced = mine, version, out, layout, where
            return out
    tensor._meta = tensor._meta.replace()
    return tensor


def is_read_only(trace: Trace, num_tensors: int) -> bool:
    """Whether a call only reads its tensors: it writes none, and returns no view of one."""
    about = [facts(op.overload) for op in trace.ops]
    return not any(each.writes or each.is_view for each in about) and all(
        slot.index >= num_tensors for slot in slots_of(trace.result)
    )
