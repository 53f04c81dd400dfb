"""How one call is carried out, decided once and kept: transitions, the local op, wrapping.

A recipe is built for one function and the metas of its operands on one rank. The gradient rule
is applied here and nowhere else: where an op varies over an axis, replicated operands enter
through I -> R (their gradient is reduced) and replicated results leave through R -> I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_grad_enabled

from weft.core import Layout
from weft.tensor.call.kernels import BoundKernel
from weft.tensor.call.memory_format import is_last
from weft.tensor.meta import Meta
from weft.tensor.placing.left_whole import LeftWhole, WideHalo
from weft.tensor.placing.operands import Caller, move_operands
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.torch_collectives import filled
from weft.tensor.trace.derivatives import Constant
from weft.tensor.trace.trees import Slot, fill, flatten, local_of, map_tensors, slots_of, substitute
from weft.tensor.views.moved import attach_to_base, bump_view_epoch, unwrap_view
from weft.transport.order import Order, laid, order_due, order_of
from weft.transport.transition import Transition

__all__ = ["Alias", "Direct", "Function", "Recipe", "Result", "tie", "tied"]


class Recipe(Caller):
    """Base. A recipe with `fast` is carried out by the short route, without `run`.

    That is a call with one result, without tensors in lists that move: `fast` is its meta, `moves`
    the transitions by argument place (keywords last), `bound` what runs on the opened arguments
    instead of the function, `leave` the transition of the result.
    """

    __slots__ = ()
    fast: Meta | None = None
    moves: tuple[tuple[int, Transition], ...] = ()
    bound: Any = None
    leave: Transition | None = None
    as_called = False
    """Whether the function runs with the caller's own numbers, none of them baked in."""
    by_value = False
    """Whether this only says that the floats' values belong to the key."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry the call out."""
        raise NotImplementedError

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        """`run` from the short route, which has opened the arguments already."""
        return self.run(func, args, {})


