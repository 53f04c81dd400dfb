"""DistributedDataParallel around a module on a mesh: each rank of its process group is in another
mesh, on which the same module has the same layouts.

Theory of operation. torch's reducer counts hooks of the engine, but gradients of replicated
parameters are there only once weft has summed them over the mesh, after the engine is done. So the
wrapper is torch's, without its reducer: when a backward is over, the local gradients are averaged
over the process group, a bucket of one dtype at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.comm import joined, parts
from weft.errors import ModuleError
from weft.interop.wrappers import refuse_inputs, refuse_wrapped
from weft.tensor import ShardTensor
from weft.tensor.backward import running
from weft.tensor.placing.freed import local_data
from weft.tensor.trace.trees import flatten

__all__ = ["forward", "make"]

_CALL = "DistributedDataParallel(module)"


def make(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """The `__init__` of DistributedDataParallel.

    Raises:
        ModuleError: the process group has several ranks of the module's mesh, or the module has
            other layouts on other ranks of the group.
    """
    given = inspect.signature(original).bind(wrapper, *args, **kwargs).arguments
    module, group = given["module"], given.get("process_group")
    held = [one for one in _tensors(module) if isinstance(one, ShardTensor)]
    if not held:
        return original(wrapper, *args, **kwargs)
    meshes = {one.device_mesh for one in held}
    if group is None or not dist.is_initialized() or _overlap(group, meshes):
        refuse_wrapped(_CALL, module)
    _check_alike(module, group)
    nn.Module.__init__(wrapper)
    wrapper.module, wrapper.process_group = module, group
    wrapper.broadcast_buffers = given.get("broadcast_buffers", True)
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
    wrapper._weft_nbytes = int((given.get("bucket_cap_mb") or 25) * 2**20)
    _broadcast(_tensors(module), group)
    return None


def forward(original: Any, wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    """The `forward` of DistributedDataParallel."""
    if "_weft_nbytes" not in vars(wrapper):
        return refuse_inputs(original, wrapper, *inputs, **kwargs)
    module, syncs = wrapper.module, wrapper.require_backward_grad_sync
    if wrapper.broadcast_buffers and syncs and torch.is_grad_enabled():
        _broadcast(module.buffers(), wrapper.process_group)
    out = module(*inputs, **kwargs)
    if syncs and torch.is_grad_enabled():
        seen: set[int] = set()

        def starts(grad: Any) -> None:
            backward = running()
            if id(backward) not in seen:  # once for all outputs
                seen.add(id(backward))
                backward.when_over(lambda: _average(wrapper))

        for tensor in flatten(out):
            if tensor.requires_grad:
                tensor.register_hook(starts)
    return out


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def _overlap(group: Any, meshes: set[Any]) -> bool:
    """Whether the group has several ranks of one mesh, or this rank is not in all of them."""
    ranks = set(dist.get_process_group_ranks(group))
    return any(
        mesh.here is None or len(ranks & set(map(mesh.rank_at, range(mesh.size())))) != 1
        for mesh in meshes
    )


def _check_alike(module: nn.Module, group: Any) -> None:
    mine = [
        (name, str(one.sharding), one.device_mesh.here) if isinstance(one, ShardTensor)
        else (name, str(tuple(one.shape)), None)
        for name, one in chain(module.named_parameters(), module.named_buffers())
    ]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group)
    ranks = dist.get_process_group_ranks(group)
    wrong = [
        f"rank {rank}: {next((b for a, b in zip(told[0], one) if a != b), f'{len(one)} tensors')}"
        for rank, one in zip(ranks, told) if one != told[0]
    ]
    if wrong:
        raise ModuleError(
            _CALL, f"{len(wrong)} of {len(told)} ranks of the process group hold other "
            f"blocks than rank {ranks[0]}",
            "the ranks of the group hold the same blocks of copies of one module", wrong,
            'process_group=mesh.get_group("dp"), and the module on mesh["tp"]')


def _block(tensor: torch.Tensor) -> torch.Tensor:
    return local_data(tensor).detach()


def _broadcast(tensors: Any, group: Any) -> None:
    """The first rank's blocks."""
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for one in tensors:
            local = _block(one)
            if local.numel():
                data = local.contiguous()
                dist.broadcast(data, source, group=group)
                local.copy_(data)


def _average(wrapper: Any) -> None:
    """Average the gradient of each parameter that has one on some rank; a missing one counts as
    zero."""
    wanted = [one for one in wrapper.module.parameters() if one.requires_grad]
    if not wanted:
        return
    found = torch.tensor([one.grad is not None for one in wanted], dtype=torch.int32,
                         device=_block(wanted[0]).device)
    dist.all_reduce(found, group=wrapper.process_group)
    used = [one for one, num in zip(wanted, found.tolist()) if num]
    for one in used:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
    grads = [_block(one.grad) for one in used]
    for bucket in _buckets(grads, wrapper._weft_nbytes):
        flat = joined(bucket)
        dist.all_reduce(flat, group=wrapper.process_group)
        flat /= dist.get_world_size(wrapper.process_group)
        torch._foreach_copy_(bucket, list(parts(flat, bucket)))


def _buckets(grads: Sequence[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype, of about this many bytes."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        bucket: list[torch.Tensor] = []
        for grad in grads:
            if grad.dtype == dtype:
                bucket.append(grad)
            if sum(one.nbytes for one in bucket) >= nbytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
