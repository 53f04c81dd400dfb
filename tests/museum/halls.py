"""Runs an exhibit over processes that are forked for it, and judges what its ranks give."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import weft

__all__ = ["NAMES", "RIGHT", "Exhibit", "Put", "judge"]

RIGHT = "right"
NAMES = ("a", "b")

Put = Callable[..., Any]
"""`put(tensor, *dims)`: the tensor, sharded over the k-th mesh axis in dims[k]; None replicates,
"sum" makes a partial value of it."""

Program = Callable[[Put, int], Any]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A program: it puts tensors of `rows` rows on the mesh, and returns what is compared."""

    number: str
    says: str
    program: Program
    mesh: tuple[int, ...]
    rows: tuple[int, ...]


Run = tuple[Exhibit, int]
"""An exhibit and its n."""


def judge(runs: Sequence[Run], system: str, seconds: float = 60.0) -> Iterator[str]:
    """What a system makes of each run: right, or in a few words what is wrong.

    Every rank must give the values, shapes and dtypes that plain tensors give.
    """
    for plain, told in zip(_told(runs, "plain", seconds), _told(runs, system, seconds)):
        assert not isinstance(plain[0], str), plain
        yield _verdict(plain[0], told)


def _verdict(plain: Any, told: list[Any]) -> str:
    """The most telling thing that went wrong on a rank."""
    wrong = [each for each in told if isinstance(each, str)]
    errors = [each for each in wrong if each.startswith("error")]
    return errors[0] if errors else wrong[0] if wrong else _compare(plain, told)


def _told(runs: Sequence[Run], system: str, seconds: float) -> Iterator[list[Any]]:
    """What each rank gives for each run: a list, or the text of what went wrong there.

    Runs on one mesh share their processes until something goes wrong.
    """
    at = 0
    while at < len(runs):
        _, together = next(itertools.groupby(runs[at:], lambda run: run[0].mesh))
        for told in _share(list(together), system, seconds):
            at += 1
            yield told


def _share(runs: list[Run], system: str, seconds: float) -> Iterator[list[Any]]:
    """Results of the first runs, by processes that all of them share."""
    num = math.prod(runs[0][0].mesh) if system == "DTensor" else 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [_start(runs, system, rank, num, folder) for rank in range(num)]
        try:
            for at in range(len(runs)):
                told = _wait([folder / f"{at}.{rank}" for rank in range(num)], children, seconds)
                yield told if num > 1 or isinstance(told[0], str) else told[0]
                wrong = [each for each in told if isinstance(each, str)]
                errors = [each for each in wrong if each.startswith("error")]
                if wrong and len(errors) < len(told):
                    return  # ranks are gone, or at different collectives
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _wait(paths: list[Path], children: list[int], seconds: float) -> list[Any]:
    """What stands in the files, as soon as it does; not much longer once a rank has failed."""
    until = time.monotonic() + seconds
    failed = False
    while not all(path.exists() for path in paths) and time.monotonic() < until:
        if not failed and any(_has_failed(*each) for each in zip(paths, children)):
            failed, until = True, time.monotonic() + 3
        time.sleep(0.005)
    return [pickle.loads(path.read_bytes()) if path.exists() else
            "ends the process" if _is_dead(child) else "hangs"
            for path, child in zip(paths, children)]


def _has_failed(path: Path, child: int) -> bool:
    return (isinstance(pickle.loads(path.read_bytes()), str) if path.exists()
            else _is_dead(child))


