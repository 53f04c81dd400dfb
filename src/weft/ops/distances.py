"""Distances: between the rows of two tensors (cdist), and between all rows of one (pdist)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local
from weft.ops.precision import widened
from weft.rules import Call, Decision, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]


def _cdist_text(call: Call, wants_grad: Any) -> str:
    """A sharded dim of columns stays where a shard's distances are smaller than its rows."""
    x, y, norm = *call.tensors, float(call.get("p", 2.0))
    few = 2 * min(x.shape[-2], y.shape[-2]) <= x.shape[-1]
    if few and norm and math.isfinite(norm):
        return "...>0 m>0 k~, ... n>0 k~ -> ... m n"
    return _CDIST


_CDIST = "...>0 m>0 k!, ... n>0 k! -> ... m n"


def _cdist(shards: Shards, x: Tensor, y: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """The norm over the shards of the distances that each shard's columns give."""
    own = torch.cdist(x, y, p, _MODES[compute_mode or 0])
    total = shards.psum(_power(widened(own), p))
    return _power(total, 1 / p).to(own.dtype)


def _euclidean_dist(shards: Shards, x: Tensor, y: Tensor) -> Tensor:
    """The root of the summed squares that each shard's columns give."""
    return _cdist(shards, x, y, 2.0, None)


_MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist",
          "donot_use_mm_for_euclid_dist")


def _power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent with gradient 0 at 0, like that of a distance."""
    zero = x == 0
    return x.masked_fill(zero, 1).pow(exponent).masked_fill(zero, 0)


def _pdist(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """Each shard computes the pairs whose first row it holds, with all later rows."""
    x, norm, num = layouts[0], float(call.get("p", 2.0)), layouts[0].shape[0]
    if not x.dims[0] or num < 2 or not math.isfinite(norm):
        return None

    def before(row: int) -> int:
        """How many pairs begin with an earlier row."""
        return row * (2 * num - row - 1) // 2

    cuts = tuple(map(before, x.cuts_of(0)))
    result = Layout.make(x.mesh, (before(num),), x.dims[:1], (cuts,))

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        assert mesh.here is not None
        (start, stop), *_ = result.box_at(mesh.here)
        one, other = torch.triu_indices(num, num, 1, device=mesh.device)[:, start:stop]

        def local(rows: Tensor) -> Tensor:
            apart = rows.index_select(0, one) - rows.index_select(0, other)
            found = torch.linalg.vector_norm(apart, norm, -1)
            # A norm of order 0 has no gradient; torch's pdist has a gradient of zeros.
            return found if norm else found + rows.narrow(0, 0, 0).sum()

        return local

    return Local(Decision((Layout.replicated(x.mesh, x.shape),), (result,)), bind)


PAGE = page(
    op("cdist", rule(_cdist_text), kernel=_cdist),
    op("_cdist_forward", rule(_CDIST)),
    op("_euclidean_dist", rule("m>0 k~, n>0 k~ -> m n"), kernel=_euclidean_dist),
    op("pdist", rule("n! k! -> pairs!"), layouts=_pdist),
)
