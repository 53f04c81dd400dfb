"""torch's wrappers of modules, and its functions that send tensors: they refuse ShardTensors,
because weft does their work.

`fully_shard` and FSDP shard each rank's own parameters, and DDP sums its own gradients. For a
module that is already on a mesh, the result would be wrong, or the backend would abort. DDP over
ranks of other meshes works (`replicas`), and so do stages of a pipeline. Functions that send Python
values (`all_gather_object` and its kin) stay: they pickle a ShardTensor as a rank's block.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

from weft.core import P
from weft.errors import ModuleError
from weft.interop.zero_bubble import detachable
from weft.tensor import ShardTensor
from weft.tensor.torch_collectives import function_of, is_global, refusal, refusal_of_plain
from weft.tensor.trace.trees import flatten

__all__ = ["make_stage", "refuse_inputs", "refuse_to_send", "refuse_wrapped", "refusing"]

_LIBRARIES = (
    "where a library wraps it (accelerate, Trainer of transformers): "
    "with weft.nn.as_one_process(): ... around all that the library does"
)


def refusing(call: str, place: int) -> Callable[..., Any]:
    """A wrapper that checks its module, the positional argument of this number."""
    def look(original: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_wrapped(call, args[place] if len(args) > place else kwargs.get("module"))
        return original(*args, **kwargs)

    return look


def refuse_to_send(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `original`, a function of torch.distributed; UnsupportedOpError if a tensor holds a
    global value."""
    tensors = flatten((args, kwargs))
    found = [tensor.sharding for tensor in tensors if type(tensor) is ShardTensor]
    if found:
        raise refusal(original, found)
    plain = list(filter(is_global, tensors)) or (tensors if function_of() is not None else [])
    if plain:
        raise refusal_of_plain(original, plain[0])
    return original(*args, **kwargs)


def make_stage(original: Any, stage: Any, submodule: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The `__init__` of a pipeline's stage: the output of a stage on a mesh is whole on each of its
    ranks, to be sent to the next one."""
    original(stage, submodule, *args, **kwargs)
    if any(type(one) is ShardTensor for one in submodule.parameters()):
        submodule.register_forward_hook(lambda _, inputs, out: _whole(out))


def _whole(out: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return type(out)(map(_whole, out))
    return detachable(out.full_tensor()) if type(out) is ShardTensor else out


def refuse_inputs(original: Any, wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    """The forward of DistributedDataParallel checks its inputs: around a plain module it would also
    sum gradients of the global loss again."""
    given = [one for one in flatten((inputs, kwargs)) if type(one) is ShardTensor]
    if given:
        raise ModuleError(
            "DistributedDataParallel.forward(...)", f"{len(given)} of its inputs are "
            "ShardTensors", "weft sums the gradients of replicated parameters over the "
            "mesh, plain ones too", [str(one.sharding) for one in given],
            f"call the module itself, without the wrapper\n{_LIBRARIES}")
    return original(wrapper, *inputs, **kwargs)


def refuse_wrapped(call: str, given: Any) -> None:
    """Raise ModuleError if a module for a wrapper holds ShardTensors."""
    modules = [
        one for one in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(one, nn.Module)
    ]
    tensors = [
        named for module in modules
        for named in chain(module.named_parameters(), module.named_buffers())
    ]
    held = [f"{name}: {one.sharding}" for name, one in tensors if isinstance(one, ShardTensor)]
    if held:
        raise ModuleError(
            call, f"{len(held)} of {len(tensors)} parameters and buffers are ShardTensors",
            "a module on a mesh needs no wrapper: weft sums the gradients of replicated "
            "parameters over the mesh, and gathers those that are sharded for their use",
            held[:8] + [f"and {len(held) - 8} more"] * (len(held) > 8),
            "leave the wrapper out. With the batch sharded over dp, "
            'weft.distribute_module(module, mesh, shardings={"*": P("dp")}) does what '
            f"fully_shard does, and without shardings= what DDP does\n{_table(tensors)}"
            f"{_LIBRARIES}")


def _table(tensors: list[tuple[str, Any]]) -> str:
    """The advice for a module on other axes than dp that has dp beside them; else ""."""
    laid = {name: one for name, one in tensors if type(one) is ShardTensor and one.dim()}
    axes = {axis: size for one in laid.values() for axis, size in zip(
        one.device_mesh.axis_names, one.device_mesh.axis_sizes)}
    is_sharded = any(one.sharding.sharded_axes for one in laid.values())
    is_part = any(one.device_mesh.size() < one.device_mesh.world.size for one in laid.values())
    if "dp" in axes or not (is_sharded or is_part):
        return ""
    table = ", ".join(f'"{name}": {_spec(one)}' for name, one in list(laid.items())[:4])
    table = f"shardings={{{table}{', ...' * (len(laid) > 4)}}}, " if is_sharded else ""
    return (f'beside {", ".join(map(repr, axes))}: weft.init_mesh({({"dp": 2} | axes)!r}), '
            f"{table}and the batch P(\"dp\")\n"
            'DistributedDataParallel takes process_group=mesh.get_group("dp") and the module on '
            "the rest of the mesh\n")


def _spec(tensor: ShardTensor) -> P:
    """The spec of a tensor, with dp as the minor axis of dim 0."""
    names = tensor.device_mesh.axis_names
    first, *rest = [tuple(names[axis] for axis in axes) for axes in tensor.sharding.dims]
    return P((*first, "dp"), *rest)
