"""Torch's own composition of an op that the book does not know, if the book covers all its parts.

If it does not cover one of them, the op stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._decomp import decomposition_table

from weft import ops
from weft.tensor.trace.calls import facts, overload_named, target_of
from weft.tensor.trace.capture import NotCapturable, Op, Trace, as_autocast, capture
from weft.tensor.trace.trees import Slot, fill, slots_of

__all__ = ["Parts", "parts_of"]

_IMPLICIT = "CompositeImplicitAutograd"


@dataclass(frozen=True, slots=True)
class Parts(ops.Composite):
    """The ops that torch composes an op of; the first slots of `trace` are the call's tensors.

    `is_cast`: autocast casts the tensors first, and is off for the parts.
    """

    trace: Trace = field(kw_only=True)
    is_cast: bool = False


def parts_of(
    op: Op, metas: Sequence[torch.Tensor], device_type: str, dtype: torch.dtype | None = None
) -> Parts | None:
    """The parts of the op, on meta tensors like its call's; None if the book does not cover them.

    An op that torch does not compose, or that writes, stays whole; so does a view that only its
    compilers compose. `dtype`: that autocast gives the op, where it is on.
    """
    overload, about = op.overload, facts(op.overload)
    composed = _composed(overload)
    if composed is None or about.writes or (about.is_view and not _has_kernel(overload, _IMPLICIT)):
        return None
    metas = list(metas)
    if torch.is_autocast_enabled(device_type) and _has_kernel(
        overload, f"Autocast{device_type.upper()}"
    ):
        as_cast = as_autocast(lambda *given: parts_of(op, given, device_type), dtype, device_type)
        found = as_cast(*metas)
        return None if found is None else replace(found, is_cast=True)
    try:
        trace = capture(composed, fill(op.args, metas), fill(op.kwargs, metas), metas, device_type)
    except NotCapturable:
        return None
    except RuntimeError:
        if _has_kernel(overload, _IMPLICIT):
            raise
        return None  # compositions for compilers may look at devices
    trace = _out_of_place(trace, len(metas))
    covered = all(_is_covered(one, trace, device_type) for one in trace.ops)
    return Parts(composed, trace=trace) if covered and slots_of(trace.result) else None


def _out_of_place(trace: Trace, num_given: int) -> Trace:
    """The trace, with new values for writes to tensors of its own of which there are no views."""
    found, metas = list[Op](), list(trace.metas)
    now = [Slot(at) for at in range(len(metas))]
    own: set[int] = set()
    for op in trace.ops:
        about, target = facts(op.overload), target_of(op)
        operands = [slot.index for slot in slots_of((op.args, op.kwargs))]
        results = [slot.index for slot in slots_of(op.results)]
        args, kwargs = fill(op.args, now), fill(op.kwargs, now)
        plain = overload_named(about.functional)
        if about.name == "aten.copy_.default" and (  # `copy` has no derivative
            len({(metas[at].dtype, metas[at].shape) for at in operands}) == 1
        ):
            plain, args, kwargs = torch.ops.aten.clone.default, args[1:2], {}
        if target in own and plain is not None and about.writes == (0,) and (
            len({metas[at].dtype for at in operands}) == 1
        ):
            now[target] = Slot(len(metas))
            metas.append(metas[target])
            found.append(Op(plain, args, kwargs, now[target]))
            continue
        if about.is_view:
            own.difference_update(operands)
        elif not about.writes:
            own.update(at for at in results if at >= num_given)
        found.append(replace(op, args=args, kwargs=kwargs))
    return Trace(tuple(found), fill(trace.result, now), tuple(metas))


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
