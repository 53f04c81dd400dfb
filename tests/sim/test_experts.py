"""Layers of experts: rows go to the rank that has their expert, and come back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.harness import ranks
from weft import P

WIDTH, HIDDEN = 64, 84


class Experts(nn.Module):
    """Sorted rows, and one product for all experts. `skew` rows more go to the first experts."""

    def __init__(self, num: int, skew: float, direct: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, num)
        self.up = nn.Parameter(torch.randn(num, WIDTH, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(num, HIDDEN, WIDTH) / 8)
        self.skew, self.direct = skew, direct
        self.expert: Any = None

    def forward(self, x: Any) -> Any:
        scores = 4 * self.router(x) - self.skew * torch.arange(len(self.up))
        weight, expert = scores.softmax(-1).max(-1)
        self.expert = expert
        order = expert.argsort(stable=True)
        ends = expert.bincount(minlength=len(self.up)).cumsum(0).int()
        to = weft.nn.by_expert(order, ends, self.up) if self.direct else order
        hidden = F.gelu(F.grouped_mm(x[to], self.up, offs=ends))
        made = F.grouped_mm(hidden, self.down, offs=ends)
        return x + made[order.argsort()] * weight[:, None]


def trained(model: Any, x: Tensor) -> list[Any]:
    x = x.requires_grad_()
    out = model(x)
    (out**2).sum().backward()
    return [out, x.grad, *(one.grad for one in model.parameters())]


_OF_ORDER = 64
"""Bytes to order a row: its expert, its place, and the request for it, twice."""

EP, HALF = {"up": P("ep"), "down": P("ep")}, {"ep": 2, "tp": 2}
WAYS: dict[str, tuple[dict[str, int], Any, dict[str, Any], int, float]] = {
    "even": ({"ep": 4}, P("ep"), EP, 4, 0.0),
    "experts that do not divide": ({"ep": 4}, P("ep"), EP, 6, 0.0),
    "most for one, none for others": ({"ep": 4}, P("ep"), EP, 6, 60.0),
    "fewer experts than ranks": ({"ep": 4}, P("ep"), EP, 3, 0.0),
    "data parallel": ({"dp": 2, "ep": 2}, P(("dp", "ep")), EP, 5, 0.0),
    "tensor parallel": (HALF, P("ep"), {"up": P("ep", None, "tp"), "down": P("ep", "tp")}, 5, 0.0),
    "whole rows": ({"ep": 2}, P(), EP, 3, 0.0),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_experts_are_those_of_one_process(name: str, direct: bool) -> None:
    axes, tokens, table, num, skew = WAYS[name]
    x = torch.randn(61, WIDTH, generator=torch.Generator().manual_seed(1))
    due = trained(Experts(num, skew, direct), x.clone())

    def on_rank(mesh: Any) -> None:
        model = weft.distribute_module(
            Experts(num, skew, direct), mesh, shardings=table, gather=False)
        found = trained(model, weft.distribute_tensor(x, mesh, tokens))
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("num, skew", [(4, 0.0), (6, 0.0), (6, 4.0)])
def test_rows_move_to_their_expert_and_back_and_nowhere_else(num: int, skew: float) -> None:
    num_ranks, num_rows = 4, 400
    x = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1))
    model = Experts(num, skew, True)
    trained(model, x.clone())
    share = -(-num // num_ranks)
    away = model.expert // share != torch.arange(num_rows) // (num_rows // num_ranks)
    by_hand = 4 * int(away.sum()) * WIDTH * 4  # there and back, and their gradients

    def on_rank(mesh: Any) -> int:
        model = weft.distribute_module(
            Experts(num, skew, True), mesh, shardings=EP, gather=False)
        with weft.explain() as log:
            trained(model, weft.distribute_tensor(x, mesh, P("ep")))
        return sum(one.nbytes for one in log.events if "linear" not in one.op)  # the router's

    moved = sum(weft.testing.run(on_rank, mesh={"ep": num_ranks}))
    assert by_hand <= moved <= 1.1 * by_hand + _OF_ORDER * num_rows


@ranks(ep=4)
def test_a_product_with_one_of_many_matrices_sends_rows_to_it(mesh: Any) -> None:
    """As a batch of one: the matrix stays, and nothing comes to other ranks."""
    full = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))
    up = torch.randn(6, WIDTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    rows, experts = (weft.distribute_tensor(one, mesh, P("ep")) for one in (full, up))
    here, (start, stop) = mesh.here[0], rows.sharding.box_at(mesh.here)[0]
    for e in (1, 5):
        with weft.explain() as log:
            made = torch.bmm(rows[None], experts[e : e + 1])[0]
        moved = sum(one.nbytes for one in log.events if "bmm" in one.op)
        assert moved == (here == e // 2) * (10 - (stop - start)) * WIDTH * 4
        torch.testing.assert_close(made.full_tensor(), full @ up[e])


def test_gradients_of_gathered_experts_are_reduced_once() -> None:
    """The ends of both products are one partial tensor, which the first of them sums."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    due = trained(Experts(3, 0.0, False), x.clone())

    def on_rank(mesh: Any, table: dict[str, Any]) -> list[str]:
        model: Any = weft.distribute_module(Experts(3, 0.0, False), mesh, shardings=table)
        with weft.explain() as log:
            found = trained(model, weft.distribute_tensor(x, mesh, P("dp")))
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)
        return [one.collective for one in log.events
                if one.direction == "backward" and one.op.startswith(("aten._gr", "param"))]

    for table, sums in (({}, ["AllReduce"]), ({"*": P("dp")}, ["ReduceScatter"])):
        found = weft.testing.run(partial(on_rank, table=table), mesh={"dp": 4})
        assert found == [sums] * 4


