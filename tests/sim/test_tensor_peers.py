"""What DTensor and PhysicsNeMo's ShardTensor get wrong, as measured: right here, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.sharded import WAYS, Make, agree
from weft import Layout, P, Partial, Replicate, Shard, ShardTensor

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
T = X.flip(0) / 3
LABELS = torch.tensor([0, 5, -100, 2, -100])

ELEMENTWISE = {
    "mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss, "smooth_l1": F.smooth_l1_loss,
    "soft_margin": lambda x, t: F.soft_margin_loss(x, (t > 1).to(t) * 2 - 1),
    "bce": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t.sigmoid()),
    "bce logits": lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()),
}


def losses(make: Make) -> Any:
    seen = []
    for loss in ELEMENTWISE.values():
        x = make(X)
        value = loss(x, make(T, False))
        value.backward()
        seen += [value, x.grad]
    return seen


def ignored_targets(make: Make) -> Any:
    seen = []
    for weight in (None, torch.linspace(0.5, 2, 6, dtype=X.dtype)):
        x = make(X)
        value = F.cross_entropy(x, make(LABELS), weight, ignore_index=-100)
        value.backward()
        seen += [value, x.grad]
    return seen


def partial_values(make: Make) -> Any:
    total = make(X, False).sum()
    return [total.item(), float(total), bool(total > 1), int(total)]


def writes_to_slices(make: Make) -> Any:
    x = make(X, False)
    x[:2].zero_()
    x[3:, 1:4] = 7
    x[-1, 0] = -1
    x[1] = torch.arange(6.0)
    x[x > 3] = 0.5
    return x


def integers_stay_integers(make: Make) -> Any:
    whole = make(torch.arange(30).view(5, 6) + 2**53)
    total = whole.sum(0) + torch.arange(6)
    return [str(total.dtype), total, str(whole.sum().dtype), whole.sum() + 1]


def filled(make: Make) -> Any:
    total = make(X, False).sum(0)
    return [total.fill_(3.0), total.zero_(), total.add_(1)]


def over_empty_shards(make: Make) -> Any:
    x = make(X)
    y = x.amax(0).sum() + x.max() + torch.linalg.vector_norm(x, float("inf")) + x.amin(1).sum()
    y.backward()
    return [y, x.grad]


def keepdim_before_the_cut(make: Make) -> Any:
    x = make(X.view(5, 3, 2).transpose(0, 2).contiguous())
    seen = [x.mean(0, keepdim=True), x.sum(0, keepdim=True), x.mean((0, 1), keepdim=True)]
    (x - seen[0]).square().mean().backward()
    return [*seen, x.grad]


def masks_and_lists(make: Make) -> Any:
    x = make(X)
    y = x.masked_fill(x > 2, 0) + torch.where(x < 1, x, x * 0)
    y.sum().backward()
    return [y, x.grad]


def moments_far_from_zero(make: Make) -> Any:
    return F.layer_norm(make(X / 1e4 + 100), (6,))


PROGRAMS = [
    losses, ignored_targets, partial_values, writes_to_slices, integers_stay_integers, filled,
    over_empty_shards, keepdim_before_the_cut, masks_and_lists, moments_far_from_zero,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_right_where_peers_are_wrong(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize(
    "placements", [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(1), Partial()]],
    ids=str,
)
def test_two_axes_on_one_uneven_dim(placements: list[Any]) -> None:
    full = torch.arange(15.0).view(5, 3)

    def on_rank(mesh: Any) -> bool:
        x = weft.distribute_tensor(full, mesh, [Shard(0), Shard(0)])
        return torch.equal(x.redistribute(placements=placements).full_tensor(), full)

    assert weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}) == [True] * 4


@pytest.mark.parametrize("rows", [5, 6, 9])
def test_more_ranks_than_fit(rows: int) -> None:
    full = torch.arange(rows * 2.0).view(rows, 2)

    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(full, mesh, P("x"))
        local = ShardTensor.from_local(x.to_local(), mesh, [Shard(0)])
        assert local.shape == full.shape and torch.equal(local.full_tensor(), full)
        return [str(x.sharding), str(local.sharding)]

    for one, other in weft.testing.run(on_rank, mesh={"x": 4}):
        assert one == other == str(Layout(weft.Mesh({"x": 4}), (rows, 2), P("x")))


def test_plain_operands_need_no_wrapping() -> None:
    """Users' most frequent error elsewhere: got mixed torch.Tensor and DTensor."""
    def on_rank(mesh: Any) -> bool:
        x = weft.distribute_tensor(X, mesh, P("x"))
        mixed = torch.cat([x, T]) @ T.t() + torch.ones(5).double()
        due = torch.cat([X, T]) @ T.t() + torch.ones(5).double()
        return torch.allclose(mixed.full_tensor(), due)

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [True] * 2
