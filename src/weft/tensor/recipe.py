"""How one call is carried out, decided once and kept: transitions, the local op, wrapping.

A recipe is built for one function and the metas of its operands on one rank. The gradient rule
is applied here and nowhere else: where an op varies over an axis, replicated operands enter
through I -> R (their gradient is reduced) and replicated results leave through R -> I.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_grad_enabled

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor import modes
from weft.tensor.calls import slots_of
from weft.tensor.capture import Slot, map_tensors
from weft.tensor.meta import Meta, bounded_put
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.transport import move_together, traffic
from weft.transport.transition import Transition

__all__ = [
    "Alias", "Direct", "Function", "Named", "Recipe", "Result", "Views",
    "enter", "enter_all", "fill", "flatten", "local_of",
    "forget_views", "transition_between", "varying_axes",
]

MAX_VIEWS = 4096


class Recipe:
    """Base. A recipe with `fast` is carried out by the short route, without `run`.

    That is a call without tensors in lists, with one result: `fast` is its meta, `moves` the
    transitions by argument place (keywords last), `bound` what runs on the opened arguments
    instead of the function, `leave` the transition of the result.
    """

    __slots__ = ()
    name = ""
    why: Callable[[], str] = str
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
        anchor: where this rank's shard is empty, the tensor arguments that get a gradient on the
            other ranks: torch's kernels may drop edges on empty tensors, and a transition behind
            a dropped edge would leave its peers waiting.
        places: where the tensors stand among the call's arguments, keywords last; None when some
            stand in lists.
    """

    __slots__ = (
        "anchor", "args", "bound", "fast", "kwargs", "leave", "local", "moves", "name", "operands",
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
        write: Transition | None = None,
        why: Callable[[], str] = str,
        anchor: Sequence[int] = (),
        places: Sequence[int] | None = None,
    ) -> None:
        self.name, self.why, self.anchor = name, why, anchor
        self.local = local
        self.operands = tuple((at, move) for at, move in enumerate(operands) if move is not None)
        self.args, self.kwargs = args, kwargs
        self.results, self.result = tuple(results), result
        self.target, self.write_back, self.write = target, write_back, write
        self.single = (
            len(results) == 1 and isinstance(result, Slot) and result.index == results[0].slot
        )
        self.bound = None
        if local is not None and places is not None:
            self.bound = _bound(local, args, kwargs, places)
        self.fast, self.moves, self.leave = None, (), None
        runs_alone = target is None and not anchor and (local is None or self.bound is not None)
        if runs_alone and self.single and places is not None:
            self.fast, self.leave = self.results[0].meta, self.results[0].leave
            self.moves = tuple((places[at], move) for at, move in self.operands)

    @property
    def as_called(self) -> bool:  # type: ignore[override]
        return self.local is None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs) if kwargs else args)
        locals_ = [local_of(tensor) for tensor in tensors]
        if self.operands:
            enter_all(tensors, self.operands, locals_, self)
        if self.write_back and is_grad_enabled():
            # The op may save the target's old value for backward.
            assert self.target is not None
            locals_[self.target] = locals_[self.target].clone()
        if self.local is None:
            feed = iter(locals_)
            out = func(*_substitute(args, feed), **_substitute(kwargs, feed))
        else:
            out = self.local(*fill(self.args, locals_), **fill(self.kwargs, locals_))
        if self.target is not None:
            return self._finish_in_place(tensors, out)
        if self.anchor:
            out = _anchored(out, [locals_[index] for index in self.anchor])
        return self._wrap(tensors, out)

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
                out = self.write(out)
            local.copy_(out)
        if type(target) is ShardTensor:
            target._memo = None
            if target._meta.requires_grad != local.requires_grad:
                target._meta = target._meta.replace(requires_grad=local.requires_grad)
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
    if not named and order[:1] == [places[0]] and order[1:] == [None] * (len(args) - 1):
        first, rest = places[0], tuple(args[1:])
        return lambda opened: local(opened[first], *rest)
    return lambda opened: local(
        *[arg if at is None else opened[at] for at, arg in zip(order, args)], **named
    )


def _anchored(out: Any, locals_: Sequence[torch.Tensor]) -> Any:
    """The results with a graph edge to each of these operands."""
    # Sums of no elements: zero whatever the elements are.
    zero: Any = sum(torch.atleast_1d(local).narrow(0, 0, 0).sum() for local in locals_)

    def tie(one: torch.Tensor) -> torch.Tensor:
        differentiable = one.is_floating_point() or one.is_complex()
        return one + zero.to(one.dtype) if differentiable else one

    return map_tensors(tie, out)


def enter(tensor: torch.Tensor, transition: Transition, recipe: Recipe) -> torch.Tensor:
    """The local tensor of one operand in the layout that the op needs."""
    locals_: list[Any] = [None]
    enter_all((tensor,), ((0, transition),), locals_, recipe)
    return locals_[0]


