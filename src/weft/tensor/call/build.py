"""Builds the recipe of a function: capture, then a step of one op or a program of several.

Nothing here communicates. Everything depends on facts that are the same on all ranks, so all ranks
build the same recipe for the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import ops
from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.rules import Entry
from weft.tensor.call import by_book, fallback, numbers, reduce_once, stretches
from weft.tensor.call.autocast import dtype_of
from weft.tensor.call.compose import Composer, is_cast, stand_in
from weft.tensor.call.decide import Builder
from weft.tensor.call.decompose import Parts
from weft.tensor.call.lengths import numbers_come_from
from weft.tensor.call.local import as_it_is, is_builtin
from weft.tensor.call.op_by_op import applied, as_calls, op_by_op
from weft.tensor.call.own import functions as own
from weft.tensor.call.own import local as own_local
from weft.tensor.call.program import Program, Step
from weft.tensor.call.recipe import Alias, Function, Recipe
from weft.tensor.call.sizes import Sizes, keep, known_for
from weft.tensor.call.torchs_errors import check_refused
from weft.tensor.counts import STRUCTURES
from weft.tensor.counts import TRACES as COUNTS
from weft.tensor.keys import Structure, floats_of, key_of, structure_key, trace_key
from weft.tensor.meta import Meta, dense, kept
from weft.tensor.placing.boxed import is_stretched, view
from weft.tensor.placing.layouts import check_given
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.torch_collectives import refusal, sends
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import (
    NotCapturable,
    Op,
    Trace,
    as_autocast,
    asks_for_grad,
    capture,
    meta_like,
    reshaped,
)
from weft.tensor.trace.trees import Slot, fill, flatten, leaves, slots_of, substitute

__all__ = ["MAX_TRACES", "TRACES", "layout_of_view", "reads", "recipe"]


def recipe(
    func: Any, args: Any, kwargs: Any, mesh: BoundMesh, key: Sequence[Any] | None,
    carry_out: numbers.CarryOut,
) -> tuple[Recipe, bool]:
    """The recipe of a call, and whether its float arguments only flow through.

    `key` is the call's; None where it has none, because an argument cannot be hashed. `carry_out`
    carries out the same call with numbers for tensors.
    """
    tensors = flatten((args, kwargs) if kwargs else args)
    structure = found = None
    if key is not None and mesh.here is not None:
        structure = structure_key(key, floats_of((*args, *kwargs.values())))
    if structure is not None:
        found = known_for(mesh, structure)
        (STRUCTURES.misses if found is None else STRUCTURES.hits).step()
        if found is not None:
            resized = found.resized(tensors)
            if resized is not None:
                return resized, found.numbers_flow
    if sends(func):
        raise refusal(func, [one.sharding for one in tensors if type(one) is ShardTensor])
    _check_quantized(func, args, kwargs, tensors)
    odd = [one for one in tensors if one.is_nested or not dense(one)]
    if odd:
        form = "nested" if odd[-1].is_nested else str(odd[-1].layout)
        return Function(fallback.runner(mesh, f"an operand is no dense tensor ({form})")), True
    return _Miss(func, args, kwargs, tensors, mesh, key, carry_out, structure, found).recipe()


class _Miss:
    """A call that no recipe is kept for."""

    def __init__(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], mesh: BoundMesh,
        key: Sequence[Any] | None, carry_out: numbers.CarryOut, structure: Structure | None,
        found: Sizes | None,
    ) -> None:
        self.func, self.args, self.kwargs, self.key = func, args, kwargs, key
        self.tensors, self.mesh, self.carry_out = tensors, mesh, carry_out
        self.structure, self.found = structure, found

    def recipe(self) -> tuple[Recipe, bool]:
        if any(map(is_stretched, self.tensors)):
            try:
                return self._in_stretches(), False
            except (stretches.Torn, NotCapturable):
                return stretches.BY_BOXES, False
        trace, reason = None, None
        function, entry = own.rule_of(self.func), ops.FUNCTIONS.get(self.func)
        if function is None or function.is_op:
            if entry is not None and entry.each_call:
                return by_book.composed(entry, self.mesh), True
            resized = self._resized()
            if resized is not None:
                return resized
            try:
                trace = self._trace()
            except NotCapturable as error:
                check_refused(error.__cause__, self.func, self.args, self.kwargs)
                reason = error.alone()
        if function is not None and (trace is None or _writes(trace)):
            made = own_local.recipe(function, self.args, self.kwargs, self.tensors, self.mesh)
            if made is not None:
                return made
        if trace is None:
            return self._by_data(entry, reason)
        num = len(self.tensors)
        if len(trace.ops) > 1 and _has_data_of_its_own(trace, num):
            return Function(fallback.runner(self.mesh, "it makes tensors of its own")), False
        if not trace.ops or _returns_operand(trace, num):
            alias = Alias(trace.result)
            if is_builtin(self.func) and type(trace.result) is Slot:
                self._keep(Sizes.of_alias(alias))
            return alias, False
        if len(trace.ops) > 1 or own.handled(trace.ops[0].overload, self.func):
            made, sizes = _program(trace, self.tensors, self.mesh)
            self._keep(sizes)
            return made, False
        return self._of_one_op(trace)

    def _in_stretches(self) -> Recipe:
        """The recipe of a call on dims in stretches: of the op, if it treats rows alike; Torn of
        any other."""
        entry = ops.FUNCTIONS.get(self.func)
        if own.rule_of(self.func) is not None or (entry is not None and entry.each_call):
            raise stretches.Torn
        trace = self._trace()
        if not trace.ops or _returns_operand(trace, len(self.tensors)):
            return Alias(trace.result)
        op, *others = trace.ops
        if others or own.handled(op.overload, self.func):
            raise stretches.Torn
        builder = self._builder(trace, True)
        made = builder.build()
        if not isinstance(made, Step):
            raise stretches.Torn
        return builder.program(made)

    def _builder(self, trace: Trace, stretches: bool) -> Builder:
        """What decides on the one op of the call."""
        places = _places((*self.args, *self.kwargs.values()))
        is_leaf = self.kwargs.get("requires_grad") is True
        return Builder(self.func, trace, self.tensors, self.mesh, places, is_leaf, stretches)

    def _resized(self) -> tuple[Recipe, bool] | None:
        """The recipe that a known call of several ops gives, whose lengths may turn out to vary."""
        found = self.found
        if found is None or found.is_free:
            return None
        found.vary(self.tensors, self._sizes_of)
        resized = found.resized(self.tensors)
        return None if resized is None else (resized, found.numbers_flow)

    def _sizes_of(self, others: Sequence[torch.Tensor]) -> Sizes | None:
        """The program of the call on other tensors, if it is one."""
        func = self.func
        args, kwargs = substitute((self.args, self.kwargs), iter(others))
        try:
            trace = _captured(func, args, kwargs, others, key_of(func, args, kwargs)[0])
            if len(trace.ops) > 1:
                return _program(trace, others, self.mesh)[1]
            builder = Builder(func, trace, others, self.mesh, None)
            made = builder.build()
        except (NotCapturable, RuntimeError, ValueError, IndexError):
            return None  # it may not be called with such lengths
        return _composite(made, builder)[1] if isinstance(made, ops.Composite) else None

    def _keep(self, sizes: Sizes | None) -> None:
        """Keep the form for other lengths."""
        if sizes is not None and self.structure is not None and self.found is None:
            keep(self.mesh, self.structure, sizes)

    def _trace(self) -> Trace:
        """The trace of the call: the ops that it consists of."""
        known = None if self.found is None else self.found.trace(self.tensors)
        return known or _captured(self.func, self.args, self.kwargs, self.tensors, self.key)

    def _by_data(
        self, entry: Entry | None, reason: NotCapturable | None
    ) -> tuple[Recipe, bool]:
        """The recipe of a call that needs the data of its operands."""
        if entry is not None:
            return by_book.composed(entry, self.mesh, str(reason or "")), True
        found = None
        if reason is not None and reason.op is not None:
            found = by_book.of_op(self.func, reason.op, self.mesh)
        if found is not None:
            return found, False
        text = str(reason or "")
        places = numbers.places_of(self.args, self.kwargs, self._takes) if "item()" in text else ()
        if places:
            return Function(numbers.reading(places, self.carry_out)), False
        if "item()" in text:
            numbers.check(self.func, self.args, self.kwargs)
        return Function(fallback.runner(self.mesh, text)), False

    def _takes(self, args: Any, kwargs: Any) -> None:
        """Raise where the function does not take these arguments."""
        _capture(self.func, args, kwargs, flatten((args, kwargs)))

    def _of_one_op(self, trace: Trace) -> tuple[Recipe, bool]:
        func, args, kwargs = self.func, self.args, self.kwargs
        builder = self._builder(trace, func is view)
        made = builder.build()
        if isinstance(made, ops.Composite):
            made, sizes = _composite(made, builder)
            self._keep(sizes)
            return made, False
        if isinstance(made, Step):
            if made.target is not None and made.args is builder.op.args:
                made.let_flow(_floats_of(func, builder.op, args, kwargs))
            made = builder.program(made)
        op = trace.ops[0]
        by_number = builder.own is not None and not builder.own.by_shape
        numbers_flow = made.as_called and not by_number and ops.floats_flow(
            facts(op.overload).functional)
        decision = builder.decision
        is_plain = decision is None or not any(one.is_stretched for one in decision.results)
        if is_plain and (as_it_is(func) or numbers_come_from(op, (args, kwargs))):
            by_form = made if isinstance(made, Program) and builder.by_form else None
            if self.structure is not None and self.found is None:
                self._keep(Sizes.of_op(builder, by_form, numbers_flow, is_builtin(func)))
        made, flow = reduce_once.reducing_once(made, builder, self._with_operands_in)
        return made, numbers_flow and flow

    def _with_operands_in(self, targets: reduce_once.Targets) -> tuple[Recipe, bool]:
        """The recipe of the call with some of its tensors in other layouts."""
        tensors, grad = list(self.tensors), torch.is_grad_enabled()
        for at, layout in targets:
            meta: Meta = tensors[at]._meta  # type: ignore[attr-defined]
            tensors[at] = stand_in(
                meta.replace(layout=layout, requires_grad=grad and meta.requires_grad))
        args, kwargs = substitute((self.args, self.kwargs), iter(tensors))
        key = None if self.key is None else key_of(self.func, args, kwargs)[0]
        return recipe(self.func, args, kwargs, self.mesh, key, self.carry_out)


def layout_of_view(meta: Meta) -> Layout:
    """The layout of boxes that a tensor with dims in stretches has as a view (`placing.boxed`)."""
    apart = stand_in(meta.replace(layout=meta.layout.apart, strides=None))
    func, args = torch.Tensor.view, (apart, tuple(meta.shape))
    trace = _captured(func, args, {}, [apart], key_of(func, args, {})[0])
    builder = Builder(func, trace, [apart], meta.mesh, (0,))
    builder.build()
    assert builder.decision is not None
    return builder.decision.results[0]


_QUANTIZED = frozenset(
    (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
)


def _check_quantized(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if an operand is quantized, or the result would be: torch has no meta kernels for
    these."""
    name = getattr(func, "__name__", str(func))
    for tensor in tensors:
        if tensor.is_quantized:
            check_given(tensor, f"{name}, a plain tensor beside ShardTensors")
    for arg in (*args, *kwargs.values()):
        if type(arg) is torch.dtype and arg in _QUANTIZED:
            raise UnsupportedOpError(
                name, f"its result would be {arg}",
                "ShardTensors are dense and not quantized", [str(arg)],
                "the op on x.to_local(), or on x.full_tensor()")


