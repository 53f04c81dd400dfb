"""Users' functions on local tensors, by their rules.

The effect of a user's function on local tensors is not known before it has run. Shapes come from
the rule, and every call compares its results with them; dtypes come from the results. Version
counters show which operands the function has written to. These move back to the layout of the
caller's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError
from weft.ops import Kernel
from weft.rules import Call, Decision, TensorArg
from weft.rules.factors import carries
from weft.tensor import modes
from weft.tensor.call.anchor import tied
from weft.tensor.call.in_place import check_writable
from weft.tensor.call.kernels import BoundKernel
from weft.tensor.call.own.functions import OwnFunction
from weft.tensor.call.own.outside import OutsideMesh, edges
from weft.tensor.call.recipe import Function, Recipe
from weft.tensor.placing.layouts import common_strides, layout_of, local_to_sharded
from weft.tensor.placing.operands import (
    Caller,
    move_operands,
    operand_transitions,
    share_memory,
    varying_axes,
)
from weft.tensor.placing.transitions import order_in_memory, transition_between
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import dtype_text
from weft.tensor.trace.trees import flatten, local_of, map_tensors, substitute
from weft.tensor.versions import counted_version, write_counted
from weft.tensor.views.moved import Moved, unwrap_view, written_to
from weft.transport import traffic
from weft.transport.facts import replicated
from weft.transport.order import Order

__all__ = ["recipe"]


def recipe(
    function: OwnFunction, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    mesh: BoundMesh,
) -> tuple[Recipe, bool] | None:
    """The recipe of a call, and whether its floats only flow through.

    None if the rule does not cover such a call of an op that torch knows.
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
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    decision = propagate.decide(
        found, Call(rule.name, call.args, call.kwargs, results), layouts, wants
    )
    if mesh.here is None:
        varying = varying_axes((*decision.operands, *decision.results))
        moved = frozenset(
            at for at, (src, dst) in enumerate(zip(layouts, decision.operands))
            if src != dst or (wants[at] and replicated(dst, varying))
        )
        outside = OutsideMesh(function.run, mesh, decision.results, moved)
        return Function(outside.run, as_called=True), rule.by_shape
    dtypes = [arg.dtype for arg in args_of]
    anchor: Sequence[Sequence[int]] = ()
    if not function.keeps_edges and any(wants) and any(
        layout.has_empty_shards for layout in decision.operands
    ):
        wanted = tuple([at for at, wants_grad in enumerate(wants) if wants_grad])
        found = edges(function.run, args, kwargs, tensors, wanted)
        anchor = (wanted,) * len(decision.results) if found is None else found
    orders = [*map(order_in_memory, tensors)]
    run = function.run
    if decision.finish:
        assert rule.kernel is not None
        kernel = BoundKernel(rule.name, Kernel.of(decision, rule.kernel), mesh, (), None)
        run = kernel.local(decision.operands)
    made = OnLocal(function, run, mesh, decision, layouts, wants, dtypes, anchor, orders)
    return Function(made.run, as_called=True), rule.by_shape


