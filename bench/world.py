"""One process that is rank 0 of a world whose collectives cost next to nothing.

torch's "fake" backend returns from every collective at once, for all systems alike: what is
measured is the work of the calling process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft

NUM_RANKS = 4


def start() -> None:
    """One thread, and a fake process group of `NUM_RANKS`."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)


@cache
def device_mesh() -> DeviceMesh:
    """dp=2 x tp=2 as torch's DTensor takes it."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@cache
def line() -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))


@cache
def weft_mesh():
    """dp=2 x tp=2 as weft takes it."""
    return weft.init_mesh({"dp": 2, "tp": 2}, device_type="cpu")


@cache
def weft_line():
    """All ranks on one axis."""
    return weft.init_mesh({"dp": NUM_RANKS}, device_type="cpu")


Lay = Callable[[Tensor, int | None], Tensor]
"""A local tensor, and the dim that is sharded."""


def lay_weft(mesh: Any) -> Lay:
    """Sharded over the first axis of `mesh`, or whole."""
    axis = mesh.axis_names[0]

    def lay(local: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return weft.ShardTensor.from_local(local, mesh, weft.P())
        shape = list(local.shape)
        shape[dim] *= NUM_RANKS
        spec = weft.P(*[None] * dim, axis)
        return weft.ShardTensor.from_local(local, mesh, spec, sizes="chunk", shape=shape)

    return lay


def lay_dtensor(mesh: Any) -> Lay:
    """The same as a DTensor."""
    return lambda local, dim: DTensor.from_local(
        local, mesh, [Replicate() if dim is None else Shard(dim)]
    )
