"""cov and corrcoef, as the torch code that defines them: torch needs data to know their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.precision import wide
from weft.rules import op, page

__all__ = ["PAGE"]


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> Tensor:
    """Products of deviations from the mean, each observation by its weight."""
    if not _is_usual(input, fweights, aweights):
        return NotImplemented
    rows = input if input.dim() == 2 else input.unsqueeze(0)
    weights = [one for one in (fweights, aweights) if one is not None]
    if not weights:
        count = rows.shape[1]
        centered = rows - rows.sum(1, keepdim=True) / count
        return (centered @ centered.t().conj() / max(count - correction, 0)).squeeze()
    for name, one in (("fweights", fweights), ("aweights", aweights)):
        if one is not None and bool((one < 0).any()):
            raise RuntimeError(f"cov(): {name} cannot be negative")
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
    total = _sum(weight)
    if bool(total == 0):
        raise RuntimeError("cov(): weights sum to zero, can't be normalized")
    centered = rows - (rows * weight).sum(1, keepdim=True) / total
    left = total - correction
    if aweights is not None and correction:
        left = total - correction * _sum(weight * aweights) / total
    products = centered @ (centered * weight).t().conj()
    return (products / left.clamp(min=0)).squeeze()


def _sum(weights: Tensor) -> Tensor:
    """The sum, of narrow floats rounded once."""
    return weights.sum(dtype=wide(weights.dtype)).to(weights.dtype) if (
        weights.is_floating_point()) else weights.sum()


def _is_usual(x: Tensor, fweights: Tensor | None, aweights: Tensor | None) -> bool:
    """Whether there are elements to add, and torch refuses none of the arguments."""
    return (
        0 < x.dim() <= 2 and 0 not in x.shape and x.dtype is not torch.bool
        and all(one is None or one.shape == x.shape[-1:] for one in (fweights, aweights))
        and (fweights is None or not (
            fweights.is_floating_point() or fweights.is_complex() or fweights.dtype is torch.bool))
        and (aweights is None or aweights.is_floating_point())
    )


def _corrcoef(input: Tensor) -> Tensor:
    """Covariances by deviations: dims are sharded as for `cov`."""
    products = torch.cov(input)
    if not products.dim():
        return products / products
    variances = products.diagonal()
    deviations = (variances.real if products.is_complex() else variances).sqrt()
    out = products / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    if out.is_complex():
        return torch.complex(out.real.clamp(-1, 1), out.imag.clamp(-1, 1))
    return out.clamp(-1, 1)


PAGE = page(
    op("cov", compose=_cov),
    op("corrcoef", compose=_corrcoef),
)