@ranks(ep=4)
def test_a_rank_without_experts_takes_part_under_autocast(mesh: Any) -> None:
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Experts(6, 0.0, False)
    model: Any = weft.distribute_module(
        Experts(6, 0.0, False), mesh, shardings=EP, gather=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, due = model(weft.distribute_tensor(x, mesh, P("ep"))), plain(x)
    assert found.dtype is due.dtype
    torch.testing.assert_close(found.full_tensor(), due, rtol=0.02, atol=0.02)
    with pytest.raises(weft.StrictError), weft.strict():
        model(weft.distribute_tensor(x, mesh, P("ep")))


def test_shapes_that_do_not_fit_are_refused() -> None:
    order, ends, up = torch.arange(5), torch.tensor([2, 5]), torch.zeros(3, 4, 4)
    with pytest.raises(weft.LayoutError, match="there is an end for each expert"):
        weft.nn.by_expert(order, ends, up)
    assert weft.nn.by_expert(order, ends, up[:2]) is order


def loop(x: Any, choice: Any, up: Any, down: Any, bias: Any) -> Any:
    """As a user writes it."""
    out = torch.zeros_like(x)
    for e in range(len(up)):
        (rows,) = torch.where(choice == e)
        hidden = F.gelu(F.linear(x[rows], up[e], bias[e]))
        out.index_add_(0, rows, hidden @ down[e])
    return out


_STACKED = {
    "even": ({"ep": 2}, P("ep"), P("ep")),
    "experts that do not divide": ({"ep": 4}, P("ep"), P("ep")),
    "whole rows": ({"ep": 3}, P(), P("ep")),
    "tensor parallel": ({"ep": 2, "tp": 2}, P("ep"), P("ep", "tp")),
    "two axes": ({"a": 2, "b": 2}, P("a"), P(("b", "a"))),
    "none of the experts": ({"ep": 2}, P("ep"), P(None, None, "ep")),
}


@pytest.mark.parametrize("name", _STACKED)
def test_a_loop_over_experts_is_that_of_one_process(name: str) -> None:
    axes, tokens, experts = _STACKED[name]
    draw = torch.Generator().manual_seed(4)
    given = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in (
        (13, 6), (5, 9, 6), (5, 9, 6), (5, 9))]
    choice = torch.randint(4, (13,), generator=draw)  # none for the last

    def run(put: Any) -> list[Any]:
        x, up, down, bias = [put(one.clone(), at).requires_grad_() for at, one in enumerate(given)]
        out = loop(x, put(choice, 0), up, down, bias)
        (out**3).sum().backward()
        return [out, *(one.grad for one in (x, up, down, bias))]

    due = run(lambda one, at: one)
    specs = [tokens, experts, experts, P(*tuple(experts)[:1])]

    def on_rank(mesh: Any) -> None:
        found = run(lambda one, at: weft.distribute_tensor(one, mesh, specs[at]))
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)

    weft.testing.run(on_rank, mesh=axes)


