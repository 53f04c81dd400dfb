"""Functions of torch.nn that replace, load or lay out the memory of parameters.

torch's own `load_state_dict` copies into ShardTensors without resharding them, from full tensors
(each rank takes its block) and from ShardTensors of any layout. weft adds three things. With
`assign=True` a full tensor would replace a distributed one, whole on every rank; tied
weights would come apart; and the error about a wrong shape would mention the shape of the block.
`module.to(x)` takes dtype and device of a ShardTensor, too.

`parameter.data = x` of a ShardTensor x would make it the memory of a plain parameter, but x has
none, and the process would end at the first use. torch asks the parameter's `__torch_function__`
alone.

SyncBatchNorm of a ShardTensor is batch_norm, whose statistics are already those of the global
batch. torch's own would gather them over a process group, as if each rank had a batch of its own,
and only on GPUs. Recurrent networks put their weights into one block of memory on a GPU;
ShardTensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.errors import ModuleError, WeftError
from weft.nn.named import Named, named_tensors, put, replace_references
from weft.tensor import ShardTensor, distribute_tensor

__all__ = [
    "flatten_parameters", "load_state_dict", "parse_to", "set_data", "sync_batch_norm",
    "vector_to_parameters",
]


def load_state_dict(
    original: Any, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True,
    assign: bool = False,
) -> Any:
    """As torch's. With `assign`, a full tensor takes the layout of the tensor that it replaces."""
    held = [named for named in named_tensors(module) if type(named.tensor) is ShardTensor]
    if not held:
        return original(module, state_dict, strict, assign)
    try:
        return original(module, state_dict, strict, assign)
    except WeftError:
        raise
    except RuntimeError as error:
        wrong = _wrong_shapes(held, state_dict)
        if wrong:
            raise _mismatch(module, wrong, len(state_dict)) from error
        raise
    finally:
        if assign:
            _lay_out(module, held)


def _lay_out(module: nn.Module, held: Sequence[Named]) -> None:
    """Give assigned tensors the layouts of those that they replace; tied weights stay tied."""
    replaced: list[tuple[Any, torch.Tensor]] = []
    for named in held:
        old: Any = named.tensor
        found = [place.store.get(place.key) for place in named.places]
        new = next((one for one in reversed(found) if one is not old), old)
        if isinstance(new, torch.Tensor) and type(new) is not ShardTensor:
            if new.shape != old.shape:
                continue
            laid: torch.Tensor = distribute_tensor(
                new.detach(), old.device_mesh, old.sharding, src_data_rank=None)
            is_parameter = isinstance(new, nn.Parameter)
            new = nn.Parameter(laid, new.requires_grad) if is_parameter else laid
        if new is not None:
            put(named, new)
            replaced += [(one, new) for one in found if one is not new]
    replace_references(module, {id(one): new for one, new in replaced})


def _wrong_shapes(
    held: Sequence[Named], state_dict: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """The name, the shape in the state dict, and the tensor in the module."""
    found = []
    for named in held:
        for name in named.names:
            given = state_dict.get(name)
            if isinstance(given, torch.Tensor) and given.shape != named.tensor.shape:
                found.append((name, tuple(given.shape), named.tensor))
    return found


def _mismatch(module: nn.Module, wrong: list[tuple[str, Any, Any]], count: int) -> ModuleError:
    blocks = [name for name, shape, tensor in wrong if shape == tuple(tensor._local.shape)]
    fix = "{name: x.full_tensor() for name, x in module.state_dict().items()} is what is loaded"
    if blocks:
        fix = (f"weft.ShardTensor.from_local(block, mesh, "
               f"module.state_dict()[{blocks[0]!r}].sharding), where a block of a rank was meant")
    return ModuleError(
        "load_state_dict(state_dict)", f"{len(wrong)} of {count} tensors have another "
        f"shape than those of the {type(module).__name__}",
        "a state dict holds full tensors, or ShardTensors, of the global shape",
        [f"{name}: {shape}, not {tuple(tensor.shape)} ({tensor.sharding})"
         for name, shape, tensor in wrong], fix)


def parse_to(original: Any, *args: Any, **kwargs: Any) -> Any:
    """What `Module.to` reads from its arguments. For a ShardTensor torch would see a meta
    tensor."""
    def plain(value: Any) -> Any:
        if type(value) is not ShardTensor:
            return value
        return torch.empty(0, dtype=value.dtype, device=value.device)

    return original(*map(plain, args), **{name: plain(one) for name, one in kwargs.items()})


def vector_to_parameters(
    original: Any, vec: torch.Tensor, parameters: Iterable[torch.Tensor]
) -> None:
    """As torch's; parameters keep their layouts, which a piece of the vector does not have."""
    given = list(parameters)
    if not any(type(one) is ShardTensor for one in (vec, *given)) or not isinstance(
        vec, torch.Tensor
    ):
        return original(vec, given)
    start = 0
    for one in given:
        piece = vec[start : start + one.numel()].view(one.shape)
        start += one.numel()
        if type(piece) is ShardTensor:
            piece = piece.detach()
            piece = piece.redistribute(one.device_mesh, one.sharding) if (
                type(one) is ShardTensor) else piece.full_tensor()
        one.data = piece


def set_data(original: Any, parameter: nn.Parameter, value: Any) -> None:
    if type(value) is ShardTensor:
        raise ModuleError(
            "parameter.data = x", f"x is a ShardTensor {value.sharding}, the parameter a "
            f"plain tensor of shape {tuple(parameter.shape)}",
            "a plain parameter's data is memory of one device", [str(value.sharding)],
            "module.weight = nn.Parameter(x), or weft.distribute_module(module, mesh, "
            'shardings={"weight": ...})')
    original(parameter, value)


def sync_batch_norm(original: Any, module: nn.SyncBatchNorm, input: Any) -> torch.Tensor:
    """The forward of `nn.SyncBatchNorm`."""
    if type(input) is not ShardTensor:
        return original(module, input)
    module._check_non_zero_input_channels(input)
    return _BatchNorm.forward(module, input)


def flatten_parameters(original: Any, module: nn.RNNBase) -> None:
    if not any(type(weight) is ShardTensor for weight in module._flat_weights):
        original(module)
