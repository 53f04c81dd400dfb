"""Views of results whose operands moved, over processes: where one rank failed others waited."""

from __future__ import annotations

from typing import Any

import torch

import weft
from tests.gloo import GlooWorld
from tests.oracle import same
from tests.sim.test_gpt import GPT, SHARDINGS
from tests.sim.test_memory_order import attention, channels_last
from weft import P


def on_rank(mesh: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 10, 18, generator=generator)
    for grad in (False, True):
        x = weft.distribute_tensor(whole, mesh, P(None, None, "tp")).requires_grad_(grad)
        same(attention(x).full_tensor().detach(), attention(whole), "attention")
    image, kernel = torch.randn(4, 2, 6, 5, generator=generator), torch.randn(8, 2, 3, 3)
    kernel = weft.distribute_tensor(kernel, mesh, P()).requires_grad_()
    for cut in range(4):
        x = weft.distribute_tensor(image, mesh, P(*[None] * cut, "tp"))
        out = channels_last(x, kernel)
        out.sum().backward()
        due = channels_last(image, kernel.detach().full_tensor())
        same(out.full_tensor().detach(), due, "convolution")


def a_gpt(mesh: Any, width: int, heads: int) -> tuple[float, list[float]]:
    torch.manual_seed(1)
    model: Any = weft.distribute_module(
        GPT(width, heads, True).double(), mesh, shardings=SHARDINGS)
    text = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(0))
    text = weft.distribute_tensor(text, mesh, P("dp"), src_data_rank=None)
    loss = model(text[:, :-1], text[:, 1:].contiguous())
    loss.backward()
    return loss.item(), [p.grad.square().sum().item() for p in model.parameters()]


def test_views_of_results(gloo: GlooWorld) -> None:
    gloo.run(on_rank, {"tp": 4})


def test_gpt(gloo: GlooWorld) -> None:
    for width, heads in ((24, 4), (18, 3)):
        found = gloo.run(a_gpt, {"dp": 2, "tp": 2}, width, heads)
        alone = weft.testing.run(
            lambda mesh, width=width, heads=heads: a_gpt(mesh, width, heads), 1,
            {"dp": 1, "tp": 1},
        )[0]
        for loss, sizes in found:
            same(torch.tensor(loss), torch.tensor(alone[0]), "loss")
            same(torch.tensor(sizes), torch.tensor(alone[1]), "gradients")
