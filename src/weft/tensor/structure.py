"""A new size of a known structure: what a call consists of is known, only lengths differ.

Capturing costs 0.1 to 1 ms, most of it in torch's meta kernels. Where a rule has described the op
by factors, the lengths of its results follow from those of its operands, so neither is needed
again: the recorded op is taken over, with results of the new lengths. The structure of a call is
its key with every length reduced to "0, 1 or more" (what broadcasting looks at); other numbers
keep their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.rules import Rule
from weft.tensor.calls import slots_of
from weft.tensor.capture import Op, Trace
from weft.tensor.meta import Meta, contiguous_strides, memory_order, strides_in_order
from weft.tensor.trees import leaves

__all__ = ["MAX_STRUCTURES", "Structure", "numbers_come_from", "structure_key", "structure_of"]

MAX_STRUCTURES = 2048


@dataclass(frozen=True, slots=True)
class Structure:
    """An op with the factors of its operands' and results' dims."""

    op: Op
    result: Any
    slots: tuple[int, ...]
    operands: tuple[tuple[str | None, ...], ...]
    results: tuple[tuple[tuple[str | None, ...], torch.dtype, tuple[int, ...]], ...]
    """Per result: factors, dtype, and its dims in the order of memory."""

    def trace(self, tensors: Sequence[torch.Tensor]) -> Trace | None:
        """The trace of the call on tensors of other lengths; None where they do not fit."""
        sizes: dict[str | None, int] = {}
        for slot, factors in zip(self.slots, self.operands):
            for factor, length in zip(factors, tensors[slot].shape):
                known = sizes.get(factor, 1)
                if known == 1:
                    sizes[factor] = length
                elif length not in (1, known):
                    return None  # torch will say so
        sizes[None] = 1
        metas: list[Any] = [None] * len(tensors)  # nobody asks for those of the operands
        for factors, dtype, order in self.results:
            shape = [sizes[factor] for factor in factors]
            strides = strides_in_order(shape, order)
            metas.append(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
        return Trace((self.op,), self.result, tuple(metas))


def structure_of(trace: Trace, rule: Rule, num_tensors: int) -> Structure | None:
    """The structure of a captured call, if lengths and strides of its results follow from it."""
    op = trace.ops[0]
    slots = tuple(slot.index for slot in slots_of((op.args, op.kwargs)))
    results = slots_of(op.results)
    if rule.size_arg is not None or rule.offsets or rule.op is not None:
        return None
    if [slot.index for slot in results] != list(range(num_tensors, num_tensors + len(results))):
        return None
    tensors = [*rule.operands, *rule.results]
    if any(dims is None or any(len(factors) > 1 for factors in dims) for dims in tensors):
        return None
    single = [tuple(factors[0] if factors else None for factors in dims or ()) for dims in tensors]
    count = len(rule.operands)
    told = {factor for factors in single[:count] for factor in factors} | {None}
    if any(factor not in told for factors in single[count:] for factor in factors):
        return None  # a length that an argument says (repeat, one-hot)
    metas = [trace.metas[slot.index] for slot in results]
    orders = [memory_order(meta.shape, meta.stride()) for meta in metas]
    made = Structure(
        op, trace.result, slots, tuple(single[:count]),
        tuple(
            (factors, meta.dtype, order)
            for factors, meta, order in zip(single[count:], metas, orders)
        ),
    )
    found = made.trace(trace.metas[:num_tensors])
    if found is None:
        return None
    again = found.metas[num_tensors:]
    same = all(
        (one.shape, one.stride()) == (other.shape, other.stride())
        for one, other in zip(again, metas)
    )
    return made if same else None


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
    """The key of a call with its lengths reduced; None where strides are not the default.

    A plain tensor stands in the key as shape, strides, dtype and requires_grad; an argument that
    is a torch.Size follows its type.
    """
    out: list[Any] = []
    skip = False
    for place, item in enumerate(key):
        if skip:  # the strides of a plain tensor, known by its shape
            skip = False
            continue
        if type(item) is Meta:
            if item.strides is not None and item.strides != strides_in_order(
                item.shape, item.order
            ):
                return None
            item = item.form
        elif type(item) is torch.Size and key[place - 1] is not torch.Size:
            if key[place + 1] != contiguous_strides(item):
                return None
            item, skip = tuple([min(length, 2) for length in item]), True
        out.append(item)
    return tuple(out)
