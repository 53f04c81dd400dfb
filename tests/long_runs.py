"""`python -m tests.long_runs`: thousands of steps of each kind of parallelism, and what grows.

After some steps that fill caches, nothing may be more at the end than in between: objects of
Python, tensors and their bytes, entries of caches, blocks of its allocator, memory of the process.
Every kind is trained with a schedule of learning rates, clipped gradients, batches whose size
changes, and a checkpoint that is written and read now and then. Layouts of experts depend on the
data, so their caches fill until they are full; of these only tensors and memory are compared, and
the caches with their bounds.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from weft import P
from weft.comm import live_meshes

__all__ = ["KINDS", "Growth", "grown"]

WIDTH, VOCABULARY, LENGTH = 4, 8, 4
SIZES = (4, 2, 5, 4, 1, 3)
"""Samples of the batches, in turns."""

_OF_PROCESS = {"objects": 60, "blocks": 600, "RSS": 8 << 20}
"""What is not only of the steps, and how much the interpreter and its allocators take."""


@dataclass
class Growth:
    """What there was at each mark, by name; `caches` are entries and bounds at the end."""

    marks: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    caches: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def check(self, kind: str, alone: bool = True) -> None:
        """Raise where something has grown from the last mark but one to the last. Where other tests
        run in the process (not `alone`), its objects and memory are not only of the steps."""
        names = [name for name in self.marks if alone or name not in _OF_PROCESS]
        wrong = {
            name: self.marks[name] for name in names
            if self.marks[name][-1] - self.marks[name][-2] > _OF_PROCESS.get(name, 0)
        }
        assert not wrong, f"{kind}: {wrong} grow with the steps"
        full = {name: it for name, it in self.caches.items() if it[0] > it[1]}
        assert not full, f"{kind}: {full} are beyond their bounds"


class Net(nn.Module):
    """Two blocks with a table of tokens, which is small so that steps are fast."""

    def __init__(self, how: Kind) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Experts() if how.experts else Block() for _ in range(2))
        self.checkpoints = how.checkpoints

    def forward(self, ids: Any) -> Any:
        x = self.token(ids)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return self.head(x)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 8))
        self.down = nn.Parameter(torch.randn(3, 8, WIDTH))

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, -2)
        weight, expert = self.router(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = expert.bincount(minlength=3).cumsum(0).int()
        hidden = F.gelu(F.grouped_mm(rows[order], self.up, offs=ends))
        made = F.grouped_mm(hidden, self.down, offs=ends)
        return (made[order.argsort()] * weight[:, None]).view_as(x)


class Stages(nn.Module):
    """The first half of the model on one rank, the second on the other."""

    def __init__(self, world: Any) -> None:
        super().__init__()
        self.meshes = [weft.init_mesh({"x": 1}, ranks=(at,)) for at in range(world.size())]
        net = Net(Kind())
        parts = [nn.Sequential(net.token, net.layers[0]), nn.Sequential(net.layers[1], net.head)]
        self.parts = nn.ModuleList(map(weft.distribute_module, parts, self.meshes))

    def forward(self, ids: Any) -> Any:
        x = ids.redistribute(self.meshes[0], P())
        for mesh, part in zip(self.meshes, self.parts):
            x = part(x.redistribute(mesh, P()))
        return x


ROWS = P("x")


@dataclass(frozen=True)
class Kind:
    """A table, the spec of the batch, and how steps go."""

    table: dict[str, Any] = field(default_factory=dict[str, Any])
    batch: P = ROWS
    gather: Any = None
    optimizer: Callable[[Any], Any] = torch.optim.AdamW
    mesh: dict[str, int] = field(default_factory=lambda: {"x": 2})
    accumulate: bool = False
    checkpoints: bool = False
    autocast: bool = False
    experts: bool = False
    stages: bool = False

    @property
    def by_data(self) -> bool:
        """Whether layouts depend on the data."""
        return self.experts


def _muon(params: Any) -> Any:
    return torch.optim.Muon([one for one in params if one.dim() == 2])


_TENSOR = {"*.0.weight": P("x"), "*.0.bias": P("x"), "*.2.weight": P(None, "x"), "token*": P("x")}
_SEQUENCES = {
    "token": weft.nn.VocabParallel("x", output_layouts=weft.Shard(1)),
    "head": weft.nn.VocabParallel("x"),
    "*.0": weft.nn.ColwiseParallel("x"),
    "*.2": weft.nn.RowwiseParallel("x", output_layouts=weft.Shard(1)),
}
_BOTH = {"*.0.weight": P("x", "y"), "*.0.bias": P(("x", "y")), "*.2.weight": P("y", "x"),
         "token*": P(("x", "y")), "*": P("y")}

KINDS: dict[str, Kind] = {
    "data parallel": Kind(),
    "data parallel, autocast": Kind(autocast=True, checkpoints=True),
    "fully sharded": Kind({"*": P("x")}),
    "fully sharded, checkpoints": Kind({"*": P("x")}, checkpoints=True),
    "fully sharded, autocast": Kind({"*": P("x")}, autocast=True, checkpoints=True),
    "accumulation": Kind({"*": P("x")}, accumulate=True),
    "tensor parallel": Kind(_TENSOR, P()),
    "tensor parallel, sequences": Kind(_SEQUENCES, P(), checkpoints=True),
    "sequences": Kind({"*": P("x")}, P(None, "x"), {"layers.*": weft.nn.Gather(axes="x")}),
    "fully sharded x tensor": Kind(_BOTH, P("y"), mesh={"y": 2, "x": 2}),
    "experts": Kind({"*up": P("x"), "*down": P("x")}, gather=False, experts=True),
    "pipeline": Kind(stages=True),
    "muon": Kind({"*": P("x")}, optimizer=_muon),
}


def grown(kind: str, marks: Sequence[int]) -> Growth:
    """Train on simulated ranks, and look after so many steps."""
    how, found = KINDS[kind], Growth()

    def on_rank(mesh: Any) -> None:
        torch.manual_seed(0)
        model = Stages(mesh) if how.stages else weft.distribute_module(
            Net(how), mesh, shardings=how.table, gather=how.gather)
        optimizer = how.optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        draw = torch.Generator().manual_seed(1)
        comm = mesh.comm((0,))
        wait = torch.zeros(mesh.axis_sizes[0])
        for step in range(1, marks[-1] + 1):
            ids = torch.randint(VOCABULARY, (SIZES[step % len(SIZES)], LENGTH), generator=draw)
            _step(how, model, optimizer, weft.distribute_tensor(ids, mesh, how.batch))
            schedule.step()
            if step % max(marks[-1] // 50, 6) == 0:
                _save_and_load(model, optimizer)
            if step in marks:
                comm.all_reduce(wait, "sum")
                if mesh.rank == 0:
                    if not found.marks:
                        _measure(Growth(), how)  # what the first look itself leaves behind
                    _measure(found, how)
                comm.all_reduce(wait, "sum")

    weft.testing.run(on_rank, mesh=how.mesh)
    return found


def _step(how: Kind, model: Any, optimizer: Any, ids: Tensor) -> None:
    optimizer.zero_grad()
    with weft.nn.accumulate(model) if how.accumulate else nullcontext():
        for _ in range(1 + how.accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
                scores = model(ids)
                targets: Any = ids
                if how.stages:
                    targets = targets.redistribute(scores.device_mesh, P())
                loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _save_and_load(model: Any, optimizer: Any) -> None:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _measure(into: Growth, how: Kind) -> None:
    info = weft.cache_info()
    if how.by_data:
        weft.cache_clear()
    gc.collect()
    every = gc.get_objects()
    tensors = [one for one in every if type(one) in (Tensor, nn.Parameter)]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    now = {
        "objects": len(every), "tensors": len(tensors),
        "bytes": sum(one.untyped_storage().nbytes() for one in tensors
                     if one.device.type == "cpu"),
        "blocks": sys.getallocatedblocks(), "RSS": pages * os.sysconf("SC_PAGE_SIZE"),
        **{f"cache of {name}": it.currsize for name, it in info.items() if not how.by_data},
    }
    del every, tensors
    for name, value in now.items():
        into.marks.setdefault(name, []).append(value)
    # Each mesh has tables of its own; where other tests run in the process, meshes of theirs live.
    meshes = len(live_meshes())
    into.caches = {name: (it.currsize, it.maxsize * meshes) for name, it in info.items()}


@click.command()
@click.option("--steps", default=10_000, show_default=True, type=click.IntRange(min=100))
@click.option("--only", "kinds", multiple=True, type=click.Choice([*KINDS]), default=[*KINDS])
def main(steps: int, kinds: tuple[str, ...]) -> None:
    """Print what there is after a hundredth of the steps, a tenth, and all of them; fails where
    something grows."""
    warnings.simplefilter("ignore")
    failed = False
    for kind in kinds:
        start = time.process_time()
        found = grown(kind, (steps // 100, steps // 10, steps))
        click.echo(f"{kind}: {steps} steps in {time.process_time() - start:.0f} s of CPU")
        for name, values in found.marks.items():
            click.echo(f"  {name:24} {' '.join(map(str, values))}")
        try:
            found.check(kind)
        except AssertionError as error:
            failed = True
            click.echo(f"  GROWS: {error}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
