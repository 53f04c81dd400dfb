"""Ops of torch's own gradients, by the gradients of the ops that they belong to.

torch.func's transforms carry out a gradient op by op. torch composes most of its ops of others. The
rest belong to ops with windows or with all pairs of rows: these run once more, and autograd gives
the gradient of their shards and halos. The gradient of a slice is a pad, which sends nothing; torch
writes it into zeros of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table

from weft.rules import op, page

__all__ = ["PAGE"]

_ATEN: Any = torch.ops.aten


def _pulled(
    forward: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor, *,
    wanted: Sequence[bool] = (True,),
) -> list[Tensor | None]:
    """The gradients of the wanted operands; in a graph where the caller records one."""
    records = torch.is_grad_enabled() and any(one.requires_grad for one in (grad, *operands))
    with torch.enable_grad():
        given = [
            one.detach().requires_grad_() if want and not one.requires_grad else one
            for one, want in zip(operands, wanted)
        ]
        asked = [one for one, want in zip(given, wanted) if want]
        found = iter(torch.autograd.grad(forward(*given), asked, grad, create_graph=records))
    return [next(found) if want else None for want in wanted]


def _convolution(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Of the input and of the weight by the convolution; of the bias a sum over all places."""
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(
            x, weight, None, stride, padding, dilation, transposed, output_padding, groups)

    found: Sequence[Tensor | None] = (None, None)
    if any(output_mask[:2]):
        found = _pulled(forward, (x, weight), grad, wanted=output_mask[:2])
    return *found, grad.sum((0, *range(2, grad.dim()))) if output_mask[2] else None


def _as_of(x: Tensor, dims: tuple[int, ...], mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the reciprocal deviation that a norm has saved, as functions of x."""
    wide = x.to(mean.dtype)
    moved = wide.mean(dims, keepdim=True).view(mean.shape)
    var = wide.var(dims, correction=0, keepdim=True).view(rstd.shape)
    eps = (rstd ** -2 - var).detach()
    return mean.detach() + (moved - moved.detach()), (var + eps).rsqrt()


def _layer_norm(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """As torch composes it; in a graph the saved statistics are functions of the operand."""
    if torch.is_grad_enabled() and x.requires_grad:
        mean, rstd = _as_of(x, tuple(range(-len(shape), 0)), mean, rstd)
    composed = decomposition_table[_ATEN.native_layer_norm_backward.default]
    return composed(grad, x, shape, mean, rstd, *rest)


def _batch_norm(
    grad: Tensor, x: Tensor, weight: Any, running_mean: Any, running_var: Any, mean: Any,
    rstd: Any, train: bool, *rest: Any,
) -> tuple[Tensor | None, ...]:
    """As torch composes it; in a graph the statistics of a batch are functions of it."""
    if train and torch.is_grad_enabled() and x.requires_grad:
        mean, rstd = _as_of(x, (0, *range(2, x.dim())), mean, rstd)
    composed = decomposition_table[_ATEN.native_batch_norm_backward.default]
    return composed(grad, x, weight, running_mean, running_var, mean, rstd, train, *rest)


def _of_input(forward: Any) -> Callable[..., Tensor]:
    """`op_backward(grad, x, ...)` of `op(x, ...)`."""
    def backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
        """By the op itself, which runs once more."""
        return _pulled(lambda x: forward(x, *args), (x,), grad)[0]  # type: ignore[return-value]

    return backward


def _of_size(forward: Any) -> Callable[..., Tensor]:
    """`op_backward(grad, output_size, input_size, ...)` of `op(x, output_size, ...)`: any x serves,
    sharded as batch and channels are."""
    def backward(grad: Tensor, size: Any, input_size: Sequence[int], *args: Any) -> Tensor:
        """By the op itself, which is linear, of zeros."""
        corner = grad[(..., *(slice(1),) * len(size))].detach()
        x = torch.zeros_like(corner.expand(*grad.shape[:2], *input_size[2:]))
        return _of_input(forward)(grad, x, size, *args)

    return backward


def _max_pool(
    grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each gradient goes to the place in its plane that was the largest of a window."""
    if not x.numel():
        return NotImplemented
    zeros = torch.zeros_like(x)
    if x.requires_grad and torch.is_grad_enabled():  # a function of x as well, of gradient zero
        zeros = x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)
    planes = zeros.contiguous().flatten(-2).scatter_add(-1, indices.flatten(-2), grad.flatten(-2))
    return planes.reshape(x.shape)