@ranks(ep=4)
def test_a_matrix_of_many_stays_on_its_rank(mesh: Any) -> None:
    """And is a view of them: what is written to it is written there."""
    full = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(1))
    x = weft.distribute_tensor(full, mesh, P("ep"))
    with weft.strict():
        for e in range(6):
            row = x[e]
            sizes = [7 * (e // 2 == rank) for rank in range(4)]
            assert row.sharding == weft.Layout(mesh, (5, 7), P(None, "ep"), {1: sizes})
            back = row.unsqueeze(0)
            assert back.sharding == x[e : e + 1].sharding
        again = torch.stack([x[e] for e in range(6)])
        assert again.sharding == x.sharding
        x[4].mul_(2)
        x[:, 3].zero_()
    full[4] *= 2
    full[:, 3] = 0
    torch.testing.assert_close(x.full_tensor(), full)


@ranks(x=4)
def test_other_ops_on_what_one_rank_has_use_all_ranks(mesh: Any) -> None:
    """Products, and sums with what is larger, spread a row of a sharded dim first."""
    full = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1))
    x, whole = (weft.distribute_tensor(full, mesh, one) for one in (P(None, "x"), P()))
    row = x[:, 2]
    for made, due in (
        (F.linear(row, whole[0]), F.linear(full[:, 2], full[0])),
        (row + whole.new_zeros(5, 3, 8), full[:, 2].expand(5, 3, 8)),
        (torch.einsum("bk,cnk->cbn", row, whole), torch.einsum("bk,cnk->cbn", full[:, 2], full)),
    ):
        lies = made.sharding
        assert all(max(lies.sizes_of(dim)) < lies.shape[dim] for dim in range(made.dim())
                   if lies.dims[dim]), lies
        torch.testing.assert_close(made.full_tensor(), due)
    assert max((row * 2).sharding.sizes_of(1)) == 8  # which is as much as it has


@ranks(x=4)
def test_samples_of_one_rank_keep_their_dim(mesh: Any) -> None:
    """A slice of the batch is no row: new dims leave it as it is, and nothing moves."""
    full = torch.randn(8, 3, 6, 4, generator=torch.Generator().manual_seed(1))
    x, samples = weft.distribute_tensor(full, mesh, P("x"))[:2], full[:2]
    rotated = [torch.stack([-one[..., 1::2], one[..., ::2]], -1).flatten(-2)
               for one in (x, samples)]
    with weft.strict():
        for made, due in ((x.unsqueeze(0), samples[None]), (x.unsqueeze(1), samples[:, None]),
                          rotated, (rotated[0] @ rotated[0].mT, rotated[1] @ rotated[1].mT)):
            at = due.shape.index(2)
            assert made.sharding == weft.Layout(
                mesh, due.shape, P(*[None] * at, "x"), {at: (2, 0, 0, 0)})
            torch.testing.assert_close(made.full_tensor(), due)


@ranks(ep=4)
def test_rows_go_to_a_matrix_however_it_lies(mesh: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    full, rows = (torch.randn(*shape, generator=draw) for shape in ((4, 32, 64), (6, 64)))
    matrices, x = (weft.distribute_tensor(one, mesh, P("ep")) for one in (full, rows))
    due = F.linear(rows, full[1])
    with weft.explain() as log:
        found = F.linear(x, matrices[1]), x @ matrices[1].t()
    assert log.nbytes <= 2 * 4 * rows.numel()
    for one in found:
        torch.testing.assert_close(one.full_tensor(), due)
