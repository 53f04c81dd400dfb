"""torch.distributed's own collectives over processes: refused on ShardTensors, on every rank, while
those of plain tensors and of Python values go on. Metrics that gather by themselves say so."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.gloo import GlooWorld
from weft import P, UnsupportedOpError

MESH = {"dp": 4}


def logging_loop(mesh: Any) -> tuple[str, float, list[int]]:
    """The idiom of data-parallel programs; then the group is as whole as before."""
    loss = weft.ones(10, mesh=mesh, spec=P("dp")).sum()
    with pytest.raises(UnsupportedOpError) as error:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    mine = torch.tensor(float(mesh.rank))
    dist.all_reduce(mine)
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, mesh.rank)
    assert mine.item() == 6
    return str(error.value), loss.item(), found


def test_a_loss_is_not_reduced_twice(gloo: GlooWorld) -> None:
    for text, loss, found in gloo.run(logging_loop, MESH):
        assert "there is nothing to reduce" in text
        assert (loss, found) == (10, [0, 1, 2, 3])


class Metric:
    """Gathers its states as torchmetrics does, and as it does not with `sync_on_compute=False`."""

    def __init__(self, sync_on_compute: bool = True) -> None:
        self.sync_on_compute = sync_on_compute
        self.total, self.count = torch.zeros(()), torch.zeros(())

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.sum()
        self.count += (values > 0).sum()

    def compute(self) -> tuple[float, float]:
        states = [self.total, self.count]
        if self.sync_on_compute:
            for place, state in enumerate(states):
                gathered = [torch.zeros_like(state) for _ in range(dist.get_world_size())]
                dist.all_gather(gathered, state)
                states[place] = torch.stack(gathered).sum()
        return states[0].item(), states[1].item()


def measured(mesh: Any) -> list[Any]:
    values = weft.arange(10, dtype=torch.float32, mesh=mesh, spec=P("dp"))
    metric = Metric(sync_on_compute=False)
    metric.update(values)
    said = [metric.compute()]
    metric.sync_on_compute = True
    for state in ("total", "count"):
        with pytest.raises(UnsupportedOpError, match="sync_on_compute=False"):
            metric.compute()
        setattr(metric, state, torch.zeros(()))  # so that the other is found
    return said


def test_a_metric_that_gathers_by_itself(gloo: GlooWorld) -> None:
    assert gloo.run(measured, MESH) == [[(45, 9)]] * 4


def with_torchmetrics(mesh: Any) -> list[float]:
    import torchmetrics  # noqa: PLC0415

    torch.manual_seed(0)
    x = weft.randint(16, (10, 3), mesh=mesh, spec=P("dp")) / 4  # sums are exact
    y = weft.randint(3, (10,), mesh=mesh, spec=P("dp"))
    made = (
        (torchmetrics.SumMetric, {}, (x,)),
        (torchmetrics.CatMetric, {}, (x[:, 0],)),
        (torchmetrics.MeanSquaredError, {}, (x, x * x)),
        (torchmetrics.Accuracy, {"task": "multiclass", "num_classes": 3}, (x, y)),
    )
    found = []
    for kind, options, given in made:
        metric = kind(**options)
        metric.update(*given)
        with pytest.raises(UnsupportedOpError, match="sync_on_compute=False"):
            metric.compute()
        metric, plain = (kind(**options, sync_on_compute=False) for _ in range(2))
        metric.update(*given)
        plain.update(*[one.full_tensor() for one in given])
        found.append((metric.compute() - plain.compute()).abs().max().item())
    return found


@pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="no torchmetrics")
def test_metrics_of_torchmetrics(gloo: GlooWorld) -> None:
    for found in gloo.run(with_torchmetrics, MESH):
        assert max(found) < 1e-6
