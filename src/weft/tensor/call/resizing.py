"""Values of a known call: where their lengths come from, and what they are for other lengths.

`Resizing` is a known program on its way to other lengths: see `sizes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.rules import Length
from weft.tensor.call.compose import stand_in
from weft.tensor.call.decide import Builder
from weft.tensor.call.lengths import Place, Source, places_in
from weft.tensor.call.program import Program, Step
from weft.tensor.meta import Meta
from weft.tensor.placing.layouts import layout_of
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Op, Trace, unseen_meta
from weft.tensor.trace.trees import slots_of
from weft.transport.order import Gaps, gaps_of, memory_order, strides_in_order

__all__ = [
    "Resizing", "Sized", "gaps_in", "length_of", "resized_meta", "sized_as", "strides_like",
]


@dataclass(frozen=True, slots=True)
class Sized:
    """A value whose lengths are those of the call's tensors.

    Args:
        dims: per dim, where its length comes from.
        dtype: its dtype.
        order: its dims in the order of memory.
        lines: its dims that are parts of longer ones, each with the place that is as long a part.
        local: per dim, whether this rank's part is as long as that of the tensor that the length
            comes from, or as the dim (False); None where it has to be computed.
        is_scaled: whether a sharded dim is one of theirs, times others.
        same: the tensor of the call that has its very meta, for all lengths, if there is one.
    """

    dims: tuple[Source, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    lines: tuple[tuple[int, Place], ...] = ()
    local: tuple[bool | None, ...] = ()
    is_scaled: bool = False
    same: int | None = None

    def beside(self, meta: Meta | None, tensors: Sequence[torch.Tensor]) -> Sized:
        """The same, which knows what of the call's tensors it is like: it has become `meta`."""
        if meta is None:
            return self
        layouts = [layout_of(one, meta.mesh) for one in tensors]
        layout = meta.layout
        local: list[bool | None] = []
        scaled = False
        for source, axes, cut in zip(self.dims, layout.dims, layout.cuts):
            alike = None
            lead = source
            if isinstance(source, Length):
                lead = source.terms[0] if source.times and not source.plus else None
            if type(lead) is tuple:
                theirs, dim = layouts[lead[0]], lead[1]
                if axes == theirs.dims[dim] and (lead is not source or cut == theirs.cuts[dim]):
                    alike = True
                    scaled = scaled or bool(axes and lead is not source)
            local.append(alike if axes else False)
        same = next((
            slot for slot, one in enumerate(tensors)
            if type(one) is ShardTensor and one._meta is meta
            and self.dims == tuple([(slot, dim) for dim in range(layout.ndim)])), None)
        return replace(self, local=tuple(local), is_scaled=scaled, same=same)

    def comes_from(self, places: set[Place]) -> bool:
        """Whether some of its lengths come from these places."""
        return any(not places.isdisjoint(places_in(source)) for source in self.dims)

    def strides(self, shape: Sequence[int], tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        lines = {dim: _line(tensors[slot], at) for dim, (slot, at) in self.lines}
        return strides_in_order(shape, self.order, lines)


def _line(tensor: torch.Tensor, dim: int) -> int:
    """The length that a dim of a tensor is a part of, by its strides."""
    if type(tensor) is ShardTensor:
        for (at, _), line in zip(gaps_in(tensor), tensor._meta.lines()):
            if at == dim:
                return line
    return tensor.shape[dim]


def gaps_in(tensor: ShardTensor) -> Gaps:
    form = tensor._meta.form
    return () if form is None else form.gaps


def length_of(source: Source, tensors: Sequence[torch.Tensor]) -> int:
    if type(source) is tuple:
        return tensors[source[0]].shape[source[1]]
    length = source.plus  # type: ignore[union-attr]
    for slot, dim in source.terms:  # type: ignore[union-attr]
        length += tensors[slot].shape[dim]
    for slot, dim in source.times:  # type: ignore[union-attr]
        length *= tensors[slot].shape[dim]
    return length


def resized_meta(
    like: Meta, layout: Layout, local_shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Meta:
    """The meta of the same form with this layout, whose local shape may be known, and of a part of
    a dense tensor the strides."""
    if strides is None and like.strides is not None:
        strides = strides_like(like.shape, like.strides, layout.shape)
    if local_shape is None:
        assert like.mesh.here is not None
        local_shape = layout.local_shape_at(like.mesh.here)
    return like.resized(layout, local_shape, strides)


def strides_like(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Those of a tensor of the wanted shape that lies in the same order, expanded (stride 0) in the
    same dims."""
    stepping = [length if step else 1 for length, step in zip(wanted, strides)]
    found = strides_in_order(stepping, memory_order(shape, strides))
    return tuple([mine if step else 0 for mine, step in zip(found, strides)])


def sized_as(
    dims: tuple[Source, ...], meta: torch.Tensor, is_part: bool
) -> Sized | None:
    """A result with these sources, in the dtype and the order of memory of a captured one; None
    where its strides do not follow from that, nor, if it `is_part` of an operand, from that one's.
    """
    shape, strides = meta.shape, meta.stride()
    order = memory_order(shape, strides)
    lines: list[tuple[int, Place]] = []
    for dim, _ in gaps_of(shape, strides, order) or ():
        places = places_in(dims[dim])
        if not is_part or len(places) > 1:
            return None
        lines.append((dim, places[0] if places else (0, dim)))
    return Sized(dims, meta.dtype, order, tuple(lines))


class Resizing:
    """One known program on its way to other lengths.

    `ops`, `by_form` and `sized` are those of `Sizes`. `shapes` are those of the local tensors.
    `places` are the slots and dims of the call's tensors that differ; None: all may.
    """

    def __init__(
        self, program: Program, ops: Sequence[Op], by_form: Sequence[bool],
        sized: Sequence[Sized], tensors: Sequence[torch.Tensor],
        layouts: Sequence[Layout], shapes: Sequence[Sequence[int]],
        places: set[tuple[int, int]] | None, mesh: BoundMesh,
    ) -> None:
        self.before, self.tensors = program, tensors
        self.ops, self.by_form, self.sized = ops, by_form, sized
        self.layouts, self.shapes, self.places, self.mesh = layouts, shapes, places, mesh
        self.num = len(tensors)
        self.metas: dict[int, Meta] = {}

    def resized(self) -> Program | None:
        before, num = self.before, self.num
        if self.places is None:  # one op
            (step,), metas = before.steps, list(before.metas)
            for at in range(num, len(metas)):
                metas[at] = self._meta(at)
            return before.resized((step.resized(self._layout, self._meta),), metas)
        steps = []
        asked = set(before.made)
        for step, op, by_form in zip(before.steps, self.ops, self.by_form):
            made = step.resized(self._layout, self._meta) if by_form else self._step(step, op)
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
        return self.sized[slot - self.num].comes_from(places)

    def _step(self, step: Step, op: Op) -> Step | None:
        slots = [slot.index for slot in slots_of((op.args, op.kwargs))]
        results = [slot.index for slot in slots_of(op.results)]
        if not any(map(self._differs, (*results, *slots))):
            return step
        return self._decided(op, slots, results)

    def _decided(self, op: Op, slots: Sequence[int], results: Sequence[int]) -> Step | None:
        """The step decided anew; None where its results come in layouts that others do not know."""
        values: list[Any] = [*self.tensors, *[None] * len(self.sized)]
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
        """What a step's result is."""
        meta = self.metas.get(slot)
        if meta is None:
            meta = self.before.metas[slot]
            assert meta is not None
            if self._differs(slot):
                sized = self.sized[slot - self.num]
                if sized.same is None:
                    meta = self._sized(meta, sized)
                else:
                    meta = self.tensors[sized.same]._meta  # type: ignore[attr-defined]
                    meta = meta.replace() if meta.was_reduced else meta
            self.metas[slot] = meta
        return meta

    def _sized(self, like: Meta, sized: Sized) -> Meta:
        """A value for the new lengths."""
        shape = tuple([length_of(source, self.tensors) for source in sized.dims])
        before = like.layout
        cuts: Any = before.cuts
        if sized.is_scaled or any(cuts):
            cuts = tuple([
                self._cuts(source, length) if axes and (cut or sized.is_scaled) else None
                for source, length, axes, cut in zip(sized.dims, shape, before.dims, cuts)
            ])
        if sized.is_scaled:  # by chance these cuts may be the default
            layout = Layout.make(before.mesh, shape, before.dims, cuts, before.partial)
            strides = like.strides and strides_like(like.shape, like.strides, shape)
            return like.replace(layout=layout, strides=strides)
        local: Any = tuple([
            self.shapes[source[0]][source[1]] if alike  # type: ignore[index]
            else length if alike is False else None
            for source, length, alike in zip(sized.dims, shape, sized.local)
        ])
        strides = sized.strides(shape, self.tensors) if sized.lines else None
        return resized_meta(
            like, before.resized(shape, cuts), None if None in local else local, strides)

    def _cuts(self, source: Source, length: int) -> tuple[int, ...] | None:
        """The cuts of a dim: those of the operand's dim that its length comes from, times the
        others."""
        places = places_in(source)
        if not places:
            return None
        (slot, dim), *others = places
        theirs = self.layouts[slot]
        if not others:
            return theirs.cuts[dim]
        step = length // theirs.shape[dim]
        return tuple([cut * step for cut in theirs.cuts_of(dim)])
