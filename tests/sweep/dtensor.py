"""The same samples on torch's DTensor, its ranks threads of one process."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.cases import seed_of
from tests.harness import local_part
from tests.oracle import same
from tests.sweep.judge import Dense, Verdict, backward, leaves, short
from tests.sweep.samples import Sample
from tests.sweep.ways import laid_out
from weft.core import Layout

__all__ = ["judge"]

_STILL_SECONDS, _MOST_SECONDS = 3.0, 40.0
"""A call hangs whose process has computed nothing for the one, or has not ended in the other."""

logging.getLogger("torch").setLevel(logging.ERROR)  # it warns of costs, rank by rank

# What it keeps of a redistribution is that of one rank; in threads all would take it for theirs.
_redistribute._gen_transform_infos = _redistribute._gen_transform_infos.__wrapped__

_OF_THREADS = ("narrow unexpectedly changed concrete size", "match the broadcast shape")
"""What goes wrong where ranks are threads and blocks are uneven: one takes another's place in the
mesh. Over processes such calls are right, so they say nothing of DTensor."""

_CLEAR = ("sharding strategy", "got mixed torch.Tensor and", "not supported", "not implemented")
"""Words of errors that say what DTensor does not do."""


def judge(sample: Sample, expected: Dense, way: str, what: str) -> Verdict | None:
    """None where the way does not apply, or DTensor has no such layout.

    What fails is tried once more: its ranks are threads here, which share what DTensor caches.
    """
    first = _judge(sample, expected, way, what)
    if first is None or first.kind not in ("unclear", "wrong"):
        return first
    return _judge(sample, expected, way, what)


def _judge(sample: Sample, expected: Dense, way: str, what: str) -> Verdict | None:
    placed = laid_out(way, sample.tensors, sample.roles)
    if placed is None:
        return None
    abstract, layouts = placed
    placements = [None if layout is None else _placements(layout) for layout in layouts]
    if any(found is False for found in placements):
        return None
    num, shape, names = abstract.size(), abstract.axis_sizes, tuple(map(str, abstract.axis_names))

    def on_rank(rank: int) -> tuple[list[Any], list[Any]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        operands = []
        for place, (tensor, layout) in enumerate(zip(sample.tensors, layouts)):
            if layout is None:
                operands.append(tensor.clone())
                continue
            local = local_part(layout, tensor, abstract.coordinate(rank), seed_of(what, place))
            operands.append(DTensor.from_local(
                local.clone(), mesh, placements[place], run_check=False,
                shape=tensor.shape, stride=tensor.stride(),
            ))
        for operand, wanted in zip(operands, sample.wants_grad):
            operand.requires_grad_(wanted)
        results = leaves(sample.fn(operands))
        backward(results, lambda one, steps: _like(one, steps, mesh))
        return [_whole(one) for one in results], [_whole(one.grad) for one in operands]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcomes = _run(on_rank, num)
        except TimeoutError:
            return Verdict("hang")
        except Exception as error:
            if any(words in str(error) for words in _OF_THREADS):
                return None
            clear = any(words in str(error) for words in _CLEAR)
            return Verdict("refused" if clear else "unclear", short(error))
        try:
            for results, gradients in outcomes:
                _verify(expected, results, gradients, what, num)
        except AssertionError as error:
            return Verdict("wrong", short(error))
    return Verdict("right")


def _placements(layout: Layout) -> list[Placement] | Any:
    """DTensor's placements; False where a layout has cuts or an order that they do not know."""
    if any(layout.cuts) or any(list(axes) != sorted(axes) for axes in layout.dims):
        return False
    out: list[Placement] = [Replicate()] * layout.mesh.ndim
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            out[axis] = Shard(dim)
    for axis, kind in enumerate(layout.partial):
        if kind is not None:
            out[axis] = Partial(kind)
    return out


def _like(one: Tensor, steps: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(one, DTensor):
        return steps
    return DTensor.from_local(steps, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(one: Any) -> Any:
    if isinstance(one, DTensor):
        full = one.full_tensor().detach().clone()
        assert tuple(full.shape) == tuple(one.shape), f"{one.shape} holds {full.shape}"
        return full
    return one.detach().clone() if isinstance(one, Tensor) else one


def _verify(
    expected: Dense, results: list[Any], gradients: list[Any], what: str, num: int
) -> None:
    assert len(results) == len(expected.results), f"{what}: {len(results)} results"
    pairs = [*zip(results, expected.results), *zip(gradients, expected.gradients)]
    close = [one for part in expected.close(num) for one in part]
    for place, (mine, due) in enumerate(pairs):
        where = f"{what}: {place}"
        if due is None or mine is None:
            zero = mine if due is None else due
            assert zero is None or not (isinstance(zero, Tensor) and zero.any()), where
        elif isinstance(due, Tensor):
            assert isinstance(mine, Tensor), f"{where}: {mine}"
            same(mine, due, where, close[place])
        elif isinstance(due, (bool, int, float, complex)):
            same(torch.tensor(mine), torch.tensor(due), where)
        else:
            assert mine == due, where


def _join(threads: list[threading.Thread]) -> None:
    """Wait until all have ended, or none goes on."""
    start = moved = time.monotonic()
    spent = time.process_time()
    while any(thread.is_alive() for thread in threads):
        now = time.monotonic()
        if time.process_time() - spent > 0.02:
            spent, moved = time.process_time(), now
        if now - moved > _STILL_SECONDS or now - start > _MOST_SECONDS:
            return
        for thread in threads:
            thread.join(0.1)


def _run(program: Any, num: int) -> list[Any]:
    """`program(rank)` on threads that are ranks of a world.

    Raises:
        TimeoutError: some rank waits for others. What the first rank raised that failed.
    """
    outcomes: list[Any] = [None] * num
    errors: list[BaseException] = []
    world, store = _install_threaded_pg(), dist.HashStore()

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=num, store=store)
        try:
            with implicit_replication():
                outcomes[rank] = program(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if world == dist.distributed_c10d._world:
                dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            threads = [threading.Thread(target=work, args=(rank,), daemon=True)
                       for rank in range(num)]
            for thread in threads:
                thread.start()
            _join(threads)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError
    if errors:
        raise errors[0]
    return outcomes
