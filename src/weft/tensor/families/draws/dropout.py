"""Dropout of all kinds: multiplication by a random mask.

So transitions and gradients are those of `mul`, also for partial sums: each partial value times the
mask adds up to the sum times the mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.rng import Source, samples
from weft.rules import Call, op, page, rule
from weft.tensor.families.draws.samplers import like
from weft.tensor.placing.draw import drawn
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["PAGE"]


def _noise(
    x: Tensor, keep: float, num_dims: int | None = None, scaled: bool = True
) -> ShardTensor:
    """1 / keep (or 1, where not scaled) with probability `keep`, else 0.

    For each element, or one for all of those that share their place in the first dims of x.
    """
    assert type(x) is ShardTensor

    def sample(source: Source) -> Tensor:
        found = samples.bernoulli(source, keep, x.dtype)
        return found.div_(keep) if scaled and keep else found

    if num_dims is None:
        return like(x, sample)
    rest = range(min(num_dims, x.ndim), x.ndim)
    layout = x._meta.layout.without_partial().gathered(rest)
    for dim in rest:
        layout = layout.recut(dim, 1)
    return drawn(sample, x._meta.mesh, layout, x.dtype)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """A product with a mask in x's layout."""
    return x * _noise(x, 1.0 - p) if train and p else x


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """A product with a mask of the first two dims, in their layout."""
    return x * _noise(x, 1.0 - p, 2) if train and p else x


def _alpha_dropout(x: Tensor, p: float, train: bool, num_dims: int | None = None) -> Tensor:
    """A mask in x's layout, and the factors that keep mean and variance (Klambauer et al.,
    "Self-normalizing neural networks", 2017)."""
    if not (train and p):
        return x
    if p == 1.0:
        return x * 0.0
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    noise = _noise(x, 1.0 - p, num_dims, scaled=False)
    return x * (noise * a) + ((noise - 1.0) * (alpha * a) + alpha * a * p)


def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """`alpha_dropout`, of a mask of the first two dims."""
    return _alpha_dropout(x, p, train, 2)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """A product with a mask in x's layout, and the mask."""
    if train is False or not p:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _noise(x, 1.0 - p)
    return x * noise, noise != 0.0


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> Tensor:
    """Slopes in x's layout."""
    x = x.contiguous()  # as torch's result is
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = like(
        x, lambda source: samples.uniform(source, x.dtype, lower, upper), generator=generator
    )
    return torch.where(x <= 0.0, x * slope, x)


def _is_off(call: Call) -> bool:
    """Without training or probability, dropout returns its input."""
    return not (call.get("train") and call.get("p"))


_OFF = rule("... -> ...", linear=[0], moves=True, serves=_is_off)

PAGE = page(
    op("dropout", _OFF, compose=_dropout, each_call=True),
    op("feature_dropout", _OFF, compose=_feature_dropout, each_call=True),
    op("alpha_dropout", _OFF, compose=_alpha_dropout, each_call=True),
    op("feature_alpha_dropout", _OFF, compose=_feature_alpha_dropout, each_call=True),
    op("native_dropout", compose=_native_dropout, each_call=True),
    op("rrelu", compose=_rrelu, each_call=True),
)
