"""Calls of ops that torch's database of operators has not, or has too large: one of each, for the
checks of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CALLS"]

aten = torch.ops.aten


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "_prelu_kernel": lambda: (aten._prelu_kernel.default, _numbers(5, 4), _numbers(4)),
    "linalg__powsum": lambda: (aten.linalg__powsum.default, _numbers(5, 4), 3.0, [1], True),
    "_scaled_dot_product_attention_math": lambda: (
        aten._scaled_dot_product_attention_math.default, _numbers(2, 3, 5, 4),
        _numbers(2, 3, 6, 4) + 1, _numbers(2, 3, 6, 2)),
    "_euclidean_dist": lambda: (aten._euclidean_dist.default, _numbers(5, 4), _numbers(3, 4) + 1),
    "_linalg_det": lambda: (aten._linalg_det.default, _numbers(5, 3, 3)),
    "_linalg_slogdet": lambda: (aten._linalg_slogdet.default, _numbers(5, 3, 3)),
    "_linalg_solve_ex": lambda: (
        aten._linalg_solve_ex.default, _numbers(5, 3, 3), _numbers(5, 3, 2) + 1),
    "_linalg_svd": lambda: (aten._linalg_svd.default, _numbers(5, 4, 3)),
    "_linalg_eigh": lambda: (
        aten._linalg_eigh.default, _numbers(5, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)),
    "diagonal_backward": lambda: (
        aten.diagonal_backward.default, _numbers(5, 2), [5, 4, 3], 1, 2, 1),
    "softshrink_backward": lambda: (
        aten.softshrink_backward.default, _numbers(5, 4), _numbers(5, 4), 0.1),
    "hardshrink_backward": lambda: (
        aten.hardshrink_backward.default, _numbers(5, 4), _numbers(5, 4), 0.1),
    "affine_grid_generator": lambda: (
        aten.affine_grid_generator.default, _numbers(5, 2, 3), [5, 3, 4, 6], False,
    ),
    "scaled_dot_product_attention": lambda: (
        aten.scaled_dot_product_attention.default, _numbers(3, 5, 4), _numbers(3, 7, 4),
        _numbers(3, 7, 2), None, 0.0, True,
    ),
}
"""Name -> the overload, then its arguments."""
