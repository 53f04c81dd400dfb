"""Building a recipe on a miss: capture, then per op an algorithm, a rule, or fallback.

Nothing here communicates, and everything depends on facts that are the same on all ranks, so all
ranks build the same recipe for the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import ops, propagate, rules
from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import UnsupportedOpError, message
from weft.rules import Call, Decision, Rule
from weft.tensor import fallback, foreach
from weft.tensor.calls import (
    as_call,
    facts,
    functional,
    overload_named,
    place_slots,
    slots_of,
    target_of,
)
from weft.tensor.capture import (
    NotCapturable,
    Op,
    Slot,
    Trace,
    capture,
    differentiated,
    map_tensors,
    meta_like,
    reshaped,
)
from weft.tensor.enter import transition_between, varying_axes
from weft.tensor.meta import Meta, bounded_put, contiguous_strides, intern
from weft.tensor.recipe import Alias, Direct, Function, Recipe, Result
from weft.tensor.shard_tensor import ShardTensor, hooks, wrap
from weft.tensor.structure import MAX_STRUCTURES, Structure, numbers_come_from, structure_of
from weft.tensor.trees import fill, flatten

__all__ = ["recipe"]

_BUILTINS = (type(torch.add), type(torch.Tensor.add), type(torch.Tensor.__len__))


def recipe(
    func: Any, args: Any, kwargs: Any, mesh: BoundMesh, structure: Any = None
) -> tuple[Recipe, bool]:
    """The recipe of a call, and whether its float arguments only flow through.

    `structure` is the call's key with lengths reduced (see `structure`), or None.
    """
    tensors = flatten((args, kwargs))
    known: dict[Any, Structure] = mesh.cache.setdefault("structures", {})
    found = None if structure is None else known.get(structure)
    if found is not None:
        resized = found.resized(tensors)
        if resized is not None:
            return resized, found.numbers_flow
        trace = found.trace(tensors)
    else:
        try:
            trace = _captured(func, args, kwargs, tensors)
        except NotCapturable as reason:
            return Function(fallback.runner(mesh, str(reason))), False
    if mesh.here is None:
        return Function(_outside(trace, tensors, mesh)), False
    if not trace.ops or _returns_operand(trace, len(tensors)):
        return Alias(trace.result), False
    op, *others = trace.ops
    if others:
        return Function(_program(trace)), False
    places = _places((*args, *kwargs.values()))
    builder = _Builder(func, trace, tensors, mesh, places)
    made = builder.build()
    numbers_flow = made.as_called and _numbers_flow(op)
    if found is None and structure is not None and builder.rule is not None and (
        isinstance(func, _BUILTINS) or numbers_come_from(op, (args, kwargs))
    ):
        new = structure_of(trace, builder.rule, tensors)
        if new is not None:
            if builder.by_form:
                new.recipe, new.numbers_flow = made, numbers_flow
            bounded_put(known, structure, new, MAX_STRUCTURES)
    return made, numbers_flow


def _captured(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Trace:
    quick = None if kwargs else reshaped(func, args, tensors[0])
    if quick is not None:
        return quick
    metas = [meta_like(tensor) for tensor in tensors]
    feed = iter(metas)
    return capture(
        func,
        map_tensors(lambda _: next(feed), args),
        map_tensors(lambda _: next(feed), kwargs),
        metas,
        tensors[0].device.type,
    )


def _returns_operand(trace: Trace, num_tensors: int) -> bool:
    """Whether nothing is to do: `x.float()` of a float32 tensor is `x` itself."""
    return (
        len(trace.ops) == 1
        and type(trace.result) is Slot
        and trace.result.index < num_tensors
        and not facts(trace.ops[0].overload).writes
    )


class _Builder:
    """Builds the recipe of a call that consists of one op."""

    def __init__(
        self, func: Any, trace: Trace, tensors: Sequence[torch.Tensor], mesh: BoundMesh,
        places: Sequence[int] | None,
    ) -> None:
        self.places = places
        self.rule: Rule | None = None
        self.by_form = False
        self.layouts: list[Layout] = []
        self.func, self.trace, self.tensors, self.mesh = func, trace, tensors, mesh
        self.op = trace.ops[0]
        self.facts = facts(self.op.overload)
        self.name = self.facts.name
        self.slots: list[int] = [slot.index for slot in slots_of((self.op.args, self.op.kwargs))]
        self.grad = torch.is_grad_enabled()
        self.target = target_of(self.op)

    def build(self) -> Recipe:
        if self.name.startswith("aten._foreach_"):
            return foreach.recipe(self.func, self.trace, self.op, self.tensors, self.mesh)
        if self.facts.reshapes:
            raise UnsupportedOpError(
                message(self.name, "the op would change the shape of a ShardTensor in place",
                        "shape-changing in-place ops are refused", [self.name],
                        "use the op without the trailing underscore")
            )
        if any(index >= len(self.tensors) for index in self.slots):
            return Function(fallback.runner(self.mesh, "it makes tensors of its own"))
        operands = [self.tensors[index] for index in self.slots]
        layouts = [_layout_of(tensor, self.mesh) for tensor in operands]
        self.layouts = layouts
        call = as_call(self.op, operands, self.trace)
        wants = [self.grad and tensor.requires_grad for tensor in operands]
        chosen = self._choose(call, layouts, wants)
        match chosen:
            case ops.Composite():
                return Function(self._composite(chosen.function))
            case ops.Local():
                return self._direct(chosen.decision, layouts, wants, chosen.bind)
            case Decision():
                return self._direct(chosen, layouts, wants, None)
        if self.facts.is_random:
            raise UnsupportedOpError(
                message(self.name, "the op draws random numbers on a ShardTensor",
                        "random numbers that do not depend on the sharding are not built yet",
                        [str(layout) for layout in layouts],
                        "draw on the full tensor and weft.distribute_tensor() it")
            )
        return Function(fallback.runner(self.mesh, "no rule covers it"))

    def _choose(self, call: Call, layouts: list[Layout], wants: list[bool]) -> Any:
        algorithm = ops.lookup(call, layouts, wants)
        if algorithm is not None:
            return algorithm
        rule = rules.lookup(call, layouts)
        if isinstance(rule, Rule):
            self.rule = rule
            return propagate.decide(rule, call, layouts, wants)
        return rule

    def _composite(self, function: Callable[..., Any]) -> Callable[..., Any]:
        op, trace, target = self.op, self.trace, self.target

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            tensors = flatten((args, kwargs))
            out = function(*fill(op.args, tensors), **fill(op.kwargs, tensors))
            if target is not None:
                return tensors[target].copy_(out)
            values = dict(enumerate(tensors))
            values.update(zip((slot.index for slot in slots_of(op.results)), flatten(out)))
            return fill(trace.result, values)

        return run

    def _direct(
        self, decision: Decision, layouts: list[Layout], wants: list[bool], bind: Any
    ) -> Recipe:
        varying = varying_axes((*decision.operands, *decision.results))
        entering: list[Any] = [None] * len(self.tensors)
        for place, src, dst, wanted in zip(self.slots, layouts, decision.operands, wants):
            replicated = frozenset(axis for axis in varying if wanted and dst.on(axis) is None)
            entering[place] = transition_between(
                self.mesh, src, dst, frozenset(), replicated
            )
        local, args, kwargs = self._local(decision, bind)
        if self.target is not None:
            return self._in_place(decision, entering, varying, local, args, kwargs)
        results = self._results(decision, entering, varying, any(wants))
        anchor = self._anchored(decision, wants) if bind is None else ()
        self.by_form = self._is_by_form(decision) and not anchor
        return Direct(
            self.name, entering, local, args, kwargs, results, self.trace.result,
            why=decision.reason, anchor=anchor, places=self.places,
        )

    def _is_by_form(self, decision: Decision) -> bool:
        """Whether other lengths of the same structure change nothing but layouts."""
        return decision.by_form and decision.args is None and all(
            mine is wanted for mine, wanted in zip(self.layouts, decision.operands)
        )

    def _anchored(self, decision: Decision, wants: list[bool]) -> tuple[int, ...]:
        """The arguments that must keep a graph edge though this rank's shard is empty."""
        assert self.mesh.here is not None
        here = self.mesh.here
        if not any(wants) or self.facts.is_view or all(
            0 not in layout.local_shape_at(here) for layout in dict.fromkeys(decision.operands)
        ):
            return ()
        wanted = [index for index, wants_grad in zip(self.slots, wants) if wants_grad]
        return differentiated(self.op, self.tensors, wanted)

    def _local(self, decision: Decision, bind: Any) -> tuple[Any, Any, Any]:
        """What runs on the local tensors, with its arguments (None: the user's own call)."""
        if bind is not None:
            order = tuple(Slot(index) for index in self.slots)
            return bind(self.mesh), order, {}
        as_called = (
            decision.args is None
            and decision.op is None
            and isinstance(self.func, _BUILTINS)
            and self.slots == list(range(len(self.tensors)))
        )
        if as_called:
            return None, None, None
        local = self.op.overload if decision.op is None else overload_named(decision.op)
        if decision.args is None:
            return local, self.op.args, self.op.kwargs
        assert self.mesh.here is not None
        args, kwargs = decision.args(self.mesh.here)
        slots = [Slot(index) for index in self.slots]
        # Positional arguments first, as the Call lists its tensors.
        count = len(slots_of(self.op.args))
        return local, place_slots(args, slots[:count]), place_slots(kwargs, slots[count:])

    def _results(
        self, decision: Decision, entering: list[Any], varying: frozenset[int], grad: bool
    ) -> list[Result]:
        out: list[Result] = []
        alias = self._alias(entering) if self.facts.is_view else None
        for slot, layout in zip(slots_of(self.op.results), decision.results):
            meta = self.trace.metas[slot.index]
            differentiable = grad and (meta.dtype.is_floating_point or meta.dtype.is_complex)
            leaving = frozenset(axis for axis in varying if layout.on(axis) is None)
            leave = (
                transition_between(self.mesh, layout, layout, leaving, frozenset())
                if differentiable and leaving
                else None
            )
            out.append(
                Result(slot.index, self._meta(layout, meta, differentiable, alias), leave)
            )
        return out

    def _alias(self, entering: list[Any]) -> str | None:
        """Why the results, views by the op's schema, share no memory with their base."""
        if any(move is not None and move.src != move.dst for move in entering):
            return self.name
        known = [t._meta.alias for t in self.tensors if type(t) is ShardTensor]
        return next((alias for alias in known if alias), None)

    def _meta(
        self, layout: Layout, meta: torch.Tensor, grad: bool, alias: str | None = None
    ) -> Meta:
        strides = tuple(meta.stride())
        return intern(
            self.mesh, layout, meta.dtype, self.tensors[0].device, grad,
            None if strides == contiguous_strides(meta.shape) else strides, alias,
        )

    def _in_place(
        self, decision: Decision, entering: list[Any], varying: frozenset[int],
        local: Any, args: Any, kwargs: Any,
    ) -> Recipe:
        assert self.target is not None
        target = self.tensors[self.target]
        if isinstance(target, ShardTensor) and target._meta.alias is not None:
            raise UnsupportedOpError(
                message(self.name, f"the tensor {target.layout} came from a view op "
                        f"({target._meta.alias}) that had to communicate",
                        "a write through a view reaches its base only where they share memory",
                        [str(target.layout)], "write to the base, or clone() the view first")
            )
        wanted = _layout_of(target, self.mesh)
        direct = decision.results[0] == wanted and entering[self.target] is None and not (
            _needs_leaving(decision.results[0], varying) and self.grad
        )
        if direct and decision.op is None:
            self.by_form = self._is_by_form(decision)
            return Direct(
                self.name, entering, local, args, kwargs, (), self.trace.result, self.target,
                why=decision.reason,
            )
        if local is None or local is self.op.overload:
            local = functional(self.op)
            args = self.op.args if args is None else args
            kwargs = self.op.kwargs if kwargs is None else kwargs
        result = decision.results[0]
        leaving = frozenset(axis for axis in varying if result.on(axis) is None)
        write = transition_between(
            self.mesh, result, wanted, leaving if self.grad else frozenset(), frozenset()
        )
        return Direct(
            self.name, entering, local, args, kwargs, (), self.trace.result, self.target,
            write_back=True, write=write, why=decision.reason,
        )


