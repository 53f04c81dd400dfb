"""Training libraries with a distribution of their own: accelerate, `Trainer` of transformers.

They look for a launcher's environment variables. If they find them, they wrap the model, split the
batches, and gather their measurements, all of which weft does. If they find none, they run as on
one device, which is right for a program on ShardTensors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import get_worker_info

from weft.comm import as_bound_mesh, this_world
from weft.core import P
from weft.core.arguments import MeshLike
from weft.core.names import ADVICE, PLACEMENTS, also_called
from weft.core.scopes import Inside
from weft.errors import MeshError, UnsupportedOpError
from weft.tensor import distribute_tensor

__all__ = ["ShardedCollator", "as_one_process"]

_NAMES = frozenset((
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
))
_PREFIXES = ("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
"""Prefixes of the variables that torchrun and the launchers of MPI set."""


_hidden = Inside()
_kept: dict[str, str] = {}


def _found() -> list[str]:
    return [name for name in os.environ if name in _NAMES or name.startswith(_PREFIXES)]


def _hide() -> None:
    """While a block is open, in any simulated rank, the process has no such variables."""
    if _hidden.on:
        _kept.update((name, os.environ.pop(name)) for name in _found())
    else:
        os.environ.update(_kept)
        _kept.clear()


_hidden.changed = _hide


@contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, a library that looks for the launcher's environment variables finds none.

    accelerate, and the `Trainer` of transformers, which uses it, then leave the model, the batches
    and their measurements as they are. Every rank believes that it is the only one: all write files
    and logs.

    Raises:
        MeshError: there are such variables, but no mesh has been made from them yet.
    """
    found = _found()
    if found and this_world().size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise MeshError(
            "weft.nn.as_one_process()", "this process was launched as one of "
            f"{os.environ['WORLD_SIZE']} ranks, and has not met the others",
            "ranks meet by the launcher's variables, before these are hidden", found,
            'mesh = weft.init_mesh({"dp": ...}) first')
    with _hidden.counted():
        yield


class ShardedCollator:
    """A collate function whose batches hold ShardTensors.

    Every rank collates the same samples, without communication; debug mode compares them.
    A tensor with fewer dims than the P has entries takes the first entries.

    Args:
        collate_fn: makes a batch of samples: a tensor, or tensors in maps, lists and tuples.
        mesh: the mesh; None means the current one at each call.
        placements: a P, the layout of each tensor of a batch; None replicates.

    Raises:
        UnsupportedOpError: when called in a worker of a DataLoader, which is on no mesh.
    """

    @also_called(ADVICE, device_mesh="mesh", **PLACEMENTS)
    def __init__(
        self, collate_fn: Callable[[Any], Any], mesh: MeshLike | None = None,
        placements: P | None = None,
    ) -> None:
        self.collate_fn, self.device_mesh = collate_fn, mesh
        self.spec = P() if placements is None else placements

    def __call__(self, samples: Any) -> Any:
        if get_worker_info() is not None:
            raise UnsupportedOpError(
                "ShardedCollator(samples)", "it is called in a worker process of a "
                "DataLoader", "ShardTensors live in the processes of their mesh",
                ["num_workers > 0"], "num_workers=0 (dataloader_num_workers=0 of Trainer)\n"
                'with workers: weft.ShardedLoader(dataloader, P("dp"), mesh=mesh)')
        mesh = as_bound_mesh(self.device_mesh, "ShardedCollator(mesh)")
        return self._laid(self.collate_fn(samples), mesh)

    def _laid(self, value: Any, mesh: Any) -> Any:
        if isinstance(value, torch.Tensor):
            spec = P(*self.spec[: value.ndim])
            return distribute_tensor(value, mesh, spec, src_data_rank=None)
        if isinstance(value, Mapping) or hasattr(value, "items"):  # transformers' is no Mapping
            batch: Any = copy.copy(value)
            for name, part in value.items():
                batch[name] = self._laid(part, mesh)
            return batch
        if isinstance(value, (list, tuple)):
            parts = [self._laid(part, mesh) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value
