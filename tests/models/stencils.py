"""The shallow-water equations as people write them: by slices between walls, by rolls on a torus.

Heights and velocities on one grid; central differences, one explicit step after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["SOLVERS", "State", "start"]

State = tuple[Tensor, Tensor, Tensor]
"""Height, and velocity along rows and along columns."""

DT, GRAVITY, DEPTH = 0.05, 1.0, 1.0


def start(rows: int, columns: int) -> State:
    """A hill of water at rest, between walls of still water."""
    y = torch.linspace(-2, 2, rows, dtype=torch.float64)[:, None]
    x = torch.linspace(-2, 2, columns, dtype=torch.float64)[None]
    height = DEPTH + 0.2 * torch.exp(-2 * (x * x + y * y))
    return height, torch.zeros(rows, columns).double(), torch.zeros(rows, columns).double()


def by_slices(h: Tensor, u: Tensor, v: Tensor) -> State:
    """One step between walls, where nothing changes."""
    def along_rows(f: Tensor) -> Tensor:
        return (f[2:, 1:-1] - f[:-2, 1:-1]) / 2

    def along_columns(f: Tensor) -> Tensor:
        return (f[1:-1, 2:] - f[1:-1, :-2]) / 2

    def inside(f: Tensor) -> Tensor:
        return f[1:-1, 1:-1]

    flow = inside(h) * (along_rows(u) + along_columns(v))
    flow = flow + inside(u) * along_rows(h) + inside(v) * along_columns(h)
    push = inside(u) * along_rows(u) + inside(v) * along_columns(u) + GRAVITY * along_rows(h)
    pull = inside(u) * along_rows(v) + inside(v) * along_columns(v) + GRAVITY * along_columns(h)
    new: list[Tensor] = []
    for field, change in ((h, flow), (u, push), (v, pull)):
        out = field.clone()
        out[1:-1, 1:-1] = inside(field) - DT * change
        new.append(out)
    return new[0], new[1], new[2]


def by_rolls(h: Tensor, u: Tensor, v: Tensor) -> State:
    """One step on a torus: mass in the form of fluxes, and a little viscosity."""
    def change(f: Tensor, dim: int) -> Tensor:
        return (torch.roll(f, -1, dim) - torch.roll(f, 1, dim)) / 2

    def spread(f: Tensor) -> Tensor:
        around = torch.roll(f, 1, 0) + torch.roll(f, -1, 0)
        return around + torch.roll(f, (1,), (1,)) + torch.roll(f, (-1,), (1,)) - 4 * f

    flow = h * (change(u, 0) + change(v, 1)) + u * change(h, 0) + v * change(h, 1)
    push = u * change(u, 0) + v * change(u, 1) + GRAVITY * change(h, 0)
    pull = u * change(v, 0) + v * change(v, 1) + GRAVITY * change(h, 1)
    return (h - DT * (flow - 0.1 * spread(h)), u - DT * (push - 0.1 * spread(u)),
            v - DT * (pull - 0.1 * spread(v)))


SOLVERS: dict[str, Callable[..., State]] = {"slices": by_slices, "rolls": by_rolls}
