"""A call of several ops: decided once, then carried out step by step on local tensors.

The ops are those that an algorithm of `weft.ops` is composed of (`Composite`), or a function of
torch. They are captured on meta tensors of global shape, and each becomes the recipe of one op on
numbered values: first the call's tensors, then the results of the steps. No ShardTensor is made
in between but where a value has to move. Programs with a step that is no such recipe (a write, a
random op, a fallback) are not made: then each op is a call of its own.

A known program serves other lengths as a known structure does (`structure`): steps in which only
layouts differ stay, others are built anew. Since an algorithm is Python code, which may have
computed a step's arguments from lengths, a length may vary only after it was changed alone and
the same ops came out, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft import ops
from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.call.decide import Builder
from weft.tensor.call.decompose import Parts
from weft.tensor.call.own.functions import handled
from weft.tensor.call.recipe import Direct, Recipe
from weft.tensor.call.sizes import Sized, moved_to, resized_meta, sized_as, sources
from weft.tensor.meta import Meta
from weft.tensor.placing.layouts import layout_of
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import NotCapturable, Op, Trace, capture, meta_like
from weft.tensor.trace.trees import Slot, fill, flatten, local_of, slots_of
from weft.tensor.views.moved import attach_to_base

__all__ = ["Composer", "Program", "Sizes"]


class Program(Recipe):
    """Steps on numbered values.

    Args:
        steps: recipes of one op each, their Slots numbering the values.
        metas: per value what it is as a ShardTensor; None for the call's own tensors, and where
            nobody asks.
        result: the structure that the call returns, with Slots.
    """

    __slots__ = ("metas", "moved", "result", "steps")

    def __init__(
        self, steps: Sequence[Direct], metas: Sequence[Meta | None], result: Any
    ) -> None:
        self.steps, self.metas, self.result = tuple(steps), tuple(metas), result
        made = [self.metas[slot.index] for slot in slots_of(result)]
        self.moved = any(meta is not None and meta.alias is not None for meta in made)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = flatten((args, kwargs) if kwargs else args)
        metas = self.metas
        more = [None] * (len(metas) - len(given))
        wrapped: list[Any] = [*given, *more]
        locals_: list[Any] = [*map(local_of, given), *more]
        for step in self.steps:
            step.advance(wrapped, locals_, metas)
        for slot in slots_of(self.result):
            at = slot.index
            if wrapped[at] is None:
                wrapped[at] = wrap(locals_[at], metas[at])  # type: ignore[arg-type]
        out = fill(self.result, wrapped)
        return attach_to_base(out, func, args, kwargs) if self.moved else out


class Composer:
    """Makes the program of ops, one after the other.

    `composed` and `traced` give the result with Slots, or None where the program cannot be made.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mesh: BoundMesh) -> None:
        self.mesh = mesh
        self.num_given = len(tensors)
        self.device = mesh.device
        self.values: list[torch.Tensor] = list(tensors)
        """The call's tensors, then ShardTensors without data in the place of results."""
        self.traced: list[Any] = list(tensors)
        """The same with a captured result's meta tensor in its place."""
        self.metas: list[Meta | None] = [None] * len(tensors)
        self.steps: list[Direct] = []
        self.built: list[Builder] = []

    def composed(self, function: Callable[..., Any], op: Op) -> Any:
        """Add what `function` does with the op's arguments; gives its result."""
        slots = list(dict.fromkeys(slots_of((op.args, op.kwargs))))
        metas = [meta_like(self.values[slot.index]) for slot in slots]
        feed = {slot.index: meta for slot, meta in zip(slots, metas)}
        try:
            trace = capture(
                function, fill(op.args, feed), fill(op.kwargs, feed), metas, self.device.type
            )
        except NotCapturable:
            return None
        if trace.result is NotImplemented:
            return None
        return self.add(trace, dict(enumerate(slots)))

    def add(self, trace: Trace, slots: dict[int, Slot]) -> Any:
        """Add a trace whose own slots are `slots` here; gives its result."""
        for op in trace.ops:
            about = facts(op.overload)
            if about.writes or about.is_random or not slots_of((op.args, op.kwargs)):
                return None
            if handled(op.overload):
                return None
            results = slots_of(op.results)
            if all(slot.index in slots for slot in results):
                continue  # an operand as it is
            mine = Op(op.overload, fill(op.args, slots), fill(op.kwargs, slots), None)
            found = self._one(mine, op.results, [trace.metas[slot.index] for slot in results])
            if found is None:
                return None
            slots.update(zip([slot.index for slot in results], found))
        return fill(trace.result, slots)

    def _one(self, op: Op, results: Any, metas: Sequence[torch.Tensor]) -> list[Slot] | None:
        """Add one op; gives the Slots of its results."""
        new = [Slot(len(self.values) + at) for at in range(len(metas))]
        renamed = dict(zip([slot.index for slot in slots_of(results)], new))
        op = Op(op.overload, op.args, op.kwargs, fill(results, renamed))
        trace = Trace((op,), op.results, (*self.traced, *metas))
        builder = Builder(None, trace, self.values, self.mesh, range(len(self.values)))
        made = builder.build()
        if isinstance(made, Parts):
            out = self.add(made.trace, {at: Slot(at) for at in range(len(builder.tensors))})
            return None if out is None else slots_of(out)
        if isinstance(made, ops.Composite):
            if made.each_call:
                return None
            if torch.is_autocast_enabled(self.device.type):
                return None  # what it is composed of runs without
            out = self.composed(made.function, op)
            return None if out is None else slots_of(out)
        if type(made) is not Direct or builder.clashes:
            return None
        self.steps.append(made)
        self.built.append(builder)
        for result, meta in zip(made.results, metas):
            self.values.append(_stand_in(result.meta))
            self.traced.append(meta)
            self.metas.append(result.meta)
        return new

    def program(self, result: Any) -> Program:
        """The program of what was added."""
        return Program(self.steps, self.metas, result)


