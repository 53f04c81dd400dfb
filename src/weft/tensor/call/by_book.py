"""Compositions of the book that run at each call, on the ShardTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from weft import ops
from weft.comm import BoundMesh
from weft.errors import UnsupportedOpError
from weft.rules import Entry
from weft.tensor.call import fallback
from weft.tensor.call.local import is_torchs_own
from weft.tensor.call.recipe import Function
from weft.tensor.trace.calls import Facts, facts
from weft.tensor.trace.capture import Op
from weft.tensor.trace.trees import fill, flatten

__all__ = ["NO_COMPOSITION", "UNKNOWN", "composed", "entry_of", "of_op"]

NO_COMPOSITION = "its composition does not serve such a call"


def composed(
    entry: Entry, mesh: BoundMesh, reason: str = NO_COMPOSITION, op: Op | None = None
) -> Function:
    """The composition of an entry, of the call's arguments or of those of an op."""
    compose = entry.compose
    assert compose is not None

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given, named = args, kwargs
        if op is not None:
            given, named = fill((op.args, op.kwargs), flatten((args, kwargs)))
        out = compose(*given, **named)
        if out is NotImplemented:
            return fallback.runner(mesh, reason)(func, args, kwargs)
        return out

    return Function(run)


UNKNOWN = Entry(())
"""The entry of an op that is not in the book."""


def entry_of(about: Facts) -> Entry:
    """The entry of an op: that of the op in place, if there is one, else of the op out of place.
    One that changes a shape in place has to have its own: else UnsupportedOpError."""
    own = ops.find_exactly(about.name) if about.writes else None
    if own is None and about.reshapes:
        known = [entry.names[0] for key, entry in ops.BOOK.items() if _reshapes(key)]
        raise UnsupportedOpError(
            about.name, "the op would change the memory of a ShardTensor in place",
            "in place, a shape changes where the elements stay: "
            + ", ".join(sorted(known)), [about.name],
            "use the op without the trailing underscore")
    return own or ops.find(about.functional) or UNKNOWN


def _reshapes(key: str) -> bool:
    packet = getattr(torch.ops.aten, key.removeprefix("aten."), None) if key.endswith("_") else None
    return packet is not None and facts(getattr(packet, packet.overloads()[0])).reshapes


def of_op(func: Any, op: Op, mesh: BoundMesh) -> Function | None:
    """The composition for a call of an op that cannot be recorded.

    None if the book does not compose the op, or the called function may do more than call it.
    """
    if not (is_torchs_own(func) or isinstance(func, OpOverload)):
        return None
    about = facts(op.overload)
    entry = entry_of(about)
    if entry.compose is None or bool(about.writes) is not entry.writes:
        return None
    return composed(entry, mesh, op=op)