class Function(Recipe):
    """A Python function that is given the call's own arguments."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any, Any, Any], Any]) -> None:
        self.function = function

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.function(func, args, kwargs)


class Alias(Recipe):
    """The result consists of the arguments themselves and of constants."""

    __slots__ = ("is_constant", "result")

    def __init__(self, result: Any) -> None:
        self.result = result
        self.is_constant = not slots_of(result)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.is_constant:
            return self.result
        return fill(self.result, flatten((args, kwargs)))


@dataclass(slots=True)
class Result:
    """One result of the local op: what it becomes, and the R -> I on its way out."""

    slot: int
    meta: Meta
    leave: Transition | None


class Direct(Recipe):
    """One local op between transitions.

    Args:
        name: the op, for messages.
        operands: per tensor argument, its transition or None.
        local: what runs on the local tensors; None = the very function that the user called.
        args, kwargs: the local op's arguments with Slots; None = the user's own.
        results: per tensor the local op returns.
        result: the structure that the call returns, with Slots.
        target: the tensor argument that an in-place op writes, or None.
        write_back, write: whether an in-place result is computed out of place, and how it then
            comes to the target's layout.
        why: tells the reason of the transitions, for `weft.explain()`.
        anchor: where this rank's shard is empty, per result, the tensor arguments that get a
            gradient from it on the other ranks: torch's kernels may drop edges on empty tensors,
            and a transition behind a dropped edge would leave its peers waiting.
        places: where the tensors stand among the call's arguments, keywords last; None when some
            stand in lists.
        kernel: what makes `local` for other lengths, where it is a kernel of the book.
        left_whole: what it leaves whole though an operand is sharded, or a halo that is too wide.

    The first run looks at whether the local op's results lie in memory as their metas say, and
    where one does not, has it laid in that order in every run. Only then the short route is open.
    """

    __slots__ = (
        "anchor", "args", "bound", "fast", "reductions", "flowing", "is_quick", "kernel", "kwargs",
        "lays", "leave", "left_whole", "local", "moves", "name", "operands", "moved", "places",
        "result", "results", "single", "target", "why", "write", "write_back",
    )

    def __init__(
        self,
        name: str,
        operands: Sequence[Transition | None],
        local: Callable[..., Any] | None,
        args: Any,
        kwargs: Any,
        results: Sequence[Result],
        result: Any,
        target: int | None = None,
        write_back: bool = False,
        write: Callable[[torch.Tensor], torch.Tensor] | None = None,
        why: Callable[[], str] = str,
        anchor: Sequence[Sequence[int]] = (),
        places: Sequence[int] | None = None,
        kernel: BoundKernel | None = None,
        left_whole: LeftWhole | WideHalo | None = None,
    ) -> None:
        self.kernel, self.places, self.left_whole = kernel, places, left_whole
        self.name, self.why, self.anchor, self.reductions = name, why, anchor, None
        self.local = local
        self.operands = tuple((at, move) for at, move in enumerate(operands) if move is not None)
        self.args, self.kwargs = args, kwargs
        self.results, self.result = tuple(results), result
        self.target, self.write_back, self.write = target, write_back, write
        self.single = (
            len(results) == 1 and isinstance(result, Slot) and result.index == results[0].slot
        )
        self.bound, self.flowing = None, ()
        if local is not None and places is not None:
            self.bound = _bound(local, args, kwargs, places)
        self.fast, self.moves, self.leave = None, (), None
        self.lays: tuple[Order | None, ...] | None = None if results else ()
        self.moved = any(result.meta.alias is not None for result in results)
        runs_alone = not (self.moved or anchor or target is not None) and (
            local is None or self.bound is not None
        )
        self.is_quick = runs_alone and self.single and (places is not None or not self.operands)
        if self.is_quick:
            self.leave = self.results[0].leave
            if places is not None:
                self.moves = tuple((places[at], move) for at, move in self.operands)

    @property
    def as_called(self) -> bool:  # type: ignore[override]
        return self.local is None or bool(self.flowing)

    def let_flow(self, places: Sequence[tuple[Any, Any]]) -> None:
        """Take floats from each call: per float, its place in the local op's arguments and in the
        call's (numbers of positional ones, names of others). Of an in-place op."""
        assert self.target is not None
        self.flowing = tuple(places)

    def resized(
        self, operands: tuple[tuple[int, Transition], ...], results: tuple[Result, ...],
        layout_of: Callable[[int], Layout],
    ) -> Direct:
        """This recipe for operands of other lengths, by the same transitions and metas of these.

        `layout_of` tells the layout of a tensor of the call.
        """
        new = object.__new__(Direct)
        for name in Direct.__slots__:
            setattr(new, name, getattr(self, name))
        new.operands, new.results = operands, results
        new.fast, new.lays = None, None if results else ()
        if self.kernel is not None:
            new.local = self.kernel.local(layout_of(self.kernel.slot))
            if self.places is not None:
                new.bound = _bound(new.local, self.args, self.kwargs, self.places)
        if self.is_quick:
            new.leave = results[0].leave
            new.moves = tuple([
                (place, move) for (place, _), (_, move) in zip(self.moves, operands)
            ])
        return new

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs) if kwargs else args)
        locals_ = [local_of(tensor) for tensor in tensors]
        if self.operands:
            move_operands(tensors, self.operands, locals_, self)
        if self.write_back and is_grad_enabled():
            # The op may save the target's old value for backward.
            assert self.target is not None
            locals_[self.target] = locals_[self.target].clone()
        if self.local is None:
            feed = iter(locals_)
            out = func(*substitute(args, feed), **substitute(kwargs, feed))
        else:
            opened, named = fill(self.args, locals_), fill(self.kwargs, locals_)
            if self.flowing:
                opened, named = _with_numbers(opened, named, self.flowing, args, kwargs)
            out = self.local(*opened, **named)
        if self.target is not None:
            return self._finish_in_place(tensors, out)
        if self.anchor:
            out = tied(out, self.anchor, locals_)
        if self.lays is None:
            self._look(out, locals_)
        if self.lays:
            out = self._laid(out)
        result = self._wrap(tensors, out)
        return attach_to_base(result, func, args, kwargs) if self.moved else result

    def advance(
        self, wrapped: list[Any], locals_: list[Any], metas: Sequence[Meta | None]
    ) -> None:
        """Run as a step of a program, whose values Slots number: put the results into `locals_`.

        `wrapped` are the ShardTensors of values that have moved, or are about to.
        """
        have = locals_
        if self.operands:
            for at, _ in self.operands:
                if wrapped[at] is None:
                    wrapped[at] = wrap(locals_[at], metas[at])  # type: ignore[arg-type]
            have = locals_.copy()
            move_operands(wrapped, self.operands, have, self)
        if self.bound is not None:
            out = self.bound(have)
        else:
            assert self.local is not None
            out = self.local(*fill(self.args, have), **fill(self.kwargs, have))
        if self.anchor:
            out = tied(out, self.anchor, have)
        if self.lays is None:
            self._look(out, have)
        if self.lays:
            out = self._laid(out)
        outs = (out,) if self.single else flatten(out)
        for result, local in zip(self.results, outs):
            locals_[result.slot] = local if result.leave is None else result.leave(local)

    def _look(self, out: Any, locals_: Sequence[Any]) -> None:
        """See how the results of the local op lie in memory.

        Views of operands lie as these do. Where a shard is one long in some dim, its strides there
        are chance, and a kernel that looks for channels last may take either order the next time.
        """
        moved = {at for at, _ in self.operands}
        opened = flatten([local for at, local in enumerate(locals_) if at not in moved])
        memory = {unwrap_view(local).untyped_storage()._cdata for local in opened}
        is_chance = any(1 in local.shape for local in flatten(locals_))
        lays: list[Order | None] = []
        for result, local in zip(self.results, (out,) if self.single else flatten(out)):
            due = None
            if type(local) is torch.Tensor and local.untyped_storage()._cdata not in memory:
                meta = result.meta
                if meta.strides is not None or not local.is_contiguous():
                    due = order_due(meta.shape, meta.stride(), local)
                if is_chance and is_last(meta):
                    due = order_of(meta.shape, meta.stride())
            lays.append(due)
        self.lays = tuple(lays) if any(lays) else ()
        if self.is_quick and not self.lays:
            self.fast = self.results[0].meta

    def _laid(self, out: Any) -> Any:
        assert self.lays is not None
        each = iter(self.lays)
        return map_tensors(
            lambda one: one if (order := next(each)) is None else laid(one, order), out
        )

    def _wrap(self, tensors: Sequence[torch.Tensor], out: Any) -> Any:
        if self.single:
            result = self.results[0]
            local = out if result.leave is None else result.leave(out)
            return wrap(local, result.meta)
        values: dict[int, Any] = dict(enumerate(tensors))
        for result, local in zip(self.results, flatten(out)):
            if result.leave is not None:
                local = result.leave(local)
            values[result.slot] = wrap(local, result.meta)
        return fill(self.result, values)

    def _finish_in_place(self, tensors: Sequence[torch.Tensor], out: Any) -> Any:
        assert self.target is not None
        target = tensors[self.target]
        local = local_of(target)
        if self.write_back:
            if self.write is not None:
                out = self.write(unwrap_view(out))
            local.copy_(out)
        bump_view_epoch()
        if type(target) is ShardTensor:
            if target._memo is not None:
                target._memo.clear()
            if target._meta.requires_grad != local.requires_grad:
                target._meta = target._meta.replace(requires_grad=local.requires_grad)
        else:
            filled(target)
        return fill(self.result, tensors)


