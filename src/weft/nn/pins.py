"""Fixed layouts of activations by module name: hooks that reshard a module's inputs or outputs.

In weft the layout of an activation follows from those of its operands. A pin fixes another layout
at a named place. It is `redistribute`, with its gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm import as_bound_mesh
from weft.core import Layout, Mesh, Placement
from weft.core.arguments import Placements
from weft.errors import LayoutError, ModuleError, ShardTypeError, WeftError
from weft.tensor import ShardTensor
from weft.tensor.meta import NONE, Meta, kept
from weft.tensor.placing.layouts import as_layout, as_sharded
from weft.tensor.placing.operands import NamedCaller, move_operand
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import wrap
from weft.transport.transition import Transition

__all__ = [
    "BringHook", "Brought", "Cut", "InputFn", "OutputFn", "PinHook", "PrepareModuleInput",
    "PrepareModuleOutput", "has_hook",
]


@dataclass(frozen=True, slots=True)
class Cut:
    """A spec for some mesh axes (numbers) alone. The rest of a layout stays.

    They shard a dim; with `dim` None they replicate.
    """

    axes: tuple[int, ...]
    dim: int | None

    def of(self, layout: Layout) -> Layout:
        """The layout with these axes changed. Raises LayoutError if there is no such dim."""
        dim = None if self.dim is None else self.dim + layout.ndim * (self.dim < 0)
        if dim is not None and not 0 <= dim < layout.ndim:
            raise LayoutError(
                "Shard(dim)", f"dim is {self.dim}, the activation is {layout} with "
                f"{layout.ndim} dims", "the dim is one of the activation's",
                [f"dim={self.dim}"], "Shard(0)")
        if all(layout.on(axis) == dim for axis in self.axes):
            return layout
        dims = [[axis for axis in axes if axis not in self.axes] for axes in layout.dims]
        if dim is not None:
            dims[dim] += self.axes
        return layout.without_partial(self.axes).replace(dims=dims)


_OF_TORCH = frozenset({
    "input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts",
    "output_layouts", "desired_output_layouts", "use_local_input", "use_local_output",
})
"""Arguments of torch's `PrepareModule` classes. As names of inputs they would do nothing."""


class _Prepare:
    """Specs for a module's inputs or outputs, by position and by name."""

    word = ""

    def __init__(
        self, *specs: Placements | Placement | None, **by_name: Placements | Placement | None
    ) -> None:
        self.specs: tuple[Any, ...] = specs
        self.by_name = by_name
        of_torch = [name for name in by_name if name in _OF_TORCH]
        if of_torch:
            raise ShardTypeError(
                f"{type(self).__name__}({of_torch[0]}=)",
                f"{len(of_torch)} of {len(by_name)} names are those of torch's class, not of "
                f"{self.word}", f"specs are given as the {self.word} are, by position or by their "
                "own names, and say the layout that is wanted; the present one is known",
                of_torch, f"{type(self).__name__}(P(...), None), or by name: "
                f"{type(self).__name__}(mask=P(...))")

    def __repr__(self) -> str:
        shown = [repr(spec) for spec in self.specs]
        shown += [f"{name}={spec!r}" for name, spec in self.by_name.items()]
        return f"{type(self).__name__}({', '.join(shown)})"


class PrepareModuleInput(_Prepare):
    """Fix the layouts of a module's arguments: a spec per positional argument, others by name.

    None leaves an argument as it is, and so do fewer specs than arguments. A plain tensor counts as
    replicated.

    Args:
        specs: placements, a P or a Layout for each positional argument.
        by_name: the same for keyword arguments.
    """

    word = "inputs"

    def register(self, module: nn.Module, mesh: Mesh, path: str, pattern: str) -> None:
        module.register_forward_pre_hook(PinHook(self, mesh, path, pattern), with_kwargs=True)

    def apply(self, mesh: Mesh, path: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = list(args)
        for at, spec in enumerate(self.specs[: len(given)]):
            given[at] = _laid(given[at], spec, mesh, f"input {at} of {path!r}")
        named = dict(kwargs)
        for name, spec in self.by_name.items():
            if name in named:
                named[name] = _laid(named[name], spec, mesh, f"input {name!r} of {path!r}")
        return tuple(given), named


class PrepareModuleOutput(_Prepare):
    """Fix the layouts of a module's results: a spec per result, and by name for results in a map.

    A single spec for a module with several results applies to its first tensor.

    Args:
        specs: placements, a P or a Layout for each result.
        by_name: the same for the entries of a map.
    """

    word = "outputs"

    def register(self, module: nn.Module, mesh: Mesh, path: str, pattern: str) -> None:
        module.register_forward_hook(PinHook(self, mesh, path, pattern))

    def apply(self, mesh: Mesh, path: str, args: Any, out: Any) -> Any:
        where = f"output of {path!r}"
        if isinstance(out, torch.Tensor):
            if self.by_name or len(self.specs) > 1:
                raise _no_tensor(self, where, out)
            for spec in self.specs:
                out = _laid(out, spec, mesh, where)
            return out
        is_map = isinstance(out, Mapping)
        if not is_map and not isinstance(out, (tuple, list)):
            raise _no_tensor(self, where, out)
        parts: Any = copy.copy(out) if is_map else list(out)
        keys = list(out) if is_map else range(len(out))
        first = next((key for key in keys if isinstance(out[key], torch.Tensor)), None)
        specs: dict[Any, Any] = dict(self.by_name) if is_map else {}
        if is_map or len(self.specs) < 2:
            for spec in self.specs[:1]:
                specs.setdefault(first, spec)
        else:
            specs |= enumerate(self.specs)
        if any(key not in keys for key in specs) or (first is None and not is_map):
            raise _no_tensor(self, where, out)
        for key, spec in specs.items():
            parts[key] = _laid(parts[key], spec, mesh, f"{where}, {key!r}")
        if is_map or isinstance(out, list):
            return parts
        return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)


