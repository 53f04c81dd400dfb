"""Known programs serve other lengths: the ops of a call stay the same, and only lengths differ.

The structure of a call is its key without lengths (`keys.structure_key`). A length of 0 or 1 stays
in the structure. Any other is "the n-th different one", and so is a number of the call that equals
a length: calls of one structure broadcast alike, and whatever a rule finds by comparing lengths
with each other, with 1 or with a number is the same for all of them. So the lengths of a step's
results follow from those of its operands by the factors of the rule: each is one of theirs, or a
sum (`lengths`). Torch's meta kernels, the largest cost of a capture, need not run again. If no axis
had to compare costs, and no operand had to move, the decision is the same as well, and a step
differs in layouts alone (`by_form`), or in the size that it is given. Other steps are decided anew.

What is known of a structure holds for some lengths alone where a number of the call is none but
in name (a dim, a count), where a dim has several factors, and where a slice would end beyond what
it is a slice of. A structure may be known for several such lengths.

One op of which every number is the call's own serves all other lengths. A call of several comes
from Python code, which may have computed a step's arguments from lengths: there a length may vary
only after it was changed alone and the same ops came out, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.rules import Length
from weft.tensor.call.compose import Composer, stand_in
from weft.tensor.call.decide import Builder
from weft.tensor.call.lengths import Place, Source, places_in, sources_of, summed
from weft.tensor.call.program import Program
from weft.tensor.call.recipe import Alias
from weft.tensor.call.resizing import (
    Resizing,
    Sized,
    gaps_in,
    length_of,
    resized_meta,
    sized_as,
    strides_like,
)
from weft.tensor.keys import Structure
from weft.tensor.meta import bounded_put
from weft.tensor.placing.layouts import layout_of
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Op, Trace, unseen_meta
from weft.tensor.trace.trees import slots_of
from weft.transport.order import memory_order

__all__ = ["MAX_STRUCTURES", "Sizes", "keep", "known_for"]

MAX_STRUCTURES = 2048
MAX_OF_STRUCTURE = 8

Change = tuple[int, int, bool]
"""Slot and dim of one of the call's tensors; whether its length is another, or its cuts alone."""


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
        fixed, least: what dims of theirs have to be as long as in `layouts`, and how long others.
        sizes_flow: whether the call's numbers may be other lengths, too.
        is_free: whether every length may vary.
        varied: else, which lengths of the call's tensors may differ from `layouts`; None if none
            may, because arguments follow from them.
        numbers_flow: whether no float is part of the program.
        wants_grad: whether a gradient may be wanted of a tensor of the call, or of a view of it.
        exactly, at_least: the same as `fixed` and `least`, by the numbers of the structure.
    """

    program: Program | Alias | None
    result: Any
    outer: Op | None
    ops: tuple[Op, ...]
    by_form: tuple[bool, ...]
    sized: tuple[Sized, ...]
    layouts: tuple[Layout, ...]
    fixed: frozenset[Place] = frozenset()
    least: tuple[tuple[int, int, int], ...] = ()
    sizes_flow: bool = False
    is_free: bool = False
    varied: set[Change] | None = field(default_factory=set)
    numbers_flow: bool = False
    wants_grad: bool = True
    exactly: tuple[tuple[int, int], ...] = ()
    at_least: tuple[tuple[int, int], ...] = ()

    def bind(self, structure: Structure) -> None:
        """Find out which of the structure's lengths are not free."""
        values = structure.values
        lengths = {self.layouts[slot].shape[dim] for slot, dim in self.fixed}
        if self.sizes_flow:  # what a length of the result says is a number, unless an operand's
            lengths |= {source.plus for sized in self.sized for source in sized.dims
                        if type(source) is Length and not source.terms}
        exactly = {values.index(length) for length in lengths if length in values}
        if not self.sizes_flow:
            exactly |= structure.numbers
        self.exactly = tuple([(at, values[at]) for at in sorted(exactly)])
        self.at_least = tuple([
            (values.index(self.layouts[slot].shape[dim]), least)
            for slot, dim, least in self.least if self.layouts[slot].shape[dim] in values
        ])

    def serves(self, structure: Structure) -> bool:
        """Whether it is known for these lengths."""
        values = structure.values
        for at, length in self.exactly:
            if values[at] != length:
                return False
        return not self.at_least or all(values[at] >= least for at, least in self.at_least)

    @classmethod
    def of_alias(cls, alias: Alias) -> Sizes:
        """A function of torch that hands an operand on."""
        return cls(alias, alias.result, None, (), (), (), (), is_free=True)

    @classmethod
    def of_op(
        cls, builder: Builder, program: Program | None, numbers_flow: bool, is_own: bool = False
    ) -> Sizes | None:
        """One op that every length may vary of; None where lengths and strides of its results do
        not follow from those of its operands. `program`: its recipe, where that differs in layouts
        alone. `is_own`: whether the op's numbers are the call's, each in its place."""
        trace, num = builder.trace, len(builder.tensors)
        op, rule = trace.ops[0], builder.rule
        results = slots_of(op.results)
        fresh = [slot.index for slot in results if slot.index >= num]
        found = None if rule is not None and rule.op is not None else sources_of(builder)
        if found is None or fresh != list(range(num, num + len(fresh))):
            return None
        if len(fresh) != len(results) and builder.target is None:
            return None  # it hands an operand on
        sized: list[Sized] = []
        for slot, dims in zip(results, found.results):
            if slot.index >= num:
                made = sized_as(dims, trace.metas[slot.index], found.parts and builder.shares())
                if made is None:
                    return None
                sized.append(made.beside(builder.metas.get(slot.index), builder.tensors))
        if program is not None and not _differs_in_layouts(program, sized):
            program = None
        if found.sizes_flow and (program is None or not is_own):
            return None  # the op's numbers are those of one size
        layouts = tuple([layout_of(one, builder.mesh) for one in builder.tensors])
        made = cls(
            program, trace.result, None, (op,), (program is not None,), tuple(sized), layouts,
            found.fixed, found.least, found.sizes_flow, is_free=True, numbers_flow=numbers_flow,
            wants_grad=builder.grad and (
                builder.may_view or any(one.requires_grad for one in builder.tensors)),
        )
        again = made._traced(builder.tensors)
        same = all(
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
        known: list[tuple[Source, ...]] = []
        sized: list[Sized] = []
        by_form: list[bool] = []
        fixed: set[Place] = set()
        least: list[tuple[int, int, int]] = []
        for builder in composer.built:
            found = sources_of(builder)
            if found is None:
                return None
            for place in found.fixed:
                source = summed(place, known, num)
                assert source is not None
                fixed.update(places_in(source))
            for slot, dim, length in found.least:
                source = summed((slot, dim), known, num)
                if type(source) is not tuple:
                    return None
                least.append((*source, length))
            own = builder.by_form
            for slot, dims in zip(slots_of(builder.op.results), found.results):
                given = _all_of([summed(source, known, num) for source in dims])
                if given is None:
                    return None
                meta = composer.metas[slot.index]
                assert meta is not None
                shape, strides = meta.shape, meta.strides
                if strides is not None and strides != strides_like(shape, strides, shape):
                    return None
                for axes, cut, at in zip(meta.layout.dims, meta.layout.cuts, given):
                    if cut and (type(at) is not tuple or layouts[at[0]].cuts[at[1]] != cut
                                or layouts[at[0]].dims[at[1]] != axes):
                        return None
                    own = own and (not axes or type(at) is tuple or not places_in(at))
                meta = composer.traced[slot.index]
                known.append(given)
                one = Sized(given, meta.dtype, memory_order(meta.shape, meta.stride()))
                sized.append(one.beside(composer.metas[slot.index], composer.values[:num]))
            by_form.append(own)
        return cls(
            program, program.result, outer, tuple([builder.op for builder in composer.built]),
            tuple(by_form), tuple(sized), layouts, frozenset(fixed), tuple(least),
        )

    def trace(self, tensors: Sequence[torch.Tensor]) -> Trace | None:
        """The trace of one op on tensors of other lengths; several have to be captured again."""
        return self._traced(tensors) if self.ops and self.is_free and not self.sizes_flow else None

    def _traced(self, tensors: Sequence[torch.Tensor]) -> Trace:
        metas = list(tensors)
        for sized in self.sized:
            shape = [length_of(source, tensors) for source in sized.dims]
            metas.append(unseen_meta(shape, sized.strides(shape, tensors), sized.dtype))
        return Trace(self.ops, self.result, tuple(metas))

    def resized(self, tensors: Sequence[torch.Tensor]) -> Program | Alias | None:
        """The recipe for tensors of other lengths; None where it has to be made anew."""
        if type(self.program) is not Program:
            return self.program  # type: ignore[return-value]
        if self.varied is None:
            return None
        shapes: list[Sequence[int]] = []
        layouts: list[Layout] = []
        mesh = _mesh_of(tensors)
        for one in tensors:
            layout = layout_of(one, mesh)
            shape = one._meta.local_shape if type(one) is ShardTensor else one.shape
            if self.wants_grad and (0 in shape or layout.has_empty_shards):
                return None  # edges may have to be anchored, or views to be replayed
            shapes.append(shape)
            layouts.append(layout)
        places = None
        if not self.is_free:
            changed = self._changed(layouts)
            if not changed <= self.varied:
                return None
            places = {(slot, dim) for slot, dim, _ in changed}
        return Resizing(
            self.program, self.ops, self.by_form, self.sized, tensors, layouts, shapes, places, mesh
        ).resized()

    def vary(
        self, tensors: Sequence[torch.Tensor], compose: Callable[[list[torch.Tensor]], Sizes | None]
    ) -> None:
        """Find out whether lengths that are new in `tensors` may vary, each of them alone.

        `compose` makes the program of the call on tensors that stand in for its own.
        """
        if any(type(one) is ShardTensor and gaps_in(one) for one in tensors):
            return  # lengths that they are parts of would have to be others, too
        mesh = _mesh_of(tensors)
        layouts = [layout_of(one, mesh) for one in tensors]
        if any(one.has_empty_shards or 0 in one.shape for one in (*self.layouts, *layouts)):
            return  # edges may have to be anchored
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
        return stand_in(resized_meta(tensor._meta, layout))
    made = torch.empty(layout.shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _differs_in_layouts(program: Program, sized: Sequence[Sized]) -> bool:
    """Whether for other lengths it differs in layouts alone, and in sizes that it is told: no slice
    of a sharded dim remembers its offsets, and no sharded dim is as long as several together."""
    (step,) = program.steps
    made = [program.metas[at] for at, _ in step.results]
    return step.slice_of is None and all(
        not axes or type(source) is tuple or one.is_scaled
        or not (cut or places_in(source))
        for one, meta in zip(sized, made) if meta is not None
        for source, axes, cut in zip(one.dims, meta.layout.dims, meta.layout.cuts)
    )


def _all_of(sources: Sequence[Source | None]) -> tuple[Source, ...] | None:
    return None if None in sources else tuple(sources)  # type: ignore[return-value]


def known_for(mesh: BoundMesh, structure: Structure) -> Sizes | None:
    """What is known of the structure for such lengths."""
    for known in mesh.cache.get("structures", {}).get(structure.key, ()):
        if known.serves(structure):
            return known
    return None


def keep(mesh: BoundMesh, structure: Structure, sizes: Sizes) -> None:
    """Keep what is known, for other lengths."""
    sizes.bind(structure)
    table: dict[Any, tuple[Sizes, ...]] = mesh.cache.setdefault("structures", {})
    others = table.get(structure.key, ())
    bounded_put(table, structure.key, (sizes, *others[: MAX_OF_STRUCTURE - 1]), MAX_STRUCTURES)