def _places(args: Sequence[Any]) -> tuple[int, ...] | None:
    """Where tensors stand among positional arguments; None when lists or slices hold some."""
    if any(isinstance(arg, (list, tuple, dict, slice)) and flatten(arg) for arg in args):
        return None
    return tuple(place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor))


def _needs_leaving(layout: Layout, varying: frozenset[int]) -> bool:
    return any(layout.on(axis) is None for axis in varying)


def _program(trace: Trace) -> Callable[..., Any]:
    """A function of several ops: each is a call of its own, with a recipe of its own."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        values: dict[int, Any] = dict(enumerate(flatten((args, kwargs))))
        device = values[0].device
        for op in trace.ops:
            out = _call_op(op, fill(op.args, values), fill(op.kwargs, values), device)
            for slot, value in zip(slots_of(op.results), flatten(out)):
                values[slot.index] = value
        return fill(trace.result, values)

    return run


def _call_op(op: Op, args: Any, kwargs: Any, device: torch.device) -> Any:
    if any(type(tensor) is ShardTensor for tensor in flatten((args, kwargs))):
        return hooks.call(op.overload, args, kwargs)
    if kwargs.get("device") is not None:  # captured on meta tensors
        kwargs["device"] = device
    return op.overload(*args, **kwargs)


def _outside(trace: Trace, tensors: Sequence[Any], mesh: BoundMesh) -> Callable[..., Any]:
    """A rank outside the mesh: global metadata, an empty local part, no collective."""
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    device = tensors[0].device

    def empty(meta: torch.Tensor) -> ShardTensor:
        wanted = grad and meta.dtype.is_floating_point
        layout = Layout.replicated(mesh.abstract, meta.shape)
        local = torch.empty(0, dtype=meta.dtype, device=device, requires_grad=wanted)
        return wrap(local, intern(mesh, layout, meta.dtype, device, wanted))

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        values: dict[int, Any] = dict(enumerate(flatten((args, kwargs))))
        for index, meta in enumerate(trace.metas[len(values):], start=len(values)):
            values[index] = empty(meta)
        return fill(trace.result, values)

    return run


def _layout_of(tensor: torch.Tensor, mesh: BoundMesh) -> Layout:
    if type(tensor) is ShardTensor:
        return tensor._meta.layout
    return Layout.replicated(mesh.abstract, tensor.shape)


def _numbers_flow(op: Op) -> bool:
    name = facts(op.overload).functional
    return name.startswith("aten._foreach_") or rules.numbers_flow(name)
