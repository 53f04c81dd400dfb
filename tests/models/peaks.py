"""Peaks of memory and bytes of halos of models on four ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import weft
from tests.models.fields import FIELDS
from weft import Layout, P
from weft.ops.attending import tiles
from weft.testing import peak_memory

__all__ = ["MESHES", "SHARE", "Run", "largest", "measured", "small_tiles"]

MESHES: dict[str, tuple[dict[str, int], tuple[str | None, ...]]] = {
    "one dim": ({"x": 4}, (None, None, "x")),
    "two dims": ({"x": 2, "y": 2}, (None, None, "x", "y")),
    "samples and rows": ({"dp": 2, "x": 2}, ("dp", None, "x")),
}
"""Axes, and the dims that they shard; a field has a sample for each rank of dp."""

SHARE = 1.5
"""The peak of a rank, as a multiple of its part of the peak of one process."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank found.

    Attributes:
        peak: bytes. values: the result and the gradients, whole.
        layout: of the result; None in one process.
        received, read: bytes of halos forward, and those that its convolutions read of others.
    """

    peak: int
    values: list[Tensor]
    layout: Layout | None = None
    received: int = 0
    read: int = 0


@contextmanager
def small_tiles(whole: int | None = None) -> Iterator[None]:
    """Tiles of attention scores that are small, as the fields are; and the size of a result that is
    left whole from which on there is a warning."""
    before, warned = tiles._TILE_SCORES["cpu"], weft.warn_if_whole(whole)
    tiles._TILE_SCORES["cpu"] = 1 << 12
    try:
        yield
    finally:
        tiles._TILE_SCORES["cpu"] = before
        weft.warn_if_whole(warned)


def trained(mesh: Any, name: str, shape: tuple[int, ...], spec: P) -> Run:
    """One pass of a model, forward and backward."""
    model, field = FIELDS[name].make(shape)
    read: list[int] = []
    if mesh is not None:
        weft.distribute_module(model, mesh)
        field = weft.distribute_tensor(field, mesh, spec)
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                module.register_forward_hook(
                    lambda module, given, out: read.append(_read(module, given[0], out)))
    field.requires_grad_()
    torch.manual_seed(1)
    with peak_memory(model, field) as memory, weft.explain() as log:
        out: Any = model(field)
        (out * out).mean().backward()
    grads = [field.grad, *[one.grad for one in model.parameters()]]
    if mesh is None:
        return Run(memory.peak, [out.detach(), *grads])  # type: ignore[list-item]
    halos = [event.nbytes for event in log.events
             if event.collective == "Halo" and event.direction == "forward"]
    return Run(memory.peak, [one.full_tensor() for one in (out.detach(), *grads)], out.sharding,
               sum(halos), sum(read))


def _read(module: Any, given: Any, out: Any) -> int:
    """Bytes that this rank's part of a convolution reads of other ranks, by plain arithmetic."""
    rank = out.device_mesh.get_rank()
    own, made = given.sharding.box(rank), out.sharding.box(rank)
    box = []
    for dim, (first, last) in enumerate(own):
        if dim > 1 and given.sharding.dims[dim] and made[dim][0] < made[dim][1]:
            stride, pad = module.stride[dim - 2], module.padding[dim - 2]
            reach = module.dilation[dim - 2] * (module.kernel_size[dim - 2] - 1)
            start, stop = made[dim][0] * stride - pad, (made[dim][1] - 1) * stride - pad + reach + 1
            if module.padding_mode == "zeros":
                start, stop = max(start, 0), min(stop, given.shape[dim])
            first, last = min(first, start), max(last, stop)
        box.append(last - first)
    volume = math.prod([stop - start for start, stop in own])
    return (math.prod(box) - volume) * given.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one model: `share` of the peak of one process, by the largest shard; `halos`, bytes
    received in those that are read, of the busiest rank."""

    share: float
    halos: float | None
    ranks: list[Run]
    alone: Run


def measured(name: str, mesh: str, size: str) -> Measured:
    """A model of `FIELDS`, on four ranks and in one process."""
    axes, names = MESHES[mesh]
    shape = (axes.get("dp", 1), *getattr(FIELDS[name], size)[1:])
    spec = P(*names)
    with small_tiles():
        peak = trained(None, name, shape, P()).peak
        [alone] = weft.testing.run(  # its random numbers are weft's
            lambda mesh: trained(mesh, name, shape, P()), mesh={"x": 1})
        ranks = weft.testing.run(lambda mesh: trained(mesh, name, shape, spec), mesh=axes)
    layout = ranks[0].layout
    assert layout is not None
    part = max(largest(Layout(layout.mesh, shape, spec)), largest(layout))
    busiest = max(ranks, key=lambda run: run.received)
    return Measured(max(run.peak for run in ranks) / peak / part,
                    busiest.received / busiest.read if busiest.read else None, ranks, alone)


def largest(layout: Layout) -> float:
    """The largest shard, as a part of the tensor; 0 where ranks hold terms of it."""
    if any(layout.partial):
        return 0.0
    sizes = [max(layout.sizes_of(dim)) / max(length, 1) for dim, length in enumerate(layout.shape)]
    return math.prod(sizes) if layout.sharded_axes else 0.0
