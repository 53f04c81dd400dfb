"""`python -m tests.long_runs`: thousands of steps of each kind of parallelism, and what grows.

After some steps that fill caches, nothing may be more at the end than in between: objects of
Python, tensors and their bytes, entries of caches, blocks of its allocator. Layouts of experts
depend on the data, so their caches fill until they are full; of these only tensors are compared,
and the caches with their bounds.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft import P

__all__ = ["KINDS", "Growth", "grown"]

WIDTH = 4


@dataclass
class Growth:
    """What there was at each mark, by name; `caches` are entries and bounds at the end."""

    marks: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    caches: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def check(self, kind: str) -> None:
        """Raise where something has grown between the first mark and the last."""
        names = [*self.marks] if kind not in _BY_DATA else ["tensors", "bytes"]
        slack = {"objects": 60, "blocks": 600}  # of the interpreter's own, not of any step
        wrong = {
            name: self.marks[name] for name in names
            if self.marks[name][-1] - self.marks[name][0] > slack.get(name, 0)
        }
        assert not wrong, f"{kind}: {wrong} grow with the steps"
        full = {name: it for name, it in self.caches.items() if it[0] > it[1]}
        assert not full, f"{kind}: {full} are beyond their bounds"


class Net(nn.Module):
    """Two blocks with a table of tokens, which is small so that steps are fast."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(
            Experts() if experts else nn.Sequential(
                nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)) for _ in range(2))

    def forward(self, ids: Any) -> Any:
        x = self.token(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


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


ROWS = P("x")


@dataclass(frozen=True)
class Kind:
    """A table, the spec of the batch, and how steps go."""

    table: dict[str, Any] = field(default_factory=dict[str, Any])
    batch: P = ROWS
    gather: Any = None
    optimizer: Callable[[Any], Any] = torch.optim.AdamW
    accumulate: bool = False
    experts: bool = False


def _muon(params: Any) -> Any:
    return torch.optim.Muon([one for one in params if one.dim() == 2])


KINDS: dict[str, Kind] = {
    "data parallel": Kind(),
    "fully sharded": Kind({"*": P("x")}),
    "tensor parallel": Kind(
        {"*.0.weight": P("x"), "*.0.bias": P("x"), "*.2.weight": P(None, "x"), "token*": P("x")},
        P()),
    "sequences": Kind({"*": P("x")}, P(None, "x"), {"layers.*": weft.nn.Gather(axes="x")}),
    "accumulation": Kind({"*": P("x")}, accumulate=True),
    "muon": Kind({"*": P("x")}, optimizer=_muon),
    "experts": Kind({"*up": P("x"), "*down": P("x")}, gather=False, experts=True),
}
_BY_DATA = ("experts",)


def grown(kind: str, num_steps: int, num_marks: int = 3, num_ranks: int = 2) -> Growth:
    """Train for so many steps on simulated ranks; a quarter of them comes before the first mark."""
    how = KINDS[kind]
    first = num_steps // 4
    marks = {first + (num_steps - first) * at // (num_marks - 1) for at in range(num_marks)}
    found = Growth()

    def on_rank(mesh: Any) -> None:
        torch.manual_seed(0)
        model = weft.distribute_module(
            Net(how.experts), mesh, shardings=how.table, gather=how.gather)
        optimizer = how.optimizer(model.parameters())
        draw = torch.Generator().manual_seed(1)
        comm = mesh.comm((0,))
        wait = torch.zeros(num_ranks)
        for step in range(num_steps + 1):
            if step in marks:
                comm.all_reduce(wait, "sum")
                if mesh.rank == 0:
                    if not found.marks:
                        _measure(Growth())  # what the first look itself leaves behind
                    _measure(found)
                comm.all_reduce(wait, "sum")
            ids = torch.randint(8, (4, 4), generator=draw)
            _step(how, model, optimizer, weft.distribute_tensor(ids, mesh, how.batch))

    weft.testing.run(on_rank, mesh={"x": num_ranks})
    return found


def _step(how: Kind, model: Any, optimizer: Any, ids: Tensor) -> None:
    optimizer.zero_grad()
    if how.accumulate:
        with weft.nn.accumulate(model):
            for _ in range(2):
                _loss(model, ids).backward()
    else:
        _loss(model, ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _loss(model: Any, ids: Any) -> Any:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _measure(into: Growth) -> None:
    gc.collect()
    every = gc.get_objects()
    tensors = [one for one in every
               if isinstance(one, Tensor) and type(one) is not weft.ShardTensor]
    info = weft.cache_info()
    now = {
        "objects": len(every), "tensors": len(tensors),
        "bytes": sum(one.untyped_storage().nbytes() for one in tensors
                     if one.device.type == "cpu"),
        "blocks": sys.getallocatedblocks(),
        **{f"cache of {name}": it.currsize for name, it in info.items()},
    }
    del every, tensors
    for name, value in now.items():
        into.marks.setdefault(name, []).append(value)
    into.caches = {name: (it.currsize, it.maxsize * 2) for name, it in info.items()}


@click.command()
@click.option("--steps", default=10_000, show_default=True)
@click.option("--only", "kinds", multiple=True, type=click.Choice([*KINDS]), default=[*KINDS])
def main(steps: int, kinds: tuple[str, ...]) -> None:
    """Print what there is at each mark; fails where something grows."""
    warnings.simplefilter("ignore")
    failed = False
    for kind in kinds:
        start = time.monotonic()
        found = grown(kind, steps, 4)
        click.echo(f"{kind}: {steps} steps in {time.monotonic() - start:.0f} s")
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
