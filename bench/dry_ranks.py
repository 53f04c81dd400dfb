"""One of the ranks of `weft bench dry`; and the steps, which the dry run takes as they are.

Started as `weft run -n 2 dry_ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object per
step, and one of the rates. Turns alternate between steps and rates, so that other processes disturb
all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from bench.by_turns import as_rank
from bench.training.models import MODELS, Shape
from bench.training.systems import table_of
from weft import P
from weft.dry.compute import rates_by

__all__ = ["AXES", "PROGRAMS", "program", "step_of"]

AXES = {"dp": "batch sharded", "tp": "weights sharded"}
PROGRAMS = [(name, axis) for name in ("MLP", "Llama") for axis in AXES]
_LAYERS, _WIDTH = 2, 512
_SIZES = (1 << 14, 1 << 18, 1 << 21)


def step_of(mesh: Any, name: str, axis: str) -> Callable[[], None]:
    """A training step of a model that is sharded over one axis."""
    torch.manual_seed(0)
    spec = P("dp") if axis == "dp" else P()
    if name == "MLP":
        model: Any = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
        shardings = {"0.*": P("tp"), "2.weight": P(None, "tp")}
        given = torch.randn(1024, _WIDTH)

        loss_of: Any = _mean_square
    else:
        made, shape = MODELS["Llama"], Shape(layers=_LAYERS, width=_WIDTH, length=256)
        model, given, loss_of = made.make(shape), made.given(shape, shape.batch), made.loss
        shardings = table_of("tensor", model)
    weft.distribute_module(model, mesh, shardings=shardings if axis == "tp" else {})
    x = weft.distribute_tensor(given, mesh, spec)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _mean_square(out: Any, _: Any) -> Any:
    return out.square().mean()


def program(mesh: Any, name: str, axis: str) -> None:
    """What the dry run runs."""
    step = step_of(mesh, name, axis)
    for _ in range(2):
        step()


def _measured(asked: Any) -> Iterator[Mapping[str, Any]]:
    meshes = {axis: weft.init_mesh({axis: 2}) for axis in AXES}
    line = meshes["dp"]
    steps = {each: step_of(meshes[each[1]], *each) for each in PROGRAMS}
    for step in steps.values():  # recipes, and memory
        step()
        step()
    seconds: dict[Any, list[float]] = {each: [] for each in steps}
    of_cpu: dict[Any, list[float]] = {each: [] for each in steps}
    links, rates, rates_of_cpu = [], [], []
    for _ in range(asked["rounds"]):
        links.append(weft.measure_links(line, sizes=_SIZES, num_rounds=1))
        rates.append(weft.measure_compute(line, num_rounds=1))
        rates_of_cpu.append(rates_by(time.process_time, line, torch.float32, 1))
        for each, step in steps.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            step()
            of_cpu[each].append(time.process_time() - cpu)
            dist.barrier()
            seconds[each].append(time.perf_counter() - start)
    for (name, axis), turns in seconds.items():
        yield {"model": name, "axis": axis, "seconds": turns, "cpu_seconds": of_cpu[name, axis]}
    yield {"links": _links(links), "compute": _rates(rates), "cpu": _rates(rates_of_cpu)}


def _links(found: list[weft.Links]) -> dict[str, Any]:
    """Of the mean seconds."""
    def link(name: str) -> dict[str, float]:
        return {each: fmean(getattr(getattr(one, name), each) for one in found)
                for each in ("latency_s", "seconds_per_byte")}

    return {"near": link("near"), "far": link("far"), "axes": (),
            "start_s": fmean(one.start_s for one in found),
            "member_s": fmean(one.member_s for one in found)}


def _rates(found: list[weft.Compute]) -> dict[str, float]:
    """Likewise."""
    return {"flops_per_s": 1 / fmean(1 / one.flops_per_s for one in found),
            "bytes_per_s": 1 / fmean(1 / one.bytes_per_s for one in found),
            "call_s": fmean(one.call_s for one in found)}


if __name__ == "__main__":
    as_rank(_measured)