_QUICK = {
    "aten.view.default": torch.Tensor.view,
    "aten.reshape.default": torch.Tensor.reshape,
    "aten._unsafe_view.default": torch.Tensor.view,
    "aten.expand.default": torch.Tensor.expand,
    "aten.unflatten.int": torch._C.TensorBase.unflatten,
    "aten.layer_norm.default": torch.layer_norm,
    "aten.softmax.int": torch.softmax,
    "aten.embedding.default": torch.embedding,
}
"""torch's own builtin for an overload, where it takes the same positional arguments: 1 us less."""


def _bound(
    local: Any, args: Sequence[Any], kwargs: Any, places: Sequence[int]
) -> Callable[[Sequence[Any]], Any] | None:
    """The local op as a function of the call's opened arguments, its own numbers bound.

    None where tensors stand in lists or keywords of the op.
    """
    named = {name: value for name, value in (kwargs or {}).items() if value is not None}
    if slots_of(named) or any(slots_of(arg) and type(arg) is not Slot for arg in args):
        return None
    local = _QUICK.get(str(local), local)
    order = [places[arg.index] if type(arg) is Slot else None for arg in args]
    if not named and order and order[0] is not None and order[1:] == [None] * (len(args) - 1):
        first, rest = order[0], tuple(args[1:])
        if len(rest) == 1:  # as most views: without a tuple to be taken apart
            only = rest[0]
            return lambda opened: local(opened[first], only)
        return lambda opened: local(opened[first], *rest)
    return lambda opened: local(
        *[arg if at is None else opened[at] for at, arg in zip(order, args)], **named
    )


def _with_numbers(
    opened: Any, named: Any, places: Sequence[tuple[Any, Any]], args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The local op's arguments with the floats of this call."""
    opened, named = list(opened), dict(named)
    for mine, theirs in places:
        value = args[theirs] if type(theirs) is int else kwargs[theirs]
        if type(mine) is int:
            opened[mine] = value
        else:
            named[mine] = value
    return opened, named


def tied(out: Any, anchor: Sequence[Sequence[int]], locals_: Sequence[torch.Tensor]) -> Any:
    """The results with graph edges, each to the operands that `anchor` names for it."""
    each = iter(anchor)
    return map_tensors(lambda one: tie(one, [_end(locals_[at], at) for at in next(each)]), out)


def _end(local: torch.Tensor, at: int) -> torch.Tensor:
    """What the result is tied to: where its gradient is a constant on the other ranks, it is one
    here, too, and has no gradient of its own."""
    if type(at) is not Constant:
        return local
    nothing = torch.atleast_1d(local).narrow(0, 0, 0)
    return (torch.view_as_real(nothing) if nothing.is_complex() else nothing).round()


def tie(one: torch.Tensor, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result with a graph edge to each of these operands."""
    if not locals_ or not (one.is_floating_point() or one.is_complex()):
        return one
    # Sums of no elements: zero whatever the elements are.
    zero: Any = sum(torch.atleast_1d(local).narrow(0, 0, 0).sum() for local in locals_)
    if zero.is_complex() and not one.is_complex():
        zero = zero.real
    return one + zero.to(one.dtype)
