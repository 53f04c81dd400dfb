"""Known programs serve other lengths: the ops of a call stay the same, and only lengths differ.

The structure of a call is its key without lengths (`keys.structure_key`). A length of 0, of 1, or
equal to one of the call's own numbers stays in the structure; any other is "the n-th different
one": calls of one structure broadcast alike, and whatever a rule finds by comparing lengths with
each other, with 1 or with a number is the same for all of them. So the lengths of a step's results
follow from those of its operands by the factors of the rule, and torch's meta kernels, the largest
cost of a capture, need not run again. If no axis had to compare costs, and no operand had to move,
the decision is the same as well, and a step differs in layouts alone (`by_form`). Other steps are
decided anew.

One op of which every number is the call's own serves all lengths. A call of several comes from
Python code, which may have computed a step's arguments from lengths: there a length may vary only
after it was changed alone and the same ops came out, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.call.compose import Composer, stand_in
from weft.tensor.call.decide import Builder
from weft.tensor.call.lengths import Sources, sources_of
from weft.tensor.call.program import Program, Step
from weft.tensor.meta import Meta
from weft.tensor.placing.layouts import layout_of
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Op, Trace, unseen_meta
from weft.tensor.trace.trees import slots_of
from weft.transport.order import memory_order, strides_in_order

__all__ = ["MAX_STRUCTURES", "Sizes"]

MAX_STRUCTURES = 2048

Change = tuple[int, int, bool]
"""Slot and dim of one of the call's tensors; whether its length is another, or its cuts alone."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A value whose lengths are those of the call's tensors.

    Args:
        dims: per dim, where its length stands.
        dtype: its dtype.
        order: its dims in the order of memory.
    """

    dims: Sources
    dtype: torch.dtype
    order: tuple[int, ...]


@dataclass(slots=True)
class Sizes:
    """A known call, for other lengths of its tensors.

    Args:
        program: that of one size; None where the one op is decided anew for each.
        result: the result of the call, with Slots.
        outer: the op that the steps are composed for, if there is one. ops: those of the steps.
        by_form: per step, whether only layouts differ.
        sized: per result of a step, the sources of its lengths.
        layouts: of the call's tensors.
        is_free: whether every length may vary.
        varied: else, which lengths of the call's tensors may differ from `layouts`; None if none
            may, because arguments follow from them.
        numbers_flow: whether no float is part of the program.
    """

    program: Program | None
    result: Any
    outer: Op | None
    ops: tuple[Op, ...]
    by_form: tuple[bool, ...]
    sized: tuple[Sized, ...]
    layouts: tuple[Layout, ...]
    is_free: bool = False
    varied: set[Change] | None = field(default_factory=set)
    numbers_flow: bool = False

    @classmethod
    def of_op(
        cls, builder: Builder, program: Program | None, numbers_flow: bool
    ) -> Sizes | None:
        """One op that every length may vary of; None where lengths and strides of its results do
        not follow from those of its operands. `program`: its recipe, where that differs in layouts
        alone."""
        trace, num = builder.trace, len(builder.tensors)
        op, rule = trace.ops[0], builder.rule
        results = slots_of(op.results)
        fresh = [slot.index for slot in results if slot.index >= num]
        if rule is not None and (rule.size_arg is not None or rule.offsets or rule.op is not None):
            return None
        found = sources_of(builder)
        if found is None or fresh != list(range(num, num + len(fresh))):
            return None
        if len(fresh) != len(results) and builder.target is None:
            return None  # it hands an operand on
        sized = [
            _sized_as(dims, trace.metas[slot.index]) for slot, dims in zip(results, found)
            if slot.index >= num
        ]
        layouts = tuple([layout_of(one, builder.mesh) for one in builder.tensors])
        made = cls(
            program, trace.result, None, (op,), (program is not None,), tuple(sized), layouts,
            is_free=True, numbers_flow=numbers_flow,
        )
        again = made.trace(builder.tensors)
        same = again is not None and all(
            (one.shape, one.stride()) == (other.shape, other.stride())
            for one, other in zip(again.metas[num:], trace.metas[num:])
        )
        return made if same else None

    @classmethod
    def of_several(cls, outer: Op | None, composer: Composer, program: Program) -> Sizes | None:
        """None where lengths of some value do not follow from those of the call's tensors."""
        num = composer.num_given
        layouts = tuple([layout_of(one, composer.mesh) for one in composer.values[:num]])
        if any(step.anchor or step.slice_of for step in program.steps):
            return None  # of a rank whose shard is empty; or slices, which remember their offsets
        known: list[Sized] = []
        for builder in composer.built:
            found = sources_of(builder)
            if found is None:
                return None
            for slot, dims in zip(slots_of(builder.op.results), found):
                given = tuple([
                    at if at is None or at[0] < num else known[at[0] - num].dims[at[1]]
                    for at in dims
                ])
                meta = composer.metas[slot.index]
                assert meta is not None
                shape, strides = meta.shape, meta.strides
                if strides is not None and strides != _strides_like(shape, strides, shape):
                    return None
                for axes, cut, at in zip(meta.layout.dims, meta.layout.cuts, given):
                    if cut and (at is None or layouts[at[0]].cuts[at[1]] != cut
                                or layouts[at[0]].dims[at[1]] != axes):
                        return None
                known.append(_sized_as(given, composer.traced[slot.index]))
        return cls(
            program, program.result, outer, tuple([builder.op for builder in composer.built]),
            tuple([builder.by_form for builder in composer.built]), tuple(known), layouts,
        )

    def trace(self, tensors: Sequence[torch.Tensor]) -> Trace | None:
        """The trace of one op on tensors of other lengths; several have to be captured again."""
        if not self.is_free:
            return None
        metas = list(tensors)
        for sized in self.sized:
            shape = [1 if at is None else tensors[at[0]].shape[at[1]] for at in sized.dims]
            strides = strides_in_order(shape, sized.order)
            metas.append(unseen_meta(shape, strides, sized.dtype))
        return Trace(self.ops, self.result, tuple(metas))

    def resized(self, tensors: Sequence[torch.Tensor]) -> Program | None:
        """The program for tensors of other lengths; None where it has to be made anew."""
        if self.program is None or self.varied is None:
            return None
        shapes = [
            one._meta.local_shape if type(one) is ShardTensor else one.shape for one in tensors
        ]
        for shape in shapes:
            if 0 in shape:
                return None  # edges may have to be anchored
        mesh = _mesh_of(tensors)
        layouts = [layout_of(one, mesh) for one in tensors]
        places = None
        if not self.is_free:
            changed = self._changed(layouts)
            if not changed <= self.varied:
                return None
            places = {(slot, dim) for slot, dim, _ in changed}
        return _Resizing(self, self.program, tensors, layouts, shapes, places, mesh).resized()

    def vary(
        self, tensors: Sequence[torch.Tensor], compose: Callable[[list[torch.Tensor]], Sizes | None]
    ) -> None:
        """Find out whether lengths that are new in `tensors` may vary, each of them alone.

        `compose` makes the program of the call on tensors that stand in for its own.
        """
        mesh = _mesh_of(tensors)
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
                self.outer, self.ops, self.sized, self.by_form, self.result
            ) == (other.outer, other.ops, other.sized, other.by_form, other.result)
            self.varied = self.varied | group if same else None

    def _changed(self, layouts: Sequence[Layout]) -> set[Change]:
        return {
            (slot, dim, mine.shape[dim] != other.shape[dim])
            for slot, (mine, other) in enumerate(zip(self.layouts, layouts)) if mine != other
            for dim in range(mine.ndim)
            if mine.shape[dim] != other.shape[dim] or mine.cuts[dim] != other.cuts[dim]
        }


