"""Convolutions as long as the sequence, by Fourier transforms: the sequence is sharded, and so are
the filters, by channels or by positions. A rank's memory is its share.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft import P
from weft.testing import peak_memory

RANKS, LENGTH, WIDTH = 4, 64, 8


def convolved(u: Tensor, filter: Tensor) -> Tensor:
    """Causally, over twice the length; positions come last."""
    length = u.shape[-1]
    spectrum = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(filter, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length]


class S4D(nn.Module):
    """A diagonal state space (Gu et al., 2022), whose filter is one of its parameters' channels."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(WIDTH) - 3)
        self.real = nn.Parameter(torch.rand(WIDTH, states).log())
        self.imaginary = nn.Parameter(math.pi * torch.arange(states).repeat(WIDTH, 1).float())
        self.c = nn.Parameter(torch.randn(WIDTH, states, 2))
        self.skip = nn.Parameter(torch.randn(WIDTH))
        self.leave = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(dim=-2))

    def forward(self, u: Tensor) -> Tensor:
        a = -self.real.exp() + 1j * self.imaginary
        dta = a * self.log_dt.exp().unsqueeze(-1)
        c = torch.view_as_complex(self.c) * (dta.exp() - 1) / a
        powers = torch.exp(dta.unsqueeze(-1) * torch.arange(u.shape[-1]))
        filter = 2 * torch.einsum("hn, hnl -> hl", c, powers).real
        return self.leave(F.gelu(convolved(u, filter) + u * self.skip.unsqueeze(-1)))


class Hyena(nn.Module):
    """Of order two (Poli et al., 2023): gates, and a filter that a network makes of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        t = torch.linspace(0, 1, LENGTH)[:, None]
        self.places: Tensor
        self.register_buffer("places", torch.cat([t, (6 * t).cos(), (6 * t).sin()], -1))
        self.net = nn.Sequential(nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.decays = nn.Parameter(torch.rand(WIDTH))
        self.skip = nn.Parameter(torch.randn(WIDTH))

    def forward(self, u: Tensor) -> Tensor:
        mixed = self.short(self.enter(u.mT).mT)[..., : u.shape[-1]]
        gate, other, value = mixed.chunk(3, 1)
        filter = self.net(self.places) * torch.exp(-self.places[:, :1] * self.decays)
        value = value * other
        out = convolved(value, filter.mT) + value * self.skip.unsqueeze(-1)
        return self.leave((out * gate).mT).mT


FILTERS = {
    S4D: {name: P("x") for name in ("log_dt", "real", "imaginary", "c")},
    Hyena: {"places": P("x")},
}


@pytest.mark.parametrize("kind", FILTERS, ids=lambda kind: kind.__name__)
def test_sharded_filters_keep_a_long_convolution_sharded(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    alone, u = kind(), torch.randn(1, WIDTH, LENGTH, requires_grad=True)
    with peak_memory(alone, u) as whole:
        due = alone(u)
        due.square().sum().backward()

    def on_rank(mesh: Any) -> tuple[int, list[int]]:
        mine = kind()
        mine.load_state_dict(alone.state_dict())
        weft.distribute_module(mine, mesh, shardings=FILTERS[kind])
        given = weft.distribute_tensor(u.detach(), mesh, P(None, None, "x")).requires_grad_()
        with weft.explain() as log, peak_memory(mine, given) as memory:
            out = mine(given)
            forward = [event.nbytes for event in log.events if event.op == "aten.fft_rfft.default"]
            out.square().sum().backward()
        assert out.sharding.spec == P(None, None, "x")
        torch.testing.assert_close(out.full_tensor(), due)
        found = {name: one.grad.full_tensor() for name, one in mine.named_parameters()}
        torch.testing.assert_close(
            found, {name: one.grad for name, one in alone.named_parameters()},
            rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(given.grad.full_tensor(), u.grad, rtol=1e-4, atol=1e-5)
        return memory.peak, forward

    own = WIDTH * LENGTH * 4 // RANKS
    for peak, forward in weft.testing.run(on_rank, mesh={"x": RANKS}):
        assert peak <= 1.5 / RANKS * whole.peak
        assert set(forward) == {own * 3 // 4}  # each signal and filter once, without its zeros
