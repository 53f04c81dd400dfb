"""Results without elements need no data of the operands, so nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import ops
from weft.comm import BoundMesh
from weft.core import Layout
from weft.rules import Decision
from weft.tensor.call.anchor import tie
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import Trace
from weft.tensor.trace.derivatives import differentiated
from weft.tensor.trace.trees import slots_of

__all__ = ["made_of_nothing"]


def made_of_nothing(
    trace: Trace, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout],
    wants: Sequence[bool], mesh: BoundMesh, differentiable: Callable[[torch.Tensor, bool], bool],
) -> ops.Local | None:
    """The function that makes the results of an op, if none of them has elements.

    They keep their edges in the graph. None where the op writes, draws or gives views, and where a
    result is differentiable and torch knows no gradient.
    """
    op = trace.ops[0]
    about, slots = facts(op.overload), [slot.index for slot in slots_of((op.args, op.kwargs))]
    metas = [trace.metas[slot.index] for slot in slots_of(op.results)]
    if about.writes or about.is_view or about.is_random or not metas or any(
        meta.numel() for meta in metas
    ):
        return None
    wanted = [index for index, wants_grad in zip(slots, wants) if wants_grad]
    edges = differentiated(op, tensors, wanted) if wanted else [()] * len(metas)
    if wanted and any(
        differentiable(meta, True) and not mine for meta, mine in zip(metas, edges)
    ):
        return None

    def local(*operands: torch.Tensor) -> Any:
        given = dict(zip(slots, operands))
        made = [
            tie(torch.empty(meta.shape, dtype=meta.dtype, device=mesh.device),
                [given[index] for index in mine])
            for meta, mine in zip(metas, edges)
        ]
        return tuple(made) if len(made) > 1 else made[0]

    results = [Layout.replicated(mesh.abstract, meta.shape) for meta in metas]
    return ops.Local(Decision(tuple(layouts), tuple(results)), lambda mesh: local)
