"""distribute_module: which tensor gets which layout, and that the module stays itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.harness import held
from tests.oracle import check
from weft import Layout, P, Replicate, Shard, ShardTensor
from weft.errors import LayoutError, MeshError

MESH = {"dp": 2, "tp": 2}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def sharded(tensor: torch.Tensor) -> ShardTensor:
    assert isinstance(tensor, ShardTensor)
    return tensor


def on_ranks(fn: Callable[[Any], Any]) -> list[Any]:
    return weft.testing.run(fn, 4, MESH)


class Tied(nn.Module):
    """An embedding that is its own head, a frozen weight, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.token.weight
        self.head.bias.requires_grad_(False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.arange(5.0))
        self.norm.register_buffer("scale", self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.token(tokens) * self.scale)


def test_values_and_gradients_are_those_of_the_full_module() -> None:
    dense, tokens = Tied(), torch.tensor([3, 0, 6])

    def on_rank(mesh):
        module = weft.distribute_module(
            copy.deepcopy(dense), mesh,
            shardings={"token.*": P("tp"), "head.bias": [Replicate(), Shard(0, sizes=(6, 1))]},
        )
        out = module(weft.distribute_tensor(tokens, mesh, P("dp")))
        out.square().sum().backward()
        return held(out.detach()), held(gradient_of(module.token.weight))

    out = dense(tokens)
    out.square().sum().backward()
    ranks = on_ranks(on_rank)
    check(out.detach(), [each for each, _ in ranks])
    check(gradient_of(dense.token.weight), [each for _, each in ranks], "gradient")


def test_the_first_pattern_that_matches_one_of_a_tensors_names_counts() -> None:
    def on_rank(mesh):
        dense = Tied()
        shapes = {name: each.shape for name, each in dense.state_dict().items()}
        module = weft.distribute_module(dense, mesh, shardings={
            "head.weight": P(None, "tp"),  # another name of token.weight, whose pattern is later
            "token.*": P("tp"), "norm.num*": P(), "*.bias": P("dp"), "norm.*": P("tp"),
        })
        assert module is dense
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert all(type(each) is ShardTensor for each in state.values())
        assert {name: each.shape for name, each in module.state_dict().items()} == shapes
        assert module.head.weight is module.token.weight
        assert module.scale is module.norm.scale
        assert not module.head.bias.requires_grad and module.norm.bias.requires_grad
        assert all(isinstance(each, nn.Parameter) for each in module.parameters())
        return {name: each.spec for name, each in state.items()}

    assert on_ranks(on_rank)[3] == {
        "token.weight": P(None, "tp"), "head.bias": P("dp"), "norm.bias": P("dp"),
        "norm.weight": P("tp"), "norm.running_mean": P("tp"), "norm.running_var": P("tp"),
        "norm.num_batches_tracked": P(), "scale": P("tp"),
    }


def test_without_shardings_all_is_replicated_with_the_first_ranks_values() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 2)
        nn.init.constant_(module.weight, mesh.rank)
        with mesh:
            weft.distribute_module(module)
        assert sharded(module.bias).layout.is_replicated
        assert sharded(module.weight).layout.is_replicated
        return sharded(module.weight).to_local().unique().tolist()

    assert on_ranks(on_rank) == [[0.0]] * 4


def test_functions_of_the_user_are_called_as_by_dtensor() -> None:
    def on_rank(mesh):
        calls = []

        def partition(name, module, on):
            calls.append((name, type(module).__name__, on is mesh))
            if name == "0":
                module.weight = nn.Parameter(weft.distribute_tensor(module.weight, mesh, P("dp")))

        def to_shards(module, inputs, on):
            return tuple(weft.distribute_tensor(each, on, P("dp")) for each in inputs)

        module = weft.distribute_module(
            nn.Sequential(nn.Linear(3, 4), nn.ReLU()), mesh, partition, to_shards,
            lambda module, out, on: out.redistribute(on, [Replicate()] * 2).to_local(),
        )
        weight, bias = module[0].parameters()
        assert (sharded(weight).spec, sharded(bias).spec) == (P("dp"), P())
        out = module(torch.ones(5, 3))
        assert type(out) is torch.Tensor and out.shape == (5, 4)
        return calls

    assert on_ranks(on_rank)[0] == [
        ("", "Sequential", True), ("0", "Linear", True), ("1", "ReLU", True),
    ]


def test_what_is_distributed_already_stays_or_has_to_agree() -> None:
    def on_rank(mesh):
        module = weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"weight": P("dp")})
        weight = module.weight
        weft.distribute_module(module, mesh)
        assert module.weight is weight
        assert weight.layout == Layout(mesh, (4, 3), P("dp"))
        with pytest.raises(LayoutError, match="distributed as"):
            weft.distribute_module(module, mesh, shardings={"weight": P("tp")})

    on_ranks(on_rank)


def test_a_pattern_that_matches_nothing_is_named() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 4)
        with pytest.raises(LayoutError) as caught:
            weft.distribute_module(
                module, mesh, shardings={"weight": P("dp"), "wieght": P("dp"), "x.*": P()}
            )
        assert type(module.weight) is nn.Parameter
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
distribute_module(shardings=): 2 of 3 patterns match none of the 2 names of parameters and \
buffers: weight, bias.
  Rule: every pattern matches at least one name.
  Offenders: 'wieght', 'x.*'
  Fix: print([name for name, _ in module.named_parameters()])"""


def test_a_spec_that_does_not_fit_names_its_parameter_before_anything_is_replaced() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 4)
        with pytest.raises(MeshError) as caught:
            weft.distribute_module(module, mesh, shardings={"bias": P("pp")})
        assert caught.value.__notes__ == ["  in distribute_module, for bias"]
        assert type(module.weight) is nn.Parameter

    on_ranks(on_rank)
