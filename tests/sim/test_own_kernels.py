"""Kernels that users register: what runs on the shards of a dim that the op would need whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import held
from tests.oracle import check, check_gradient
from weft import P
from weft.transport import Shards


def unit(x: Tensor, scale: Tensor) -> Tensor:
    """Rows of mean square 1, each element scaled."""
    return x * (x * x).mean(-1, keepdim=True).rsqrt() * scale


def unit_kernel(shards: Shards, x: Tensor, scale: Tensor) -> Tensor:
    count = shards.layout.shape[-1]
    mean = shards.psum((x * x).sum(-1, keepdim=True)) / count
    return x * mean.rsqrt() * scale


def energy(x: Tensor) -> Tensor:
    return (x * x).sum(-1)


def energy_kernel(shards: Shards, x: Tensor) -> Tensor:
    return (x * x).sum(-1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    weft.register_rule(unit, "... s~, s -> ... s", kernel=unit_kernel)
    weft.register_rule(energy, "... s~:sum -> ...", kernel=energy_kernel)
    yield
    weft.unregister_rule(unit)
    weft.unregister_rule(energy)


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P("y"), P(None, ("y", "x")), P()])
def test_a_kernel_serves_every_layout(spec: P) -> None:
    torch.manual_seed(0)
    whole, scale = torch.rand(5, 7, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    steps = torch.rand(5, 7, dtype=torch.float64)
    given = [whole.clone().requires_grad_(), scale.clone().requires_grad_()]
    due = unit(*given)
    due.backward(steps)

    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(whole, mesh, spec).requires_grad_()
        s = weft.distribute_tensor(scale, mesh, P()).requires_grad_()
        out = unit(x, s)
        (out * weft.distribute_tensor(steps, mesh, spec)).sum().backward()
        assert x.grad is not None and s.grad is not None
        return held(out.detach()), held(x.grad), held(s.grad)

    outs, grads, scales = zip(*weft.testing.run(on_rank, 4, {"x": 2, "y": 2}))
    check(due.detach(), outs)
    check_gradient(given[0].grad, outs[0].layout, grads)
    check_gradient(given[1].grad, weft.Layout(outs[0].layout.mesh, (7,), P()), scales)
    assert str(outs[0].layout) == str(weft.Layout(outs[0].layout.mesh, (5, 7), spec))


def test_a_kernel_may_leave_partial_sums() -> None:
    whole = torch.rand(5, 7, dtype=torch.float64)

    def on_rank(mesh: Any) -> tuple[str, Any]:
        out = energy(weft.distribute_tensor(whole, mesh, P(None, "x")))
        return str(out.sharding), held(out)

    texts, outs = zip(*weft.testing.run(on_rank, 3, {"x": 3}))
    assert texts[0] == "[5] partial(sum@x)"
    check(energy(whole), outs)


def test_rules_are_checked_with_their_kernels() -> None:
    weft.testing.check_rule(
        unit, torch.rand(5, 7, dtype=torch.float64) + 0.1, torch.rand(7, dtype=torch.float64))

    def wrong(shards: Shards, x: Tensor) -> Tensor:
        return 2 * (x * x).sum(-1)

    weft.register_rule(energy, "... s~:sum -> ...", kernel=wrong)
    with pytest.raises(weft.LayoutError, match="sharding s"):
        weft.testing.check_rule(energy, torch.rand(5, 7, dtype=torch.float64))


def test_a_mark_without_a_kernel_is_refused() -> None:
    with pytest.raises(weft.PlacementError) as caught:
        weft.register_rule(energy, "b s~ -> b")
    assert "Offenders: s~" in str(caught.value) and "kernel=" in str(caught.value)
