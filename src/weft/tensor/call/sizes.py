"""A new size of a known structure: what a call consists of is known, only lengths differ.

The structure of a call is its key with lengths taken out (`structure_key`). A length stands there
by its value where that is 0, 1 or one of the call's own numbers, else as "the n-th different
one": calls of one structure broadcast alike, and whatever a rule finds by comparing lengths with
each other, with 1 or with a number is the same for all of them. So the lengths of the results
follow from the operands' by the factors of the rule, and torch's meta kernels, which are most of
what a capture costs, need not run again. Where no axis had to compare costs, and no operand had
to move, the decision is the same as well, and a recipe is that of another size with other metas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.core import Layout
from weft.tensor.call.decide import Builder
from weft.tensor.call.recipe import Result
from weft.tensor.meta import Meta, contiguous_strides
from weft.tensor.placing.operands import transition_between
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import Op, Trace
from weft.tensor.trace.trees import leaves, slots_of
from weft.transport.order import memory_order, strides_in_order

__all__ = [
    "MAX_STRUCTURES", "Sized", "Structure", "moved_to", "numbers_come_from", "resized_meta",
    "sized_as", "sources", "structure_key", "structure_of",
]

MAX_STRUCTURES = 2048

Sources = tuple[tuple[int, int] | None, ...]
"""Per dim, the slot and the dim that have its length; None: its length is 1."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A result whose lengths are those of operands.

    Args:
        dims: per dim, where its length stands.
        dtype: its dtype.
        order: its dims in the order of memory.
    """

    dims: Sources
    dtype: torch.dtype
    order: tuple[int, ...]


@dataclass(slots=True)
class Structure:
    """One op whose results' lengths follow from those of its operands.

    `recipe` is that of one size, where it differs from those of others in its metas alone, and
    `numbers_flow` says whether floats are part of it.
    """

    op: Op
    result: Any
    results: tuple[Sized, ...]
    recipe: Any = None
    numbers_flow: bool = False

    def trace(self, tensors: Sequence[torch.Tensor]) -> Trace:
        """The trace of the call on tensors of other lengths."""
        metas = list(tensors)
        for sized in self.results:
            shape = [1 if at is None else tensors[at[0]].shape[at[1]] for at in sized.dims]
            strides = strides_in_order(shape, sized.order)
            metas.append(torch.empty_strided(shape, strides, dtype=sized.dtype, device="meta"))
        return Trace((self.op,), self.result, tuple(metas))

    def resized(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The recipe of the call on tensors of other lengths; None where it has to be built."""
        recipe = self.recipe
        if recipe is None:
            return None
        local_shapes = [
            tensor._meta.local_shape if type(tensor) is ShardTensor else tensor.shape
            for tensor in tensors
        ]
        if any(0 in shape for shape in local_shapes):
            return None  # an empty shard may have to be anchored
        operands = recipe.operands
        if operands:
            operands = tuple([
                (at, moved_to(move, _layout_for(move, tensors[at]))) for at, move in operands
            ])
        results = tuple([
            _result(sized, known, tensors, local_shapes)
            for sized, known in zip(self.results, recipe.results)
        ])
        return recipe.resized(operands, results, lambda at: tensors[at]._meta.layout)  # type: ignore


def moved_to(move: Any, layout: Layout) -> Any:
    """A transition that leaves its layout as it is (I -> R), for a layout of other lengths."""
    if layout is move.src or layout == move.src:
        return move
    return transition_between(move.mesh, layout, layout, move.src_varying, move.dst_varying)


def _layout_for(move: Any, tensor: torch.Tensor) -> Layout:
    if type(tensor) is ShardTensor:
        return tensor._meta.layout
    return move.src.resized(tuple(tensor.shape), move.src.cuts)


def _result(
    sized: Sized, known: Result, tensors: Sequence[torch.Tensor], local_shapes: Sequence[Any]
) -> Result:
    shape: list[int] = []
    local: list[int] = []
    for at in sized.dims:
        if at is None:
            shape.append(1)
            local.append(1)
            continue
        slot, dim = at
        shape.append(tensors[slot].shape[dim])
        local.append(local_shapes[slot][dim])
    like = known.meta.layout
    cuts: Any = like.cuts
    if any(cuts):
        cuts = tuple([
            None if cut is None or at is None
            else tensors[at[0]]._meta.layout.cuts[at[1]]  # type: ignore[attr-defined]
            for cut, at in zip(cuts, sized.dims)
        ])
    layout = like.resized(tuple(shape), cuts)
    leave = known.leave
    if leave is not None:
        leave = moved_to(leave, layout)
    return Result(known.slot, resized_meta(known.meta, layout, tuple(local)), leave)


def resized_meta(like: Meta, layout: Layout, local_shape: tuple[int, ...] | None = None) -> Meta:
    """The meta of the same form with this layout, whose local shape may be known."""
    strides = like.strides
    if strides is not None:
        strides = strides_in_order(layout.shape, memory_order(like.shape, strides))
    if local_shape is None:
        assert like.mesh.here is not None
        local_shape = layout.local_shape_at(like.mesh.here)
    return like.resized(layout, local_shape, strides)


