"""A module whose parameters and buffers become ShardTensors.

The module itself stays as it is: its forward runs unchanged, because the operations on its
parameters are the ShardTensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout
from weft.errors import LayoutError, WeftError, message
from weft.tensor import ShardTensor, distribute_tensor
from weft.tensor.placing.layouts import as_layout

__all__ = ["distribute_module"]

M = TypeVar("M", bound=nn.Module)

PartitionFn = Callable[[str, nn.Module, BoundMesh], None]
InputFn = Callable[[nn.Module, Any, BoundMesh], Any]
OutputFn = Callable[[nn.Module, Any, BoundMesh], Any]


def distribute_module(
    module: M,
    device_mesh: Any = None,
    partition_fn: PartitionFn | None = None,
    input_fn: InputFn | None = None,
    output_fn: OutputFn | None = None,
    *,
    shardings: Mapping[str, Any] | None = None,
) -> M:
    """Distribute a module's parameters and buffers over a mesh, in place; returns the module.

    The values are those of the mesh's first rank. Parameters keep `requires_grad`, and one that
    has several names (tied weights) stays one parameter.

    Args:
        module: an ordinary module with full parameters, built alike on every rank.
        device_mesh: the mesh; None means the current one.
        partition_fn: `partition_fn(name, submodule, mesh)`, called for every submodule first; what
            it replaces by ShardTensors stays as it left it.
        input_fn: `input_fn(module, inputs, mesh)`, a forward pre-hook.
        output_fn: `output_fn(module, outputs, mesh)`, a forward hook.
        shardings: ordered map from a glob pattern of parameter or buffer names (`*` also passes
            dots) to a P, placements or a Layout. The first pattern that matches one of a
            tensor's names counts; what no pattern matches is replicated.

    Raises:
        LayoutError: a pattern that matches no parameter or buffer.
        WeftError: a spec that does not fit its tensor, whose name stands in a note. Both come
            before anything is replaced or sent.

    The signature is that of torch.distributed.tensor.distribute_module.
    """
    mesh = as_bound_mesh(device_mesh)
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    tensors = _tensors_of(module)
    specs = _specs_for(tensors, dict(shardings or {}))
    layouts = [_layout(named, mesh, spec) for named, spec in zip(tensors, specs)]
    for named, layout in zip(tensors, layouts):
        _replace(named, mesh, layout)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, _, outputs: output_fn(mod, outputs, mesh))
    return module


@dataclass(slots=True)
class _Named:
    """A parameter or buffer with every place that holds it."""

    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def _tensors_of(module: nn.Module) -> list[_Named]:
    """In order of registration, which is the same on every rank."""
    found: dict[int, _Named] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for store in (submodule._parameters, submodule._buffers):
            for key, tensor in store.items():
                if tensor is None:
                    continue
                named = found.setdefault(id(tensor), _Named(tensor))
                named.names.append(f"{prefix}.{key}" if prefix else key)
                if (submodule, key) not in named.places:
                    named.places.append((submodule, key))
    return list(found.values())


def _specs_for(tensors: list[_Named], shardings: dict[str, Any]) -> list[Any]:
    """The spec of each tensor; None for a tensor that no pattern matches."""
    matches = [
        [pattern for pattern in shardings
         if any(fnmatchcase(name, pattern) for name in named.names)]
        for named in tensors
    ]
    matched = {pattern for patterns in matches for pattern in patterns}
    idle = [repr(pattern) for pattern in shardings if pattern not in matched]
    if idle:
        names = [name for named in tensors for name in named.names]
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise LayoutError(
            message("distribute_module(shardings=)", f"{len(idle)} of {len(shardings)} patterns "
                    f"match none of the {len(names)} names of parameters and buffers: {shown}",
                    "every pattern matches at least one name", idle,
                    "print([name for name, _ in module.named_parameters()])")
        )
    return [shardings[patterns[0]] if patterns else None for patterns in matches]


def _layout(named: _Named, mesh: BoundMesh, spec: Any) -> Layout:
    tensor = named.tensor
    if spec is None and isinstance(tensor, ShardTensor):
        return tensor.layout
    try:
        layout = as_layout(mesh, tensor.shape, spec)
        if isinstance(tensor, ShardTensor):
            distribute_tensor(tensor, mesh, layout)  # refuses another layout than it has
    except WeftError as error:
        error.add_note(f"  in distribute_module, for {', '.join(named.names)}")
        raise
    return layout


def _replace(named: _Named, mesh: BoundMesh, layout: Layout) -> None:
    old = named.tensor
    if isinstance(old, ShardTensor):
        return  # an optimizer may hold it
    new: torch.Tensor = distribute_tensor(old.detach(), mesh, layout)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for owner, key in named.places:
        store: dict[str, Any] = (
            owner._parameters if key in owner._parameters else owner._buffers
        )
        store[key] = new
