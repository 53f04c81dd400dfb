"""Dropout of all kinds: multiplication by a mask that is drawn.

So transitions and gradients are those of `mul`, terms of a sum included: terms times one mask add
up to the sum times it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.rng import Source, samples
from weft.tensor.call.random.samplers import like
from weft.tensor.placing.draw import drawn
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["DROPOUT"]


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


def _dropout_p(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    _dropout_p(p)
    return x * _noise(x, 1.0 - p) if train and p else x


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    _dropout_p(p)
    if x.ndim < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return x * _noise(x, 1.0 - p, 2) if train and p else x


def _alpha_dropout(x: Tensor, p: float, train: bool, num_dims: int | None = None) -> Tensor:
    """Klambauer et al., "Self-normalizing neural networks" (2017)."""
    _dropout_p(p)
    if not (train and p):
        return x
    if p == 1.0:
        return x * 0.0
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    noise = _noise(x, 1.0 - p, num_dims, scaled=False)
    return x * (noise * a) + ((noise - 1.0) * (alpha * a) + alpha * a * p)


def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha_dropout(x, p, train, 2)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The result, and the mask."""
    if train is False or not p:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _noise(x, 1.0 - p)
    return x * noise, noise != 0.0


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> Tensor:
    x = x.contiguous()  # as torch's result is
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = like(
        x, lambda source: samples.uniform(source, x.dtype, lower, upper), generator=generator
    )
    return torch.where(x <= 0.0, x * slope, x)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """Attention whose weights are dropped out: they are there to be multiplied, softmax and all."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (_repeated(one, query.shape[-3]) for one in (key, value))
    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        mask = query.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    if mask is not None:  # rows that attend to nothing are zero
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return _dropout(weights, p, True) @ value


def _repeated(heads: Tensor, num: int) -> Tensor:
    """Each head as often as queries share it."""
    *lead, count, length, width = heads.shape
    shared = heads.unsqueeze(-3).expand(*lead, count, num // count, length, width)
    return shared.flatten(-4, -3)


DROPOUT: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _feature_alpha_dropout,
    "native_dropout": _native_dropout,
    "rrelu": _rrelu,
    "scaled_dot_product_attention": _attention,
}
"""Op -> what carries it out: it takes all of the op's arguments, and returns its results."""
