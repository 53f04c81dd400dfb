"""Compiled functions and modules run their ShardTensors eagerly, forward and backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.sharded import Make, agree
from weft import P, WeftWarning
from weft.tensor.call import compiled

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8

pytestmark = [
    pytest.mark.usefixtures("memory_order_unwatched"),  # TorchDynamo looks at setters
    pytest.mark.filterwarnings("ignore:torch.compile. a compiled function:weft.WeftWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Net(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.weight = nn.Parameter(make(X, False))
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight)) * self.scale.square()


def functions(make: Make) -> Any:
    @torch.compile(backend="eager")
    def function(x: Tensor, k: int) -> Tensor:
        y = x * k
        return (y + x).exp().sum() if k else y

    x, plain = make(X), torch.ones(3, dtype=torch.float64, requires_grad=True)
    out = function(x, 2)
    out.backward()
    function(plain, 2).backward()
    return [out, x.grad, plain.grad]


def modules(make: Make) -> Any:
    seen: list[Any] = []
    for net in (Net(make), torch.compile(Net(make), backend="eager"), Net(make)):
        if seen:
            net.compile(backend="eager")
        for _ in range(2):
            out = net(make(X, False))
            out.sum().backward()
            seen += [out, [p.grad.clone() for p in net.parameters()]]
    return seen


@pytest.mark.parametrize("way", ["even", "ragged", "both", "partial"])
@pytest.mark.parametrize("program", [functions, modules], ids=lambda one: one.__name__)
def test_compiled(program: Any, way: str) -> None:
    torch._dynamo.reset()
    agree(program, way)


def test_plain_tensors_are_compiled_still_and_one_warning_says_what_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_TOLD", {"skip"})
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    @torch.compile(backend=backend)
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = y.exp() + 1
        return x * 2 + z.sum()

    def on_rank(mesh: Any) -> float:
        x = weft.ones(4, 3, mesh=mesh, spec=P("x"))
        return function(x, torch.zeros(2)).sum().item()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert weft.testing.run(on_rank, mesh={"x": 2}) == [72.0] * 2
    assert graphs
    told = [str(one.message) for one in seen if one.category is WeftWarning]
    assert [one.splitlines()[0] for one in told] == [
        "torch.compile: a compiled function uses a ShardTensor."
    ]


@pytest.mark.parametrize("held", ["argument", "parameter"])
def test_a_whole_graph_is_refused_with_a_ShardTensor(held: str) -> None:
    torch._dynamo.reset()
    told = """torch.compile(fullgraph=True): the compiled function uses a ShardTensor.
  Rule: ops on ShardTensors run eagerly, so the graph ends at each of them.
  Offenders: Linear
  Fix: torch.compile without fullgraph, or of what runs on local tensors
       for code of others: torch.compiler.set_stance("force_eager")"""

    def on_rank(mesh: Any) -> None:
        net, x = nn.Linear(6, 2, dtype=torch.float64), X
        if held == "parameter":
            weft.distribute_module(net, mesh, shardings={"weight": P("x")})
        else:
            x = weft.distribute_tensor(X, mesh, P("x"))
        whole = torch.compile(net, backend="eager", fullgraph=True)
        for _ in range(2):
            with pytest.raises(weft.UnsupportedOpError) as caught:
                whole(x)
            assert str(caught.value) == told

    weft.testing.run(on_rank, mesh={"x": 2})


def test_a_whole_graph_that_calls_a_method_is_refused() -> None:
    """The compiler knows no methods of the class: as in the optimizers of torchao."""
    torch._dynamo.reset()

    def on_rank(mesh: Any) -> None:
        double = torch.compile(lambda x: x.float() * 2, backend="eager", fullgraph=True)
        with pytest.raises(weft.UnsupportedOpError, match="fullgraph=True"):
            double(weft.distribute_tensor(X, mesh, P("x")))

    weft.testing.run(on_rank, mesh={"x": 2})


def test_a_whole_graph_of_plain_tensors_is_torchs() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    assert torch.equal(doubled(X), X * 2)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: print(x), backend="eager", fullgraph=True)(X)