def enter_all(
    tensors: Sequence[Any],
    moves: Sequence[tuple[int, Transition]],
    locals_: list[Any],
    recipe: Recipe,
) -> None:
    """Put the local tensors of operands, in the layouts that the op needs, into `locals_`.

    What a tensor became for one use serves its later uses (one all-gather, and one reduction of
    the gradient, for q, k and v). It is kept until the tensor changes or a backward has passed:
    all ranks run the same program, so they forget at the same call.
    """
    if traffic.STATE.on or modes.STRICT.on:
        for place, transition in moves:
            modes.check_strict(recipe.name, transition, type(tensors[place]) is ShardTensor)
        with traffic.label(recipe.name, modes.source_line(), recipe.why()):
            _enter_all(tensors, moves, locals_)
    else:
        _enter_all(tensors, moves, locals_)


def _enter_all(
    tensors: Sequence[Any], moves: Sequence[tuple[int, Transition]], locals_: list[Any]
) -> None:
    pending: list[Any] = []
    grad_mode = is_grad_enabled()
    for place, transition in moves:
        tensor = tensors[place]
        sharded = type(tensor) is ShardTensor
        local = tensor._local if sharded else tensor
        if not (grad_mode and local.requires_grad):
            locals_[place] = transition(local)
            continue
        key: Any
        if sharded:
            views = tensor._memo
            if views is None:
                views = tensor._memo = Views()
            key, state = transition, local._version
        else:
            views = transition.mesh.cache.setdefault("views", Views())
            key, state = (id(tensor), transition), (local._version, local.data_ptr())
        kept = views.get(key)
        if kept is not None and kept[0] is local and kept[1] == state:
            locals_[place] = kept[2]
        else:
            pending.append((place, transition, local, views, key, state))
    if pending:
        outs = move_together([item[1] for item in pending], [item[2] for item in pending])
        live = _LIVE.views
        if len(live) > MAX_VIEWS:
            forget_views()
        for (place, _, local, views, key, state), out in zip(pending, outs):
            locals_[place] = out
            if out is not local and out.requires_grad:
                if not views:
                    live.append(views.ref)
                views[key] = (local, state, out)


class Views(dict[Any, Any]):
    """What a tensor became for its uses. `ref` is weak: the list of them keeps none alive."""

    __slots__ = ("__weakref__", "ref")

    def __init__(self) -> None:
        self.ref = weakref.ref(self)


class _Live(threading.local):
    """The views of this thread that the next backward forgets."""

    def __init__(self) -> None:
        self.views: list[weakref.ref[Views]] = []


_LIVE = _Live()


def forget_views() -> None:
    """A backward has passed: the next forward starts anew, and nothing gathered stays alive."""
    for views in _LIVE.views:
        found = views()
        if found is not None:
            found.clear()
    _LIVE.views.clear()


class Named(Recipe):
    """Stands for a call without a recipe of its own (redistribute, fallback) in `enter`."""

    __slots__ = ("name", "why")

    def __init__(self, name: str, why: str = "") -> None:
        self.name, self.why = name, lambda: why


def transition_between(
    mesh: BoundMesh,
    src: Layout,
    dst: Layout,
    src_varying: frozenset[int] = frozenset(),
    dst_varying: frozenset[int] = frozenset(),
) -> Transition | None:
    """The one Transition of these layouts on this rank; None when it does nothing at all."""
    if src == dst and src_varying == dst_varying:
        return None
    table = mesh.cache.setdefault("transitions", {})
    key = (src, dst, src_varying, dst_varying)
    if key not in table:
        made = Transition(mesh, src, dst, src_varying=src_varying, dst_varying=dst_varying)
        bounded_put(table, key, None if made.is_identity else made, 4 * MAX_VIEWS)
    return table[key]


def varying_axes(layouts: Sequence[Layout]) -> frozenset[int]:
    """The axes over which a call with these operands and results computes different things."""
    found: set[int] = set()
    for layout in layouts:
        for axes in layout.dims:
            found.update(axes)
        if layout.is_partial:
            found.update(axis for axis, kind in enumerate(layout.partial) if kind is not None)
    return frozenset(found)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if type(tensor) is ShardTensor else tensor


def flatten(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    elif isinstance(tree, slice):
        _collect((tree.start, tree.stop, tree.step), found)


def _substitute(tree: Any, feed: Iterator[torch.Tensor]) -> Any:
    """`tree` with its tensors replaced in order by those of `feed`."""
    if isinstance(tree, torch.Tensor):
        return next(feed)
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([_substitute(item, feed) for item in tree])
    if kind is dict:
        return {name: _substitute(item, feed) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)) and kind is not torch.Size:
        return [_substitute(item, feed) for item in tree]
    if kind is slice:
        return slice(*(_substitute(part, feed) for part in (tree.start, tree.stop, tree.step)))
    return tree


def fill(tree: Any, values: Any) -> Any:
    """`tree` with each Slot replaced by `values[slot.index]`."""
    kind = type(tree)
    if kind is Slot:
        return values[tree.index]
    if kind is list or kind is tuple:
        return kind([fill(item, values) for item in tree])
    if kind is dict:
        return {name: fill(item, values) for name, item in tree.items()}
    if isinstance(tree, tuple) and kind is not torch.Size:
        items = [fill(item, values) for item in tree]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return tree
