"""What `weft bench field` runs: a stencil, a small U-Net, a Fourier layer. They know of no mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft

__all__ = ["PROGRAMS", "field_of", "fno", "stencil", "unet"]


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


class _FNO(nn.Module):
    """A Fourier layer beside a convolution of one position (Li et al., 2021)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.enter, self.beside, self.leave = (
            nn.Conv2d(first, last, 1) for first, last in ((1, width), (width, width), (width, 1)))
        self.low, self.high = (
            nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)
            for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        spectrum, modes = torch.fft.rfft2(x), self.modes
        out = torch.zeros(spectrum.shape, dtype=spectrum.dtype, device=x.device)
        for rows, weight in ((slice(modes), self.low), (slice(-modes, None), self.high)):
            part = spectrum[:, :, rows, :modes]
            out[:, :, rows, :modes] = torch.einsum("bixy,ioxy->boxy", part, weight)
        return self.leave(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.beside(x)))


def fno(model: Any, x: Tensor) -> Tensor:
    """Forward and backward; where the field is sharded, so is what the layer makes."""
    with weft.sharded_factories() if isinstance(x, weft.ShardTensor) else nullcontext():
        return unet(model, x)


PROGRAMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "stencil": (stencil, nn.Identity), "U-Net": (unet, lambda: _UNet(8)),
    "FNO": (fno, lambda: _FNO(8, 16)),
}
"""Name -> a step, and what makes its model."""


def field_of(size: int) -> Tensor:
    """A field of so many rows and columns."""
    torch.manual_seed(0)
    return torch.randn(1, 1, size, size)
