"""A known program on its way to other lengths: see `sizes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.call.compose import stand_in
from weft.tensor.call.decide import Builder
from weft.tensor.call.lengths import places_in
from weft.tensor.call.program import Program, Step
from weft.tensor.call.sized import Sized, length_of, resized_meta, strides_like
from weft.tensor.meta import Meta
from weft.tensor.trace.capture import Op, Trace, unseen_meta
from weft.tensor.trace.trees import slots_of

__all__ = ["Resizing"]


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
        if sized.like is not None and like.strides is None:
            return like.resized(self.layouts[sized.like], tuple(self.shapes[sized.like]), None)
        if sized.is_scaled:
            return self._scaled(like, sized)
        shape: list[int] = []
        local: list[int | None] = []
        for source, alike in zip(sized.dims, sized.local):
            if type(source) is tuple:
                slot, dim = source
                length = self.layouts[slot].shape[dim]
                local.append(
                    self.shapes[slot][dim] if alike else length if alike is False else None)
            else:
                length = length_of(source, self.tensors)
                local.append(length if alike is False else None)
            shape.append(length)
        cuts = like.layout.cuts
        if any(cuts):
            cuts = tuple([
                cut and self.layouts[source[0]].cuts[source[1]]  # type: ignore[index]
                for source, cut in zip(sized.dims, cuts)
            ])
        layout = like.layout.resized(tuple(shape), cuts)
        known: Any = None if None in local else tuple(local)
        strides = sized.strides(shape, self.tensors) if sized.lines else None
        return resized_meta(like, layout, known, strides)

    def _scaled(self, like: Meta, sized: Sized) -> Meta:
        """A value in which the cuts of a dim are those of an operand's dim times a length: by
        chance they may be the default."""
        shape = [length_of(source, self.tensors) for source in sized.dims]
        cuts: list[Any] = []
        for source, axes, length in zip(sized.dims, like.layout.dims, shape):
            places = places_in(source)
            if not axes or not places:
                cuts.append(None)
                continue
            (slot, dim), *others = places
            theirs = self.layouts[slot]
            if not others:
                cuts.append(theirs.cuts[dim])
            else:
                step = length // theirs.shape[dim]
                cuts.append(tuple([cut * step for cut in theirs.cuts_of(dim)]))
        layout = Layout.make(like.layout.mesh, shape, like.layout.dims, cuts, like.layout.partial)
        strides = like.strides
        if strides is not None:
            strides = strides_like(like.shape, strides, shape)
        return like.replace(layout=layout, strides=strides)