class OnLocal(Caller):
    """A user's function on local tensors, between transitions; its results are checked."""

    def __init__(
        self, function: OwnFunction, local: Callable[..., Any], mesh: BoundMesh, decision: Decision,
        layouts: Sequence[Layout], wants: Sequence[bool], dtypes: Sequence[str],
        anchor: Sequence[Sequence[int]], orders: Sequence[Order | None],
    ) -> None:
        self.local, self.mesh, self.decision = local, mesh, decision
        self.name, self.why = function.__name__, decision.reason
        self.terms = {
            dtype for dtype, layout in zip(dtypes, decision.operands) if layout.is_partial
        }
        self.varying = varying = varying_axes((*decision.operands, *decision.results))
        moves = operand_transitions(mesh, layouts, decision.operands, wants, varying, orders)
        self.operands = tuple((at, move) for at, move in enumerate(moves) if move is not None)
        self.leaves = [
            transition_between(
                mesh, layout, layout, replicated(layout, varying if any(wants) else ()))
            for layout in decision.results
        ]
        self.anchor = anchor

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs) if kwargs else args)
        mine = [unwrap_view(local_of(tensor)) for tensor in tensors]
        locals_: list[Any] = list(mine)
        if self.operands:
            move_operands(tensors, self.operands, locals_, self)
        others = {at for at, _ in self.operands}
        others.update(at for at, one in enumerate(tensors) if type(local_of(one)) is Moved)
        for at in others:
            if locals_[at].is_inference():  # which would not tell of a write
                with torch.inference_mode(False):
                    locals_[at] = locals_[at].clone()
        if self.operands and share_memory(tensors):
            for at, _ in self.operands:
                locals_[at] = locals_[at].clone()
        before = [counted_version(local) for local in locals_]
        feed = iter(locals_)
        out = self.local(*substitute(args, feed), **substitute(kwargs, feed))
        written = [at for at, local in enumerate(locals_) if counted_version(local) != before[at]]
        if out is None:  # what it has written to are its results
            written = written or [at for at, version in enumerate(before) if version is None]
        if out is not None or not written:
            self._check_number(out)
        known = {id(local): at for at, local in enumerate(locals_)}
        results = enumerate(flatten(out))
        places = {known[id(one)]: place for place, one in results if id(one) in known}
        if out is None and len(written) == len(self.decision.results):
            places = {at: place for place, at in enumerate(written)}
        given = {
            id(locals_[at]): tensors[at] for at, place in places.items()
            if mine[at] is locals_[at]
            and self.decision.results[place] == layout_of(tensors[at], self.mesh)
        }
        unknown = [at for at in places if before[at] is None]
        for at in sorted({*written, *unknown}):
            self._bring_back(tensors[at], mine[at], locals_[at], at, places.get(at))
            given[id(locals_[at])] = tensors[at]
        if out is None:
            return None
        if self.anchor and not places:
            out = tied(out, self.anchor, locals_)
        moved = {_memory(locals_[at]) for at in others}
        feed = iter(range(len(self.decision.results)))
        return map_tensors(lambda one: self._wrap(next(feed), one, given, moved), out)

    def _bring_back(
        self, tensor: torch.Tensor, mine: torch.Tensor, local: torch.Tensor, at: int,
        place: int | None,
    ) -> None:
        """An operand was written to: move its new value to the layout of the caller's tensor."""
        layout = self.decision.operands[at]
        if place is not None:
            layout = self.decision.results[place]
            self._check_shape(place, local)
        check_writable(f"{self.name}(...), which wrote to its tensor argument {at}", tensor)
        leaving = replicated(layout, self.varying if local.requires_grad else ())
        move = transition_between(self.mesh, layout, layout_of(tensor, self.mesh), leaving)
        value = local
        if move is not None:
            modes.check_strict(self.name, move)
            with traffic.label(self.name, "it writes to the operand"):
                value = move(local)
        if value is not mine:
            if layout.is_partial:  # what it has written, and may have saved, is summed now
                mine.copy_(value)
            else:
                write_counted(mine, value, local)
        if type(tensor) is ShardTensor:
            if type(tensor._local) is Moved:
                tensor._local._weft_view.write_back(mine.requires_grad)
            written_to(tensor)

    def _wrap(
        self, place: int, one: torch.Tensor, given: dict[int, torch.Tensor], moved: set[int]
    ) -> torch.Tensor:
        if id(one) in given:  # an argument that it has written to, or leaves as it is
            return given[id(one)]
        layout, leave = self.decision.results[place], self.leaves[place]
        self._check_shape(place, one)
        if self.terms and layout.is_partial:
            self._check_dtype(place, one)
        if leave is not None:
            one = leave(one)
        strides = None
        if not one.is_contiguous():
            strides = common_strides(layout, one)
            if strides is None:
                one = one.contiguous()
        # Only this rank knows that it is a view, so it cannot follow its base: writes are refused.
        alias = self.name if moved and _memory(one) in moved else None
        return local_to_sharded(one, self.mesh, layout, strides, alias)

    def _check_number(self, out: Any) -> None:
        given, due = len(flatten(out)), len(self.decision.results)
        if given != due:
            raise LayoutError(
                f"{self.name}(...)", f"it returned {given} tensors, its rule has {due} "
                "results", "a rule names every tensor result", [f"{given} tensors"],
                f"weft.register_rule({self.name}, \"... -> {', '.join(['...'] * given)}\")")

    def _check_shape(self, place: int, one: torch.Tensor) -> None:
        layout = self.decision.results[place]
        assert self.mesh.here is not None
        due = layout.local_shape_at(self.mesh.here)
        if one.shape == due:
            return
        operands = ", ".join(str(operand) for operand in self.decision.operands)
        raise LayoutError(
            f"{self.name}(...)", f"on rank {self.mesh.rank} result {place} has the local "
            f"shape {tuple(one.shape)}; by its rule it is {layout}, of local shape {due}",
            "on local tensors a function gives the local part of what it gives on the "
            "whole", [f"operands {operands}"],
            f"weft.testing.check_rule({self.name}) finds the factors that must be whole: "
            "\"b s! -> b s!\"")

    def _check_dtype(self, place: int, one: torch.Tensor) -> None:
        result = dtype_text(one.dtype)
        wrong = [f"partial sums of {dtype}" for dtype in self.terms if not carries(dtype, result)]
        if wrong:
            raise LayoutError(
                f"{self.name}(...)", f"partial sums became {result} in result {place}",
                "a linear op passes partial sums, and may not round each of them",
                wrong, "leave the operand out of linear=")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