def _is_dead(child: int) -> bool:
    """Whether a child has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _start(runs: list[Run], system: str, rank: int, num: int, folder: Path) -> int:
    """A process that does the runs, one after the other, as a rank; its id."""
    child = os.fork()
    if child:
        return child
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)  # a forked process lacks the threads of OpenMP
    if system == "DTensor":
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank,
                                world_size=num)
    for at, (exhibit, rows) in enumerate(runs):
        try:
            told = _SYSTEMS[system](exhibit, rows)
        except Exception as error:
            first = " ".join(str(error).strip().partition("\n")[0].split())
            told = f"error: {type(error).__name__}: {first}"
        half = folder / f"{at}.{rank}.half"
        half.write_bytes(pickle.dumps(told))
        half.rename(folder / f"{at}.{rank}")
    while True:  # until the others have done too: then it is killed
        time.sleep(1)


def _plain(exhibit: Exhibit, rows: int) -> Any:
    torch.manual_seed(0)
    return [_whole(exhibit.program(lambda tensor, *dims: tensor, rows))]


def _on_weft(exhibit: Exhibit, rows: int) -> Any:
    return weft.testing.run(lambda mesh: _on(exhibit, mesh, rows),
                            mesh=dict(zip(NAMES, exhibit.mesh)))


def _on(exhibit: Exhibit, mesh: Any, rows: int) -> Any:
    torch.manual_seed(0)

    def put(tensor: torch.Tensor, *dims: Any) -> Any:
        placements = _placements(dims, mesh.ndim, weft.Shard, weft.Replicate, weft.Partial)
        if "sum" in dims:
            start = [weft.Replicate()] * mesh.ndim
            return weft.distribute_tensor(tensor, mesh, start).redistribute(placements=placements)
        return weft.distribute_tensor(tensor, mesh, placements)

    return _whole(exhibit.program(put, rows))


def _on_dtensor(exhibit: Exhibit, rows: int) -> Any:
    mesh = init_device_mesh("cpu", exhibit.mesh, mesh_dim_names=NAMES[:len(exhibit.mesh)])
    torch.manual_seed(0)

    def put(tensor: torch.Tensor, *dims: Any) -> Any:
        placements = _placements(dims, mesh.ndim, Shard, Replicate, Partial)
        if "sum" in dims:  # the first rank has the value, the others have zeros
            term = tensor if dist.get_rank() == 0 else torch.zeros_like(tensor)
            return DTensor.from_local(term, mesh, placements)
        return distribute_tensor(tensor, mesh, placements)

    with implicit_replication():
        return _whole(exhibit.program(put, rows))


def _placements(dims: Any, num_axes: int, shard: Any, replicate: Any, partial: Any) -> list[Any]:
    dims = (*dims, *[None] * (num_axes - len(dims)))
    return [replicate() if dim is None else partial() if dim == "sum" else shard(dim)
            for dim in dims]


def _whole(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return [_whole(each) for each in result]
    if isinstance(result, (DTensor, weft.ShardTensor)):
        result = result.full_tensor()
    return result.detach().clone() if isinstance(result, torch.Tensor) else result


_SYSTEMS = {"plain": _plain, "weft": _on_weft, "DTensor": _on_dtensor}


def _compare(plain: Any, told: list[Any]) -> str:
    for rank, each in enumerate(told):
        verdict = _differs(plain, each)
        if verdict:
            return f"wrong on rank {rank}: {verdict}"
    return RIGHT


def _differs(plain: Any, told: Any) -> str:
    if isinstance(plain, list):
        return next(filter(None, (_differs(a, b) for a, b in zip(plain, told))), "")
    if not isinstance(plain, torch.Tensor):
        same = plain == told or (isinstance(plain, float) and abs(plain - told) <= 1e-5)
        return "" if same else f"{told} for {plain}"
    if not isinstance(told, torch.Tensor):
        return f"{told} for a tensor"
    if plain.shape != told.shape:
        return f"shape {tuple(told.shape)} for {tuple(plain.shape)}"
    if plain.dtype != told.dtype:
        return f"{told.dtype} for {plain.dtype}"
    if torch.allclose(plain, told, atol=1e-5, equal_nan=True):
        return ""
    a, b = plain.double().flatten(), told.double().flatten()
    at = int((a - b).abs().nan_to_num(float("inf")).argmax())
    return f"{b[at]:.4g} for {a[at]:.4g}"
