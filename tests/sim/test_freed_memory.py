"""Tensors that share the memory of a gathered parameter, used when that has been freed."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.harness import ranks
from weft import P


class Layer(nn.Linear):
    """It keeps what its forward has made of its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.kept: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.kept = [self.weight.detach(), self.weight.data, copy.copy(self.weight)]
        return super().forward(x)


def trained(mesh: Any) -> tuple[Layer, torch.Tensor]:
    """A layer after a step, and its weight in one process."""
    torch.manual_seed(0)
    layer = Layer()
    model = nn.Sequential(layer, nn.Linear(4, 4))
    weight = layer.weight.detach().clone()
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    x = weft.ones(3, 4, mesh=mesh, placements=P("dp"))
    model(x).sum().backward()
    return layer, weight


def saved(one: Any) -> Any:
    torch.save(one, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def set_into(one: Any) -> Any:
    other = nn.Parameter(weft.zeros(4, 4, mesh=one.device_mesh))
    other.data = one
    return other


@pytest.mark.parametrize("use", [copy.deepcopy, copy.copy, saved, set_into, torch.clone])
@ranks(dp=2)
def test_copies_have_the_values(mesh: Any, use: Any) -> None:
    layer, weight = trained(mesh)
    for one in layer.kept:
        layer(weft.ones(3, 4, mesh=mesh, placements=P("dp")))  # frees it again
        found = use(one.detach())
        assert len(repr(found)) > 50
        torch.testing.assert_close(found.full_tensor(), weight)


@ranks(dp=2)
def test_text_of_freed_memory_says_so(mesh: Any) -> None:
    layer, _ = trained(mesh)
    for one in layer.kept:
        assert "freed" in repr(one) and "freed" in f"{[one._local]}"


def test_text_of_torchs_own_wrappers_is_torchs() -> None:
    shown: list[str] = []

    def show(x: Any) -> Any:
        shown.append(repr(x))
        return x.sum()

    torch.vmap(torch.func.grad(show))(torch.ones(2, 3))
    show(torch._efficientzerotensor((3,)))
    with torch.inference_mode():
        show(torch.ones(3).conj())
    assert [one.partition("(")[0] for one in shown] == ["GradTrackingTensor", "tensor", "tensor"]
    assert "freed" not in "".join(shown)


@ranks(dp=2)
def test_what_shares_the_memory_outlives_the_module(mesh: Any) -> None:
    layer, weight = trained(mesh)
    kept = layer.kept
    del layer
    gc.collect()
    for one in kept:
        torch.testing.assert_close((one * 2).full_tensor(), weight * 2)


@ranks(dp=2)
def test_a_file_has_the_block_alone(mesh: Any) -> None:
    layer, weight = trained(mesh)
    torch.save(layer.kept[0], file := io.BytesIO())
    torch.save(weft.distribute_tensor(weight, mesh, P()), plain := io.BytesIO())
    assert abs(file.tell() - plain.tell()) < 200