def _no_tensor(pin: _Prepare, where: str, found: Any) -> ModuleError:
    kinds = [type(one).__name__ for one in (
        found.values() if isinstance(found, Mapping) else found
        if isinstance(found, (tuple, list)) else [found]
    )]
    return ModuleError(
        "distribute_module(activations=)", f"{pin!r} for the {where}, which is "
        f"{type(found).__name__} of {len(kinds)}: {', '.join(kinds) or 'nothing'}",
        "each spec is for a tensor that is there", [where],
        "PrepareModuleOutput(P(...), None) for a tuple, by name for a map: "
        "PrepareModuleOutput(logits=P(...))")


def _laid(value: Any, spec: Any, mesh: Any, where: str) -> Any:
    if spec is None or not isinstance(value, torch.Tensor):
        return value
    bound = as_bound_mesh(mesh)
    tensor = as_sharded(value, bound)

    def find() -> Layout:
        if isinstance(spec, Cut):
            return spec.of(tensor.sharding)
        return as_layout(bound, tensor.shape, spec, "distribute_module(activations)")

    key = (tensor._meta, spec if not isinstance(spec, list) else tuple(spec))
    try:
        layout = kept(bound.cache.setdefault("pins", {}), key, find)
    except WeftError as error:
        error.add_note(f"  in distribute_module, for the {where}")
        raise
    return tensor if layout == tensor.sharding else tensor.redistribute(bound, layout)


class _Hook:
    """A module's hook: copies share it; its pickles contain the mesh's value."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def has_hook(module: nn.Module, kind: type[_Hook]) -> bool:
    """Whether a module has such a hook before its forward."""
    return any(type(hook) is kind for hook in module._forward_pre_hooks.values())


class PinHook(_Hook):
    """The hook that carries out a pin."""

    def __init__(self, pin: Any, mesh: Mesh, path: str, pattern: str) -> None:
        self.pin, self.mesh, self.path, self.pattern = pin, mesh, path, pattern

    def __call__(self, module: nn.Module, args: Any, more: Any) -> Any:
        """`more`: a module's keyword arguments, or its output."""
        return self.pin.apply(self.mesh, self.path, args, more)


@dataclass(frozen=True, slots=True)
class Brought(Cut):
    """What mesh axes do to the input of a layer whose weight they shard.

    If they shard another dim than `dim`, or leave partial values, the input moves as the operand of
    a call does. All layers that read it share the moved input, and their gradients are summed once,
    on the way back to the shards.
    """

    def move(self, meta: Meta) -> tuple[Meta, Transition | None] | None:
        """The layout of an input that needs a gradient, and the transition; None: it stays as it
        is."""
        layout = meta.layout
        dim = None if self.dim is None else self.dim + layout.ndim * (self.dim < 0)
        if all(layout.on(axis) in (None, dim) for axis in self.axes):
            return None
        over = frozenset(self.axes)
        varying = meta.varying | over if dim is None else meta.varying - over
        target = meta.replace(layout=self.of(layout), varying=varying, requires_grad=True)
        return target, transition_between(
            meta.mesh, layout, target.layout, meta.varying,
            varying if meta.requires_grad else NONE, order=meta.order())


class BringHook(_Hook):
    """The hook that moves a layer's input to its weight."""

    def __init__(self, brought: Brought, mesh: Mesh, path: str) -> None:
        self.brought, self.mesh, self.path = brought, mesh, path

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        if not inputs or type(inputs[0]) is not ShardTensor:
            return None
        tensor: ShardTensor = inputs[0]
        meta = tensor._meta
        found = None
        if meta.mesh.abstract == self.mesh:
            known = meta.mesh.cache.setdefault("brought", {})
            found = kept(known, (meta, self.brought), lambda: self.brought.move(meta))
        if found is None or not self._has_shards(module.weight):
            return None
        became, move = found
        local = tensor._local if move is None else move_operand(
            tensor, move, NamedCaller(f"input of {self.path!r}", "its weight stays sharded"))
        if not local.requires_grad:
            became = became.replace(requires_grad=False, varying=NONE)
        return wrap(local, became), *inputs[1:]

    def _has_shards(self, weight: Any) -> bool:
        """Whether the weight is sharded now: a group may have gathered it."""
        if type(weight) is not ShardTensor:
            return False
        layout = weight._meta.layout
        return any(layout.on(axis) is not None for axis in self.brought.axes)


class InputFn(_Hook):
    """The user's `input_fn` as a forward pre-hook."""

    def __init__(self, fn: Callable[..., Any], mesh: Any, num_args: int) -> None:
        self.fn, self.mesh, self.num_args = fn, mesh, num_args

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        mesh = as_bound_mesh(self.mesh)
        return self.fn(inputs, mesh) if self.num_args == 2 else self.fn(module, inputs, mesh)


class OutputFn(InputFn):
    """The user's `output_fn` as a forward hook."""

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:  # type: ignore
        return super().__call__(module, outputs)
