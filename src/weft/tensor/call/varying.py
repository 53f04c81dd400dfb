"""Calls with tensors that are R: replicated over an axis, with a gradient that is partial.

A tensor becomes R by `redistribute(grad_placements=)`, and parameters are R while they are gathered
for their module. A call of which something varies over the axis takes such a tensor as it is, and
its gradient stays partial. Where all operands that want a gradient are R, the result is R too: a
cast, a transpose, a part of a weight. Beside operands that are not, it becomes I, by a transition
without communication. So does what a recipe takes that is no program: it knows no R.

Such a tensor may lie in memory that is freed and filled again (`placing.freed`): then the result's
gradient asks for it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import is_grad_enabled

from weft.tensor.call.numbers import CarryOut
from weft.tensor.call.program import Program
from weft.tensor.call.recipe import Alias, Function, Recipe
from weft.tensor.meta import Meta
from weft.tensor.placing.freed import filled, is_used, watch
from weft.tensor.placing.operands import as_value, move_operands, settle
from weft.tensor.shard_tensor import wrap
from weft.tensor.trace.trees import flatten, local_of, substitute
from weft.tensor.views.moved import writes

__all__ = ["has_varying", "of_varying"]


def has_varying(key: Sequence[Any]) -> bool:
    """Whether a call's key has a tensor that is R."""
    return any(type(item) is Meta and item.varying for item in key)


def of_varying(made: Recipe, carry_out: CarryOut) -> Recipe:
    """The recipe of a call with tensors that are R, from that of its ops. `carry_out` carries out
    the call with tensors that are I."""
    if isinstance(made, Program):
        if any(step.target is not None for step in made.steps) and is_grad_enabled():
            return Function(_Settled(made, carry_out))
        return _Watched(made) if is_used() else made
    if isinstance(made, Alias) or not is_grad_enabled():
        return _Watched(made) if is_used() else made
    return Function(_AsValues(made, carry_out))


class _Watched(Recipe):
    """A recipe whose result asks for the memory that its operands lie in."""

    __slots__ = ("made",)

    def __init__(self, made: Recipe) -> None:
        self.made = made

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        memories = filled([local_of(one) for one in flatten((args, kwargs))])
        out = self.made.run(func, args, kwargs)
        watch(out, memories)
        return out

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        made, memories = self.made, filled(flatten(locals_))
        if made.fast is None:
            out = made.run_opened(func, args, locals_)
        else:  # as the short route does
            if made.moves:
                assert made.caller is not None
                move_operands(args, made.moves, locals_, made.caller)
            local = func(*locals_) if made.bound is None else made.bound(locals_)
            out = wrap(local if made.leave is None else made.leave(local), made.fast)
        watch(out, memories)
        return out


class _AsValues:
    """A recipe that is given what is R as I."""

    __slots__ = ("carry_out", "made")

    def __init__(self, made: Recipe, carry_out: CarryOut) -> None:
        self.made, self.carry_out = made, carry_out

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        memories = filled([local_of(one) for one in tensors])
        if writes(func):
            for one in flatten(args[:1]):
                settle(one)
        given = substitute((args, kwargs), map(as_value, tensors))
        out = self.carry_out(func, *given)
        watch(out, memories)
        return out


class _Settled(_AsValues):
    """A program that writes in place: its target is I from now on."""

    __slots__ = ()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        assert isinstance(self.made, Program)
        targets = {step.target for step in self.made.steps if step.target is not None}
        again = False
        for at in targets:
            if at < len(tensors):
                again |= settle(tensors[at])
        memories = filled([local_of(one) for one in tensors])
        run = self.carry_out if again else self.made.run
        out = run(func, args, kwargs)
        watch(out, memories)
        return out
