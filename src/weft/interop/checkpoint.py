"""torch.distributed.checkpoint: every rank writes its block once, and reads what its box needs.

torch's planners ask a tensor three things, which DTensor implements itself: what this rank
writes, which boxes it reads, and the memory that a box is read into. With these, files are
resharded when loaded, whatever meshes and layouts they were written from, DTensor's included.

If replicas hold a block, all of them offer it, and torch lets one write. A rank without elements
offers nothing: its box begins where the next one does, and torch distinguishes blocks by where they
begin. The first rank of the mesh writes a tensor that has no elements at all.

`async_save` first copies the blocks into memory of its own, and communicates over a group of its
own. `StateDictOptions` ask for full tensors or for tensors on the CPU. These functions of torch
recognize DTensors by their class; this file teaches them ShardTensors.

torch takes each simulated rank for a program of one process, which would overwrite the files of the
others. There the first rank writes whole tensors. Any rank reads what it needs, as elsewhere.
"""

from __future__ import annotations

import pkgutil
import warnings
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import this_world
from weft.comm.alone import is_alone
from weft.comm.collective_call import timeout
from weft.comm.simulated import current_simulated_world
from weft.core import Mesh, P
from weft.core.layout import Box
from weft.errors import UnsupportedOpError
from weft.tensor import ShardTensor
from weft.tensor.placing.construct import deepcopy
from weft.tensor.placing.freed import local_data
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.trace.trees import flatten, map_tensors

__all__ = ["async_save", "boxes_of", "install", "iterate", "save", "stage"]

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"


def install() -> None:
    """Give ShardTensor the three methods."""
    methods: dict[str, Any] = {
        "__create_write_items__": _write_items, "__create_chunk_list__": _chunks,
        "__get_tensor_shard__": _memory,
    }
    for name, method in methods.items():
        setattr(ShardTensor, name, method)


def _write_items(tensor: ShardTensor, fqn: str, _: Any) -> list[Any]:
    if _is_one_of_several():
        raise UnsupportedOpError(
            "torch.distributed.checkpoint", f"a simulated rank writes its block of {fqn!r}, "
            f"{tensor.sharding}, as if it were the only process", "simulated ranks save by "
            "torch.distributed.checkpoint.save or async_save", [str(tensor.sharding)],
            "torch.distributed.checkpoint.save(state, checkpoint_id=folder) on all ranks\n"
            "over processes other ways of saving work, too: weft run -n 2 script.py")
    metadata, planner = pkgutil.resolve_name(_METADATA), pkgutil.resolve_name(_PLANNER)
    properties = metadata.TensorProperties.create_from_tensor(_memory(tensor))
    properties.requires_grad = tensor.requires_grad
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(fqn, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, torch.Size(tensor.shape)),
        )
        for chunk in _chunks(tensor)
    ]


def _chunks(tensor: ShardTensor) -> list[Any]:
    chunk = pkgutil.resolve_name(_METADATA).ChunkStorageMetadata
    return [
        chunk(torch.Size(start for start, _ in box), torch.Size(end - start for start, end in box))
        for box in boxes_of(tensor)
    ]


def boxes_of(tensor: ShardTensor, call: str = "torch.distributed.checkpoint") -> list[Box]:
    """The box of this rank, if it takes part. UnsupportedOpError where the tensor is partial."""
    layout, mesh = tensor.sharding, tensor.device_mesh
    if layout.is_partial:
        raise UnsupportedOpError(
            call, f"a tensor is {layout}, of which each rank holds a partial value",
            "a checkpoint holds values", [str(layout)],
            "x.redistribute(placements=P()), or another spec without partial axes")
    if mesh.here is None:
        return []
    if not tensor.numel():
        first = all(place == 0 for place in mesh.here)
        return [tuple([(0, length) for length in tensor.shape])] if first else []
    box = layout.box_at(mesh.here)
    return [box] if all(start < stop for start, stop in box) else []


