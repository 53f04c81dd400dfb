"""Softmaxes. Along a sharded dim the maximum over all shards is subtracted first, and the
exponentials are summed over all shards: one reduction each. Half precision is computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.ops.idle import empty_summary
from weft.ops.precision import wide, widened
from weft.rules import op, page, rule
from weft.transport import Shards

__all__ = ["PAGE", "log_softmax"]


def _shifted(shards: Shards, x: Tensor, dim: int, dtype: Any) -> tuple[Tensor, Tensor, Any]:
    """x, of this dtype or its own, minus the maximum over all shards; that maximum; the dtype. Of
    `_softmax`, the last argument is a flag: whether half precision becomes float32."""
    dtype = torch.float32 if dtype is True else dtype or x.dtype
    x = x.to(dtype).to(wide(dtype))
    fixed = x.detach()
    own = fixed.amax(dim, keepdim=True) if x.shape[dim] else empty_summary(
        fixed, (dim,), x.dtype) - torch.inf
    largest = shards.pmax(own)
    return x - largest, largest, dtype


def _softmax(shards: Shards, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """exp(x - max) / sum exp(x - max)."""
    shifted, _, dtype = _shifted(shards, x, dim, dtype)
    exp = shifted.exp()
    return (exp / shards.psum(exp.sum(dim, keepdim=True))).to(dtype)


def _safe_softmax(shards: Shards, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """exp(x - max) / sum exp(x - max); zeros for rows that contain only -inf."""
    shifted, largest, dtype = _shifted(shards, x, dim, dtype)
    hidden = largest == -torch.inf
    exp = shifted.masked_fill(hidden, 0).exp()
    return (exp / shards.psum(exp.sum(dim, keepdim=True))).masked_fill(hidden, 0).to(dtype)


def log_softmax(shards: Shards, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """x - max - log sum exp(x - max)."""
    shifted, _, dtype = _shifted(shards, x, dim, dtype)
    total = shards.psum(shifted.exp().sum(dim, keepdim=True))
    return (shifted - total.log()).to(dtype)


def _softmax_backward(
    shards: Shards, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """Products, and one sum over all shards."""
    output = widened(output)
    terms = grad.to(output.dtype) * output
    return (terms - output * shards.psum(terms.sum(dim, keepdim=True))).to(input_dtype)


def _log_softmax_backward(
    shards: Shards, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """Products, and one sum over all shards."""
    output = widened(output)
    grad = grad.to(output.dtype)
    return (grad - output.exp() * shards.psum(grad.sum(dim, keepdim=True))).to(input_dtype)


def _check(x: Tensor, dim: int, dtype: Any = None) -> None:
    """torch's meta kernels take all dtypes, its kernels floats; the result is theirs."""
    made = dtype if isinstance(dtype, torch.dtype) else x.dtype
    if x.numel() and not made.is_floating_point:
        raise RuntimeError(f"softmax is not implemented for {made}")


_ALONG = rule("... s~ -> ... s", along="dim")
_BACK = rule("... s~, ... s~ -> ... s", along="dim", linear=[0])

PAGE = page(
    op("softmax _softmax", _ALONG, kernel=_softmax, result=_check),
    op("log_softmax _log_softmax", _ALONG, kernel=log_softmax, result=_check),
    op("_safe_softmax", _ALONG, kernel=_safe_softmax, result=_check),
    op("_softmax_backward_data", _BACK, kernel=_softmax_backward),
    op("_log_softmax_backward_data", _BACK, kernel=_log_softmax_backward),
)
