"""softmax, log_softmax, layer_norm and rms_norm over a dim that is cut.

Each is its textbook formula over global ops: the maximum is subtracted first, moments are taken
about the true mean (two passes, never E[x^2] - E[x]^2), half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite
from weft.rules import Call

__all__ = ["layer_norm_lookup", "log_softmax", "rms_norm_lookup", "softmax", "softmax_lookup"]

_HALF = (torch.float16, torch.bfloat16)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the precision to compute in, and contiguous, as torch returns these ops' results."""
    return (x.float() if x.dtype in _HALF else x).contiguous()


def softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """exp(x - max) / sum exp(x - max): one reduction of the maximum, one of the sum."""
    dtype = dtype if isinstance(dtype, torch.dtype) else x.dtype
    x = _wide(x.to(dtype))
    exp = (x - x.detach().amax(dim, keepdim=True)).exp()
    return (exp / exp.sum(dim, keepdim=True)).to(dtype)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """Zeros, not NaN, for rows of nothing but -inf."""
    hidden = (x == -torch.inf).all(dim, keepdim=True)
    return softmax(x.masked_fill(hidden, 0), dim, dtype).masked_fill(hidden, 0)


def log_softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """x - max - log sum exp(x - max)."""
    dtype = dtype if isinstance(dtype, torch.dtype) else x.dtype
    x = _wide(x.to(dtype))
    shifted = x - x.detach().amax(dim, keepdim=True)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(dtype)


def softmax_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """The softmaxes along a cut dim that has elements."""
    layout = layouts[0]
    if not layout.shape:
        return None
    dim = call.args[1] % layout.ndim
    if not layout.dims[dim] or not layout.shape[dim]:
        return None
    if "_safe" in call.op:
        return Composite(_safe_softmax)
    function = log_softmax if "log_softmax" in call.op else softmax
    if call.op.startswith(("aten._softmax", "aten._log_softmax")):
        return Composite(lambda x, dim, half_to_float: function(x, dim))
    return Composite(function)


def _normalized_dims_cut(call: Call, layout: Layout) -> bool:
    count = len(call.args[1])
    return any(layout.dims[layout.ndim - count :])


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> torch.Tensor:
    dims = tuple(range(-len(shape), 0))
    wide = _wide(x)
    centered = wide - wide.mean(dims, keepdim=True)
    out = centered * (centered * centered).mean(dims, keepdim=True).add(eps).rsqrt()
    return _affine(out, weight, bias, x.dtype)


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> torch.Tensor:
    dims = tuple(range(-len(shape), 0))
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps  # of what torch computes in
    out = wide * (wide * wide).mean(dims, keepdim=True).add(eps).rsqrt()
    return _affine(out, weight, None, x.dtype)


def _affine(out: torch.Tensor, weight: Any, bias: Any, dtype: torch.dtype) -> torch.Tensor:
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def layer_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """layer_norm over cut dims."""
    return Composite(_layer_norm) if _normalized_dims_cut(call, layouts[0]) else None


def rms_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """rms_norm over cut dims."""
    return Composite(_rms_norm) if _normalized_dims_cut(call, layouts[0]) else None
