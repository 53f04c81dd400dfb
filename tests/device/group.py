"""Process groups of the twin device: gloo's, on the same memory.

torch's gloo refuses tensors of other devices, as NCCL refuses those of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as trees

from tests.device.backend import NAME, on_cpu

__all__ = ["BACKEND", "register"]

BACKEND = "twin_gloo"


class _Group(dist.ProcessGroup):
    """A group whose collectives are those of a gloo group inside."""

    def __init__(self, rank: int, size: int, inner: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner = inner

    def getBackendName(self) -> str:
        return BACKEND

    def _set_sequence_number_for_group(self) -> None:
        """gloo counts by itself."""


def _passed_on(name: str) -> Any:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = trees.tree_map_only(Tensor, _borrowed, (args, kwargs))
        return getattr(group.inner, name)(*args, **kwargs)

    return method


def _borrowed(tensor: Tensor) -> Tensor:
    return on_cpu(tensor) if tensor.device.type == NAME else tensor


for _name in (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "scatter", "send", "all_gather_single", "reduce_scatter_single", "all_to_all_single",
):
    setattr(_Group, _name, _passed_on(_name))


def _made(store: Any, rank: int, size: int, timeout: Any) -> _Group:
    return _Group(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


def register() -> None:
    """Make "twin_gloo" the backend of the device."""
    dist.Backend.register_backend(BACKEND, _made, devices=[NAME])
