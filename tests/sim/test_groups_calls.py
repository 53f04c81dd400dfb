"""What is gathered depends on how a model is called: with which batch, and by which name."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import ranks
from weft import P
from weft.nn import ColwiseParallel, RowwiseParallel
from weft.nn.groups.hooks import _STATES

X = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(1)).double()

MEGATRON = {"*.up.*": P("tp"), "*.down.weight": P(None, "tp")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


@dataclass
class Batch:
    x: Any
    label: str = "a batch"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last = nn.ModuleList(Block() for _ in range(4)), nn.Linear(6, 6)
        self.runs: Callable[[Any, Any], Any] = lambda layer, x: layer(x)
        self.double()

    def encode(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.runs(layer, x)
        return self.last(x)

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, UserDict):
            return self.encode(batch["x"])
        return self.encode(batch if isinstance(batch, Tensor) else batch.x)


def step(model: Any, call: Callable[[Any, Any], Any], x: Any) -> None:
    call(model, x).square().mean().backward()


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)  # type: ignore


def moved(log: Any) -> Counter[Any]:
    """How often parameters and gradients of layers move."""
    return Counter((one.direction, one.collective) for one in log.events
                   if one.op.startswith("parameters of layers"))


@pytest.mark.parametrize("styles", [False, True], ids=["specs", "styles"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@ranks(tp=4)
def test_tensor_parallel_weights_stay_without_gradients(
    mesh: Any, mode: Any, styles: bool
) -> None:
    table: Any = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()} if styles else MEGATRON
    plain, model = Model(), weft.distribute_module(Model(), mesh, shardings=table)
    x = weft.distribute_tensor(X, mesh, P())
    with mode(), weft.explain() as log:
        whole, parts = model(x), model.encode(x)
    assert not moved(log) and log.events
    for out in whole, parts:
        torch.testing.assert_close(out.full_tensor(), plain(X).detach())


@ranks(tp=2)
def test_tensor_parallel_weights_stay_in_reentrant_checkpoints(mesh: Any) -> None:
    plain, model = Model(), weft.distribute_module(Model(), mesh, shardings=MEGATRON)
    model.runs = lambda layer, x: checkpoint(layer, x, use_reentrant=True)
    with weft.explain() as log:
        step(model, Model.forward, weft.distribute_tensor(X, mesh, P()).requires_grad_())
    assert not moved(log)
    step(plain, Model.forward, X)
    same_gradients(model, plain)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "in a dataclass": lambda model, x: model(Batch(x)),
    "in a map": lambda model, x: model(UserDict(x=x)),
    "in another object": lambda model, x: model(SimpleNamespace(x=x)),
    "through a method": lambda model, x: model.encode(x),
    "part by part": lambda model, x: model.last(nn.Sequential(*model.layers)(x)),
    "by checkpoints": lambda model, x: model.last(checkpoint(
        lambda x: nn.Sequential(*model.layers)(x), x, use_reentrant=False)),
}
TABLES: dict[str, dict[str, Any]] = {
    "sharded": {"*": P("dp")},
    "in two dims": {"*.up.weight": P("tp", "dp"), "*.up.bias": P(("tp", "dp")),
                    "*.down.weight": P("dp", "tp"), "*": P("dp")},
    "by styles": {"*.up": ColwiseParallel("tp"), "*.down": RowwiseParallel("tp")},
    "some are whole": {"*.weight": P("dp")},
    "replicated": {},
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("call", CALLS)
@ranks(dp=2, tp=2)
def test_gradients_are_those_of_one_process(mesh: Any, call: str, table: str) -> None:
    plain, model = Model(), weft.distribute_module(Model(), mesh, shardings=TABLES[table])
    for _ in range(3):
        for one, x in ((plain, X), (model, weft.distribute_tensor(X, mesh, P("dp")))):
            step(one, CALLS[call], x)
            with torch.no_grad():
                CALLS[call](one, x)
    same_gradients(model, plain)


@pytest.mark.parametrize("table, axes", [
    ("sharded", None), ("in two dims", None), ("some are whole", "dp")])
@pytest.mark.parametrize("call", CALLS)
@ranks(dp=2, tp=2)
def test_layers_are_freed_however_the_model_is_called(
    mesh: Any, call: str, table: str, axes: Any
) -> None:
    model = weft.distribute_module(
        Model(), mesh, shardings=TABLES[table], gather={"layers.*": weft.nn.Gather(axes=axes)})
    x = weft.distribute_tensor(X, mesh, P("dp"))
    out = CALLS[call](model, x)
    groups: list[Any] = [_STATES[layer].group for layer in model.layers]
    assert not any(pack.storage.nbytes() for group in groups for pack in group.packs)
    out.square().mean().backward()
    with weft.explain() as log:
        step(model, CALLS[call], x)
    assert moved(log) == {
        ("forward", "AllGather"): 4, ("backward", "AllGather"): 4, ("backward", "ReduceScatter"): 4}


@ranks(dp=4)
def test_parts_are_gathered_ahead_and_reduced_meanwhile(mesh: Any) -> None:
    """As in a forward of their root: the same collectives in the same order."""
    model = weft.distribute_module(Model(), mesh, shardings={"layers.*": P("dp")})
    x = weft.distribute_tensor(X, mesh, P("dp"))
    logs = []
    for call in Model.forward, Model.encode:
        step(model, call, x)
        with weft.explain() as log:
            step(model, call, x)
        logs.append([(one.direction, one.collective, one.op) for one in log.events
                     if one.op.startswith("parameters of layers")])
    assert logs[0] == logs[1] and len(logs[0]) == 12


@ranks(dp=2)
def test_gradients_of_replicated_parts_are_summed_together(mesh: Any) -> None:
    model = weft.distribute_module(Model(), mesh, shardings={})
    with weft.explain() as log:
        step(model, Model.encode, weft.distribute_tensor(X, mesh, P("dp")))
    assert moved(log) == {("backward", "AllReduce"): 1}


@pytest.mark.parametrize("spec", [P("tp"), P()], ids=["sharded", "replicated"])
@ranks(dp=2, tp=2)
def test_parts_of_a_tensor_parallel_model_keep_their_weights(mesh: Any, spec: P) -> None:
    """Also where the axis shards dim 0 of what a part is given."""
    plain, model = Model(), weft.distribute_module(Model(), mesh, shardings=MEGATRON)
    with weft.explain() as log:
        step(model, Model.encode, weft.distribute_tensor(X, mesh, spec))
    assert not any(collective == "AllGather" for _, collective in moved(log))
    step(plain, Model.encode, X)
    same_gradients(model, plain)


@pytest.mark.parametrize("first", [Model.forward, Model.encode], ids=["root", "part"])
@ranks(dp=3)
def test_parts_run_after_an_interrupted_forward(mesh: Any, first: Any) -> None:
    """torch calls no hooks after an exception that is no Exception."""
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    plain, model = Model(), weft.distribute_module(Model(), mesh, shardings={"*": P("dp")})
    for one, x in ((plain, X), (model, weft.distribute_tensor(X, mesh, P("dp")))):
        hook = one.layers[1].down.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            one(x) if first is Model.forward else one.encode(x)
        hook.remove()
        step(one, Model.encode, x)
    same_gradients(model, plain)
    assert all(one.sharding.dims[0] for one in model.layers.parameters())


@ranks(dp=3)
def test_two_models_called_by_turns(mesh: Any) -> None:
    """By their parts and whole, several times before a backward, and in other orders."""
    def program(models: Any, x: Any) -> None:
        student, teacher = models
        for order in (0, 1, 2, 3), (3, 0, 0, 2), (1, 1, 1), (0, 1, 2, 3):
            mine = others = x
            for at in order:
                mine = student.layers[at](mine)
                with torch.set_grad_enabled(order[0] == 3):
                    others = teacher.layers[at](others)
            (student.last(mine) - others + student(x)).square().mean().backward()
            teacher(x).mean().backward()

    plain = [Model(), Model()]
    program(plain, X)
    models = [weft.distribute_module(Model(), mesh, shardings={"*": P("dp")}) for _ in plain]
    program(models, weft.distribute_tensor(X, mesh, P("dp")))
    for model, one in zip(models, plain, strict=True):
        same_gradients(model, one)
