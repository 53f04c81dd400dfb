"""In debug mode: check that replicas are equal.

A plain tensor counts as replicated, and so does a leaf over the axes that do not shard it. The
first call that uses one compares digests over its ranks, as `debug_compare` compares requests:
nothing is sent over a group. The name of a tensor comes from the modules on the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from weft.comm import BoundMesh, CollectiveCall
from weft.errors import CommunicationError
from weft.tensor.meta import dense
from weft.tensor.placing.agreed import digest_of
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.views.moved import unwrap_view

__all__ = ["compare"]


def compare(call: str, mesh: BoundMesh, tensors: Iterable[torch.Tensor]) -> None:
    """Compare plain tensors and replicated leaves over the mesh, each at its first use.

    Raises:
        CommunicationError: on all ranks that hold one, if their values differ.
    """
    if mesh.here is None:
        return
    seen: Any = mesh.cache.setdefault("compared", WeakIdKeyDictionary())
    groups: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for place, tensor in enumerate(map(_owner, tensors)):
        axes = _axes(tensor, mesh)
        if axes and tensor not in seen:
            seen[tensor] = True
            groups.setdefault(axes, []).append(_image(tensor, place))
    for axes, images in groups.items():
        names, digests = zip(*images)
        ask = CollectiveCall("replicas", mesh.names(axes), mesh.group_ranks(axes), (names, digests))
        said = mesh.world.call_roll(replace(ask.by_now(), call=call))
        if said:
            raise CommunicationError(said)


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of a view, because views are new at each use."""
    base = tensor._base if type(tensor) is not ShardTensor else None
    return base if base is not None and base.is_leaf and base.requires_grad else tensor


def _axes(tensor: torch.Tensor, mesh: BoundMesh) -> tuple[int, ...]:
    """The axes, of more than one rank, over which the tensor must be the same."""
    local = tensor._local if type(tensor) is ShardTensor else tensor
    if local.is_meta or not dense(local):
        return ()
    axes = tuple(axis for axis in range(mesh.ndim) if mesh.axis_sizes[axis] > 1)
    if type(tensor) is not ShardTensor:
        return axes
    if not local.requires_grad or tensor._meta.mesh != mesh or (
        local._is_view() or not local.is_leaf  # torch may refuse to say whether views are leaves
    ):
        return ()
    return tuple(axis for axis in axes if tensor._meta.layout.on(axis) is None)


def _image(tensor: torch.Tensor, place: int) -> tuple[str, str]:
    """Its name, dtype and shape; its digest."""
    local = unwrap_view(tensor._local) if type(tensor) is ShardTensor else tensor
    name = _name_of(tensor) or f"operand {place + 1}"
    text = f"{name}, {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return text, digest_of(local)


def _name_of(tensor: torch.Tensor) -> str:
    """`layers.0.weight of Net`, by the modules whose calls are running, the outermost first."""
    modules: list[torch.nn.Module] = []
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        frame = frame.f_back
    for module in reversed(modules):
        for named in (module.named_parameters(), module.named_buffers()):
            for name, one in named:
                if one is tensor:
                    return f"{name} of {type(module).__name__}"
    return ""
