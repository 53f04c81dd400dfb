"""One of the ranks of `weft bench field`: steps by weft, by gathering, by DTensor, in turns.

The programs, a stencil, a small U-Net and a Fourier layer, know of no mesh.

Started as `weft run -n N field_ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object per
program. One process alone is rank 0, while the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import weft
from bench.by_turns import as_rank, fault_of, medians

__all__ = ["FIRST", "PROGRAMS", "field_of"]

FIRST = 4
"""Steps before the clock: recipes are made, and weft learns what a step reads."""


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


def _measured(asked: Any) -> Iterator[Mapping[str, Any]]:
    mesh = weft.init_mesh({"x": asked["ranks"]})
    for name in asked["programs"]:
        yield _times(name, asked["size"], asked["rounds"], mesh)


System = tuple[Callable[[], Any], Callable[[], Tensor]]
"""A step, and the value of one."""


def _times(name: str, size: int, rounds: int, mesh: Any) -> dict[str, Any]:
    step, make = PROGRAMS[name]

    def of(system: Callable[..., System], *more: Any) -> System:
        torch.manual_seed(1)
        return system(step, make(), field_of(size), *more)

    systems = {"one process": of(_alone, mesh), "weft": of(_weft, mesh),
               "gathered": of(_gathered, mesh)}
    due = systems["one process"][1]()
    assert torch.allclose(systems["weft"][1](), due, rtol=1e-4, atol=1e-5)
    dtensor = of(_dtensor, 3 if name == "U-Net" else 2)  # its convolutions cut the last dim alone
    fault = fault_of(dtensor[1], due)
    if fault is None:
        systems["DTensor"] = dtensor
    turns = {system: step for system, (step, _) in systems.items()}
    for turn in turns.values():
        for _ in range(FIRST):
            turn()
    return {"program": name, "milliseconds": medians(turns, rounds), "fault": fault}


def _alone(step: Any, model: Any, full: Tensor, mesh: Any) -> System:
    turn = (lambda: step(model, full)) if mesh.rank == 0 else (lambda: None)
    return turn, lambda: step(model, full)


def _weft(step: Any, model: Any, full: Tensor, mesh: Any) -> System:
    weft.distribute_module(model, mesh)
    field = weft.distribute_tensor(full, mesh, weft.P(None, None, "x"))
    return _turns(step, model, field), lambda: step(model, field).full_tensor()


def _turns(step: Any, model: Any, field: Any) -> Callable[[], None]:
    """Each turn on a field of its own, as in a loop."""
    def turn() -> None:
        with torch.no_grad():
            fresh = field.clone()
        step(model, fresh)

    return turn


def _gathered(step: Any, model: Any, full: Tensor, mesh: Any) -> System:
    """The field is gathered, every rank computes all of it and keeps its part."""
    field = weft.distribute_tensor(full, mesh, weft.P(None, None, "x"))

    def turn() -> Tensor:
        out = step(model, field.full_tensor())
        first, last = field.sharding.box(mesh.rank)[2]
        return out[:, :, first:last].clone()

    return turn, lambda: step(model, field.full_tensor())


def _dtensor(step: Any, model: Any, full: Tensor, dim: int) -> System:
    line = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_module(model, line)
    field: Any = distribute_tensor(full, line, [Shard(dim)])
    return _turns(step, model, field), lambda: step(model, field).full_tensor()


if __name__ == "__main__":
    as_rank(_measured)
