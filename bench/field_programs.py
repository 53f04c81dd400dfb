"""What `weft bench field` runs: a stencil and a small U-Net, which know of no mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PROGRAMS", "field_of", "stencil", "unet"]


def stencil(model: Any, u: Tensor) -> Tensor:
    """One step of diffusion and waves between walls, by slices."""
    inner = u[..., 1:-1, 1:-1]
    around = u[..., :-2, 1:-1] + u[..., 2:, 1:-1] + u[..., 1:-1, :-2] + u[..., 1:-1, 2:]
    new = u.clone()
    new[..., 1:-1, 1:-1] = inner + 0.1 * (around - 4 * inner) - 0.01 * inner.sin()
    return new


class _UNet(nn.Module):
    """One level down and up, with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.enter(x))
        second = self.up(F.silu(self.middle(F.avg_pool2d(first, 2))))
        return self.leave(torch.cat([first, second], 1))


def unet(model: Any, x: Tensor) -> Tensor:
    """Forward and backward."""
    out = model(x)
    (out * out).mean().backward()
    for one in model.parameters():
        one.grad = None
    return out.detach()


PROGRAMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "stencil": (stencil, nn.Identity), "U-Net": (unet, lambda: _UNet(8)),
}
"""Name -> a step, and what makes its model."""


def field_of(size: int) -> Tensor:
    """A field of so many rows and columns."""
    torch.manual_seed(0)
    return torch.randn(1, 1, size, size)
