"""Calls with tensors that are R: replicated over an axis, with a gradient that is partial.

A tensor becomes R by `redistribute(grad_placements=)`, and parameters are R while they are gathered
for their module. A call that varies over the axis takes such a tensor as it is, and its gradient
stays partial. If all operands that need a gradient are R, the result is R too: a cast, a transpose,
a part of a weight. Beside other operands it becomes I, by a transition without communication.
Recipes other than programs know no R, so their operands become I. A call with reduced operands
(`reduce_once`) finds the recipe for these, which does.

The memory of such a tensor may be freed and filled again (`placing.freed`): then the gradient of
the result fills it first. The tensor may exist in autocast's dtype alone (`views.cast_weight`): a
call of one op for which autocast casts takes it in that dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import is_grad_enabled

from weft.tensor.call.autocast import cast_of as cast_of_op
from weft.tensor.call.numbers import CarryOut
from weft.tensor.call.program import Program
from weft.tensor.call.recipe import Alias, Function, Recipe
from weft.tensor.call.reduce_once import UsingReduced
from weft.tensor.meta import Meta
from weft.tensor.placing.freed import filled, is_used, watch
from weft.tensor.placing.operands import as_value, settle
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import written_by
from weft.tensor.trace.trees import flatten, local_of, substitute
from weft.tensor.views.cast_weight import CastWeight, cast_of, gathered
from weft.tensor.views.moved import unwrap_view

__all__ = ["has_varying", "of_varying"]


def has_varying(key: Sequence[Any]) -> bool:
    """Whether a call's key has a tensor that is R."""
    for item in key:  # noqa: SIM110  (each miss asks, and a generator takes twice the time)
        if type(item) is Meta and item.varying:
            return True
    return False


def of_varying(made: Recipe, carry_out: CarryOut) -> Recipe:
    """The recipe of a call with tensors that are R, from that of its ops. `carry_out` carries out
    the call with tensors that are I."""
    if isinstance(made, UsingReduced):
        return made
    if isinstance(made, Program):
        if any(step.target is not None for step in made.steps) and is_grad_enabled():
            return Function(_settled(made, carry_out))
        return _Watched(made, _cast_to(made)) if is_used() else made
    if isinstance(made, Alias) or not is_grad_enabled():
        return _Watched(made) if is_used() else made
    return Function(_as_values(carry_out))


def _cast_to(made: Program) -> torch.dtype | None:
    """The dtype that autocast casts the operands of a program to, if that is all that happens to
    them; else None."""
    step, *others = made.steps
    if others or step.kernel is not None or step.operands or step.target is not None:
        return None
    local = getattr(step.local, "__wrapped__", step.local)  # of `as_autocast`
    if local is not None and str(local) != step.name:
        return None
    meta = next(meta for meta in made.metas if meta is not None)
    return cast_of_op(step.name, meta.dtype, meta.mesh)


@contextmanager
def _in_dtype(tensors: Sequence[Any], cast_to: torch.dtype | None) -> Iterator[None]:
    """Inside, gathered parameters of which there is a cast are of that dtype, if it is this one.
    Otherwise they are gathered in their own."""
    found = [
        (one, one._local) for one in tensors
        if type(one) is ShardTensor and type(one._local) is CastWeight
    ]
    if not found:
        yield
        return
    casts = [cast_of(local) for _, local in found]
    if any(cast.dtype is not cast_to for cast in casts):
        for _, local in found:
            gathered(local)
        yield
        return
    try:
        for (one, _), cast in zip(found, casts):
            one._local = cast
        yield
    finally:
        for one, local in found:
            one._local = local


class _Watched(Recipe):
    """A recipe whose result fills the memory of its operands again before its gradient.

    `cast_to`: the dtype that autocast casts them to, where that is all that happens to them.
    """

    __slots__ = ("cast_to", "made")

    def __init__(self, made: Recipe, cast_to: torch.dtype | None = None) -> None:
        self.made, self.cast_to = made, cast_to

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        with _in_dtype(tensors, self.cast_to):
            memories = filled([local_of(one) for one in tensors])
            out = self.made.run(func, args, kwargs)
        watch(out, memories)
        return out

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        opened = flatten(locals_)
        if any(type(one) is CastWeight for one in opened):
            return self.run(func, args, {})
        memories = filled(opened)
        out = self.made.run_opened(func, args, locals_)
        watch(out, memories)
        return out


def _as_values(carry_out: CarryOut) -> CarryOut:
    """A call that takes R operands as I."""
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        memories = filled([unwrap_view(local_of(one)) for one in tensors])
        for one in written_by(func, args, kwargs):
            settle(one)
        given = substitute((args, kwargs), map(as_value, tensors))
        out = carry_out(func, *given)
        watch(out, memories)
        return out

    return run


def _settled(made: Program, carry_out: CarryOut) -> CarryOut:
    """A program that writes in place: its target is I from now on."""
    targets = {step.target for step in made.steps if step.target is not None}

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        again = False
        for at in targets:
            if at < len(tensors):
                again |= settle(tensors[at])
        memories = filled([unwrap_view(local_of(one)) for one in tensors])
        out = (carry_out if again else made.run)(func, args, kwargs)
        watch(out, memories)
        return out

    return run