def _stand_in(meta: Meta) -> ShardTensor:
    dtype = meta.dtype
    return wrap(torch.empty(0, dtype=dtype, requires_grad=meta.requires_grad), meta)


Change = tuple[int, int, bool]
"""Slot and dim of one of the call's tensors; whether its length is another, or its cuts alone."""


@dataclass(slots=True)
class Sizes:
    """A known program, for other lengths of the call's tensors.

    Args:
        program: that of one size.
        outer: the op that it carries out, if it is one. ops: those of its steps.
        by_form: per step, whether only layouts differ.
        sized: per value that a step makes, where its lengths come from: the call's tensors.
        layouts: of the call's tensors.
        varied: what of the call's tensors may be other than in `layouts`; None where nothing
            may, because arguments follow from it.
    """

    program: Program
    outer: Op | None
    ops: tuple[Op, ...]
    by_form: tuple[bool, ...]
    sized: tuple[Sized, ...]
    layouts: tuple[Layout, ...]
    varied: set[Change] | None = field(default_factory=set)
    numbers_flow = False

    @classmethod
    def of(cls, outer: Op | None, composer: Composer, program: Program) -> Sizes | None:
        """None where lengths of some value do not follow from those of the call's tensors."""
        num = composer.num_given
        layouts = tuple([layout_of(one, composer.mesh) for one in composer.values[:num]])
        if any(step.anchor for step in program.steps):
            return None  # of a rank whose shard is empty
        known: list[Sized] = []
        for builder in composer.built:
            found = sources(builder)
            if found is None:
                return None
            for slot, dims in zip(slots_of(builder.op.results), found):
                given = tuple([
                    at if at is None or at[0] < num else known[at[0] - num].dims[at[1]]
                    for at in dims
                ])
                meta = composer.metas[slot.index]
                assert meta is not None
                for axes, cut, at in zip(meta.layout.dims, meta.layout.cuts, given):
                    if cut and (at is None or layouts[at[0]].cuts[at[1]] != cut
                                or layouts[at[0]].dims[at[1]] != axes):
                        return None
                known.append(sized_as(given, composer.traced[slot.index]))
        return cls(
            program, outer, tuple([builder.op for builder in composer.built]),
            tuple([builder.by_form for builder in composer.built]), tuple(known), layouts,
        )

    def trace(self, tensors: Sequence[torch.Tensor]) -> Trace | None:
        """None: the call has to be captured again."""

    def resized(self, tensors: Sequence[torch.Tensor]) -> Program | None:
        """The program for tensors of other lengths; None where it has to be made anew."""
        if self.varied is None:
            return None
        mesh = next(one._meta.mesh for one in tensors if type(one) is ShardTensor)
        layouts = [layout_of(one, mesh) for one in tensors]
        changed = self._changed(layouts)
        if not changed <= self.varied or _some_empty(mesh, layouts):
            return None
        return _Resizing(self, tensors, layouts, changed, mesh).program()

    def vary(
        self, tensors: Sequence[torch.Tensor], compose: Callable[[list[torch.Tensor]], Sizes | None]
    ) -> None:
        """Find out whether lengths that are new in `tensors` may vary, each of them alone.

        `compose` makes the program of the call on tensors that stand in for its own.
        """
        mesh = next(one._meta.mesh for one in tensors if type(one) is ShardTensor)
        layouts = [layout_of(one, mesh) for one in tensors]
        if _some_empty(mesh, (*self.layouts, *layouts)):
            return
        groups: dict[tuple[int, int], set[Change]] = {}
        for change in self._changed(layouts):
            slot, dim, _ = change
            pair = self.layouts[slot].shape[dim], layouts[slot].shape[dim]
            groups.setdefault(pair, set()).add(change)
        for group in groups.values():
            if self.varied is None or group <= self.varied:
                continue
            other = compose([
                _exchanged(tensor, mine, theirs, {dim for at, dim, _ in group if at == slot})
                for slot, (tensor, mine, theirs) in enumerate(zip(tensors, self.layouts, layouts))
            ])
            same = other is not None and (
                self.outer, self.ops, self.sized, self.by_form, self.program.result
            ) == (other.outer, other.ops, other.sized, other.by_form, other.program.result)
            self.varied = self.varied | group if same else None

    def _changed(self, layouts: Sequence[Layout]) -> set[Change]:
        return {
            (slot, dim, mine.shape[dim] != other.shape[dim])
            for slot, (mine, other) in enumerate(zip(self.layouts, layouts)) if mine != other
            for dim in range(mine.ndim)
            if mine.shape[dim] != other.shape[dim] or mine.cuts[dim] != other.cuts[dim]
        }


