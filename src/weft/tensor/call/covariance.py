"""cov and corrcoef, of which torch cannot tell the result without data, as the torch code that says
what they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.tensor.call.dispatch import mesh_of
from weft.tensor.call.fallback import runner
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["corrcoef", "cov"]


def cov(
    input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> Tensor:
    """Products of what differs from the mean. Weighted ones run on gathered operands."""
    weighted = fweights is not None or aweights is not None
    floats = input.is_floating_point() or input.is_complex()
    if weighted or not floats or not 0 < input.dim() <= 2 or 0 in input.shape:
        run = runner(mesh_of("cov", [one._meta for one in (input, fweights, aweights)
                                     if type(one) is ShardTensor]), "it reads its weights")
        return run(torch.cov, (input,), {
            "correction": correction, "fweights": fweights, "aweights": aweights,
        })
    rows = input if input.dim() == 2 else input.unsqueeze(0)
    count = rows.shape[1]
    centered = rows - rows.mean(1, keepdim=True)
    left = max(count - correction, 0)
    return (centered @ centered.t().conj() / left).squeeze()


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
