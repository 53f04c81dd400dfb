"""Programs that run in inference mode from the first line: what is made there counts no writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.harness import ranks
from weft import P
from weft.nn import Gather

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
