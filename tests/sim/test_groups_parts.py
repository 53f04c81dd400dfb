"""Parameters gathered for their module, of which parts are used, recomputed, or written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import ranks
from weft import P
from weft.nn.groups.policy import policies_of

IDS = torch.randint(11, (6, 3), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """A table of places of which a part is used, and a block that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(11, 4)
        self.place = nn.Parameter(torch.randn(8, 4))
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 11))
        self.double()

    def forward(self, ids: Any) -> Any:
        x = self.token(ids) + self.place[: ids.shape[1]]
        return checkpoint(self.block, x, use_reentrant=False)


def step(model: Any, ids: Any) -> Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return loss.detach()


def same_gradients(model: Any, plain: Any) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@ranks(dp=2, tp=2)
def test_a_slice_of_a_gathered_parameter_stays_partial(mesh: Any) -> None:
    plain, model = Model(), Model()
    weft.distribute_module(model, mesh, shardings={"place": P("tp", "dp")})
    step(plain, IDS)
    step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    same_gradients(model, plain)


@ranks(dp=2)
def test_a_checkpoint_inside_a_module_gathers_what_the_module_had(mesh: Any) -> None:
    plain, model = Model(), Model()
    weft.distribute_module(
        model, mesh, shardings={"*": P("dp")}, gather={"": weft.nn.Gather(free=False)})
    step(plain, IDS)
    step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    same_gradients(model, plain)
    assert all(one._local.shape[0] < one.shape[0] for one in model.parameters())


@ranks(dp=2)
def test_what_a_fused_optimizer_writes_is_gathered_again(mesh: Any) -> None:
    plain, model = Model(), Model()
    weft.distribute_module(
        model, mesh, shardings={"*": P("dp")}, gather={"": weft.nn.Gather(free=False)})
    ids = weft.distribute_tensor(IDS, mesh, P("dp"))
    for some, given in ((plain, IDS), (model, ids)):
        optimizer = torch.optim.AdamW(some.parameters(), lr=0.1, fused=True)
        step(some, given)
        before = [one._version for one in some.parameters()]
        optimizer.step()
        assert some is plain or all(
            one._version > was for one, was in zip(some.parameters(), before))
    torch.testing.assert_close(
        step(model, ids).full_tensor(), step(plain, IDS))  # type: ignore[attr-defined]


@pytest.mark.parametrize("table, gathers", [
    ({"*": P("seq")}, True), ({"token.weight": P("seq"), "block.1.*": P("seq")}, False)])
def test_an_axis_of_sequences_is_gathered_over_if_it_shards_all(
    table: dict[str, P], gathers: bool
) -> None:
    def on_rank(mesh: Any) -> None:
        plain, model = Model(), Model()
        weft.distribute_module(model, mesh, shardings=table)
        with weft.explain() as log:
            step(model, weft.distribute_tensor(IDS, mesh, P(None, "seq")))
        assert gathers == any(one.op.startswith("parameters") for one in log.events)
        step(plain, IDS)
        same_gradients(model, plain)

    weft.testing.run(on_rank, mesh={"seq": 3})


@ranks(dp=2)
def test_a_parameter_without_dims_is_summed_with_the_others(mesh: Any) -> None:
    def made() -> Any:
        model = Model()
        model.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        model.block.register_forward_pre_hook(lambda _, args: (args[0] * model.scale,))
        return model

    plain, model = made(), made()
    weft.distribute_module(model, mesh, shardings={"*": P()})
    step(plain, IDS)
    step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    same_gradients(model, plain)


def layer(*sizes: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(4, size) for size in sizes)


class Stage(nn.Module):
    """It only holds what others call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.down = layer(4), nn.Linear(4, 4)


class Bare(nn.Module):
    """Its parameters are used by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


LISTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a dict names parts and a list": (
        lambda: nn.ModuleDict({"token": nn.Linear(4, 4), "h": layer(4, 4), "norm": Bare()}),
        "h.0 h.1"),
    "a list of lists": (lambda: nn.ModuleList([layer(4, 4), layer(4)]), "0.0 0.1 1.0"),
    "stages without a forward": (
        lambda: nn.ModuleList([Stage(), Stage()]), "0.blocks.0 1.blocks.0"),
    "a list of sequences": (
        lambda: nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Bare()]), "0"),
}


@pytest.mark.parametrize("gather", [
    None, {"": weft.nn.Gather(compute_dtype=torch.float32)},
], ids=["as they are", "cast"])
@ranks(dp=3)
def test_what_input_fn_shards_is_a_batch(mesh: Any, gather: Any) -> None:
    plain, moved = Model(), []
    step(plain, IDS)

    def shard(ids: Tensor) -> Any:
        return weft.distribute_tensor(ids, mesh, P("dp"))

    for input_fn in (lambda module, inputs, mesh: tuple(map(shard, inputs)), None):
        ids = IDS if input_fn else shard(IDS)
        model = weft.distribute_module(
            Model(), mesh, shardings={"*": P("dp")}, input_fn=input_fn, gather=gather)
        with weft.explain() as log:
            for _ in range(2):
                model.zero_grad()
                step(model, ids)
        if gather is None:
            same_gradients(model, plain)
        moved.append([(event.collective, event.op, event.nbytes) for event in log.events
                      if event.op.startswith("parameters")])
    assert moved[0] == moved[1] and moved[0]


@pytest.mark.parametrize("name", LISTS)
def test_groups_are_of_modules_that_run(name: str) -> None:
    make, due = LISTS[name]
    found = {path for path, _, _ in policies_of(nn.ModuleDict({"all": make()}), None)}
    assert found == {"", *[f"all.{one}" for one in due.split()]}


@ranks(dp=3)
def test_parametrized_weights_are_in_the_group_of_their_module(mesh: Any) -> None:
    plain, model = Model(), Model()
    for one in (plain, model):
        weight_norm(one.token)
        weight_norm(one.block[1])
    assert [path for path, _, _ in policies_of(model, None)] == ["", "block.0", "block.1"]
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    step(plain, IDS)
    with weft.explain() as log:
        step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    same_gradients(model, plain)
    moved = {event.op for event in log.events if event.op.startswith("parameters")}
    assert moved == {f"parameters of {one}" for one in ("the module", "block.0", "block.1")}


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=["sharded", "replicated"])
def test_lists_of_lists_move_what_one_list_does(spec: P) -> None:
    def step(mesh: Any, parts: Any) -> tuple[int, list[str]]:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = parts()

            def forward(self, x: Any) -> Any:
                for part in self.modules():
                    x = part(x).tanh() if isinstance(part, nn.Linear) else x
                return x

        model = weft.distribute_module(Net(), mesh, shardings={"*": spec})
        x = weft.ones(4, 4, mesh=mesh, placements=P("dp"))
        with weft.explain() as log:
            model(x).sum().backward()
        return log.nbytes, [one.collective for one in log.events]

    def on_rank(mesh: Any) -> Any:
        nested = step(mesh, lambda: nn.ModuleList([layer(4, 4), layer(4)]))
        return nested, step(mesh, lambda: layer(4, 4, 4))

    for nested, flat in weft.testing.run(on_rank, mesh={"dp": 2}):
        assert nested == flat
