"""Weight normalization (Salimans and Kingma, 2016): a direction of norm 1 times a magnitude.

Norms are over all dims but one (dim -1: over all, as torch has it), along cut dims by parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Lookup
from weft.rules import Call

__all__ = ["TABLE"]


def _norm_except_dim(v: torch.Tensor, pow: int = 2, dim: int = 0) -> torch.Tensor:
    if dim == -1:
        return v.norm(pow)
    others = [other for other in range(v.ndim) if other != dim]
    return torch.linalg.vector_norm(v, pow, others, keepdim=True) if others else v.abs()


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return v * (g / _norm_except_dim(v, 2, dim))


def _norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """The norms of a weight that is cut."""
    return None if layouts[0].is_replicated else Composite(_norm_except_dim)


def _lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """A weight whose direction or magnitude is cut."""
    whole = all(layout.is_replicated for layout in layouts)
    return None if whole else Composite(_weight_norm)


TABLE: dict[str, Lookup] = {
    "aten._weight_norm.default": _lookup, "aten.norm_except_dim.default": _norm_lookup,
}
