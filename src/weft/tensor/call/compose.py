"""The program of several ops: each becomes a step, by itself.

The ops are those that an algorithm of `weft.ops` is composed of (`Composite`), or a function of
torch. They are captured on meta tensors of global shape. Programs with an op that is no step (a
write, a random op, a fallback) are not made: then each op is a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import ops
from weft.comm import BoundMesh
from weft.tensor.call.decide import Builder
from weft.tensor.call.decompose import Parts
from weft.tensor.call.own.functions import handled
from weft.tensor.call.program import Program, Step
from weft.tensor.meta import Meta
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import NotCapturable, Op, Trace, capture, meta_like
from weft.tensor.trace.trees import Slot, fill, slots_of

__all__ = ["Composer", "is_cast", "stand_in"]


class Composer:
    """Makes the program of ops, one after the other.

    `composed` and `add` return the result with Slots, or None if the program cannot be made.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mesh: BoundMesh) -> None:
        self.num_given = len(tensors)
        self.mesh = mesh
        self.values: list[torch.Tensor] = list(tensors)
        """The call's tensors, then ShardTensors without data in the place of results."""
        self.traced: list[Any] = list(tensors)
        """The same with a captured result's meta tensor in its place."""
        self.metas: list[Meta | None] = [None] * len(tensors)
        self.steps: list[Step] = []
        self.built: list[Builder] = []

    def composed(self, composite: ops.Composite, op: Op) -> Any:
        """Add the ops that `op` is composed of; returns its result."""
        if composite.each_call or is_cast(composite, self.mesh):
            return None  # autocast is off for what it is composed of
        if isinstance(composite, Parts):
            return self.add(composite.trace, {at: Slot(at) for at in range(len(self.values))})
        slots = list(dict.fromkeys(slots_of((op.args, op.kwargs))))
        metas = [meta_like(self.values[slot.index]) for slot in slots]
        feed = {slot.index: meta for slot, meta in zip(slots, metas)}
        args, kwargs = fill(op.args, feed), fill(op.kwargs, feed)
        try:
            trace = capture(composite.function, args, kwargs, metas, self.mesh.kernel_type)
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
        if isinstance(made, ops.Composite):
            out = self.composed(made, op)
            return None if out is None else slots_of(out)
        if type(made) is not Step or builder.clashes:
            return None
        self.steps.append(made)
        self.built.append(builder)
        for slot, meta in zip(new, metas):
            made_meta = builder.metas[slot.index]
            self.values.append(stand_in(made_meta))
            self.traced.append(meta)
            self.metas.append(made_meta)
        return new

    def program(self, result: Any) -> Program:
        """The program of what was added."""
        return Program(self.steps, self.metas, result)


def is_cast(composite: ops.Composite, mesh: BoundMesh) -> bool:
    """Whether autocast casts the tensors of the op before, and is off for what it consists of."""
    return torch.is_autocast_enabled(mesh.kernel_type) and (
        not isinstance(composite, Parts) or composite.is_cast)


def stand_in(meta: Meta) -> ShardTensor:
    """A ShardTensor without data, to decide on."""
    dtype = meta.dtype
    return wrap(torch.empty(0, dtype=dtype, requires_grad=meta.requires_grad), meta)
