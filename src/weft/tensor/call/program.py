"""The recipe of a call: its ops, one or several, carried out step by step on local tensors.

A call is a function of torch, or an op that is composed of others; each op that it consists of is
decided by itself and becomes a `Step` on numbered values: first the call's tensors, then the
results of the steps. A ShardTensor is made in between only if a value has to move.

The gradient rule is applied when a step is made (`decide`): if an op varies over an axis,
replicated operands become R before it (their gradient is reduced), and replicated results become I
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch._ops import OpOverload

from weft.core import Layout
from weft.tensor.call.anchor import tied
from weft.tensor.call.in_place import Reads
from weft.tensor.call.kernels import BoundKernel
from weft.tensor.call.recipe import Recipe
from weft.tensor.meta import Meta
from weft.tensor.placing.halos import slice_of
from weft.tensor.placing.left_whole import LeftWhole, WideHalo
from weft.tensor.placing.operands import Caller, move_operands
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.torch_collectives import filled
from weft.tensor.trace.trees import Slot, fill, flatten, local_of, slots_of, substitute
from weft.tensor.views.moved import attach_to_base, bump_view_epoch, unwrap_view, written_to
from weft.transport.order import Order, laid, order_due, order_of
from weft.transport.transition import Transition

__all__ = ["Program", "Step"]


class Step(Caller):
    """One local op between transitions, on numbered values.

    Args:
        name: the op, for messages.
        moves: per value that may move, its transition or None.
        local: what runs on the local tensors; None = the very function that the user called, with
            the call's own arguments.
        args, kwargs: the local op's arguments with Slots.
        results: per tensor that the local op returns, its number and its R -> I.
        target: the value that an in-place op writes, or None. It has no results.
        reads: operands that may share its memory.
        write_back, write: whether an in-place result is computed out of place, and how it is then
            moved to the target's layout.
        why: the reason of the transitions, for `weft.explain()`.
        anchor: where this rank's shard is empty, per result, the values that get a gradient from
            it on the other ranks (see `anchor`).
        kernel: makes `local` for other lengths, if it is a kernel of the book.
        left_whole: a result that is whole although an operand is sharded, or a halo that is too
            wide.
        keeps: whether autograd keeps boxes that are fetched for it.
        slice_of: for a slice, its base value and its beginning.
        sized: for a local op that takes the local shape of its result, the argument that has it,
            and the dims in it (first, one past the last).

    `serves_all`: nothing in it depends on lengths, as long as it differs in layouts alone.
    """

    __slots__ = (
        "anchor", "args", "bound", "flowing", "keeps", "kernel", "kwargs", "left_whole", "local",
        "name", "operands", "reads", "reductions", "results", "serves_all", "sized", "slice_of",
        "target", "why", "write", "write_back",
    )

    def __init__(
        self, name: str, moves: Sequence[Transition | None], local: Callable[..., Any] | None,
        args: Any, kwargs: Any, results: Sequence[tuple[int, Transition | None]] = (), *,
        target: int | None = None, write_back: bool = False,
        write: Callable[[torch.Tensor], torch.Tensor] | None = None,
        why: Callable[[], str] = str, anchor: Sequence[Sequence[int]] = (),
        kernel: BoundKernel | None = None, left_whole: LeftWhole | WideHalo | None = None,
        slice_of: tuple[int, tuple[int, ...]] | None = None, keeps: bool = True,
        sized: tuple[int, int, int] | None = None, reads: Reads | None = None,
    ) -> None:
        self.name, self.why, self.reductions, self.left_whole = name, why, None, left_whole
        self.slice_of, self.keeps, self.sized = slice_of, keeps, sized
        self.operands = tuple([(at, move) for at, move in enumerate(moves) if move is not None])
        self.local, self.args, self.kwargs, self.kernel = local, args, kwargs, kernel
        self.results, self.anchor = tuple(results), anchor
        self.target, self.write_back, self.write, self.reads = target, write_back, write, reads
        self.bound = None if local is None else _bound(local, args, kwargs)
        self.flowing: tuple[tuple[Any, Any], ...] = ()
        self.serves_all = not (self.operands or kernel or sized) and all(
            leave is None for _, leave in self.results)

    def let_flow(self, places: Sequence[tuple[Any, Any]]) -> None:
        """Take floats from each call: per float, its place in the local op's arguments and in the
        call's (numbers of positional ones, names of others)."""
        if places:
            self.flowing, self.bound = tuple(places), None

    def resized(
        self, layout_of: Callable[[int], Layout], meta_of: Callable[[int], Meta]
    ) -> Step:
        """This step for values of other lengths, whose layouts `layout_of` tells, and of its
        results `meta_of` what they are; itself where nothing in it depends on them. Its transitions
        leave layouts as they are (I -> R)."""
        if self.serves_all:
            return self
        new = object.__new__(Step)
        for name in Step.__slots__:
            setattr(new, name, getattr(self, name))
        new.operands = tuple([(at, _moved_to(move, layout_of(at))) for at, move in self.operands])
        if any(leave for _, leave in self.results):
            new.results = tuple([
                (at, leave and _moved_to(leave, layout_of(at))) for at, leave in self.results
            ])
        if self.kernel is not None:
            new.local = self.kernel.local([layout_of(at) for at in self.kernel.slots])
            new.bound = _bound(new.local, self.args, self.kwargs)
        if self.sized is not None:
            place, first, last = self.sized
            size = list(meta_of(self.results[0][0]).local_shape[first:last])
            new.args = (*self.args[:place], size, *self.args[place + 1 :])
            new.bound = _bound(new.local, new.args, self.kwargs)
        return new

    def bound_at(self, places: Sequence[int]) -> Callable[[Sequence[Any]], Any] | None:
        """`bound` for opened arguments, in which the values have these places."""
        if self.local is None or not any(at != place for at, place in enumerate(places)):
            return self.bound
        return _bound(self.local, self.args, self.kwargs, places)

    def outs(self, have: list[Any], func: Any, args: Any, kwargs: Any) -> Any:
        """The results of the local op on local tensors in the needed layouts.

        `func`, `args`, `kwargs` are the call that the user made.
        """
        if self.write_back and is_grad_enabled():
            # The op may save the target's old value for backward.
            assert self.target is not None
            have = have.copy()
            have[self.target] = have[self.target].clone()
        if self.reads is not None:
            have = self.reads.apart(have)
        if self.bound is not None:
            return self.bound(have)
        if self.local is None:
            feed = iter(have)
            return func(*substitute(args, feed), **substitute(kwargs, feed))
        opened, named = fill(self.args, have), fill(self.kwargs, have)
        if self.flowing:
            opened, named = _with_numbers(opened, named, self.flowing, args, kwargs)
        return self.local(*opened, **named)

    def written(self, target: torch.Tensor, out: Any) -> None:
        """The op has run: write its result to its target."""
        local = local_of(target)
        if self.write_back:
            if self.write is not None:
                out = self.write(unwrap_view(out))
            local.copy_(out)
        if type(target) is ShardTensor:
            written_to(target)
        else:
            bump_view_epoch()
            filled(target)


