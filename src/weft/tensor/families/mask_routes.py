"""The routes of what a mask selects, between the ranks that hold it and those that have its rows.

Selected elements follow one another row by row. Where a tensor is sharded otherwise, they alone
change ranks. Each rank knows the mask where it holds the tensor, and where it selects: so both
sides know which elements are sent, and in what order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.core.layout import Box
from weft.ops.indexing.row_exchange import Routes, RowExchange
from weft.ops.places import counted
from weft.planner.geometry import intersect
from weft.transport.boxes import part

__all__ = ["routes"]


def routes(
    mesh: BoundMesh, name: str, axes: tuple[int, ...], held: tuple[Layout, Tensor],
    chosen: tuple[Layout, Tensor], once: bool,
) -> Routes:
    """Routes between what this rank holds and what it selects, in the order of elements.

    Args:
        name: of the call, for errors.
        axes: which shard the dims of the mask.
        held, chosen: the mask and its layout, where the tensor is and where rows are whole.
        once: to fetch elements, else to deliver values to those who hold them.
    """
    assert mesh.here is not None
    everyone = mesh.along(axes, mesh.here)
    (own, mine), (rows, mask) = held, chosen
    numbers, serves = _by_rank(
        mine, own.box_at(mesh.here), [rows.box_at(place) for place in everyone])
    order, gets = _by_rank(
        mask, rows.box_at(mesh.here), [own.box_at(place) for place in everyone])
    order = order.argsort()
    return Routes(
        RowExchange(mesh.line(axes), name), numbers, serves, gets,
        order if once else order.argsort())


def _by_rank(mask: Tensor, box: Box, others: Sequence[Box]) -> tuple[Tensor, list[int]]:
    """Which elements of this box are true, counted over its dims: those in the box of each rank,
    one after the other, and how many these are."""
    out: list[Tensor] = []
    for other in others:
        both = intersect(box, other)
        if both is None:
            out.append(torch.empty(0, dtype=torch.int64, device=mask.device))
            continue
        found = part(both, box)(mask).nonzero().unbind(1)
        out.append(counted(
            [at + start - first for at, (start, _), (first, _) in zip(found, both, box)],
            mask.shape))
    return torch.cat(out), list(map(len, out))
