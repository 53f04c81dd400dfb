"""The loop over experts as transformers writes it: rows go to the matrices that ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import weft
from weft import P

WIDTH, NUM, RANKS = 128, 4, 3
SAME: dict[str, Any] = {
    "hidden_size": WIDTH, "num_experts_per_tok": 2, "experts_implementation": "eager"}
OF_ONE: dict[str, Any] = {"num_local_experts": NUM, "intermediate_size": 192}
BLOCKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "mixtral": (lambda: MixtralSparseMoeBlock(hf.MixtralConfig(**SAME, **OF_ONE)), 1.6),
    "gpt_oss": (lambda: GptOssMLP(hf.GptOssConfig(**SAME, **OF_ONE)), 2.0),  # which has biases
}


def made(name: str) -> nn.Module:
    draw = torch.Generator().manual_seed(3)
    block = BLOCKS[name][0]()
    with torch.no_grad():
        for one in block.parameters():
            one.copy_(torch.randn(one.shape, generator=draw) / 8)
    return block


def trained(block: Any, x: Tensor) -> list[Any]:
    x = x.requires_grad_()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    (out**2).mean().backward()
    return [out, x.grad, *(one.grad for one in block.parameters())]


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_go_to_their_expert(name: str) -> None:
    """Once to where the loop lists them, then to the expert, and straight back: three ways each
    way, of which an all-to-all by hand takes two."""
    x = torch.randn(6, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    block, seen = made(name), []
    router = block.router if name == "gpt_oss" else block.gate
    router.register_forward_hook(lambda module, given, result: seen.append(result[2]))
    due = trained(block, x.clone())
    home = torch.arange(42) // (42 // RANKS)
    by_hand = 4 * int((seen[0] // 2 != home[:, None]).sum()) * WIDTH * 4

    def on_rank(mesh: Any) -> int:
        block = weft.distribute_module(made(name), mesh, gather=False, shardings={
            "*gate_up_proj*": P("ep"), "*down_proj*": P("ep")})
        with weft.explain() as log:
            found = trained(block, weft.distribute_tensor(x, mesh, P("ep")))
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-5)
        return sum(one.nbytes for one in log.events if "linear" not in one.op)  # the router's

    moved = sum(weft.testing.run(on_rank, mesh={"ep": RANKS}))
    assert by_hand <= moved <= BLOCKS[name][1] * by_hand