def reads(func: Any, args: Any, kwargs: Any, key: Sequence[Any]) -> bool:
    """Whether a call only reads its tensors (see `reduce_once`)."""
    tensors = flatten((args, kwargs))
    try:
        return reduce_once.is_read_only(_captured(func, args, kwargs, tensors, key), len(tensors))
    except NotCapturable:
        return False


def _program(
    trace: Trace, tensors: Sequence[torch.Tensor], mesh: BoundMesh
) -> tuple[Recipe, Sizes | None]:
    """The recipe of several ops, and its form for other lengths."""
    if mesh.here is not None:
        composer = Composer(tensors, mesh)
        result = composer.add(trace, {at: Slot(at) for at in range(len(tensors))})
        if result is not None:
            program = composer.program(result)
            return program, Sizes.of_several(None, composer, program)
    return as_calls(op_by_op(trace, mesh), trace, trace.result), None


def _composite(composite: ops.Composite, builder: Builder) -> tuple[Recipe, Sizes | None]:
    """The recipe of an op that is composed of others, and its form for other lengths."""
    op, trace, mesh = builder.op, builder.trace, builder.mesh
    if builder.target is None and mesh.here is not None:
        composer = Composer(builder.tensors, mesh)
        out = composer.composed(composite, op)
        if out is not None:
            slots = {at: Slot(at) for at in range(len(builder.tensors))}
            slots.update(zip([slot.index for slot in slots_of(op.results)], slots_of(out)))
            if not composer.steps:
                return Alias(fill(trace.result, slots)), None
            program = composer.program(fill(trace.result, slots))
            return program, Sizes.of_several(op, composer, program)
    compose = (op_by_op(composite.trace, mesh) if isinstance(composite, Parts)
               else applied(composite.function, op))
    if is_cast(composite, mesh) and not composite.each_call:
        compose = as_autocast(compose, dtype_of(op, trace, mesh), mesh.kernel_type)
    otherwise = builder.fallback(by_book.NO_COMPOSITION) if mesh.here is not None else Function(
        fallback.runner(mesh, by_book.NO_COMPOSITION))
    target = None if composite.writes else builder.target
    return as_calls(
        compose, trace, op.results, target, writes=composite.writes,
        is_leaf=builder.is_leaf, otherwise=otherwise), None