def _memory(tensor: ShardTensor, index: Any = None) -> torch.Tensor:
    """The memory to write from and read into: the block itself, or for an empty tensor nothing."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.detach().to_local()


class _OwnGroup:
    """The group of checkpoints that are written while training goes on."""

    of: Any = None
    """The default group that it belongs to: that of another start of torch.distributed has its
    own."""
    group: Any = None

    def get(self) -> Any:
        """The group; the first call is a collective."""
        if self.of is not dist.group.WORLD:
            self.of = dist.group.WORLD
            self.group = dist.new_group(backend="gloo", timeout=timeout())
        return self.group


_own_group = _OwnGroup()


def save(original: Any, state_dict: Any, **kwargs: Any) -> Any:
    """`save`; a program that runs alone saves nothing."""
    if is_alone():
        return None
    if _is_one_of_several():
        return _first_writes(original, state_dict, kwargs)
    return original(state_dict, **kwargs)


def _is_one_of_several() -> bool:
    """Whether this is one of several simulated ranks."""
    return current_simulated_world() is not None and this_world().size > 1


def _first_writes(save: Any, state_dict: Any, kwargs: Any) -> Any:
    """The result of the first simulated rank, which writes whole tensors; all wait for it."""
    world = this_world()

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not ShardTensor:
            return tensor
        boxes_of(tensor)  # raises where it is partial
        first = world.bind(Mesh((1,)), tensor.device_mesh.device_type)
        return tensor.detach().redistribute(first, P()).to_local()

    state = {name: map_tensors(whole, one.state_dict() if hasattr(one, "state_dict") else one)
             for name, one in state_dict.items()}
    made = None
    if world.rank == 0:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            made = save(state, **kwargs)
        waiting = getattr(made, "upload_completion", made)
        made = waiting.result() if isinstance(waiting, Future) else made
    return world.bind(Mesh((world.size,)), "cpu").comm((0,)).exchange(made)[0]


def async_save(original: Any, state_dict: Any, **kwargs: Any) -> Any:
    """`async_save` in a thread, on a group of its own. Otherwise its collectives would come between
    those of the training, at another place on each rank. A program that runs alone saves
    nothing."""
    if is_alone():
        return None
    if _is_one_of_several():
        done: Future[Any] = Future()
        done.set_result(_first_writes(original, state_dict, kwargs))
        return done
    in_process = getattr(kwargs.get("async_checkpointer_type"), "value", None) == "process"
    asks = kwargs.get("process_group") is None and dist.is_initialized() and not in_process
    stateful = any(hasattr(one, "state_dict") for one in state_dict.values())
    if asks and (stateful or any(type(one) is ShardTensor for one in flatten(state_dict))):
        kwargs["process_group"] = _own_group.get()
    return original(state_dict, **kwargs)


def stage(original: Any, stager: Any, tensor: Any, memo: dict[int, Any], *args: Any,
          **kwargs: Any) -> Any:
    """A copy of a tensor that training does not change, for `async_save`: here of the block."""
    if type(tensor) is not ShardTensor:
        return original(stager, tensor, memo, *args, **kwargs)
    local = local_data(tensor).detach()
    meta = tensor._meta
    copied = local_to_sharded(
        original(stager, local, memo, *args, **kwargs), meta.mesh, meta.layout, meta.strides
    )
    memo[id(memo)] = [*memo.get(id(memo), []), local]  # an id is one object's while that lives
    memo[id(tensor)] = copied
    return copied


_OF_DTENSORS: dict[str, Any] = {
    "_gather_state_dict": lambda tensor, *_: tensor.full_tensor(),
    "_create_cpu_state_dict": lambda tensor, *_: deepcopy(tensor, {}).cpu(),
}
"""What torch's functions over state dicts do to a DTensor, by name; others leave it as it is."""


def iterate(
    original: Any, value: Any, sharded_tensor_func: Any, dtensor_func: Any, tensor_func: Any,
    **kwargs: Any,
) -> Any:
    """`_iterate_state_dict`: a ShardTensor is treated as a DTensor is."""
    if type(value) is ShardTensor:
        caller = dtensor_func.__qualname__.partition(".")[0]
        tensor_func = _OF_DTENSORS.get(caller, lambda tensor, *_: tensor)
    return original(value, sharded_tensor_func, dtensor_func, tensor_func, **kwargs)
