"""A module whose parameters and buffers become ShardTensors.

The module itself stays as it is: its forward runs unchanged, because the operations on its
parameters are the ShardTensor's.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout
from weft.core.arguments import MeshLike
from weft.core.names import also_called
from weft.errors import ModuleError, ShardTypeError, WeftError
from weft.nn.groups import check_gather, gather_in_groups
from weft.nn.match import (
    Matched,
    as_patterns,
    brought_of,
    layouts_of,
    pins_of,
    refuse_idle,
)
from weft.nn.named import (
    Named,
    named_tensors,
    places_of,
    put,
    refuse_lazy,
    replace_references,
    set_where,
)
from weft.nn.optimizers import refuse_holders, replaced
from weft.nn.pins import BringHook, InputFn, OutputFn, PrepareModuleInput, PrepareModuleOutput
from weft.nn.report import MATCHED
from weft.nn.styles import Style
from weft.tensor import ShardTensor, distribute_tensor
from weft.tensor.placing.in_place import take_along
from weft.tensor.placing.scatter import distributed_alike

__all__ = ["distribute_module"]

M = TypeVar("M", bound=nn.Module)

PartitionFn = Callable[[str, nn.Module, BoundMesh], None]
HookFn = Callable[..., Any]
"""Called with module, inputs or outputs, and mesh; or only the last two, as torch once did."""

_DONE = "_distribute_module_applied"
"""The attribute by which torch's distribute_module knows its own modules."""


@also_called(
    dict.fromkeys(("plan", "spec", "specs", "placements"), 'shardings={"*.weight": P("tp")}'),
    mesh="device_mesh", parallelize_plan="shardings")
def distribute_module(
    module: M,
    device_mesh: MeshLike | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: HookFn | None = None,
    output_fn: HookFn | None = None,
    *,
    shardings: Mapping[str, Any] | None = None,
    activations: Mapping[str, Any] | None = None,
    src_data_rank: int | None = 0,
    gather: Mapping[str, Any] | bool | None = None,
) -> M:
    """Distribute a module's parameters and buffers over a mesh, in place; returns the module.

    Parameters keep `requires_grad`, gradients, hooks and attributes. A parameter with several names
    (tied weights) stays one parameter. Tensors on the meta device stay there and get layouts: see
    `materialize`. `weft.nn.report(module)` lists the result for each tensor.

    Args:
        module: an ordinary module with full parameters, built alike on every rank.
        device_mesh: the mesh, also accepted as `mesh=`; None means the current one.
        partition_fn: `partition_fn(name, submodule, mesh)`, called for every submodule first; what
            it replaces by ShardTensors stays as it is.
        input_fn: `input_fn(module, inputs, mesh)`, a forward pre-hook.
        output_fn: `output_fn(module, outputs, mesh)`, a forward hook.
        shardings: ordered map from a glob pattern of parameter or buffer names (`*` also matches
            dots) to a P, placements or a Layout, or from a pattern of module names to a ready-made
            sharding (such as `ColwiseParallel`). The first pattern that matches counts; `"*"` means
            all parameters, and buffers only of a module that has no parameters. Tensors that no
            pattern matches are replicated, and so is what has no dims, unless it is named in full.
        activations: ordered map from a glob pattern of module names to the spec that the module's
            output is resharded to, or to a `PrepareModuleInput` or `PrepareModuleOutput`. If one
            pattern matches modules that contain each other, it applies to the outermost.
        src_data_rank: the rank whose values count (the mesh's first, if the mesh does not hold it).
            None takes each rank's own block and communicates nothing.
        gather: which parameters are gathered while their module runs: ordered map from a glob
            pattern of module names to a `weft.nn.Gather`, True or False. None: those that are
            sharded over an axis that shards the batch, in groups of the outermost members of the
            module's lists, and of the rest; False: none.

    Returns:
        `module`.

    Raises:
        LayoutError: a pattern that matches nothing; tied weights with two layouts.
        ModuleError: a module that is already distributed, whose parameters an optimizer holds, or
            whose parameters have no shape yet; a function with a wrong number of arguments.
        ShardTypeError: not a module, not a function, or not a map of patterns.
        WeftError: a spec that does not fit its tensor; a note names the tensor. All of these are
            raised before anything is replaced or sent (except by `partition_fn`).

    The signature is that of torch.distributed.tensor.distribute_module.
    """
    _refuse_others(module, partition_fn=partition_fn, input_fn=input_fn, output_fn=output_fn)
    _refuse_twice(module)
    mesh = as_bound_mesh(device_mesh, "distribute_module(device_mesh)")
    num_args = [_num_args("input_fn", input_fn), _num_args("output_fn", output_fn)]
    if partition_fn is not None:
        _partition(module, partition_fn, mesh)
    tensors = named_tensors(module)
    refuse_lazy("distribute_module(module)", tensors)
    _refuse_sparse([named for named in tensors if not isinstance(named.tensor, ShardTensor)])
    shardings = as_patterns("shardings", shardings)
    activations = as_patterns("activations", activations)
    refuse_idle(module, tensors, shardings, activations)
    check_gather(module, gather)
    matches = layouts_of(tensors, shardings, mesh)
    pins = pins_of(module, shardings, activations, mesh)
    _refuse_other_layouts(matches, mesh)
    refuse_holders(named for named in tensors if not isinstance(named.tensor, ShardTensor))
    make = distributed_alike("distribute_module(module)", _plain(matches), mesh, src_data_rank)
    new = {id(match.named.tensor): _replace(match.named, make) for match in matches}
    replace_references(module, new)
    for pinned in pins:
        pinned.pin.register(pinned.module, mesh, pinned.path, pinned.pattern)
    for part, path, brought in brought_of(module, shardings, mesh.abstract):
        part.register_forward_pre_hook(BringHook(brought, mesh.abstract, path))
    if input_fn is not None:
        module.register_forward_pre_hook(InputFn(input_fn, mesh, num_args[0]))
    if output_fn is not None:
        module.register_forward_hook(OutputFn(output_fn, mesh, num_args[1]))
    gather_in_groups(module, gather)
    setattr(module, MATCHED, {
        name: match.pattern for match in matches if match.pattern for name in match.named.names
    })
    setattr(module, _DONE, True)
    return module