def _some_empty(mesh: BoundMesh, layouts: Sequence[Layout]) -> bool:
    """Whether this rank holds nothing of one of them, so that edges may have to be anchored."""
    assert mesh.here is not None
    return any(0 in layout.local_shape_at(mesh.here) for layout in layouts)


def _exchanged(
    tensor: torch.Tensor, mine: Layout, theirs: Layout, dims: set[int]
) -> torch.Tensor:
    """A stand-in for the tensor, laid out as `mine` with some dims as in `theirs`."""
    def pick(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([other[dim] if dim in dims else one[dim] for dim in range(mine.ndim)])

    layout = mine.resized(pick(mine.shape, theirs.shape), pick(mine.cuts, theirs.cuts))
    if layout == theirs:
        return tensor
    if type(tensor) is ShardTensor:
        return _stand_in(resized_meta(tensor._meta, layout))
    made = torch.empty(layout.shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


class _Resizing:
    """One known program on its way to other lengths."""

    def __init__(
        self, known: Sizes, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout],
        changed: set[Change], mesh: BoundMesh,
    ) -> None:
        self.known, self.tensors, self.layouts, self.mesh = known, tensors, layouts, mesh
        self.num = len(tensors)
        places = {(slot, dim) for slot, dim, _ in changed}
        self.differs = [any(slot == at for at, _ in places) for slot in range(self.num)]
        self.differs += [not places.isdisjoint(sized.dims) for sized in known.sized]
        self.metas: dict[int, Meta] = {}

    def program(self) -> Program | None:
        program = self.known.program
        steps = []
        for step, op, by_form in zip(program.steps, self.known.ops, self.known.by_form):
            made = self._step(step, op, by_form)
            if made is None:
                return None
            steps.append(made)
        asked = {slot.index for slot in slots_of(program.result)}
        asked |= {at for step in steps for at, _ in step.operands}
        metas = [
            self._meta(slot) if slot in asked and slot >= self.num else None
            for slot in range(len(program.metas))
        ]
        return Program(steps, metas, program.result)

    def _step(self, step: Direct, op: Op, by_form: bool) -> Direct | None:
        slots = slots_of((op.args, op.kwargs))
        results = [slot.index for slot in slots_of(op.results)]
        if not any(self.differs[at] for at in results) and not any(
            self.differs[slot.index] for slot in slots
        ):
            return step
        if not by_form:
            return self._built(op, slots, results)
        if not step.operands and step.kernel is None and all(
            result.leave is None for result in step.results
        ):
            return step
        operands = tuple([(at, moved_to(move, self._layout(at))) for at, move in step.operands])
        if any(result.leave is not None for result in step.results):
            return self._built(op, slots, results)
        return step.resized(operands, step.results, self._layout)

    def _built(self, op: Op, slots: Sequence[Slot], results: Sequence[int]) -> Direct | None:
        """The step decided anew; None where its results come in layouts that others do not know."""
        values: list[Any] = [*self.tensors, *[None] * len(self.known.sized)]
        for slot in slots:
            if slot.index >= self.num:
                values[slot.index] = _stand_in(self._meta(slot.index))
        traced: list[Any] = list(values)
        for at in results:
            meta = self._meta(at)
            if 0 in meta.local_shape:
                return None
            traced[at] = torch.empty_strided(
                meta.shape, meta.stride(), dtype=meta.dtype, device="meta"
            )
        trace = Trace((op,), op.results, tuple(traced))
        made = Builder(None, trace, values, self.mesh, range(len(values))).build()
        if type(made) is not Direct or made.anchor or any(
            result.meta is not self._meta(result.slot) for result in made.results
        ):
            return None
        return made

    def _layout(self, slot: int) -> Layout:
        return self.layouts[slot] if slot < self.num else self._meta(slot).layout

    def _meta(self, slot: int) -> Meta:
        """What a step's result is."""
        meta = self.metas.get(slot)
        if meta is None:
            like = self.known.program.metas[slot]
            assert like is not None
            sized = self.known.sized[slot - self.num]
            meta = resized_meta(like, self._sized(like, sized)) if self.differs[slot] else like
            self.metas[slot] = meta
        return meta

    def _sized(self, like: Meta, sized: Sized) -> Layout:
        """The layout of a value for the new lengths."""
        shape, cuts = [], []
        for at, cut in zip(sized.dims, like.layout.cuts):
            shape.append(1 if at is None else self.layouts[at[0]].shape[at[1]])
            cuts.append(self.layouts[at[0]].cuts[at[1]] if cut and at is not None else None)
        return like.layout.resized(tuple(shape), tuple(cuts))
