"""A policy's dtypes hold for every parameter of its modules, in whatever layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import ranks
from weft import P

IDS = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied weights, a frozen parameter, one without dims; a dtype is where it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.place = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.token.weight
        self.checkpoint: bool | None = None

    def forward(self, ids: Any) -> Any:
        x = self.token(ids) + self.place
        for block in self.layers:
            x = block(x) if self.checkpoint is None else checkpoint(
                block, x, use_reentrant=self.checkpoint)
        return self.head(self.norm(x))


TENSOR: dict[str, Any] = {
    "*.up.*": P("tp"), "*.down.weight": P(None, "tp"), "token.weight": P("tp")}
BOTH: dict[str, Any] = {
    "*.up.*": P(("tp", "dp")), "*.down.weight": P("dp", "tp"), "token.weight": P(("tp", "dp")),
    "head.weight": P(("tp", "dp")), "place": P(None, "dp"), "*": P("dp")}
MINOR: dict[str, Any] = {
    "*.up.*": P(("dp", "tp")), "*.down.weight": P(("dp", "tp")), "*.norm.*": P("tp")}
GRID, LINE = {"dp": 2, "tp": 2}, {"tp": 3}
TABLES: dict[str, tuple[dict[str, int], Any, Any]] = {
    "dp": ({"dp": 4}, {}, P("dp")),
    "fsdp": ({"dp": 4}, {"*": P("dp")}, P("dp")),
    "tp": (LINE, TENSOR, P()),
    "tp, sequences": (LINE, TENSOR, P(None, "tp")),
    "dp x tp": (GRID, TENSOR, P("dp")),
    "dp x tp, sequences": (GRID, TENSOR, P("dp", "tp")),
    "fsdp x tp": (GRID, BOTH, P("dp")),
    "fsdp x tp, sequences": (GRID, BOTH, P("dp", "tp")),
    "whole": (GRID, {}, P("dp")),
    "not gathered": (GRID, MINOR, P("dp", "tp")),
}
OF_IDS = ("aten.embedding.default", "aten.flatten.using_ints", "aten.cross_entropy_loss.default")
"""Ops whose forward moves integers."""
NARROW, WIDE = torch.float32, torch.float64
EXACT = weft.nn.Gather(compute_dtype=NARROW, reduce_dtype=WIDE)


def make(checkpoints: bool | None = None) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    model.checkpoint = checkpoints
    return model


def loss_of(model: Any, ids: Any) -> Any:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def by_hand(num_batches: int = 1, dtype: torch.dtype = NARROW) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of a model that was cast, in one process."""
    model = make().to(dtype)
    losses = [loss_of(model, IDS) for _ in range(num_batches)]
    sum(losses).backward()  # type: ignore[union-attr]
    return losses[0].detach(), {
        name: one.grad.to(WIDE) for name, one in model.named_parameters() if one.grad is not None}


def distributed(mesh: Any, table: Any, policy: Any, checkpoints: bool | None = None) -> Any:
    return weft.distribute_module(
        make(checkpoints), mesh, shardings=table, gather={"": policy, "layers.*": policy})


def train(model: Any, ids: Any, num_batches: int) -> Any:
    if num_batches == 1:
        loss = loss_of(model, ids)
        loss.backward()
        return loss
    with weft.nn.accumulate(model):
        for _ in range(num_batches):
            loss = loss_of(model, ids)
            loss.backward()
    return loss