TRACES: dict[Any, Trace] = {}
"""What functions of torch consist of: the same on all simulated ranks, and in later runs."""

MAX_TRACES = 1024


def _captured(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], key: Sequence[Any] | None
) -> Trace:
    quick = None if kwargs else reshaped(func, args, tensors[0])
    if quick is not None:
        return quick
    if key is None:
        return _capture(func, args, kwargs, tensors)
    about = (
        *trace_key(key, asks_for_grad(func)), *floats_of((*args, *kwargs.values())),
        torch.are_deterministic_algorithms_enabled(), tensors[0].device.type,
    )
    return kept(
        TRACES, about, lambda: _capture(func, args, kwargs, tensors), MAX_TRACES, COUNTS)


def _capture(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Trace:
    metas = [meta_like(tensor) for tensor in tensors]
    asks = asks_for_grad(func)
    if asks:
        metas = [
            meta.requires_grad_(tensor.requires_grad) for meta, tensor in zip(metas, tensors)
        ]
    args, kwargs = substitute((args, kwargs), iter(metas))
    device_type = tensors[0].device.type
    has_kernels = device_type == "cpu"
    if device_type == "meta":  # tensors without memory: what runs is as on their mesh
        device_type = next(
            (one.device_mesh.kernel_type for one in tensors if type(one) is ShardTensor), "cpu")
    entry = ops.FUNCTIONS.get(func)
    if entry is not None and not entry.each_call:
        assert entry.compose is not None
        trace = capture(entry.compose, args, kwargs, metas, device_type, asks, has_kernels)
        if trace.result is not NotImplemented:
            return trace
    return capture(func, args, kwargs, metas, device_type, asks, has_kernels)


def _returns_operand(trace: Trace, num_tensors: int) -> bool:
    """Whether the call returns its operand: `x.float()` of a float32 tensor is `x` itself."""
    return (
        len(trace.ops) == 1
        and type(trace.result) is Slot
        and trace.result.index < num_tensors
        and not facts(trace.ops[0].overload).writes
    )


def _writes(trace: Trace) -> bool:
    """Whether it is one op, which writes to an operand."""
    return len(trace.ops) == 1 and bool(facts(trace.ops[0].overload).writes)


def _has_data_of_its_own(trace: Trace, num_tensors: int) -> bool:
    """Whether an op takes a tensor that neither the call nor an earlier op gives, like an index
    array."""
    known = set(range(num_tensors))
    for op in trace.ops:
        if not known.issuperset(slot.index for slot in slots_of((op.args, op.kwargs))):
            return True
        known.update(slot.index for slot in slots_of(op.results))
    return False


def _places(args: Sequence[Any]) -> tuple[int, ...] | None:
    """The places of tensors among positional arguments; None when lists or slices hold some."""
    if any(isinstance(arg, (list, tuple, dict, slice)) and flatten(arg) for arg in args):
        return None
    return tuple(place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor))


def _floats_of(func: Any, op: Op, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Per float among the op's arguments, its place there and in the call, as `Step.let_flow`
    takes them; none where one is not the call's own."""
    if not is_builtin(func):
        return []
    names = [argument.name for argument in op.overload._schema.arguments]
    found: list[tuple[Any, Any]] = []
    for at, value in (*enumerate(op.args), *op.kwargs.items()):
        if type(value) is not float:
            if leaves(value, float):
                return []
            continue
        place = names.index(at) if isinstance(at, str) else at
        theirs = place if place < len(args) else names[place]
        given = args[theirs] if isinstance(theirs, int) else kwargs.get(theirs)
        if type(given) is not float or given != value:
            return []
        found.append((at, theirs))
    return found