def structure_of(trace: Trace, builder: Builder, tensors: Sequence[torch.Tensor]) -> Any:
    """The structure of a captured call, if lengths and strides of its results follow from it."""
    num = len(tensors)
    results = slots_of(trace.ops[0].results)
    fresh = [slot.index for slot in results if slot.index >= num]
    rule = builder.rule
    if rule is not None and (rule.size_arg is not None or rule.offsets or rule.op is not None):
        return None
    found = sources(builder)
    if found is None or fresh != list(range(num, num + len(fresh))):
        return None
    if len(fresh) != len(results) and builder.target is None:
        return None  # it hands an operand on
    sized = [
        sized_as(dims, trace.metas[slot.index]) for slot, dims in zip(results, found)
        if slot.index >= num
    ]
    made = Structure(trace.ops[0], trace.result, tuple(sized))
    again = made.trace(tensors).metas[num:]
    same = all(
        (one.shape, one.stride()) == (other.shape, other.stride())
        for one, other in zip(again, trace.metas[num:])
    )
    return made if same else None


def sized_as(dims: Sources, meta: torch.Tensor) -> Sized:
    """A result with these sources, in the dtype and the order of memory of a captured one."""
    return Sized(dims, meta.dtype, memory_order(meta.shape, meta.stride()))


def sources(builder: Builder) -> list[Sources] | None:
    """Per result and dim, the slot and the dim of an operand that has its length (None: it is 1).

    None where lengths follow from arguments or from arithmetic.
    """
    op, rule = builder.op, builder.rule
    if builder.own is not None and not builder.own.by_shape:
        return None  # the user's function may look at lengths
    if type(op.results) is list and builder.name != "aten.broadcast_tensors.default":
        return None  # how many there are may follow from a length (unbind)
    if rule is None:
        return _sources_of_layouts(builder)
    if rule.windows or rule.spreads:
        return None
    places: dict[str, tuple[int, int]] = {}
    for slot, dims in zip(builder.slots, rule.operands):
        shape = builder.tensors[slot].shape
        if dims is None or any(len(factors) > 1 for factors in dims):
            return None
        for dim, factors in enumerate(dims):
            if factors and shape[dim] == rule.sizes[factors[0]]:
                places.setdefault(factors[0], (slot, dim))
    if any(
        len(factors) > 1 or (factors and factors[0] not in places)
        for dims in rule.results for factors in dims
    ):
        return None  # a length that an argument says (repeat, one-hot)
    return [
        tuple([places[factors[0]] if factors else None for factors in dims])
        for dims in rule.results
    ]


def _sources_of_layouts(builder: Builder) -> list[Sources] | None:
    """Those of results that have the very layout of an operand (zeros_like)."""
    if builder.decision is None:
        return None
    known = {id(layout): slot for slot, layout in zip(builder.slots, builder.layouts)}
    slots = [known.get(id(layout)) for layout in builder.decision.results]
    if None in slots:
        return None
    return [
        tuple([(slot, dim) for dim in range(len(builder.tensors[slot].shape))])  # type: ignore[index]
        for slot in slots
    ]


def numbers_come_from(op: Op, tree: Any) -> bool:
    """Whether every integer of the op is one of the call's own, or the schema's default.

    A Python function may compute numbers from lengths; what it recorded then serves one size.
    """
    given = _integers(tree)
    schema = op.overload._schema.arguments
    for argument, value in zip(schema, (*op.args, *op.kwargs.values())):
        if not _integers(value) <= given and value != argument.default_value:
            return False
    return True


def _integers(tree: Any) -> set[int]:
    return {number for number in leaves(tree, int) if type(number) is int}


def structure_key(key: Sequence[Any]) -> tuple[Any, ...] | None:
    """The key of a call with its lengths taken out; None where strides are not the default.

    A plain tensor stands in the key as shape, strides, dtype and requires_grad; an argument that
    is a torch.Size follows its type.
    """
    out: list[Any] = []
    shapes: list[Sequence[int]] = []
    seen: dict[Any, int] = {}
    items = iter(key)
    for item in items:
        kind = type(item)
        if kind is Meta:
            form = item.form
            if form is None:
                return None
            out.append(form)
            shapes.append(item.layout.shape)
            if any(item.layout.cuts):
                shapes.append(item.layout.cuts)
            continue
        if kind is torch.Size and out[-1] is not torch.Size:
            if next(items) != contiguous_strides(item):
                return None
            out.append(len(item))
            shapes.append(item)
            continue
        if kind is int:
            seen[item] = item
        elif kind is tuple or kind is torch.Size:
            for number in item:
                if type(number) is int:
                    seen[number] = number
        out.append(item)
    for shape in shapes:
        for length in shape:
            if length == 0 or length == 1 or length is None:
                out.append(length)
            else:
                out.append(seen.setdefault(length, -1 - len(seen)))
    return tuple(out)
