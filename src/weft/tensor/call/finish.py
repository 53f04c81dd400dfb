"""Terms that one call had to sum up: later calls take the sum.

A tensor of terms passes through whatever is linear without communication. Once a call needs its
value, the terms are reduced, by that call's transition; from then on other calls on this tensor get
what it became, as if the program had redistributed it there. So a residual stream is reduced once
for its norm and for what is added to it, where the terms would else go on beside the value and be
reduced again at the next norm.

The tensor itself stays as it is, and so does its layout. What it became is kept with its views
(`enter.Views.finished`) until it is written to or a backward has passed; `Meta.as_finished` marks
it, so that the calls which find it cost the others nothing. Views and writes go to the tensor
itself. All ranks run the same program, so they agree on what is finished. A call of several ops
decides as a whole, or op by op with `off`, so that ranks outside the mesh conclude the same. What a
checkpoint runs is a `scope` of its own: it runs again, and has to do the same ops then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import is_grad_enabled

from weft.core import Layout
from weft.tensor.call.direct import Builder
from weft.tensor.call.recipe import Recipe
from weft.tensor.meta import Meta
from weft.tensor.placing.enter import Cause, Named, Views, enter_all, transition_between
from weft.tensor.shard_tensor import ShardTensor, version_of, wrap
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import Trace, slots_of
from weft.tensor.trace.trees import flatten, local_of, substitute
from weft.tensor.views.moved import plain

__all__ = ["Finishing", "Taking", "finishing", "is_finished", "off", "reads", "scope"]


class _Thread(threading.local):
    off = False
    scope: object = None


_thread = _Thread()


@contextmanager
def off() -> Iterator[None]:
    """Calls inside leave terms as they are, as the steps of a program do."""
    before, _thread.off = _thread.off, True
    try:
        yield
    finally:
        _thread.off = before


@contextmanager
def scope() -> Iterator[None]:
    """What was finished before counts for nothing inside, nor what is finished inside after it."""
    before, _thread.scope = _thread.scope, object()
    try:
        yield
    finally:
        _thread.scope = before


def finishing(made: Recipe, builder: Builder) -> Recipe:
    """The recipe of one op, or one that first finishes those of its operands which it reduces."""
    decision = builder.decision
    if decision is None or builder.target is not None:
        return made
    targets = [
        (at, target) for at, layout, target in zip(
            builder.slots, builder.layouts, decision.operands
        )
        if type(builder.tensors[at]) is ShardTensor
        and layout.is_partial and not target.is_partial
    ]
    if not targets or builder.shares():
        return made
    return Finishing(made, targets, Named(builder.name, decision.reason()))


class Finishing(Recipe):
    """Finishes operands, then calls again with what they became.

    Args:
        made: the recipe that reduces them by itself.
        targets: which of the call's tensors come to which layout.
        cause: the op, for messages and the log.
    """

    __slots__ = ("cause", "made", "targets")

    def __init__(
        self, made: Recipe, targets: Sequence[tuple[int, Layout]], cause: Cause
    ) -> None:
        self.made, self.targets, self.cause = made, tuple(targets), cause

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _thread.off:
            return self.made.run(func, args, kwargs)
        tensors: list[Any] = flatten((args, kwargs) if kwargs else args)
        locals_ = [local_of(tensor) for tensor in tensors]
        moves = []
        for at, target in self.targets:
            meta = tensors[at]._meta
            move = transition_between(meta.mesh, meta.layout, target)
            if move is not None and meta.mesh.here is not None:
                moves.append((at, move))
        enter_all(tensors, moves, locals_, self.cause)
        for at, target in self.targets:
            tensors[at] = _became(tensors[at], locals_[at], target)
        args, kwargs = substitute((args, kwargs), iter(tensors))
        return _again(func, args, kwargs)


def _became(tensor: ShardTensor, local: torch.Tensor, layout: Layout) -> ShardTensor:
    """What the tensor is from now on; kept, where writes to the tensor can be seen."""
    mine = plain(tensor._local)
    out = wrap(local, tensor._meta.replace(layout=layout, requires_grad=local.requires_grad))
    if not mine.is_inference():
        views = tensor._memo
        if views is None:
            views = tensor._memo = Views()
        views.finished = mine, version_of(tensor), out, _thread.scope
        tensor._meta = tensor._meta.as_finished()
    return out


def is_finished(key: Sequence[Any]) -> bool:
    """Whether a call's key has a tensor that was finished."""
    return any(type(item) is Meta and item.finished for item in key)


class Taking(Recipe):
    """Calls again with what the operands became, or, unless `reads`, with them as they are."""

    __slots__ = ("reads",)

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        marked = [one for one in tensors if type(one) is ShardTensor and one._meta.finished]
        if self.reads and not _thread.off:
            args, kwargs = substitute((args, kwargs), iter([*map(_taken, tensors)]))
            return _again(func, args, kwargs)
        metas = []
        for one in marked:
            one._meta = one._meta.replace()
            metas.append(one._meta)
        try:
            return _again(func, args, kwargs)
        finally:
            for one, meta in zip(marked, metas):
                if one._meta is meta:
                    one._meta = meta.as_finished()


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor became; itself, no longer marked, where that does not hold any more."""
    if type(tensor) is not ShardTensor or not tensor._meta.finished:
        return tensor
    views = tensor._memo
    kept = None if views is None else views.finished
    if kept is not None:
        mine, version, out, where = kept
        lacks_graph = mine.requires_grad and is_grad_enabled() and not out.requires_grad
        same = mine is plain(tensor._local) and version == version_of(tensor)
        if same and where is _thread.scope and not lacks_graph:
            return out
    tensor._meta = tensor._meta.replace()
    return tensor


def _again(func: Any, args: Any, kwargs: Any) -> Any:
    return ShardTensor.__torch_function__(func, (), args, kwargs)


def reads(trace: Trace, num_tensors: int) -> bool:
    """Whether a call only reads its tensors: it writes none, and returns no view of one."""
    about = [facts(op.overload) for op in trace.ops]
    return not any(each.writes or each.is_view for each in about) and all(
        slot.index >= num_tensors for slot in slots_of(trace.result)
    )
