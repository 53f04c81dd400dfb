"""Ops that return a Python bool: each rank judges its shard, and only verdicts are sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.rules import op, page

__all__ = ["PAGE"]


def _equal(x: Tensor, other: Tensor) -> bool:
    """Elements are compared where they lie, and the verdict is read."""
    return x.shape == other.shape and bool((x == other).all())


def _allclose(
    x: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Elements are compared where they lie, and the verdict is read."""
    return bool(torch.isclose(x, other, rtol, atol, equal_nan).all())


def _contains(x: Tensor, element: Any) -> bool:
    """`element in x`: elements are compared where they lie, and the verdict is read."""
    if not isinstance(element, (Tensor, bool, int, float, complex)):
        raise RuntimeError(
            "Tensor.__contains__ only supports Tensor or scalar, but you passed in a "
            f"{type(element)}."
        )
    return bool((x == element).any())


def _left_aligned(x: Tensor, mask: Tensor) -> bool:
    """Whether what a mask of rows keeps stands at their beginning. Of `x`, nothing but the shape
    is read."""
    if mask.dtype is not torch.bool or mask.shape != x.shape[:2]:
        metas = [torch.empty(one.shape, dtype=one.dtype) for one in (x, mask)]
        return torch._nested_tensor_from_mask_left_aligned(*metas)  # raises
    places = torch.arange(mask.shape[1], device=mask.device)
    return bool((mask == (places < mask.sum(1, keepdim=True))).all())


PAGE = page(
    op("equal", compose=_equal, each_call=True),
    op("allclose", compose=_allclose, each_call=True),
    op("torch.Tensor.__contains__", compose=_contains, each_call=True),
    op("_nested_tensor_from_mask_left_aligned", compose=_left_aligned, each_call=True),
)
