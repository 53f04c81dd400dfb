"""Torch's own composition of an op that the book does not know, if the book covers all its parts.

If it does not cover one of them, the op stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft import ops
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import NotCapturable, Op, Trace, capture
from weft.tensor.trace.trees import fill, slots_of

__all__ = ["Parts", "parts_of"]


@dataclass(frozen=True, slots=True)
class Parts(ops.Composite):
    """The ops that torch composes an op of; the first slots of `trace` are the call's tensors."""

    trace: Trace = field(kw_only=True)


def parts_of(op: Op, metas: Sequence[torch.Tensor], device_type: str) -> Parts | None:
    """The parts of the op, on meta tensors like its call's; None if the book does not cover them.

    An op that torch does not compose, that writes, or whose result is a view, stays whole. So does
    an op whose operands autocast casts.
    """
    overload, about = op.overload, facts(op.overload)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if about.writes or about.is_view or not (
        has_kernel(overload.name(), "CompositeImplicitAutograd")
    ) or (
        torch.is_autocast_enabled(device_type)
        and has_kernel(overload.name(), f"Autocast{device_type.upper()}")
    ):
        return None
    metas = list(metas)
    try:
        trace = capture(
            overload.decompose, fill(op.args, metas), fill(op.kwargs, metas), metas, device_type
        )
    except NotCapturable:
        return None
    covered = bool(trace.ops) and all(_is_covered(one, trace, device_type) for one in trace.ops)
    return Parts(overload.decompose, trace=trace) if covered else None


def _is_covered(op: Op, trace: Trace, device_type: str) -> bool:
    about = facts(op.overload)
    if about.writes or about.is_random or not slots_of((op.args, op.kwargs)):
        return False
    if ops.find(about.functional) is not None:
        return True
    return parts_of(op, trace.metas, device_type) is not None
