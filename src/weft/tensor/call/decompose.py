"""Torch's own composition of an op that the book does not know, if the book covers all its parts.

If it does not cover one of them, the op stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import decomposition_table

from weft import ops
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import NotCapturable, Op, Trace, capture
from weft.tensor.trace.trees import fill, slots_of

__all__ = ["Parts", "parts_of"]

_IMPLICIT = "CompositeImplicitAutograd"


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
    composed = _composed(overload)
    if composed is None or about.writes or about.is_view or (
        torch.is_autocast_enabled(device_type)
        and _has_kernel(overload, f"Autocast{device_type.upper()}")
    ):
        return None
    metas = list(metas)
    try:
        trace = capture(composed, fill(op.args, metas), fill(op.kwargs, metas), metas, device_type)
    except NotCapturable:
        return None
    except RuntimeError:
        if _has_kernel(overload, _IMPLICIT):
            raise
        return None  # compositions for compilers may look at devices
    covered = bool(trace.ops) and all(_is_covered(one, trace, device_type) for one in trace.ops)
    return Parts(composed, trace=trace) if covered else None


def _composed(overload: Any) -> Callable[..., Any] | None:
    """What torch composes the op by: its kernel, or what its compilers use."""
    if _has_kernel(overload, _IMPLICIT):
        return overload.decompose
    return decomposition_table.get(overload)


def _has_kernel(overload: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def _is_covered(op: Op, trace: Trace, device_type: str) -> bool:
    about = facts(op.overload)
    if about.writes or about.is_random or not slots_of((op.args, op.kwargs)):
        return False
    if ops.find(about.functional) is not None:
        return True
    return parts_of(op, trace.metas, device_type) is not None
