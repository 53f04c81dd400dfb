"""Calls of ops that users have registered rules or handlers for.

An `Own` stands for one op: a Python function or an `autograd.Function` (which never come here by
themselves: see `takeover` and `bridge`), or an op that torch knows. It carries the op out by the
handler, else by the rule (a recipe of `OnLocal`), else as if nothing had been registered.

What a user's function does with local tensors is not known before it has run. So shapes come from
the rule, and what comes out is compared with them on every call; dtypes are those that come out.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, ShardTypeError, UnsupportedOpError, message
from weft.rules import Call, Decision, OwnRule, TensorArg
from weft.rules.factors import carries
from weft.tensor.calls import dtype_text
from weft.tensor.capture import connected, map_tensors, with_defaults
from weft.tensor.enter import enter_all, entering, transition_between, varying_axes
from weft.tensor.layouts import layout_of
from weft.tensor.meta import intern, memory_order, strides_in_order
from weft.tensor.recipe import Function, Recipe, anchored
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trees import flatten, local_of, substitute

__all__ = ["OWN", "Own", "OwnFunction", "handled", "is_sharded", "keys_of", "recipe", "rule_of"]


class OwnFunction:
    """What an op is called by while its rule carries it out: a key of its own in the caches.

    Args:
        name: the op, for messages.
        run: the op itself, on plain tensors.
        otherwise: the op on ShardTensors where the rule does not speak.
        rule: what the user says of it, or None.
        is_op: whether torch's dispatcher knows it, so that it may tell its results' shapes.
        keeps_edges: whether results of empty tensors still have their place in autograd's graph,
            as those of an autograd.Function do.
    """

    __slots__ = ("__name__", "is_op", "keeps_edges", "otherwise", "rule", "run")

    def __init__(
        self, name: str, run: Callable[..., Any], otherwise: Callable[..., Any],
        rule: OwnRule | None, is_op: bool, keeps_edges: bool,
    ) -> None:
        self.__name__, self.run, self.otherwise, self.rule = name, run, otherwise, rule
        self.is_op, self.keeps_edges = is_op, keeps_edges

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Own:
    """One op that a user has registered something for.

    Args:
        target: the function, the autograd.Function or the op that torch knows.
        name: for messages.
        run: the op on plain tensors.
        otherwise: the op on ShardTensors, as if nothing had been registered.
        signature: of its arguments, where tensors may come by keyword.
    """

    __slots__ = ("function", "handler", "name", "otherwise", "run", "signature", "target", "undo")

    def __init__(
        self, target: Any, name: str, run: Callable[..., Any], otherwise: Callable[..., Any],
        signature: inspect.Signature | None,
    ) -> None:
        self.target, self.name, self.run, self.otherwise = target, name, run, otherwise
        self.signature = signature
        self.handler: Callable[..., Any] | None = None
        self.function = self.function_with(None)
        self.undo: Callable[[], None] = lambda: None

    def function_with(self, rule: OwnRule | None) -> OwnFunction:
        """A new key, of which no recipe has been made."""
        is_op = isinstance(self.target, (OpOverload, OpOverloadPacket))
        keeps_edges = isinstance(self.target, type) or (
            is_op and not str(self.target).startswith("aten.")
        )
        return OwnFunction(self.name, self.run, self.otherwise, rule, is_op, keeps_edges)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op on arguments among which there is a ShardTensor."""
        if self.handler is not None and self not in _INSIDE.ops:
            out = self._handled(self.handler, args, kwargs)
            if out is not NotImplemented:
                return out
        if self.function.rule is None:
            return self.otherwise(*args, **kwargs)
        if kwargs:
            args, kwargs = self.in_order(args, kwargs)
        return ShardTensor.__torch_function__(self.function, (), args, kwargs)

    def _handled(self, handler: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        _INSIDE.ops.append(self)
        try:
            out = handler(*args, **kwargs)
        finally:
            _INSIDE.ops.pop()
        plain = [str(tuple(one.shape)) for one in flatten(out) if type(one) is not ShardTensor]
        if plain:
            raise ShardTypeError(
                message(f"the handler of {self.name}", f"it returned {len(plain)} plain tensors",
                        "a handler gets ShardTensors and returns ShardTensors, whose layouts say "
                        "what each rank holds", [f"shape {shape}" for shape in plain],
                        "ShardTensor.from_local(local, x.device_mesh, x.layout)")
            )
        return out

    def in_order(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments in the order of the signature: a rule counts tensors."""
        if isinstance(self.target, OpOverload):
            return with_defaults(self.target, args, kwargs)
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            return bound.args, bound.kwargs
        named = [name for name, value in kwargs.items() if flatten(value)]
        if named:
            raise ShardTypeError(
                message(f"{self.name}(...)", f"{len(named)} tensors are given by name, and the op "
                        "does not say where they stand", "a rule counts the tensors of a call",
                        named, "give tensors by position")
            )
        return args, kwargs


class _Inside(threading.local):
    def __init__(self) -> None:
        self.ops: list[Own] = []


_INSIDE = _Inside()
"""The ops whose handlers run now: calls of theirs mean what they would mean without."""

OWN: dict[Any, Own] = {}
"""By what users call: the function, the autograd.Function, the op."""


def is_sharded(*trees: Any) -> bool:
    """Whether there is a ShardTensor in nested arguments."""
    return any(type(tensor) is ShardTensor for tensor in flatten(trees))


def rule_of(func: Any) -> OwnFunction | None:
    """The registered function that `func` is or is called by, if it has a rule."""
    if type(func) is OwnFunction:
        return func if func.rule is not None else None
    own = OWN.get(func)
    return None if own is None or own.function.rule is None else own.function


def keys_of(target: Any) -> list[Any]:
    """The objects that calls of an op come by: it, its overloads, the packet of its only one."""
    if isinstance(target, OpOverloadPacket):
        return [target, *(getattr(target, name) for name in target.overloads())]
    if isinstance(target, OpOverload) and len(target.overloadpacket.overloads()) == 1:
        return [target, target.overloadpacket]
    return [target]


def handled(overload: OpOverload, func: Any = None) -> bool:
    """Whether the op that `func` consists of is to go to its handler."""
    own = OWN.get(overload)
    return own is not None and own.handler is not None and own.function is not func


# Recipes.


def recipe(
    function: OwnFunction, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    mesh: BoundMesh,
) -> tuple[Recipe, bool] | None:
    """The recipe of a call, and whether its floats only flow through.

    None where the rule does not speak of such a call to an op that torch knows.
    """
    rule = function.rule
    assert rule is not None
    layouts = [layout_of(tensor, mesh) for tensor in tensors]
    args_of = [TensorArg(tuple(t.shape), dtype_text(t.dtype)) for t in tensors]
    feed = iter(args_of)
    call = Call(
        rule.name, map_tensors(lambda _: next(feed), args),
        map_tensors(lambda _: next(feed), kwargs), (),
    )
    bound = rule.bind(call, False)
    if bound is None:
        if function.is_op:
            return None
        return Function(lambda _, args, kwargs: function.otherwise(*args, **kwargs)), False
    found, results = bound
    if mesh.here is None:
        return OutsideMesh(rule.name, mesh, results), rule.by_shape
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    decision = propagate.decide(
        found, Call(rule.name, call.args, call.kwargs, results), layouts, wants
    )
    dtypes = [arg.dtype for arg in args_of]
    anchor = () if function.keeps_edges or not any(wants) or not _has_empty_shard(decision) else (
        _edges(function, args, kwargs, tensors, [at for at, wanted in enumerate(wants) if wanted])
    )
    return OnLocal(function, mesh, decision, layouts, wants, dtypes, anchor), rule.by_shape


def _has_empty_shard(decision: Decision) -> bool:
    return any(
        0 in layout.sizes_of(dim) for layout in decision.operands
        for dim, axes in enumerate(layout.dims) if axes
    )


def _edges(
    function: OwnFunction, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    wanted: Sequence[int],
) -> tuple[int, ...]:
    """The operands that a function gives a gradient, found by running it on ones.

    torch's kernels, and the function itself, may drop edges of empty tensors; a transition behind
    a dropped edge would leave other ranks waiting. All ranks of the call look, and find the same.
    """
    def sample(index: int) -> torch.Tensor:
        tensor = tensors[index]
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def call(given: Callable[[int], torch.Tensor]) -> Any:
        feed = map(given, range(len(tensors)))
        return function.run(*substitute(args, feed), **substitute(kwargs, feed))

    try:
        return connected(call, sample, wanted)
    except Exception:  # it does not like ones
        return tuple(wanted)


class OnLocal(Recipe):
    """A user's function on local tensors, between transitions; its results are looked at."""

    __slots__ = (
        "anchor", "decision", "function", "leaves", "mesh", "name", "operands", "terms", "why",
    )
    as_called = True

    def __init__(
        self, function: OwnFunction, mesh: BoundMesh, decision: Decision,
        layouts: Sequence[Layout], wants: Sequence[bool], dtypes: Sequence[str],
        anchor: Sequence[int],
    ) -> None:
        self.function, self.mesh, self.decision = function, mesh, decision
        self.name, self.why = function.__name__, decision.reason
        self.terms = {
            dtype for dtype, layout in zip(dtypes, decision.operands) if layout.is_partial
        }
        varying = varying_axes((*decision.operands, *decision.results))
        moves = entering(mesh, layouts, decision.operands, wants, varying)
        self.operands = tuple((at, move) for at, move in enumerate(moves) if move is not None)
        self.leaves = [
            transition_between(
                mesh, layout, layout,
                frozenset(axis for axis in varying if any(wants) and layout.on(axis) is None),
            )
            for layout in decision.results
        ]
        self.anchor = anchor

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs) if kwargs else args)
        locals_ = [local_of(tensor) for tensor in tensors]
        if self.operands:
            enter_all(tensors, self.operands, locals_, self)
        before = [local._version if not local.is_inference() else 0 for local in locals_]
        feed = iter(locals_)
        out = self.function.run(*substitute(args, feed), **substitute(kwargs, feed))
        written = [
            at for at, (local, version) in enumerate(zip(locals_, before))
            if not local.is_inference() and local._version != version
        ]
        if written:
            self._check_written(written, tensors)
        if out is None and written:  # what it has written to are its results
            return None
        if self.anchor:
            out = anchored(out, [locals_[at] for at in self.anchor])
        self._check_number(out)
        given = {id(local): tensor for local, tensor in zip(locals_, tensors)
                 if local_of(tensor) is local}
        moved = {_memory(locals_[at]) for at, _ in self.operands}
        places = iter(range(len(self.decision.results)))
        return map_tensors(lambda one: self._wrap(next(places), one, given, moved), out)

    def _wrap(
        self, place: int, one: torch.Tensor, given: dict[int, torch.Tensor], moved: set[int]
    ) -> torch.Tensor:
        tensor = given.get(id(one))
        if tensor is not None:  # an argument that it has written to, or leaves as it is
            return tensor
        layout, leave = self.decision.results[place], self.leaves[place]
        assert self.mesh.here is not None
        due = layout.local_shape_at(self.mesh.here)
        if one.shape != due:
            self._refuse_shape(place, layout, tuple(one.shape), due)
        if self.terms and layout.is_partial:
            self._check_dtype(place, one)
        if leave is not None:
            one = leave(one)
        strides = None
        if not one.is_contiguous():
            strides = _strides(layout, one)
            if strides is None:
                one = one.contiguous()
        alias = self.name if moved and _memory(one) in moved else None
        return wrap(one, intern(
            self.mesh, layout, one.dtype, one.device, one.requires_grad, strides, alias
        ))

    def _check_number(self, out: Any) -> None:
        given, due = len(flatten(out)), len(self.decision.results)
        if given != due:
            raise LayoutError(
                message(f"{self.name}(...)", f"it returned {given} tensors, its rule has {due} "
                        "results", "a rule names every tensor result", [f"{given} tensors"],
                        f"weft.register_rule({self.name}, \"... -> {', '.join(['...'] * given)}\")")
            )

    def _refuse_shape(
        self, place: int, layout: Layout, shape: tuple[int, ...], due: tuple[int, ...]
    ) -> None:
        operands = ", ".join(str(operand) for operand in self.decision.operands)
        raise LayoutError(
            message(f"{self.name}(...)", f"on rank {self.mesh.rank} result {place} has the local "
                    f"shape {shape}; by its rule it is {layout}, of local shape {due}",
                    "on local tensors a function gives the local part of what it gives on the "
                    "whole", [f"operands {operands}"],
                    f"weft.testing.check_rule({self.name}) finds the factors that must be whole: "
                    "\"b s! -> b s!\"")
        )

    def _check_dtype(self, place: int, one: torch.Tensor) -> None:
        result = dtype_text(one.dtype)
        wrong = [f"terms of {dtype}" for dtype in self.terms if not carries(dtype, result)]
        if wrong:
            raise LayoutError(
                message(f"{self.name}(...)", f"terms of a sum became {result} in result {place}",
                        "an op that is linear passes terms of a sum, each of which it may not "
                        "round", wrong, "leave the operand out of linear=")
            )

    def _check_written(self, written: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        moves = dict(self.operands)
        wrong = [at for at in written if at in moves]
        aliases = [at for at in written if isinstance(tensors[at], ShardTensor)
                   and tensors[at]._meta.alias is not None]  # type: ignore[attr-defined]
        for at in written:
            tensor = tensors[at]
            if type(tensor) is ShardTensor:
                if tensor._memo is not None:
                    tensor._memo.clear()
                tensor._meta = tensor._meta.replace(requires_grad=tensor._local.requires_grad)
        if wrong or aliases:
            raise UnsupportedOpError(
                message(f"{self.name}(...)", f"it wrote to {len(wrong) + len(aliases)} arguments "
                        "that share no memory with what the caller holds",
                        "a function writes to operands that lie as its rule wants them",
                        [f"tensor argument {at}: {moves[at].src} came as {moves[at].dst}"
                         for at in wrong]
                        + [f"tensor argument {at}, a view that had to communicate"
                           for at in aliases],
                        "x.redistribute(placements=...) first, or return a new tensor")
            )


class OutsideMesh(Recipe):
    """On a rank outside the mesh: global metadata, an empty local part, nothing runs."""

    __slots__ = ("mesh", "name", "results")
    as_called = True

    def __init__(self, name: str, mesh: BoundMesh, results: Sequence[TensorArg]) -> None:
        self.name, self.mesh, self.results = name, mesh, results

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        floats = [one.dtype for one in tensors if one.is_floating_point() or one.is_complex()]
        dtype = floats[0] if floats else tensors[0].dtype
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        made = []
        for result in self.results:
            layout = Layout.replicated(self.mesh.abstract, result.shape)
            local = torch.empty(0, dtype=dtype, device=tensors[0].device, requires_grad=grad)
            made.append(wrap(local, intern(self.mesh, layout, dtype, local.device, grad)))
        return made[0] if len(made) == 1 else tuple(made)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _strides(layout: Layout, one: torch.Tensor) -> tuple[int, ...] | None:
    """Global strides in the order of the local ones; None where ranks might disagree about it.

    A dim of length 0 or 1 has no place in the order.
    """
    clear = all(min(layout.sizes_of(dim) if axes else (length,)) > 1
                for dim, (axes, length) in enumerate(zip(layout.dims, layout.shape)))
    order = memory_order(one.shape, one.stride())
    if not clear or one.stride() != strides_in_order(one.shape, order):
        return None
    return strides_in_order(layout.shape, order)
