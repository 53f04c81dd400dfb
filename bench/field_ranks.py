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
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

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


def _times(name: str, size: int, rounds: int, mesh: Any) -> dict[str, Any]:
    systems = {
        "one process": _alone(name, size, mesh), "weft": _weft(name, size, mesh),
        "gathered": _gathered(name, size, mesh),
    }
    due = systems["one process"][1]()
    assert torch.allclose(systems["weft"][1](), due, rtol=1e-4, atol=1e-5)
    dtensor = _dtensor(name, size)
    fault = fault_of(dtensor[1], due)
    if fault is None:
        systems["DTensor"] = dtensor
    turns = {system: step for system, (step, _) in systems.items()}
    for step in turns.values():
        for _ in range(FIRST):
            step()
    return {"program": name, "milliseconds": medians(turns, rounds), "fault": fault}


System = tuple[Callable[[], Any], Callable[[], Tensor]]
"""A step, and the value of one."""


def _alone(name: str, size: int, mesh: Any) -> System:
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model, field = make(), field_of(size)
    turn = (lambda: step(model, field)) if mesh.rank == 0 else (lambda: None)
    return turn, lambda: step(model, field)


def _weft(name: str, size: int, mesh: Any) -> System:
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model = weft.distribute_module(make(), mesh)
    field: Any = weft.distribute_tensor(field_of(size), mesh, weft.P(None, None, "x"))
    turn = _turns(lambda field: step(model, field), field)
    def value() -> Tensor:
        out: Any = step(model, field)
        return out.full_tensor()

    return turn, value


def _turns(step: Callable[[Any], Any], field: Any) -> Callable[[], None]:
    """Each turn on a field of its own, as in a loop."""
    def turn() -> None:
        with torch.no_grad():
            fresh = field.clone()
        step(fresh)

    return turn


def _gathered(name: str, size: int, mesh: Any) -> System:
    """The field is gathered, every rank computes all of it and keeps its part."""
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    model = make()
    field = weft.distribute_tensor(field_of(size), mesh, weft.P(None, None, "x"))

    def turn() -> Tensor:
        full = step(model, field.full_tensor())
        first, last = field.sharding.box(mesh.rank)[2]
        return full[:, :, first:last].clone()

    return turn, lambda: step(model, field.full_tensor())


def _dtensor(name: str, size: int) -> System:
    step, make = PROGRAMS[name]
    torch.manual_seed(1)
    line = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = distribute_module(make(), line)
    columns = Shard(3) if name == "U-Net" else Shard(2)  # its convolutions cut the last dim alone
    field: Any = distribute_tensor(field_of(size), line, [columns])

    def value() -> Tensor:
        out: Any = step(model, field)
        return out.redistribute(line, [Replicate()]).to_local()

    return _turns(lambda field: step(model, field), field), value


if __name__ == "__main__":
    as_rank(_measured)