def check(model: Any, loss: Any, due: tuple[Tensor, dict[str, Tensor]], close: float) -> None:
    assert loss.dtype == due[0].dtype
    torch.testing.assert_close(loss.detach().full_tensor(), due[0], rtol=close, atol=close)
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == due[1].keys()
    for name, grad in found.items():
        assert grad.dtype == WIDE
        torch.testing.assert_close(
            grad.full_tensor(), due[1][name], rtol=close, atol=close,
            msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("checkpoints", [None, False, True])
def test_all_parameters_are_used_in_the_dtype(table: str, checkpoints: bool | None) -> None:
    axes, shardings, spec = TABLES[table]
    due = {num: by_hand(num) for num in (1, 3)}

    def on_rank(mesh: Any) -> None:
        model = distributed(mesh, shardings, EXACT, checkpoints)
        before = {name: one.sharding for name, one in model.named_parameters()}
        ids = weft.distribute_tensor(IDS, mesh, spec)
        for num in (1, 3):
            model.zero_grad()
            check(model, train(model, ids, num), due[num], 1e-5)
        assert {name: one.sharding for name, one in model.named_parameters()} == before
        assert all(one.dtype == WIDE for one in model.parameters())

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("table", TABLES)
def test_what_moves_is_half_and_the_next_step_reads_new_weights(table: str) -> None:
    axes, shardings, spec = TABLES[table]

    def on_rank(mesh: Any) -> None:
        ids = weft.distribute_tensor(IDS, mesh, spec)
        nbytes, losses = [], []
        own = weft.nn.Gather() if "dp" in axes else None  # else tp is taken for a batch's axis
        for policy in (own, weft.nn.Gather(compute_dtype=NARROW)):
            model = distributed(mesh, shardings, policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with weft.explain() as log:
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = train(model, ids, 1)
                    optimizer.step()
            nbytes.append(sum(one.nbytes for one in log.events if not (
                one.direction == "forward" and one.op in OF_IDS)))
            losses.append(loss.detach().full_tensor().double())
        assert nbytes[1] * 2 <= nbytes[0]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)

    weft.testing.run(on_rank, mesh=axes)


@ranks(dp=2, tp=2)
def test_gradients_are_reduced_in_the_dtype(mesh: Any) -> None:
    ids = weft.distribute_tensor(IDS, mesh, P("dp", "tp"))
    nbytes = {}
    for compute in (None, NARROW):
        for reduce in (NARROW, WIDE):
            model = distributed(mesh, TENSOR, weft.nn.Gather(
                compute_dtype=compute, reduce_dtype=reduce))
            loss = loss_of(model, ids)
            with weft.explain() as log:
                loss.backward()
            of_parameters = [one for one in log.events if one.collective == "AllReduce" and (
                one.op.startswith("parameters") or "dp" in one.reason)]
            nbytes[compute, reduce] = sum(one.nbytes for one in of_parameters)
            check(model, loss, by_hand(1, compute or WIDE), 1e-5)
    assert nbytes[NARROW, WIDE] == 2 * nbytes[NARROW, NARROW] > 0
    assert nbytes[None, WIDE] >= 2 * nbytes[None, NARROW] > 0


@ranks(dp=2, tp=2)
def test_casts_are_freed_after_the_forward_of_their_group(mesh: Any) -> None:
    model = distributed(mesh, TENSOR, weft.nn.Gather(compute_dtype=NARROW))
    seen: list[Any] = []
    for block in model.layers:
        block.register_forward_hook(
            lambda block, *_: seen.append(block.up.weight._local.untyped_storage()), prepend=True)
    loss = loss_of(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    assert len(seen) == 2 and all(one.nbytes() == 0 for one in seen)
    loss.backward(retain_graph=True)
    first = {name: one.grad.clone() for name, one in model.named_parameters()
             if one.grad is not None}
    loss.backward()
    for name, one in first.items():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(),
                                   2 * one.full_tensor())
    assert all(one.nbytes() == 0 for one in seen)


@pytest.mark.parametrize("table", ["tp", "tp, sequences", "dp x tp, sequences", "not gathered"])
def test_torch_finds_the_gradients_of_casts(table: str) -> None:
    axes, shardings, spec = TABLES[table]
    due = by_hand()[1]

    def on_rank(mesh: Any) -> None:
        model = distributed(mesh, shardings, EXACT)
        wanted = [name for name, one in model.named_parameters() if one.requires_grad]
        loss = loss_of(model, weft.distribute_tensor(IDS, mesh, spec))
        found = torch.autograd.grad(loss, [model.get_parameter(name) for name in wanted])
        for name, grad in zip(wanted, found):
            assert grad.dtype == WIDE
            torch.testing.assert_close(
                grad.full_tensor(), due[name], rtol=1e-5, atol=1e-5)

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("table", ["tp, sequences", "dp x tp, sequences", "fsdp x tp"])
def test_hooks_see_the_whole_gradient_once(table: str) -> None:
    axes, shardings, spec = TABLES[table]
    due = by_hand()

    def on_rank(mesh: Any) -> None:
        model = distributed(mesh, shardings, EXACT)
        seen: list[Any] = []
        model.norm.weight.register_post_accumulate_grad_hook(
            lambda one: seen.append(one.grad.full_tensor()))
        loss = loss_of(model, weft.distribute_tensor(IDS, mesh, spec))
        loss.backward()
        check(model, loss, due, 1e-5)
        [once] = seen
        torch.testing.assert_close(once, due[1]["norm.weight"], rtol=1e-5, atol=1e-5)

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("table", ["tp", "dp x tp", "fsdp x tp, sequences", "whole"])
def test_bfloat16_beside_float32_masters(table: str) -> None:
    axes, shardings, spec = TABLES[table]
    plain = make().float()
    cast = copy.deepcopy(plain).bfloat16()
    loss_of(cast, IDS).backward()
    loss_of(plain, IDS).backward()

    def on_rank(mesh: Any) -> None:
        policy = weft.nn.Gather(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = weft.distribute_module(
            make().float(), mesh, shardings=shardings, gather={"": policy, "layers.*": policy})
        loss = loss_of(model, weft.distribute_tensor(IDS, mesh, spec))
        loss.backward()
        assert loss.dtype == torch.bfloat16
        for (name, one), due, narrow in zip(
            model.named_parameters(), plain.parameters(), cast.parameters()
        ):
            if due.grad is not None and narrow.grad is not None:
                assert one.grad is not None and one.grad.dtype == torch.float32
                away = (one.grad.full_tensor() - due.grad).norm()
                bound = 2 * (narrow.grad.float() - due.grad).norm() + 0.01 * due.grad.norm()
                assert away <= bound, f"{name}: {away:.2g} > {bound:.2g}"

    weft.testing.run(on_rank, mesh=axes)