def _grid_sampler(
    grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Of the image and of the points, by the op itself."""
    def forward(x: Tensor, grid: Tensor) -> Tensor:
        return torch.grid_sampler(x, grid, mode, padding, aligned)

    return tuple(_pulled(forward, (x, grid), grad, wanted=output_mask))


def _adaptive_pool(grad: Tensor, x: Tensor) -> Tensor:
    """By the op itself, to as many places as the gradient has."""
    return _of_input(_ATEN._adaptive_avg_pool2d)(grad, x, grad.shape[-2:])


def _pad(mode: str) -> Callable[..., Tensor]:
    def pad(x: Tensor, padding: Sequence[int]) -> Tensor:
        """As the mode of `pad`."""
        return F.pad(x, padding, mode=mode)

    return pad


def _slice(
    grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """A pad with zeros; with a step, rows written into zeros."""
    dim = dim % len(sizes)
    first = slice(start, end).indices(sizes[dim])[0]
    if step != 1:
        return grad.new_zeros(sizes).slice_scatter(grad, dim, start, end, step)
    behind = sizes[dim] - first - grad.shape[dim]
    return F.pad(grad, [0, 0] * (len(sizes) - 1 - dim) + [first, behind])


def _select(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """A pad with zeros around one row, which may stay partial."""
    dim = dim % len(sizes)
    at = index % sizes[dim]
    return _slice(grad.unsqueeze(dim), sizes, dim, at, at + 1, 1)


def _diagonal(
    grad: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    """A matrix with this diagonal, padded with zeros to the sizes."""
    dim1, dim2 = dim1 % len(sizes), dim2 % len(sizes)
    made = torch.diag_embed(grad, offset, dim1, dim2)
    for dim in (dim1, dim2):
        made = F.pad(made, [0, 0] * (len(sizes) - 1 - dim) + [0, sizes[dim] - made.shape[dim]])
    return made


_POOLS = ("avg_pool2d", "avg_pool3d")
_RESIZED = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)
_PADS = {f"{text}_pad{num}d": _pad(mode) for num in (1, 2, 3)
         for text, mode in (("reflection", "reflect"), ("replication", "replicate"))}

PAGE = page(
    op("convolution_backward", compose=_convolution, each_call=True),
    *[op(f"{name}_backward", compose=_of_input(getattr(_ATEN, name)), each_call=True)
      for name in _POOLS],
    *[op(f"{name}_backward", compose=_of_size(getattr(_ATEN, name)), each_call=True)
      for name in _RESIZED],
    *[op(name, compose=pad, each_call=True) for name, pad in _PADS.items()],
    *[op(f"{name}_backward", compose=_of_input(pad), each_call=True)
      for name, pad in _PADS.items()],
    op("max_pool2d_with_indices_backward", compose=_max_pool, each_call=True),
    op("slice_backward", compose=_slice),
    op("select_backward", compose=_select),
    op("diagonal_backward", compose=_diagonal),
    op("_adaptive_avg_pool2d_backward", compose=_adaptive_pool, each_call=True),
    op("grid_sampler_2d_backward", compose=_grid_sampler, each_call=True),
    op("_cdist_backward", compose=_of_input(lambda x, y, p, distances: torch.cdist(x, y, p)),
       each_call=True),
    op("native_layer_norm_backward", compose=_layer_norm, each_call=True),
    op("native_batch_norm_backward", compose=_batch_norm, each_call=True),
)
