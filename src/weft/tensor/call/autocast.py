"""Ops whose operands autocast casts, and what that spares: what moves is cast before it is sent."""

from __future__ import annotations

import torch

from weft.comm import BoundMesh

__all__ = ["CAST", "cast_of"]

CAST = frozenset(
    f"aten.{name}.default" for name in (
        "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm")
)
"""Ops for which autocast casts all operands, on every device."""


def cast_of(name: str, mesh: BoundMesh) -> torch.dtype | None:
    """The dtype that autocast casts float32 operands of an op to; None where it does not."""
    kind = mesh.kernel_type
    if name not in CAST or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
