"""Data parallel and tensor parallel training as one writes them: plain tensors, collectives.

Tensor parallel blocks are Megatron-LM's (Shoeybi et al. 2019), with sequences those of Korthikanti
et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.redistribution.by_hand import ByHand, gather_even, scatter_even
from bench.training.models import HEAD_WIDTH

__all__ = ["Enter", "Leave", "in_one_bucket", "norms_of", "tensor_parallel"]


def in_one_bucket(
    parameters: Iterable[Any], over: int = 1, group: Any = None
) -> Callable[[Tensor], Tensor]:
    """What sums all gradients, and the loss, by one all-reduce, and divides them by `over`."""
    parameters = list(parameters)
    sizes = [*(one.numel() for one in parameters), 1]

    def reduced(loss: Tensor) -> Tensor:
        flat = torch.cat([*(one.grad.reshape(-1) for one in parameters), loss.view(1)])
        dist.all_reduce(flat, group=group)
        *gradients, total = (flat if over == 1 else flat.div_(over)).split(sizes)
        for one, gradient in zip(parameters, gradients):
            one.grad = gradient.view(one.shape)
        return total

    return reduced


def norms_of(model: nn.Module) -> list[Any]:
    """What is whole on each rank but has seen a part of the sequence."""
    return [one for name, one in model.named_parameters()
            if "norm" in name or name.endswith(("out.bias", "down.bias"))]


class Enter(torch.autograd.Function):
    """Nothing forward; backward sums the gradient over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any = None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """The sum over a group forward; nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any = None) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _gathered(x: Tensor) -> Tensor:
    num = dist.get_world_size()
    out = x.new_empty(num * x.shape[0], *x.shape[1:])
    gather_even(out, x.contiguous())
    return torch.cat(out.chunk(num), 1)


def _scattered(x: Tensor) -> Tensor:
    parts = torch.cat(x.chunk(dist.get_world_size(), 1))
    out = x.new_empty(x.shape[0], x.shape[1] // dist.get_world_size(), x.shape[2])
    scatter_even(out, parts)
    return out


def _whole(x: Tensor) -> Any:
    """The whole sequence; backward sums and scatters."""
    return ByHand.apply(x, _gathered, _scattered)


def _part(x: Tensor) -> Any:
    """A part of the sum; backward gathers."""
    return ByHand.apply(x, _scattered, _gathered)


def tensor_parallel(stack: Any, sequences: bool) -> nn.Module:
    """Blocks of which this rank keeps its heads and hidden units."""
    num, rank = dist.get_world_size(), dist.get_rank()
    for layer in stack.layers:
        for name in ("q", "k", "v", "up"):
            _keep(getattr(layer, name), 0, rank, num)
        for name in ("out", "down"):
            _keep(getattr(layer, name), 1, rank, num)
    enter, leave = (_whole, _part) if sequences else (Enter.apply, Leave.apply)
    stack.layers = nn.ModuleList(_Block(one, enter, leave) for one in stack.layers)
    return stack


def _keep(linear: Any, dim: int, rank: int, num: int) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().chunk(num, dim)[rank].clone())
    if dim == 0:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(num)[rank].clone())


class _Block(nn.Module):
    def __init__(self, block: nn.Module, enter: Any, leave: Any) -> None:
        super().__init__()
        self.block, self.enter, self.leave = block, enter, leave

    def forward(self, x: Tensor) -> Tensor:
        b: Any = self.block
        h = self.enter(b.norm1(x))
        heads = [one(h).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for one in (b.q, b.k, b.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + (self.leave(F.linear(mixed, b.out.weight)) + b.out.bias)
        h = F.gelu(b.up(self.enter(b.norm2(x))))
        return x + (self.leave(F.linear(h, b.down.weight)) + b.down.bias)
