"""Normalization: layer_norm, rms_norm, batch_norm, instance_norm, group_norm, weight_norm.

Moments over sharded dims are taken about the true mean (two passes, never E[x^2] - E[x]^2), and
half precision is computed in float32. Ops with running statistics update them in place,
as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from weft.ops.precision import widened
from weft.rules import Call, op, page, rule
from weft.transport import Shards
from weft.transport.nodes import REDUCTIONS

__all__ = ["PAGE"]


# Rows.


def _mean(shards: Shards, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The mean over all shards of each row."""
    total = shards.psum(x.sum(tuple(range(-len(shape), 0)), keepdim=True))
    return total / math.prod(shape)


def _layer_norm(
    shards: Shards, x: Tensor, shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(var + eps), with mean and variance over all shards."""
    rows = widened(x)
    centered = rows + -_mean(shards, rows, shape)  # the gradient of a mean is summed, then negated
    out = centered * (_mean(shards, centered * centered, shape) + eps).rsqrt()
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def _rms_norm(
    shards: Shards, x: Tensor, shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """x / sqrt(mean of x^2 + eps), with the mean over all shards."""
    rows = widened(x)
    eps = torch.finfo(rows.dtype).eps if eps is None else eps  # of the dtype torch computes in
    out = rows * (_mean(shards, rows * rows, shape) + eps).rsqrt()
    return (out if weight is None else out * weight).to(x.dtype)


# Batches and channels.


def _as_given(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast: torch casts operands of none of these ops."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _per_channel(one: Tensor, x: Tensor) -> Tensor:
    """Numbers per channel, or per sample and channel, in a shape that broadcasts over positions."""
    lead = (1, -1) if one.dim() == 1 else tuple(one.shape)
    return one.reshape(*lead, *[1] * (x.dim() - 2))


def _normalised(
    x: Tensor, mean: Tensor, var: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None,
    apart: Tensor | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) with weight and bias; `apart` is x - mean, if already known."""
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    if apart is None:  # x - mean, whose gradient would be negated before it is summed
        apart = widened(x) + _per_channel(-mean, x)
    scale = _per_channel(scale, x)
    out = apart * scale if bias is None else torch.addcmul(
        _per_channel(bias, x).to(apart.dtype), apart, scale)
    return out.to(x.dtype).contiguous()


def _run(running: Tensor | None, now: Tensor, momentum: float) -> None:
    """running = (1 - momentum) running + momentum now."""
    if running is not None:
        with torch.no_grad():
            running.lerp_(now.detach().to(running.dtype), momentum)


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The variance, the mean, and x - mean, which is all that autograd keeps of x. (Of `var_mean`
    it would also keep x less the mean of each shard.) Adding 0 reduces each of them once."""
    mean = x.mean(dims, keepdim=True) + 0.0
    apart = x + -mean
    return (apart * apart).mean(dims) + 0.0, mean.squeeze(dims), apart


def _unbiased(var: Tensor, count: int) -> Tensor:
    """The variance divided by count - 1: nan for one element, as in torch."""
    return var.detach() * (count / (count - 1) if count > 1 else float("nan"))


def _trained(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x normalized by the statistics of the global batch, and these; the running ones follow."""
    var, mean, apart = _moments(widened(x), (0, *range(2, x.dim())))
    _run(running_mean, mean, momentum)
    _run(running_var, _unbiased(var, x.numel() // x.shape[1]), momentum)
    out = _normalised(x, mean, var, eps, weight, bias, apart)
    return out.contiguous(memory_format=suggest_memory_format(x)), mean, var


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:
    """In training by statistics of the global batch; in evaluation it is elementwise."""
    if x.dim() < 2:  # torch accepts it where it is empty
        scale, shift = (None if one is None else one[0] for one in (weight, bias))
        out = x.clone() if scale is None else x * scale
        return out if shift is None else out + shift
    with _as_given(x):
        if not x.numel():
            zero, one = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return _normalised(x, zero, one, eps, weight, bias)
        return _trained(x, weight, bias, running_mean, running_var, momentum, eps)[0]


# torch's kernels on CPUs misread a gradient, or an operand, with a dim of length 1 and the strides
# of two memory formats; instance_norm's misreads every gradient with channels last. With one dim of
# positions, or none, there is only one format.


def _evaluated(x: Tensor, *args: Any) -> Tensor:
    """batch_norm of local tensors, elementwise."""
    if x.dim() < 4 or 1 not in x.shape or not x.is_cpu:
        return torch.batch_norm(x, *args)
    if x.is_contiguous() or not x.movedim(1, -1).is_contiguous():
        return torch.batch_norm(x.flatten(2), *args).view(x.shape)
    rows = x.movedim(1, -1)
    return torch.batch_norm(rows.flatten(0, -2), *args).view(rows.shape).movedim(-1, 1)


def _normed(x: Tensor, *args: Any) -> Tensor:
    """instance_norm of local tensors that have all positions of a sample."""
    if x.dim() < 4 or not x.is_cpu:
        return torch.instance_norm(x, *args)
    return torch.instance_norm(x.flatten(2), *args).view(x.shape)


def _with_running(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:
    """Statistics of each sample; the running ones are of all."""
    with _as_given(x):
        if not use_input:
            assert running_mean is not None and running_var is not None
            return _normalised(x, running_mean, running_var, eps, weight, bias)
        if x.shape[0] and not x.numel():  # nothing to count
            zero, one = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return _normalised(x, zero, one, eps, weight, bias)
        var, mean = torch.var_mean(widened(x), tuple(range(2, x.dim())), correction=0)
        count = x.numel() // max(x.shape[0] * x.shape[1], 1)
        out = _normalised(x, mean, var, eps, weight, bias)
        if REDUCTIONS.on:
            REDUCTIONS.thread.counting()  # as in torch, whose kernel has saved what it saves
        _run(running_mean, mean.detach().mean(0), momentum)
        _run(running_var, _unbiased(var, count).mean(0), momentum)
        return out


def _is_of_samples(call: Call) -> bool:
    """Neither with running statistics, which are of all samples, nor of empty shards."""
    keeps = call.args[3] is not None or call.args[4] is not None
    empty = any(0 in layout.sizes_of(dim) for layout in call.layouts[:1] for dim in (0, 1))
    return 0 in call.tensors[0].shape or not (keeps or empty)


# Without running statistics a kernel serves.


def _by_means(
    x: Tensor, mean: Callable[[Tensor], Tensor], eps: float, weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """x normalized, where `mean` gives the mean over the elements of each sample and channel."""
    apart = widened(x)
    center = mean(apart)
    apart = apart + _per_channel(-center, x)
    return _normalised(x, center, mean(apart * apart), eps, weight, bias, apart)


def _instance_norm(
    shards: Shards, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: None,
    running_var: None, use_input: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:
    """(x - mean) / sqrt(var + eps), with mean and variance over all shards' positions."""
    count = math.prod(shards.layout.shape[2:])

    def mean(each: Tensor) -> Tensor:
        return shards.psum(each.sum(tuple(range(2, x.dim())))) / count

    return _by_means(x, mean, eps, weight, bias)


def _group_norm(
    shards: Shards, x: Tensor, groups: int, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(var + eps), with mean and variance over all shards of a group."""
    shape = shards.layout.shape
    size = shape[1] // groups
    # Whole groups on every rank: nothing to communicate.
    alone = shards.dims == (1,) and not any(cut % size for cut in shards.layout.cuts_of(1))
    if alone and x.numel():
        return torch.group_norm(x, x.shape[1] // size, weight, bias, eps, cudnn)
    positions, count = tuple(range(2, x.dim())), size * math.prod(shape[2:])
    of = (torch.arange(x.shape[1], device=x.device) + shards.starts[1]) // size

    def mean(each: Tensor) -> Tensor:
        own = each.sum(positions) if positions else each
        total = own.new_zeros(len(own), groups).index_add(1, of, own)
        return ((total if alone else shards.psum(total)) / count).index_select(1, of)

    out = _by_means(x, mean, eps, weight, bias)
    return out.contiguous(memory_format=suggest_memory_format(x)) if x.is_cpu else out


# What torch's own kernels give: the statistics as well.


def _native_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """batch_norm, and in training the mean and the inverse of the deviation of each channel."""
    if not x.numel() or x.dim() < 2:
        return NotImplemented
    if not training:
        out = torch.batch_norm(
            x, weight, bias, running_mean, running_var, False, momentum, eps, False)
        return out, x.new_empty(0), x.new_empty(0)
    with _as_given(x):
        out, mean, var = _trained(x, weight, bias, running_mean, running_var, momentum, eps)
        kept = mean.detach(), (var + eps).rsqrt().detach()
    given = [one.dtype for one in (weight, bias, running_mean, running_var) if one is not None]
    if x.is_cpu and mean.dtype not in given:  # accelerators keep what they compute in
        return out, kept[0].to(x.dtype), kept[1].to(x.dtype)
    return out, *kept


def _without_running(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As with running statistics, which there are none of."""
    return _native_batch_norm(x, weight, bias, None, None, True, momentum, eps)


def _with_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, momentum: float, eps: float,
) -> Any:
    """Statistics of the global batch, which go into the running ones."""
    found = _native_batch_norm(
        x, weight, bias, running_mean, running_var, True, momentum, eps)
    return found if found is NotImplemented else (*found, x.new_empty(0, dtype=torch.uint8))


# Weights, as a direction of norm 1 times a magnitude (Salimans and Kingma, Weight Normalization,
# 2016).


def _norm_except_dim(v: Tensor, pow: int = 2, dim: int = 0) -> Tensor:
    """The norms over all dims except one; over all for dim -1, as in torch."""
    if dim == -1:
        return v.norm(pow)
    others = [other for other in range(v.ndim) if other != dim]
    return torch.linalg.vector_norm(v, pow, others, keepdim=True) if others else v.abs()


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v * (g / norm of v)."""
    return v * (g / _norm_except_dim(v, 2, dim))


def _last(call: Call, ndim: int) -> tuple[int, ...]:
    """the last dims, as many as `normalized_shape` lists lengths"""
    return tuple(range(ndim - len(call.get("normalized_shape")), ndim))


def _batch_norm_result(x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Contiguous, or with channels last if the input is; torch's meta kernel keeps any strides."""
    if x.is_contiguous():
        return None
    out = torch.ops.aten.batch_norm.default(x, *args, **kwargs)
    return torch.empty_like(out, memory_format=suggest_memory_format(x))


def _layer_norm_result(
    x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Any = None, *_: Any
) -> Tensor | None:
    """Like the operand, if it is contiguous; torch's meta kernel is a reference in Python. Of
    `rms_norm`, the last argument is no bias but eps."""
    given = [one for one in (weight, bias) if isinstance(one, Tensor)]
    alike = all(list(one.shape) == list(shape) and one.dtype is x.dtype for one in given)
    ends = len(shape) and list(x.shape[-len(shape):]) == list(shape)
    if not (alike and ends and x.is_floating_point() and x.is_contiguous()):
        return None
    return torch.empty_like(x)


PAGE = page(
    op("layer_norm", rule("... s~, [s], [s] -> ... s", along=_last), kernel=_layer_norm,
       result=_layer_norm_result),
    op("rms_norm", rule("... s~, [s] -> ... s", along=_last), kernel=_rms_norm,
       result=_layer_norm_result),
    op("native_layer_norm", rule("... s!, [s], [s] -> ... s, ..., ...", along=_last)),
    op("batch_norm",
       rule("n c>0 ..., [c], [c], [c], [c] -> n c ...",
            serves=lambda call: not call.get("training")),
       compose=_batch_norm, each_call=True, floats_flow=True, result=_batch_norm_result,
       local=_evaluated),
    op("instance_norm", rule("n>0 c>0 ...~, [c], [c] -> n c ...", serves=_is_of_samples),
       kernel=_instance_norm, compose=_with_running, each_call=True, floats_flow=True,
       local=_normed),
    op("group_norm", rule("n c~ ...~, [c], [c] -> n c ..."), kernel=_group_norm),
    op("native_batch_norm _native_batch_norm_legit", compose=_native_batch_norm, each_call=True,
       writes=True),
    op("_native_batch_norm_legit.no_stats", compose=_without_running, each_call=True),
    op("_batch_norm_with_update", compose=_with_update, each_call=True, writes=True),
    op("native_group_norm",
       rule("n>0 c! ...!, [c], [c] -> n c ..., n g!, n g!", counts={"N": "n"})),
    op("_weight_norm", compose=_weight_norm),
    op("norm_except_dim", compose=_norm_except_dim),
)
