"""A small GPT whose attention is written as many write it: one linear for q, k and v, `split`,
`view`, `transpose`, and back by `contiguous().view`; tied weights; sharded by tensor parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.oracle import same
from weft import P


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.width, self.fused = heads, width, fused
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(1, 1, 16, 16).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            hidden = self.get_buffer("mask")[:, :, :length, :length] == 0
            y = F.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads, fused)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(37, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width, heads, fused) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 37, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


SHARDINGS = {
    "h.*.attn.c_attn.*": P("tp"), "h.*.attn.c_proj.weight": P(None, "tp"),
    "h.*.c_fc.*": P("tp"), "h.*.c_proj.weight": P(None, "tp"), "wte.weight": P("tp"),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("width", "heads"), [(24, 4), (18, 3), (30, 5)])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}])
def test_gpt(axes: dict[str, int], width: int, heads: int, fused: bool) -> None:
    """Two steps of AdamW, of which the second sees other lengths; heads that divide, or do not."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 37, (2, 3, 12), generator=generator)

    def trained(mesh: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(1)
        model: Any = GPT(width, heads, fused).double()
        if mesh is not None:
            model = weft.distribute_module(model, mesh, shardings=SHARDINGS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(2):
            batch = text[step, :, : 11 - 2 * step]
            if mesh is not None:
                spec = P("dp") if "dp" in axes else P()
                batch = weft.distribute_tensor(batch, mesh, spec, src_data_rank=None)
            loss = model(batch[:, :-1], batch[:, 1:].contiguous())
            loss.backward()
            losses.append(loss.detach())
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses, {name: p.grad for name, p in model.named_parameters()}

    losses, gradients = trained(None)

    def on_rank(mesh: Any) -> None:
        mine, grads = trained(mesh)
        for one, other in zip(mine, losses):
            same(one.full_tensor(), other, "loss")  # type: ignore[operator]
        for name, other in gradients.items():
            same(grads[name].full_tensor(), other, name)  # type: ignore[operator]

    weft.testing.run(on_rank, mesh=axes)
