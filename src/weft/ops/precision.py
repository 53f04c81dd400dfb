"""The dtype in which an algorithm computes: half precision in float32, as in torch's kernels."""

from __future__ import annotations

import torch

__all__ = ["HALF", "wide", "widened"]

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: partial values in half precision would be rounded one by one."""
    return torch.float32 if dtype in HALF else dtype


def widened(x: torch.Tensor) -> torch.Tensor:
    """The tensor in that dtype; of complex numbers, both parts."""
    if x.is_complex():
        return x.to(wide(x.dtype.to_real()).to_complex())
    return x.float() if x.dtype in HALF else x