def _refuse_others(module: Any, **functions: Any) -> None:
    """Raises ShardTypeError if an argument is not a module, or not a function."""
    meant = functions["partition_fn"]
    if isinstance(meant, Mapping):
        raise ShardTypeError(
            "distribute_module(partition_fn)", f"it is a map of {len(meant)} patterns",
            "the third argument is a function, as in torch; patterns of names are given as "
            "shardings=", [repr(name) for name in meant],
            f"distribute_module(module, mesh, shardings={meant!r})")
    if isinstance(meant, Style | PrepareModuleInput | PrepareModuleOutput):
        raise ShardTypeError(
            "distribute_module(partition_fn)", "it is a style",
            "the third argument is a function, as in torch; a style stands in the table of "
            "shardings, where the name of the module itself is empty", [repr(meant)],
            f'distribute_module(module, mesh, shardings={{"": {meant!r}}})')
    wrong = [] if isinstance(module, nn.Module) else [f"module: {type(module).__name__}"]
    wrong += [f"{name}: {type(one).__name__}" for name, one in functions.items()
              if one is not None and not callable(one)]
    if wrong:
        raise ShardTypeError(
            "distribute_module(module)", f"{len(wrong)} of {1 + len(functions)} arguments "
            "are of other types",
            "a torch.nn.Module is distributed; partition_fn, input_fn and output_fn are "
            "functions", wrong,
            "distribute_tensor(tensor, mesh, P(...)), where a tensor is meant")


def _refuse_twice(module: nn.Module) -> None:
    if getattr(module, _DONE, False):
        raise ModuleError(
            "distribute_module(module)", f"this {type(module).__name__} has been "
            "distributed already", "a module is distributed once; its hooks would be "
            "registered again", [type(module).__name__],
            "parameter.data = parameter.redistribute(placements=...) for another layout; "
            "distribute_module(module.new_part, mesh) for a part that was added\n"
            "two kinds of parallelism are one table, whose entries name both axes: "
            'shardings={"0": weft.nn.ColwiseParallel(("tp", "dp")), "*": P("dp")}')


