"""A field that no rank holds: a Fourier network learns what diffusion makes of it.

    weft run -n 4 examples/fourier.py

The solver and the network are ordinary PyTorch, and know of no mesh: both transform the field, keep
few modes, and transform back. The field is sharded by rows and columns. Inside of
`weft.sharded_factories()` ranks send each other these modes alone, and no rank ever holds the whole
field or its spectrum. Each rank first trains by itself; the losses of all steps must agree, or the
program fails.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft import P
from weft.testing import peak_memory

SIZE, WIDTH, MODES, NUM_STEPS = 256, 8, 8, 4

TOLERANCE = 1e-4
"""How far two float32 losses of a step may be apart, as a part of the loss."""


def waves(rows: Tensor, columns: Tensor) -> Tensor:
    """A smooth field (1, 1, rows, columns) at coordinates from 0 to 1."""
    y, x = torch.meshgrid(2 * math.pi * rows, 2 * math.pi * columns, indexing="ij")
    return ((3 * y).sin() * (2 * x).cos() + (y + 4 * x).sin() / 2)[None, None]


def with_modes(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The field of a few modes of lowest frequency, each times a matrix of channels: `low` for the
    positive frequencies of rows, `high` for the negative ones."""
    spectrum, modes = torch.fft.rfft2(u), low.shape[-1]
    shape = (u.shape[0], low.shape[1], *spectrum.shape[2:])
    out = torch.zeros(shape, dtype=spectrum.dtype, device=u.device)
    for rows, weight in ((slice(modes), low), (slice(-modes, None), high)):
        part = spectrum[:, :, rows, :modes]
        out[:, :, rows, :modes] = torch.einsum("bixy,ioxy->boxy", part, weight)
    return torch.fft.irfft2(out, s=u.shape[-2:])


def diffused(u: Tensor, time: float = 0.05) -> Tensor:
    """What diffusion makes of a field after `time`: each mode decays by itself."""
    low, columns = torch.arange(MODES), torch.arange(MODES)
    decays = [torch.exp(-time * (rows[:, None] ** 2 + columns**2)) for rows in (low, low - MODES)]
    return with_modes(u, *(decay[None, None].to(torch.cfloat) for decay in decays))


class Layer(nn.Module):
    """A Fourier layer beside a convolution of one position (Li et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        shape = WIDTH, WIDTH, MODES, MODES
        self.low, self.high = (
            nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / WIDTH) for _ in range(2))
        self.beside = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, u: Tensor) -> Tensor:
        return F.gelu(with_modes(u, self.low, self.high) + self.beside(u))


def train(u: Tensor) -> list[float]:
    """The losses of a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, WIDTH, 1), Layer(), Layer(), nn.Conv2d(WIDTH, 1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    target, losses = diffused(u), list[float]()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(u), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train by oneself, then together, and compare."""
    mesh = weft.init_mesh({"rows": -1, "columns": 2})
    line = torch.linspace(0, 1, SIZE + 1)[:-1]
    with peak_memory() as alone:
        due = train(waves(line, line))
    rows, columns = (weft.distribute_tensor(line, mesh, P(axis)) for axis in ("rows", "columns"))
    with peak_memory() as together, weft.sharded_factories(), weft.explain() as log:
        losses = train(waves(rows, columns))
    if mesh.get_rank() == 0:
        for step, (mine, one) in enumerate(zip(losses, due)):
            print(f"step {step}: loss {mine:.6f}, of one process {one:.6f}")
        print(f"{log.nbytes:,} bytes received for {NUM_STEPS} steps; a whole spectrum of {WIDTH} "
              f"channels has {WIDTH * SIZE * (SIZE // 2 + 1) * 8:,}")
        print(f"peak of memory: {together.peak / alone.peak:.2f} of one process")
    if any(abs(mine - one) > TOLERANCE * one for mine, one in zip(losses, due)):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
