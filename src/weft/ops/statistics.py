"""batch_norm, instance_norm and group_norm by statistics of the global tensor.

The moments are `var_mean` over the dims that are normalised, whichever of them are cut: one small
gather, about the true mean (`ops.blocks.moments`). Half precision is computed in float32. What
keeps running statistics writes to them where they are, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite
from weft.rules import Call

__all__ = ["batch_norm_lookup", "group_norm_lookup", "instance_norm_lookup"]

_HALF = (torch.float16, torch.bfloat16)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def _as_given(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast: torch casts for none of these ops."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _per_channel(one: Tensor, x: Tensor) -> Tensor:
    """A number per channel, or per sample and channel, to be spread over positions."""
    lead = (1, -1) if one.dim() == 1 else tuple(one.shape)
    return one.reshape(*lead, *[1] * (x.dim() - 2))


def _normalised(
    x: Tensor, mean: Tensor, var: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None,
    apart: Tensor | None = None,
) -> Tensor:
    """`apart` is x - mean, where it is known already."""
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    if apart is None:  # x - mean, whose gradient would be negated before it is summed
        apart = _wide(x) + _per_channel(-mean, x)
    scale = _per_channel(scale, x)
    out = apart * scale if bias is None else torch.addcmul(
        _per_channel(bias, x).to(apart.dtype), apart, scale)
    return out.to(x.dtype).contiguous()


def _run(running: Tensor | None, now: Tensor, momentum: float) -> None:
    """running = (1 - momentum) running + momentum now."""
    if running is not None:
        with torch.no_grad():
            running.lerp_(now.detach().to(running.dtype), momentum)


def _moments(
    x: Tensor, dims: tuple[int, ...], cut: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The variance, the mean, and x - mean: of `cut` dims the first two by one gather; else in two
    passes, which is a few times as fast on CPUs as torch's one."""
    if cut:
        return *torch.var_mean(x, dims, correction=0), None
    mean = x.mean(dims, keepdim=True)
    apart = x + -mean
    return (apart * apart).mean(dims), mean.squeeze(dims), apart


def _unbiased(var: Tensor, count: int) -> Tensor:
    """The variance by count - 1: nan for one element, as torch has it."""
    return var.detach() * (count / (count - 1) if count > 1 else float("nan"))


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn: bool,
    *, cut: bool,
) -> Tensor:
    with _as_given(x):
        if not x.numel():
            zero, one = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return _normalised(x, zero, one, eps, weight, bias)
        dims = (0, *range(2, x.dim()))
        var, mean, apart = _moments(_wide(x), dims, cut)
        _run(running_mean, mean, momentum)
        _run(running_var, _unbiased(var, x.numel() // x.shape[1]), momentum)
        return _normalised(x, mean, var, eps, weight, bias, apart)


def _of_nothing(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> Tensor:
    """batch_norm of a line, which torch takes where it is empty."""
    scale, shift = (None if one is None else one[0] for one in (weight, bias))
    out = x.clone() if scale is None else x * scale
    return out if shift is None else out + shift


def batch_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """batch_norm in training: statistics of the global batch. In evaluation it is elementwise."""
    if layouts[0].ndim < 2:
        return Composite(_of_nothing)
    if not call.args[5]:
        return None
    cut = bool(layouts[0].dims[0]) or any(layouts[0].dims[2:])
    return Composite(partial(_batch_norm, cut=cut), writes=True)


def _instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:
    with _as_given(x):
        if not use_input:
            assert running_mean is not None and running_var is not None
            return _normalised(x, running_mean, running_var, eps, weight, bias)
        var, mean = torch.var_mean(_wide(x), tuple(range(2, x.dim())), correction=0)
        count = x.numel() // max(x.shape[0] * x.shape[1], 1)
        _run(running_mean, mean.detach().mean(0), momentum)
        _run(running_var, _unbiased(var, count).mean(0), momentum)
        return _normalised(x, mean, var, eps, weight, bias)


def instance_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """instance_norm over cut positions, of empty blocks, or with running statistics."""
    layout = layouts[0]
    keeps = call.args[3] is not None or call.args[4] is not None
    empty = any(0 in layout.sizes_of(dim) for dim in (0, 1))
    if 0 in layout.shape or not (keeps or empty or any(layout.dims[2:])):
        return None
    return Composite(_instance_norm, writes=True)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn: bool = True,
) -> Tensor:
    """Moments of each channel, then of a group's channels: small ones, wherever groups are cut."""
    wide = _wide(x)
    if x.dim() > 2:
        var, mean = torch.var_mean(wide, tuple(range(2, x.dim())), correction=0)
        means = mean.unflatten(1, (groups, -1))
        inside = var.unflatten(1, (groups, -1))
    else:
        means, inside = wide.unflatten(1, (groups, -1)), None
    center = means.mean(2, keepdim=True)
    apart = means - center
    spread = apart * apart if inside is None else inside + apart * apart
    spread = spread.mean(2, keepdim=True)
    center = center.expand_as(means).flatten(1)
    spread = spread.expand_as(means).flatten(1)
    out = _normalised(x, center, spread, eps, weight, bias)
    return out.contiguous(memory_format=suggest_memory_format(x)) if x.is_cpu else out


def group_norm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """group_norm over cut channels or positions."""
    layout = layouts[0]
    if 0 in layout.shape or not any(layout.dims[1:]):
        return None
    return Composite(_group_norm)