class Program(Recipe):
    """Steps on numbered values.

    Args:
        steps: one or more.
        metas: per value its Meta as a ShardTensor; None for the call's own tensors, and for
            contiguous values that nobody asks for.
        result: the structure that the call returns, with Slots.
        places: of one step, where the call's tensors stand among its arguments, keywords last; None
            when some stand in lists.

    The first run compares the memory order of local results with their metas. Where one differs,
    every run reorders it. After the first run the short route may carry out a program of one step
    with one result.
    """

    __slots__ = (
        "bound", "caller", "fast", "in_place", "is_quick", "lays", "leave", "made", "metas",
        "moved", "moves", "places", "result", "steps",
    )

    def __init__(
        self, steps: Sequence[Step], metas: Sequence[Meta | None], result: Any,
        places: Sequence[int] | None = None,
    ) -> None:
        self.steps, self.metas = tuple(steps), tuple(metas)
        self.result, self.places = result, places
        self.lays: list[tuple[Order | None, ...] | None] = [None] * len(self.steps)
        made = {at for step in self.steps for at, _ in step.results}
        self.made = tuple([slot.index for slot in slots_of(result) if slot.index in made])
        self.moved = any(metas[at].alias is not None for at in self.made)  # type: ignore
        self.fast, self.moves, self.bound, self.leave, self.caller = None, (), None, None, None
        self.is_quick, self.in_place = False, None
        if len(self.steps) == 1:
            self.is_quick = self._is_quick(self.steps[0])
            self.in_place = self._place_written(self.steps[0])
        if self.is_quick:
            self._set_moves(self.steps[0])
            self.bound = None if self.places is None else self.steps[0].bound_at(self.places)

    def _is_quick(self, step: Step) -> bool:
        """Whether the short route may carry out the one step, once its result has been seen."""
        return (
            type(self.result) is Slot and self.made == (self.result.index,)
            and len(step.results) == 1 and not self.moved and not step.anchor
            and step.slice_of is None
            and (self.places is not None or not (step.operands or step.local))
            and (step.local is None or step.bound is not None)
        )

    def _place_written(self, step: Step) -> int | None:
        """The argument that the very call writes to in place, if it does nothing else."""
        if step.target is None or self.places is None or self.result != Slot(step.target):
            return None
        as_it_is = step.local is None and not step.operands and not step.write_back
        return self.places[step.target] if as_it_is else None

    def _set_moves(self, step: Step) -> None:
        """Set what the short route reads, but for `fast` and `bound`."""
        self.caller, self.leave = step, step.results[0][1]
        if self.places is not None:
            self.moves = tuple([(self.places[at], move) for at, move in step.operands])

    @property
    def as_called(self) -> bool:  # type: ignore[override]
        (step, *others) = self.steps
        return not others and (step.local is None or bool(step.flowing))

    def resized(self, steps: Sequence[Step], metas: Sequence[Meta | None]) -> Program:
        """This program for other lengths, with the same steps for these."""
        new = object.__new__(Program)
        new.result, new.places, new.made, new.moved = (
            self.result, self.places, self.made, self.moved)
        new.is_quick, new.moves, new.bound, new.leave, new.caller, new.in_place = (
            self.is_quick, self.moves, self.bound, self.leave, self.caller, self.in_place)
        new.steps, new.metas, new.fast = tuple(steps), tuple(metas), None
        new.lays = [None] * len(steps)
        if new.is_quick and steps[0] is not self.steps[0]:
            new._set_moves(steps[0])
            if steps[0].local is not None and self.places is not None:
                new.bound = steps[0].bound_at(self.places)
        return new

    def run(
        self, func: Any, args: Any, kwargs: Any, opened: Sequence[Any] | None = None
    ) -> Any:
        given = flatten((args, kwargs) if kwargs else args)
        metas = self.metas
        room = [None] * (len(metas) - len(given))
        values: list[Any] = given + room  # ShardTensors of values that have moved, or are about to
        locals_: list[Any] = [*map(local_of, given), *room]
        for place, step in enumerate(self.steps):
            have = locals_
            if step.operands:
                for at, _ in step.operands:
                    if values[at] is None:
                        values[at] = wrap(locals_[at], metas[at])  # type: ignore[arg-type]
                have = locals_.copy()
                move_operands(values, step.operands, have, step)
            if opened is not None and step.local is None and have is locals_ and not step.reads:
                out = func(*opened)
            else:
                out = step.outs(have, func, args, kwargs)
            if step.target is not None:
                step.written(values[step.target], out)
                continue
            if step.anchor:
                out = tied(out, step.anchor, have)
            outs = (out,) if isinstance(out, torch.Tensor) else flatten(out)
            lays = self.lays[place]
            if lays is None:
                lays = self._look(place, outs, have)
            if lays:
                outs = [one if due is None else laid(one, due) for one, due in zip(outs, lays)]
            for (at, leave), one in zip(step.results, outs):
                values[at], locals_[at] = None, one if leave is None else leave(one)
            if step.slice_of is not None:
                self._remember(step, values, locals_)
        for at in self.made:
            if values[at] is None:
                values[at] = wrap(locals_[at], metas[at])  # type: ignore[arg-type]
        result = fill(self.result, values)
        return attach_to_base(result, func, args, kwargs) if self.moved else result

    def _remember(self, step: Step, values: list[Any], locals_: Sequence[Any]) -> None:
        """A slice remembers its base."""
        ((at, _),), (base, starts) = step.results, step.slice_of  # type: ignore[misc]
        for slot in (base, at):
            if values[slot] is None and self.metas[slot] is not None:
                values[slot] = wrap(locals_[slot], self.metas[slot])  # type: ignore[arg-type]
        if values[at] is not None and values[base] is not None:
            slice_of(values[base], starts, values[at])

    def run_opened(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        if self.is_quick:
            return self._first(func, args, locals_)
        if self.in_place is None:
            return self.run(func, args, {}, locals_)
        (step,), target = self.steps, args[self.in_place]
        func(*(step.reads.apart(locals_, self.places) if step.reads else locals_))
        step.written(target, None)
        return target

    def _first(self, func: Any, args: Any, locals_: list[Any]) -> Any:
        """What the short route does, with a look at the result."""
        if self.moves:
            assert self.caller is not None
            move_operands(args, self.moves, locals_, self.caller)
        local = func(*locals_) if self.bound is None else self.bound(locals_)
        lays, meta = self.lays[0], self.metas[self.made[0]]
        assert meta is not None
        if lays is None:
            if meta.strides is None and local.is_contiguous():
                lays = self._looked(0, ())
            else:
                lays = self._look(0, (local,), flatten(locals_))
        if lays and lays[0] is not None:
            local = laid(local, lays[0])
        if self.leave is not None:
            local = self.leave(local)
        return wrap(local, meta)

    def _look(
        self, place: int, outs: Sequence[torch.Tensor], have: Sequence[Any]
    ) -> tuple[Order | None, ...]:
        """Compare the memory order of local results with their metas; the orders they need.

        Views of operands have the order of these. Where a shard has length 1 in some dim, its
        strides there are chance, and a kernel that looks for channels last may take either order
        the next time.
        """
        step = self.steps[place]
        moved = {at for at, _ in step.operands}
        opened = flatten([local for at, local in enumerate(have) if at not in moved])
        memory = {unwrap_view(local).untyped_storage()._cdata for local in opened}
        is_chance = any(1 in local.shape for local in flatten(have))
        lays: list[Order | None] = []
        for (at, _), local in zip(step.results, outs):
            due, meta = None, self.metas[at]
            if type(local) is torch.Tensor and local.untyped_storage()._cdata not in memory:
                if meta is None or meta.strides is None:
                    due = None if local.is_contiguous() else tuple(range(local.dim()))
                elif is_chance and _is_last(meta):
                    due = order_of(meta.shape, meta.strides)
                else:
                    due = order_due(meta.shape, meta.strides, local)
            lays.append(due)
        return self._looked(place, tuple(lays) if any(lays) else ())

    def _looked(self, place: int, found: tuple[Order | None, ...]) -> tuple[Order | None, ...]:
        self.lays[place] = found
        if self.is_quick and not found:
            self.fast = self.metas[self.steps[place].results[0][0]]
        return found


def _is_last(meta: Meta) -> bool:
    """Whether channels come last in memory. Kernels read this from the strides of a shard, which
    show nothing if it has one channel, or one place."""
    ndim = len(meta.shape)
    return meta.strides is not None and ndim in (4, 5) and (
        order_of(meta.shape, meta.strides) == (0, *range(2, ndim), 1)
    )


def _moved_to(move: Transition, layout: Layout) -> Transition:
    """A transition that leaves its layout as it is (I -> R), for a layout of other lengths."""
    if layout is move.src or layout == move.src:
        return move
    made = transition_between(move.mesh, layout, layout, move.src_varying, move.dst_varying)
    assert made is not None
    return made


_HOMES: Any = torch._C._nn, torch._C._VariableFunctions, torch._C.TensorBase  # type: ignore
"""Where torch's own builtins are; methods take the tensor first."""

_ALIKE = ("default", "int", "dim", "dim_IntList")
"""The overloads that a builtin finds by its arguments. It would take the arguments of any other
overload for those of a deprecated one, and warn."""


def _builtin_of(local: Any) -> Any:
    """torch's builtin of an overload's name, which takes the same arguments: calling it is 1 to 6
    us faster. What has none is called as it is."""
    if type(local) is not OpOverload or local.namespace != "aten" or (
        local._overloadname not in _ALIKE
    ):
        return local
    name = local._schema.name.removeprefix("aten::")
    found = (getattr(home, name, None) for home in _HOMES)
    return next((one for one in found if callable(one)), local)


def _bound(
    local: Any, args: Sequence[Any], kwargs: Any, places: Sequence[int] | None = None
) -> Callable[[Sequence[Any]], Any] | None:
    """The local op as a function of local tensors, with its own numbers bound.

    `places` says where a value stands among what is opened, if not by its number. None where
    tensors stand in lists or keywords of the op.
    """
    named = {name: value for name, value in (kwargs or {}).items() if value is not None}
    if slots_of(named) or any(slots_of(arg) and type(arg) is not Slot for arg in args):
        return None
    local = _builtin_of(local)
    order = [
        None if type(arg) is not Slot else arg.index if places is None else places[arg.index]
        for arg in args
    ]
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
