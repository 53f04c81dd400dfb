"""cov and corrcoef, of which torch cannot tell the result without data, as the torch code that says
what they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import runner
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["corrcoef", "cov"]


def cov(
    input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> Tensor:
    """Products of what differs from the mean, each observation by its weight."""
    weights = [one for one in (fweights, aweights) if one is not None]
    if not _is_usual(input, fweights, aweights):
        metas = [one._meta for one in (input, *weights) if type(one) is ShardTensor]
        run = runner(mesh_of("cov", metas),
                     "of no elements, or of such weights, there is nothing to add up")
        return run(torch.cov, (input,), {
            "correction": correction, "fweights": fweights, "aweights": aweights,
        })
    rows = input if input.dim() == 2 else input.unsqueeze(0)
    if not weights:
        count = rows.shape[1]
        centered = rows - rows.sum(1, keepdim=True) / count
        return (centered @ centered.t().conj() / max(count - correction, 0)).squeeze()
    for name, one in (("fweights", fweights), ("aweights", aweights)):
        if one is not None and bool((one < 0).any()):
            raise RuntimeError(f"cov(): {name} cannot be negative")
    aweights = None if aweights is None else _summable(aweights, rows)
    weights = [one for one in (fweights, aweights) if one is not None]
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
    total = weight.sum()
    if bool(total == 0):
        raise RuntimeError("cov(): weights sum to zero, can't be normalized")
    centered = rows - (rows * weight).sum(1, keepdim=True) / total
    left = total - correction
    if aweights is not None and correction:
        left = total - correction * (weight * aweights).sum() / total
    products = centered @ (centered * weight).t().conj()
    return (products / left.clamp(min=0)).squeeze()


def _summable(weights: Tensor, rows: Tensor) -> Tensor:
    """The weights; whole where their sum would round more coarsely than the rows do."""
    dtype = torch.promote_types(rows.dtype, torch.get_default_dtype())
    if type(weights) is not ShardTensor or weights.dtype.itemsize >= dtype.itemsize:
        return weights
    return redistribute_to(
        weights, Layout.replicated(weights.sharding.mesh, weights.shape), "cov"
    )


def _is_usual(x: Tensor, fweights: Tensor | None, aweights: Tensor | None) -> bool:
    """Whether there is something to add up, of which torch refuses nothing."""
    weights = [one for one in (fweights, aweights) if one is not None]
    return (
        0 < x.dim() <= 2 and 0 not in x.shape and x.dtype is not torch.bool
        and all(one.shape == x.shape[-1:] for one in weights)
        and (fweights is None or _is_integral(fweights))
        and (aweights is None or aweights.is_floating_point())
    )


def _is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def corrcoef(input: Tensor) -> Tensor:
    """Covariances by deviations."""
    products = cov(input)
    if not products.dim():
        return products / products
    variances = products.diagonal()
    deviations = (variances.real if products.is_complex() else variances).sqrt()
    out = products / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    if out.is_complex():
        return torch.complex(out.real.clamp(-1, 1), out.imag.clamp(-1, 1))
    return out.clamp(-1, 1)
