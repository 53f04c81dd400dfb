"""Programs that run in inference mode from the first line: what is made there counts no writes.
And what moves without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.harness import ranks
from weft import P
from weft.nn import Gather
from weft.testing import peak_memory

TABLES: dict[str, Any] = {
    "fully sharded": {"shardings": {"*": P(("dp", "tp"))}},
    "in two ways": {"shardings": {"0.*": P("tp"), "2.weight": P("dp", "tp"), "2.bias": P("dp")}},
    "kept": {"shardings": {"*": P("dp")}, "gather": {"": Gather(free=False)}},
    "kept in a narrower dtype": {
        "shardings": {"*": P("dp")},
        "gather": {"": Gather(free=False, compute_dtype=torch.float32)},
    },
}


def made() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)).double()


def served(model: Any, x: Any) -> list[Tensor]:
    """Results before and after weights were loaded, written in place and through `.data`."""
    results = [model(x), model(x)]
    model.load_state_dict({key: one * 2 for key, one in model.state_dict().items()})
    results.append(model(x))
    model[2].weight.mul_(3)
    results.append(model(x))
    model[0].bias.data.add_(1)
    results.append(model(x))
    return results


@pytest.mark.parametrize("name", TABLES)
@torch.inference_mode()
def test_a_module_that_is_made_in_inference_mode(name: str) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    due = served(made(), x)
    tolerance = 1e-4 if "narrower" in name else 1e-12

    @ranks(dp=2, tp=2)
    @torch.inference_mode()  # of this thread
    def run(mesh: Any) -> None:
        model = weft.distribute_module(made(), mesh, **TABLES[name])
        before = [one.full_tensor().clone() for one in model.parameters()]
        model(weft.distribute_tensor(x, mesh, P("dp")))
        for one, old in zip(model.parameters(), before):
            assert torch.equal(one.full_tensor(), old)  # not what was rounded for the forward
        found = served(model, weft.distribute_tensor(x, mesh, P("dp")))
        for one, wanted in zip(found, due):
            torch.testing.assert_close(
                one.full_tensor().double(), wanted, rtol=tolerance, atol=tolerance)

    run()


@ranks(dp=2)
@torch.inference_mode()
def test_materialize_in_inference_mode(mesh: Any) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    torch.manual_seed(0)
    weft.nn.materialize(model)
    x = weft.distribute_tensor(torch.ones(3, 6), mesh, P("dp"))
    layers = [layer.weight.full_tensor() for layer in model], [
        layer.bias.full_tensor() for layer in model]
    (up, down), (b, c) = layers
    wanted = (torch.ones(3, 6) @ up.T + b) @ down.T + c
    torch.testing.assert_close(model(x).full_tensor(), wanted)
    assert up.abs().max() > 0


@ranks(x=2)
def test_data_of_a_tensor_that_was_made_before(mesh: Any) -> None:
    x = weft.ones(4, 3, mesh=mesh, spec=P("x"))
    with torch.inference_mode():
        x.data.add_(1)
        x.view_as(x).data.mul_(3)
    assert torch.equal(x.full_tensor(), torch.full((4, 3), 6.0))


def _gated(mesh: Any, between: Callable[[Any], None] = lambda h: None) -> tuple[int, Any]:
    """How often two products gather the activation that they read, and their results."""
    draw = torch.Generator().manual_seed(0)
    h, *weights = (torch.randn(rows, 8, generator=draw) for rows in (8, 64, 64))
    given = weft.distribute_tensor(h, mesh, P("x")) * 1
    up, down = (weft.distribute_tensor(one, mesh, P("x")) for one in weights)
    with torch.no_grad(), weft.explain() as log:
        first = F.linear(given, up)
        between(given)
        second = F.linear(given, down)
    return len(log.events), (first.full_tensor(), second.full_tensor())


def test_calls_that_follow_each_other_move_an_activation_once() -> None:
    for times, _ in weft.testing.run(_gated, mesh={"x": 4}):
        assert times == 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda h: h.add_(1), "data": lambda h: h.data.mul_(2),
    "a view": lambda h: h[2].zero_(), "local": lambda h: h.to_local().add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_is_seen(write: str) -> None:
    """The second product is that of one process, whose activation was written to as well."""
    def on_rank(mesh: Any) -> Any:
        times, found = _gated(mesh, WRITES[write])
        draw = torch.Generator().manual_seed(0)
        h, up, down = (torch.randn(rows, 8, generator=draw) for rows in (8, 64, 64))
        first = h @ up.mT
        if write == "local":
            h += 1
        else:
            WRITES[write](h)
        torch.testing.assert_close(found, (first, h @ down.mT))
        return times

    weft.testing.run(on_rank, mesh={"x": 4})


def test_what_was_moved_ends_with_the_activation() -> None:
    def on_rank(mesh: Any) -> None:
        weight = weft.ones(64, 8, mesh=mesh, spec=P("x"))
        h = weft.ones(8, 8, mesh=mesh, spec=P("x"))
        with torch.no_grad(), peak_memory(weight) as memory:
            out = F.linear(h, weight)
            kept = memory.live - memory.start - out.to_local().nbytes
            assert kept == 8 * 8 * 4 * 5 // 4  # the shard, and all of it
            del h
            assert memory.live - memory.start == out.to_local().nbytes

    weft.testing.run(on_rank, mesh={"x": 4})
