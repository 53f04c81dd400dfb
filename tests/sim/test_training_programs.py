"""Training loops as users write them, unmodified: every number that they print is one process's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from weft import P

Put = Callable[[Any], Any]
"""Puts a module, or a batch, where it belongs; gives plain ones back for one process."""


def mlp(num_in: int = 6, num_out: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_in, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, num_out))


def batches(put: Put, *widths: int) -> Iterator[list[Any]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield [put(torch.randn(8, width, generator=draw).double()) for width in widths]


def adversaries(shard: Put, put: Put) -> Iterator[Any]:
    """Two models and optimizers; one is frozen while the other learns."""
    maker, judge = shard(mlp(4, 6)), shard(mlp(6, 1))
    of_maker = torch.optim.Adam(maker.parameters(), 1e-2)
    of_judge = torch.optim.Adam(judge.parameters(), 1e-2)
    for real, noise in batches(put, 6, 4):
        made = maker(noise)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        judge.requires_grad_(False)
        other = F.softplus(-judge(made)).mean()
        of_maker.zero_grad()
        other.backward()
        of_maker.step()
        judge.requires_grad_(True)
        yield from (loss, other)


def gradient_penalty(shard: Put, put: Put) -> Iterator[Any]:
    judge = shard(mlp(6, 1))
    optimizer = torch.optim.RMSprop(judge.parameters(), 1e-2)
    for (x,) in batches(put, 6):
        scores = judge(x.requires_grad_())
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = scores.mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def inner_step(shard: Put, put: Put) -> Iterator[Any]:
    """A gradient through a step of gradient descent (MAML), by functional_call."""
    model = shard(mlp())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, due in batches(put, 6, 3):
        weights = dict(model.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), due)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        stepped = {name: one - 0.1 * slope for (name, one), slope in zip(weights.items(), slopes)}
        after = F.mse_loss(torch.func.functional_call(model, stepped, (x,)), due)
        optimizer.zero_grad()
        after.backward()
        optimizer.step()
        yield from (loss, after)


def line_search(shard: Put, put: Put) -> Iterator[Any]:
    model = shard(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    x, due = next(batches(put, 6, 3))
    seen = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), due)
        loss.backward()
        seen.append(loss)
        return loss

    optimizer.step(closure)
    yield from seen


def averaged(shard: Put, put: Put) -> Iterator[Any]:
    model = shard(mlp())
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    for x, due in batches(put, 6, 3):
        loss = F.mse_loss(model(x), due)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.update_parameters(model)
        with torch.no_grad():
            yield from (loss, F.mse_loss(mean(x), due))


def parametrized(shard: Put, put: Put) -> Iterator[Any]:
    model = shard(nn.Sequential(
        spectral_norm(nn.Linear(6, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 3))))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, due in batches(put, 6, 3):
        loss = F.mse_loss(model(x), due)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def steps_in_backward(shard: Put, put: Put) -> Iterator[Any]:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = shard(mlp())
    optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}

    def step(one: Any) -> None:
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    for x, due in batches(put, 6, 3):
        loss = F.mse_loss(model(x), due)
        loss.backward()
        yield loss


def contrasts(shard: Put, put: Put) -> Iterator[Any]:
    """Every sample against all others of the batch."""
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for one, other in batches(put, 6, 6):
        found = F.normalize(torch.cat([model(one), model(other)]), dim=1)
        alike = (found @ found.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool), -torch.inf)
        loss = F.cross_entropy(alike, torch.arange(16).roll(8))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        yield loss


PROGRAMS = [
    adversaries, gradient_penalty, inner_step, line_search, averaged, parametrized,
    steps_in_backward, contrasts,
]
TABLES: dict[str, Any] = {
    "data parallel": ({"dp": 3}, {}),
    "fully sharded": ({"dp": 4}, {"*": P("dp")}),
    "in two axes": ({"dp": 2, "tp": 2}, {"*": P(("tp", "dp"))}),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_losses_are_those_of_one_process(program: Any, table: str) -> None:
    torch.manual_seed(0)
    expected = [loss.detach() for loss in program(lambda model: model.double(), lambda x: x)]
    sizes, shardings = TABLES[table]

    def on_rank(mesh: Any) -> list[Tensor]:
        torch.manual_seed(0)
        losses = program(
            lambda model: weft.distribute_module(model.double(), mesh, shardings=shardings),
            lambda x: weft.distribute_tensor(x, mesh, P("dp")))
        return [loss.detach().full_tensor() for loss in losses]

    for found in weft.testing.run(on_rank, mesh=sizes):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