def _num_args(name: str, fn: Callable[..., Any] | None) -> int:
    """The number of arguments of a user's function: 3, or 2 as torch once had it."""
    if fn is None:
        return 0
    count = len(inspect.signature(fn).parameters)
    what = "inputs" if name == "input_fn" else "outputs"
    if count == 2:
        warnings.warn(
            f"{name} of two arguments ({what}, device_mesh) is deprecated, as in torch: take "
            f"three, (module, {what}, device_mesh)", FutureWarning, stacklevel=3,
        )
    elif count != 3:
        raise ModuleError(
            f"distribute_module({name}=)", f"{getattr(fn, '__name__', fn)} takes {count} "
            "arguments, not 3", f"it is called with the module, its {what} and the mesh",
            [str(inspect.signature(fn))], f"def {name}(module, {what}, mesh): ...")
    return count


def _partition(module: nn.Module, partition_fn: PartitionFn, mesh: BoundMesh) -> None:
    """Call it for every submodule, and tie weights again that it has distributed separately; their
    layouts have to be equal."""
    before = [named for named in named_tensors(module) if len(named.places) > 1]
    for name, submodule in module.named_modules():
        partition_fn(name, submodule, mesh)
    for named in before:
        now = {place[:2]: tensor for place, tensor in places_of(module)}
        held = {place: now.get(place[:2]) for place in named.places}
        found = {id(one): one for one in held.values() if isinstance(one, ShardTensor)}
        if not found:
            continue
        if len({one.sharding for one in found.values()}) > 1:
            raise ModuleError(
                "distribute_module(partition_fn)", f"one tensor with {len(held)} names "
                "(tied weights) became several, in different layouts",
                "tied weights are one tensor, which has one layout",
                [f"{place.name}: {getattr(one, 'sharding', 'plain')}"
                 for place, one in held.items()],
                "if isinstance(module.weight, weft.ShardTensor): return")
        first = next(iter(found.values()))
        for place, one in held.items():
            if one is named.tensor or id(one) in found:
                set_where(place, first)


def _refuse_other_layouts(matches: list[Matched], mesh: BoundMesh) -> None:
    for match in matches:
        if match.pattern is not None and isinstance(match.named.tensor, ShardTensor):
            try:
                distribute_tensor(match.named.tensor, mesh, match.layout)
            except WeftError as error:
                error.add_note(f"  in distribute_module, for {', '.join(match.named.names)}")
                raise


def _refuse_sparse(tensors: Sequence[Named]) -> None:
    sparse = [named for named in tensors if named.tensor.layout is not torch.strided]
    if sparse:
        raise ModuleError(
            "distribute_module(module)", f"{len(sparse)} of {len(tensors)} parameters and "
            "buffers are sparse", "a ShardTensor's blocks are dense",
            [f"{named.name}: {named.tensor.layout}" for named in sparse],
            f"module.{sparse[0].name} = module.{sparse[0].name}.to_dense()")


def _plain(matches: Sequence[Matched]) -> dict[str, tuple[torch.Tensor, Layout]]:
    """The tensors that are not distributed yet, gradients included, by name."""
    found: dict[str, tuple[torch.Tensor, Layout]] = {}
    for match in matches:
        tensor, name = match.named.tensor, match.named.name
        if not isinstance(tensor, ShardTensor):
            found[name] = tensor.detach(), match.layout
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                found[f"{name}.grad"] = tensor.grad.detach(), match.layout
    return found


def _replace(named: Named, make: Callable[[str, torch.Tensor], ShardTensor]) -> torch.Tensor:
    """Replace a tensor by a ShardTensor; returns the tensor that is there now."""
    old = named.tensor
    if isinstance(old, ShardTensor):
        return old  # an optimizer may hold it
    new: torch.Tensor = make(named.name, old.detach())
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        replaced(named.name, old)
        if old.grad is not None:
            new.grad = make(f"{named.name}.grad", old.grad.detach())
    take_along(old, new)
    put(named, new)
    return new