def _mesh_of(tensors: Sequence[torch.Tensor]) -> BoundMesh:
    for one in tensors:
        if type(one) is ShardTensor:
            return one._meta.mesh
    raise AssertionError("no operand is sharded")


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
        return stand_in(_resized_meta(tensor._meta, layout))
    made = torch.empty(layout.shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


class _Resizing:
    """One known program on its way to other lengths.

    `shapes` are those of the local tensors. `places` are the slots and dims of the call's tensors
    that differ; None: all may.
    """

    def __init__(
        self, known: Sizes, program: Program, tensors: Sequence[torch.Tensor],
        layouts: Sequence[Layout], shapes: Sequence[Sequence[int]],
        places: set[tuple[int, int]] | None, mesh: BoundMesh,
    ) -> None:
        self.known, self.before, self.tensors = known, program, tensors
        self.layouts, self.shapes, self.places, self.mesh = layouts, shapes, places, mesh
        self.num = len(tensors)
        self.metas: dict[int, Meta] = {}

    def resized(self) -> Program | None:
        before, num = self.before, self.num
        steps = []
        asked = set(before.made)
        for step, op, by_form in zip(before.steps, self.known.ops, self.known.by_form):
            made = step.resized(self._layout) if by_form else self._step(step, op)
            if made is None:
                return None
            steps.append(made)
            for at, _ in made.operands:
                asked.add(at)
        metas: list[Meta | None] = [None] * len(before.metas)
        for at in range(num, len(metas)):
            if at in asked or before.metas[at].strides is not None:  # type: ignore[union-attr]
                metas[at] = self._meta(at)
        return before.resized(steps, metas)

    def _differs(self, slot: int) -> bool:
        places = self.places
        if places is None:
            return True
        if slot < self.num:
            return any(slot == at for at, _ in places)
        return not places.isdisjoint(self.known.sized[slot - self.num].dims)

    def _step(self, step: Step, op: Op) -> Step | None:
        slots = [slot.index for slot in slots_of((op.args, op.kwargs))]
        results = [slot.index for slot in slots_of(op.results)]
        if not any(map(self._differs, (*results, *slots))):
            return step
        return self._decided(op, slots, results)

    def _decided(self, op: Op, slots: Sequence[int], results: Sequence[int]) -> Step | None:
        """The step decided anew; None where its results come in layouts that others do not know."""
        values: list[Any] = [*self.tensors, *[None] * len(self.known.sized)]
        for slot in slots:
            if slot >= self.num:
                values[slot] = stand_in(self._meta(slot))
        traced: list[Any] = list(values)
        for at in results:
            meta = self._meta(at)
            if 0 in meta.local_shape:
                return None
            traced[at] = unseen_meta(meta.shape, meta.stride(), meta.dtype)
        trace = Trace((op,), op.results, tuple(traced))
        builder = Builder(None, trace, values, self.mesh, range(len(values)))
        made = builder.build()
        if type(made) is not Step or made.anchor or any(
            builder.metas[at] is not self._meta(at) for at in results
        ):
            return None
        return made

    def _layout(self, slot: int) -> Layout:
        return self.layouts[slot] if slot < self.num else self._meta(slot).layout

    def _meta(self, slot: int) -> Meta:
        """The meta of a step's result."""
        meta = self.metas.get(slot)
        if meta is None:
            meta = self.before.metas[slot]
            assert meta is not None
            if self._differs(slot):
                meta = self._sized(meta, self.known.sized[slot - self.num])
            self.metas[slot] = meta
        return meta

    def _sized(self, like: Meta, sized: Sized) -> Meta:
        """A value for the new lengths. Where a dim is sharded as the tensor that its length comes
        from, this rank's part is as long."""
        shape: list[int] = []
        local: list[int | None] = []
        cuts: list[Any] = []
        for at, axes, cut in zip(sized.dims, like.layout.dims, like.layout.cuts):
            if at is None:
                shape.append(1)
                cuts.append(None)
                local.append(None if axes else 1)
                continue
            slot, dim = at
            theirs = self.layouts[slot]
            shape.append(theirs.shape[dim])
            cuts.append(theirs.cuts[dim] if cut else None)
            alike = axes == theirs.dims[dim] and cuts[-1] == theirs.cuts[dim]
            local.append(
                shape[-1] if not axes else self.shapes[slot][dim] if alike else None
            )
        layout = like.layout.resized(tuple(shape), tuple(cuts))
        known: Any = None if None in local else tuple(local)
        return _resized_meta(like, layout, known)


def _resized_meta(like: Meta, layout: Layout, local_shape: tuple[int, ...] | None = None) -> Meta:
    """The meta of the same form with this layout, whose local shape may be known."""
    strides = like.strides
    if strides is not None:
        strides = _strides_like(like.shape, strides, layout.shape)
    if local_shape is None:
        assert like.mesh.here is not None
        local_shape = layout.local_shape_at(like.mesh.here)
    return like.resized(layout, local_shape, strides)


def _strides_like(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Those of a tensor of the wanted shape that lies in the same order, expanded (stride 0) in the
    same dims."""
    stepping = [length if step else 1 for length, step in zip(wanted, strides)]
    found = strides_in_order(stepping, memory_order(shape, strides))
    return tuple([mine if step else 0 for mine, step in zip(found, strides)])


def _sized_as(dims: Sources, meta: torch.Tensor) -> Sized:
    """A result with these sources, in the dtype and the order of memory of a captured one."""
    return Sized(dims, meta.dtype, memory_order(meta.shape, meta.stride()))
