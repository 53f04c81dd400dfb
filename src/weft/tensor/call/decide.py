"""The step of one op: from its rule or its layouts, else a composition or the fallback.

Nothing here communicates. Everything depends on facts that are the same on all ranks, so all ranks
build the same recipe for the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft import ops, rules
from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.stretched_views import stretched
from weft.rules import Decision, Rule
from weft.tensor.call import by_book, fallback, foreach, outside, stretches
from weft.tensor.call.anchor import tying
from weft.tensor.call.autocast import cast_of, cast_on_the_way, dtype_of, is_lacking
from weft.tensor.call.choose import choose
from weft.tensor.call.decompose import parts_of
from weft.tensor.call.in_place import (
    check_cast,
    check_gradient,
    check_overlap,
    check_writable,
    reads_of,
)
from weft.tensor.call.kernels import BoundKernel, bound, folding
from weft.tensor.call.local import (
    apart,
    as_it_is,
    as_leaf,
    copying,
    nothing,
    packed,
    replayed,
)
from weft.tensor.call.program import Program, Step
from weft.tensor.call.recipe import Function, Recipe
from weft.tensor.call.sharing import as_slice, shares_memory
from weft.tensor.meta import NONE, Meta, contiguous_strides, expanded_dims, intern
from weft.tensor.placing.kept_boxes import taken_apart
from weft.tensor.placing.layouts import layout_of
from weft.tensor.placing.left_whole import find_wide, find_written
from weft.tensor.placing.operands import (
    operand_transitions,
    staying,
    varying_axes,
    writing_back,
)
from weft.tensor.placing.refusals import refuse
from weft.tensor.placing.transitions import order_in_memory, transition_between
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import (
    as_call,
    facts,
    functional,
    overload_named,
    place_slots,
    target_of,
    with_dense_gradient,
)
from weft.tensor.trace.capture import Trace, as_autocast, meta_like
from weft.tensor.trace.derivatives import differentiated
from weft.tensor.trace.trees import Slot, slots_of
from weft.transport.facts import replicated
from weft.transport.order import shares_elements, strides_apart

__all__ = ["Builder"]


class Builder:
    """Decides on one op: `trace` has one, and `tensors` are the values of its Slots.

    `is_leaf`: the call asks for results that require a gradient, as `zeros_like` may. `stretches`:
    a view may leave dims in stretches rather than move their rows. Afterwards it has the `metas` of
    the step's results by slot; `rule`, if one gives the lengths of the results; `own`, a user's
    registration for the op; `layouts` of the operands and the `decision`; `by_form`, whether the
    step for other lengths differs in layouts alone; `clashes`, whether a value that the op takes
    twice moves to two layouts; `may_view`, whether results may be views.
    """

    def __init__(
        self, func: Any, trace: Trace, tensors: Sequence[torch.Tensor], mesh: BoundMesh,
        places: Sequence[int] | None, is_leaf: bool = False, stretches: bool = False,
    ) -> None:
        self.places, self.is_leaf, self.stretches = places, is_leaf, stretches
        self.entry = by_book.UNKNOWN
        self.rule: Rule | None = None
        self.own: rules.OwnRule | None = None
        self.by_form = self.clashes = self.is_idle = self.may_view = False
        self.kernel: BoundKernel | None = None
        self.layouts: list[Layout] = []
        self.decision: Decision | None = None
        self.metas: dict[int, Meta] = {}
        self.stays = NONE
        self.tensors, self.mesh = tensors, mesh
        self.facts = facts(trace.ops[0].overload)
        self.func, self.trace = func, trace
        self.op = trace.ops[0]
        if self.facts.sparse is not None and type(tensors[self.op.args[0].index]) is ShardTensor:
            dense = with_dense_gradient(self.op)
            if dense is not self.op:  # the function itself would ask for it again
                self.func, self.op, self.trace = None, dense, replace(trace, ops=(dense,))
        self.name = self.facts.name
        self.slots: list[int] = [slot.index for slot in slots_of((self.op.args, self.op.kwargs))]
        self.grad = torch.is_grad_enabled()
        self.target = target_of(self.op)

    def program(self, step: Step) -> Program:
        """The recipe of a call that consists of this one step."""
        num = max((len(self.tensors), *[slot + 1 for slot in self.metas]))
        metas = [self.metas.get(slot) for slot in range(num)]
        return Program((step,), metas, self.trace.result, self.places)

    def build(self) -> Step | Recipe | ops.Composite:
        """The step; else the recipe of the call, or a composition of other ops."""
        entry = self.entry = by_book.entry_of(self.facts)
        if entry.lists:
            return foreach.recipe(entry, self.trace, self.op, self.tensors, self.mesh)
        if any(index >= len(self.tensors) for index in self.slots):
            return self.fallback("it makes tensors of its own")
        operands = [self.tensors[index] for index in self.slots]
        layouts = [layout_of(tensor, self.mesh) for tensor in operands]
        self.layouts = layouts
        call = as_call(self.op, operands, self.trace, layouts)
        results = [self.trace.metas[slot.index] for slot in slots_of(self.op.results)]
        grad = self.grad and any(self.differentiable(meta, True) for meta in results)
        wants = [grad and tensor.requires_grad for tensor in operands]
        target = None if self.target is None else self.slots.index(self.target)
        slices = [one._meta.slice_of if type(one) is ShardTensor else None for one in operands]
        if self.stretches and (found := stretched(call, layouts)) is not None:
            return self._direct(found, layouts, wants, None)
        if any(layout.is_stretched for layout in layouts):
            if call.op in rules.OWN:
                raise stretches.Torn
            made = stretches.by_rule(call, entry, self.facts, layouts, wants, target)
            if isinstance(made, ops.Kernel):
                return self._direct(made.decision, layouts, wants, made)
            return self._direct(made, layouts, wants, None)
        chosen, self.rule, self.own = choose(
            call, entry, self.facts, layouts, wants, results, target, slices)
        if chosen is None:
            metas = [meta_like(tensor) for tensor in self.tensors]
            dtype = dtype_of(self.op, self.trace, self.mesh)
            chosen = parts_of(self.op, metas, self.mesh.kernel_type, dtype)
        match chosen:
            case ops.Composite():
                if chosen.each_call and self.facts.is_random and not entry.rules:
                    refuse(self.op, self.trace.metas)  # it only draws
                return chosen
            case ops.Local() | ops.Kernel():
                return self._direct(chosen.decision, layouts, wants, chosen)
            case Decision():
                return self._direct(chosen, layouts, wants, None)
            case None:
                return self.fallback("no rule covers it")

    def fallback(self, reason: str) -> Recipe:
        if self.mesh.here is not None:
            args = self.op.args
            written = slots_of([args[at] for at in self.facts.writes if at < len(args)])
            writes = frozenset(slot.index for slot in written)
            run = fallback.runner(self.mesh, reason, writes)
            return Function(
                run if self.func is not None else fallback.of_op(run, self.op, self.trace))
        shapes = [self.trace.metas[slot.index].shape for slot in slots_of(self.op.results)]
        layouts = tuple(Layout.replicated(self.mesh.abstract, shape) for shape in shapes)
        return self._outside(layouts, None)

    def _outside(
        self, layouts: Sequence[Layout], alias: str | None, decision: Decision | None = None
    ) -> Recipe:
        """The call on a rank outside the mesh, where its results have these layouts inside."""
        if self.target is not None:
            check_writable(self.name, self.tensors[self.target])
            op = replace(self.op, overload=functional(self.op))
            return Function(outside.written(self.trace, op, self.target))
        grad = self.grad and any(tensor.requires_grad for tensor in self.tensors)
        for slot, layout in zip(slots_of(self.op.results), layouts):
            meta = self.trace.metas[slot.index]
            made = self._meta(layout, meta, self.differentiable(meta, grad), alias)
            self.metas[slot.index] = made
        if decision is not None:
            self._slice(decision, self.metas)
        base = self.slots[0] if self.facts.is_view and self.shares() and not alias else None
        return Function(outside.computed(self.trace, self.op, base, self.metas))

    def differentiable(self, meta: torch.Tensor, grad: bool) -> bool:
        return (self.is_leaf or (grad and not self.entry.detaches)) and (
            meta.dtype.is_floating_point or meta.dtype.is_complex
        )

    def _direct(
        self, decision: Decision, layouts: list[Layout], wants: list[bool],
        algorithm: ops.Local | ops.Kernel | None,
    ) -> Step | Recipe:
        self.decision, self.wants = decision, wants
        if self.mesh.here is None:
            alias = self._alias(layouts[0] != decision.operands[0])
            return self._outside(decision.results, alias, decision)
        varying = varying_axes((*decision.operands, *decision.results))
        given = [self.tensors[place] for place in self.slots]
        known = [one._meta.varying if type(one) is ShardTensor else NONE for one in given]
        if self.target is None:
            self.stays = staying(known, wants, varying)
        varying |= self.stays
        moves: list[Any] = [None] * len(self.tensors)
        met: dict[int, Any] = {}
        orders = [order_in_memory(self.tensors[place]) for place in self.slots]
        entering = operand_transitions(
            self.mesh, layouts, decision.operands, wants, varying, orders, decision.reads, known)
        dtype = dtype_of(self.op, self.trace, self.mesh)
        cast = None if algorithm is not None else cast_of(self.name, dtype, self.mesh)
        if cast is not None:
            entering = [
                cast_on_the_way(move, self.tensors[place].dtype, cast)
                for place, move in zip(self.slots, entering)
            ]
        for place, move in zip(self.slots, entering):
            self.clashes |= met.setdefault(place, move) is not move
            moves[place] = move
        local, args, kwargs = self._local(decision, algorithm)
        lacking = is_lacking(self.op, self.tensors, dtype, self.mesh)
        self.may_view = self.facts.is_view or algorithm is not None or decision.runs is not None
        is_empty = self.target is None and self.may_view and any(
            0 in layout.local_shape_at(self.mesh.here) for layout in decision.results)
        replays = self.grad and is_empty
        if lacking or replays:
            if local is None:
                local, args, kwargs = self.op.overload, self.op.args, self.op.kwargs
            local = as_autocast(local, dtype, self.mesh.kernel_type) if lacking else local
            local = replayed(local) if replays else local
        if is_empty and not self.shares():
            local = apart(local)
        if self.grad and decision.keeps and local is not None and any(decision.reads):
            local = taken_apart(local)
        if any(decision.folds):
            assert local is not None, "a box of partial values comes of a local op of its own"
            local = tying(local) if self.is_idle else local  # its sum is a node
            local = folding(self.name, local, decision, self.mesh)
        if self.target is not None:
            return self._in_place(decision, moves, varying, local, args, kwargs, algorithm)
        brought = any(decision.reads) or decision.runs is not None or (algorithm is not None and (
            isinstance(algorithm, ops.Kernel) or bool(algorithm.communicates)
        ))
        results = self._results(decision, moves, varying, any(wants), brought)
        slice_of = self._slice(decision, self.metas)
        anchor = () if isinstance(algorithm, ops.Local) else self._anchored(decision, wants)
        sized = None if args is None else self._sized()
        self.by_form = self._is_by_form(decision, sized is not None) and not (anchor or replays)
        made = [self.trace.metas[slot.index] for slot in slots_of(self.op.results)]
        return Step(
            self.name, moves, local, args, kwargs, results,
            why=decision.reason, anchor=anchor, kernel=self.kernel, slice_of=slice_of, sized=sized,
            keeps=decision.keeps,
            left_whole=find_wide(
                self.name, self.layouts, decision, self.rule, made) if any(moves) else None,
        )

    def _slice(
        self, decision: Decision, metas: dict[int, Meta]
    ) -> tuple[int, tuple[int, ...]] | None:
        """For a slice of a sharded dim, or of such a slice: its operand and its beginning. The
        result's meta, in `metas`, remembers both."""
        slot, starts = self.slots[0], decision.starts
        base = self.tensors[slot]
        if starts is None or type(base) is not ShardTensor or not self.shares():
            return None
        (result,) = slots_of(self.op.results)
        made = as_slice(metas[result.index], base._meta, starts)
        if made is None:
            return None
        metas[result.index] = made
        return slot, starts

    def _sized(self) -> tuple[int, int, int] | None:
        """Where the local op is told the shape of its result, and nothing else of its own."""
        rule = self.rule
        if rule is None or rule.size_arg is None or rule.args is not None or rule.counts:
            return None
        first, last = rule.size_dims or (0, len(rule.results[0]))
        return rule.size_arg, first, last

    def _is_by_form(self, decision: Decision, is_sized: bool = False) -> bool:
        """Whether other lengths of the same structure change nothing but layouts, and the size that
        the local op is told."""
        as_called = decision.args is None or is_sized
        return decision.by_form and as_called and not self.entry.widens and all(
            mine is wanted for mine, wanted in zip(self.layouts, decision.operands)
        )

    def _anchored(self, decision: Decision, wants: list[bool]) -> tuple[tuple[int, ...], ...]:
        """Per result, the arguments that must keep a graph edge though my shard is empty, or
        another's is: a kernel of the book has other derivatives than the op, on all ranks alike."""
        assert self.mesh.here is not None
        here = self.mesh.here
        # A node of Python's keeps its edges; a kernel may not.
        own = self.own is not None and not decision.finish and not self.name.startswith("aten.")
        if not any(wants) or (not self.is_idle and (self.facts.is_view or own or all(
            not layout.has_empty_shards if self.kernel is not None else (
                0 not in layout.local_shape_at(here))
            for layout in dict.fromkeys(decision.operands)
        ))):
            return ()
        wanted = [index for index, wants_grad in zip(self.slots, wants) if wants_grad]
        found = differentiated(self.op, self.tensors, wanted)
        return found if any(found) else ()

    def _local(
        self, decision: Decision, algorithm: ops.Local | ops.Kernel | None
    ) -> tuple[Any, Any, Any]:
        """The function for the local tensors, with its arguments (None: the user's own call)."""
        if isinstance(algorithm, ops.Kernel):
            self.kernel = BoundKernel(
                self.name, algorithm, self.mesh, tuple(self.slots),
                dtype_of(self.op, self.trace, self.mesh))
            operands = [layout.plain for layout in decision.operands]
            return self.kernel.local(operands), self.op.args, self.op.kwargs
        if algorithm is not None:
            order = tuple(Slot(index) for index in self.slots)
            return bound(self.name, algorithm, algorithm.bind, self.mesh), order, {}
        mended = self.entry.local if self.own is None else None
        as_called = (
            decision.args is None
            and decision.op is None
            and mended is None
            and as_it_is(self.func)
            and self.slots == list(range(len(self.tensors)))
        )
        # The local op may be a view where the op is none: a slice for each of `split_copy`.
        copies = (self.facts.is_view or decision.op is not None) and not self.shares()
        if as_called and not copies and not self._has_gaps():
            return None, None, None
        local: Any = mended or (
            self.op.overload if decision.op is None else overload_named(decision.op))
        if decision.runs is not None and self.mesh.here is not None:
            local = decision.runs(self.mesh.here) or local
        self.is_idle = isinstance(local, rules.Idle)
        if self.is_idle:
            metas = [self.trace.metas[slot.index] for slot in slots_of(self.op.results)]
            local = nothing(local.shapes, [meta.dtype for meta in metas])
        if self._has_gaps():
            local = packed(local)
        if copies:
            local = copying(local)
        if self.is_leaf:
            local = as_leaf(local)
        if decision.args is None:
            return local, self.op.args, self.op.kwargs
        assert self.mesh.here is not None
        args, kwargs = decision.args(self.mesh.here)
        slots = [Slot(index) for index in self.slots]
        # Positional arguments first, as the Call lists its tensors.
        count = len(slots_of(self.op.args))
        return local, place_slots(args, slots[:count]), place_slots(kwargs, slots[count:])

    def _results(
        self, decision: Decision, moves: list[Any], varying: frozenset[int], grad: bool,
        brought: bool,
    ) -> list[tuple[int, Any]]:
        """Per result its slot and the transition after the op; `metas` describe them.

        `brought`: whether the local op itself has data come from other ranks.
        """
        out: list[tuple[int, Any]] = []
        move = moves[self.slots[0]]
        alias = self._alias(brought or (move is not None and move.src != move.dst))
        for slot, layout in zip(slots_of(self.op.results), decision.results):
            meta = self.trace.metas[slot.index]
            differentiable = self.differentiable(meta, grad)
            leaving = replicated(layout, varying)
            leave = (
                transition_between(self.mesh, layout, layout, leaving, self.stays)
                if differentiable and leaving and not self.is_leaf
                else None
            )
            stays = self.stays if differentiable else NONE
            self.metas[slot.index] = self._meta(layout, meta, differentiable, alias, stays)
            out.append((slot.index, leave))
        return out

    def shares(self) -> bool:
        """Whether results of the op share memory with an operand in torch."""
        if not (self.facts.is_view and self.facts.may_copy):
            return self.facts.is_view
        return shares_memory(self.op, self.tensors)

    def _has_gaps(self) -> bool:
        """Whether neighbours that a view makes one element of may be none in a shard's memory.

        Where one rank holds all of a sharded dim, its shard may be part of a longer line and may
        begin or end at an odd place. All ranks know it by the empty shards of the others.
        """
        if not self.entry.widens:
            return False
        result = self.trace.metas[slots_of(self.op.results)[0].index]
        wider = self.tensors[self.slots[0]].dtype.itemsize < result.dtype.itemsize
        return wider and self.layouts[0].has_empty_shards

    def _alias(self, moved: bool) -> str | None:
        """Why the results, views in torch, share no memory with their base; None if they do."""
        if not self.shares():
            return None
        if moved or self._has_gaps():
            return self.name
        operands = [self.tensors[slot] for slot in self.slots]
        known = [tensor._meta.alias for tensor in operands if type(tensor) is ShardTensor]
        return next((alias for alias in known if alias), None)

    def _meta(
        self, layout: Layout, meta: torch.Tensor, grad: bool, alias: str | None = None,
        varying: frozenset[int] = NONE,
    ) -> Meta:
        strides = tuple(meta.stride())
        if alias is not None:
            base = self.trace.metas[self.slots[0]]
            if shares_elements(base.shape, base.stride()):  # what moved holds each by itself
                strides = strides_apart(meta.shape, strides)
        return intern(
            self.mesh, layout, meta.dtype, self.tensors[0].device, grad,
            None if strides == contiguous_strides(meta.shape) else strides, alias, varying,
        )

    def _in_place(
        self, decision: Decision, moves: list[Any], varying: frozenset[int],
        local: Any, args: Any, kwargs: Any, algorithm: ops.Local | ops.Kernel | None,
    ) -> Step:
        assert self.target is not None
        target = self.tensors[self.target]
        check_writable(self.name, target)
        check_overlap(self.op, self.trace.metas, target)
        wanted = layout_of(target, self.mesh)
        if self.grad and any(
                one.requires_grad for at, one in enumerate(self.tensors) if at != self.target):
            check_gradient(self.name, wanted)
        direct = decision.results[0] == wanted and moves[self.target] is None and not (
            replicated(decision.results[0], varying) and self.grad
        )
        writes = algorithm.writes if isinstance(algorithm, ops.Local) else None
        if isinstance(algorithm, ops.Local) and writes is not None and direct:
            local = bound(self.name, algorithm, writes, self.mesh)
        if direct and decision.op is None and (algorithm is None or writes is not None):
            self.by_form = self._is_by_form(decision) and not expanded_dims(target)
            return Step(
                self.name, moves, local, args, kwargs, target=self.target, why=decision.reason,
                reads=reads_of(self.slots, self.target, self.tensors, moves),
                left_whole=find_wide(
                    self.name, self.layouts, decision, self.rule, [target]
                ) if any(moves) else None,
            )
        if local is None or local is self.op.overload:
            local = functional(self.op)
            check_cast(self.op, local, self.trace.metas, target.dtype)
            args = self.op.args if args is None else args
            kwargs = self.op.kwargs if kwargs is None else kwargs
        result = decision.results[0]
        leaving = replicated(result, varying)
        write = writing_back(
            self.name, self.mesh, result, wanted, leaving if self.grad else frozenset())
        return Step(
            self.name, moves, local, args, kwargs, target=self.target, write_back=True,
            write=write, why=decision.reason,
            left_whole=find_written(self.name, self.layouts, result, wanted, target.dtype.itemsize),
        )
