"""The order in memory of results is what their wrappers say, and what other people's code needs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.memory_order import WrongOrder, disagreement
from tests.oracle import same
from weft import P, Replicate, Shard, ShardTensor


def on_ranks(fn: Any, num_ranks: int) -> list[Any]:
    return weft.testing.run(fn, num_ranks, {"tp": num_ranks})


# What the tests look at.


@pytest.mark.parametrize(
    ("shape", "claimed", "local", "strides", "agrees"),
    [
        ((4, 6), (6, 1), (2, 6), (6, 1), True),
        ((4, 6), (6, 1), (4, 3), (6, 1), False),  # gaps
        ((4, 6), (1, 4), (2, 6), (6, 1), False),
        ((4, 6), (1, 4), (1, 6), (99, 1), True),  # one element says nothing
        ((4, 6), (1, 4), (0, 6), (6, 1), True),
        ((4, 6), (12, 2), (4, 3), (3, 1), True),  # what may be joined can be joined
        ((4, 6), (12, 2), (4, 3), (6, 1), False),
        ((4, 6), (9, 1), (4, 3), (3, 1), True),  # gaps that a move closes
        ((4, 6), (9, 1), (4, 3), (1, 4), False),
        ((4, 6), (0, 1), (4, 3), (3, 1), True),  # expanded
    ],
)
def test_what_disagrees(
    shape: Any, claimed: Any, local: Any, strides: Any, agrees: bool
) -> None:
    block = torch.empty_strided(local, strides)
    assert (disagreement(shape, claimed, block) is None) == agrees


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (4, 0), (2, 2)])
@pytest.mark.parametrize("fn", [
    lambda x: x[..., ::2].view(-1), lambda x: x[..., ::2].view(2, 3, 2).transpose(0, 1),
    lambda x: (x[..., ::2].view(-1).mul_(2), x)[1],
])
def test_steps_of_ragged_lines(fn: Any, sizes: tuple[int, ...]) -> None:
    """Every other element of a line of 3 leaves less behind the last than of a line of 4."""
    whole = torch.arange(24.0).view(6, 4)
    due = fn(whole.clone())

    def on_rank(mesh: Any) -> None:
        found = fn(weft.distribute_tensor(whole, mesh, [Shard(1, sizes=sizes)]))
        assert found.stride() == due.stride()
        torch.testing.assert_close(found.full_tensor(), due, rtol=0, atol=0)

    on_ranks(on_rank, 2)


def test_the_watch_sees_what_is_wrong() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.zeros(4, 6, mesh=mesh, spec=P("tp"))
        weft.tensor.shard_tensor.wrap(torch.zeros(6, 2).t(), x._meta)

    with pytest.raises(WrongOrder, match="no gaps"):
        on_ranks(on_rank, 2)


def test_steps_of_a_sharded_dim_end_anywhere() -> None:
    block = torch.empty_strided((6, 2), (3, 2))
    assert disagreement((6, 2), (4, 2), block) is not None
    assert disagreement((6, 2), (4, 2), block, [0]) is not None
    assert disagreement((6, 2), (4, 2), block, [1]) is None
    assert disagreement((6, 2), (4, 2), torch.empty_strided((6, 2), (6, 2)), [1]) is not None


# Operands that move, kernels on shards.


def attention(x: Tensor) -> Tensor:
    batch, length, width = x.shape
    q = x.view(batch, length, width // 6, 6).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return out.transpose(1, 2).contiguous().view(batch, length, width)


def channels_last(x: Tensor, weight: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    y = F.silu(F.conv2d(x, weight, padding=1))
    batch, channels, height, width = y.shape
    return y.permute(0, 2, 3, 1).contiguous().view(batch, height, width * channels)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_attention_then_view(dim: int, num_ranks: int, grad: bool) -> None:
    whole = torch.randn(5, 10, 18, generator=torch.Generator().manual_seed(0))

    def on_rank(mesh: Any) -> None:
        spec = P(*[None] * dim, "tp")
        x = weft.distribute_tensor(whole, mesh, spec).requires_grad_(grad)
        dense = whole.clone().requires_grad_(grad)
        out, due = attention(x), attention(dense)
        same(out.full_tensor().detach(), due.detach(), "attention")
        if grad:
            out.square().sum().backward()
            due.square().sum().backward()
            assert x.grad is not None and dense.grad is not None
            same(x.grad.full_tensor(), dense.grad, "gradient")

    on_ranks(on_rank, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("cut", range(4))
@pytest.mark.parametrize("of_weight", [None, 0, 1])
def test_channels_last_then_view(of_weight: int | None, cut: int, num_ranks: int) -> None:
    """Shards of one channel, of one row, and empty ones are among them."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(4, 2, 6, 5, generator=generator).to(memory_format=torch.channels_last)
    kernel = torch.randn(8, 2, 3, 3, generator=generator)

    def on_rank(mesh: Any) -> None:
        spec = P() if of_weight is None else P(*[None] * of_weight, "tp")
        x = weft.distribute_tensor(image, mesh, P(*[None] * cut, "tp")).requires_grad_()
        weight = weft.distribute_tensor(kernel, mesh, spec).requires_grad_()
        dense = [image.clone().requires_grad_(), kernel.clone().requires_grad_()]
        due = channels_last(*dense)
        due.square().sum().backward()
        for _ in range(2):
            x.grad = weight.grad = None
            out = channels_last(x, weight)
            same(out.full_tensor().detach(), due.detach(), "convolution")
            out.square().sum().backward()
            for mine, other in zip((x, weight), dense):
                assert mine.grad is not None and other.grad is not None
                same(mine.grad.full_tensor(), other.grad, "gradient")

    on_ranks(on_rank, num_ranks)


def test_redistribute_keeps_the_order() -> None:
    whole = torch.arange(120.0).view(4, 5, 6).permute(2, 0, 1)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.arange(120.0).view(4, 5, 6), mesh, P("tp"))
        x = x.permute(2, 0, 1)
        for placements in ([Shard(0)], [Shard(2)], [Replicate()], [Shard(1)], [Shard(2)]):
            for async_op in (False, True):
                y = x.redistribute(placements=placements, async_op=async_op) * 1
                assert y.stride() == whole.stride()
                joined = y.permute(1, 2, 0)
                assert joined.is_contiguous()
                same(joined.view(20, 6).full_tensor(), torch.arange(120.0).view(20, 6), "view")
            x = x.redistribute(placements=placements)
        assert x.full_tensor().stride() == whole.stride()

    on_ranks(on_rank, 3)


def test_what_was_expanded_and_moves() -> None:
    whole = torch.arange(12.0).view(3, 1, 4).expand(3, 2, 4)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.arange(12.0).view(3, 1, 4), mesh, P("tp"))
        x = x.expand(3, 2, 4)
        for placements in ([Replicate()], [Shard(2)], [Shard(1)]):
            joined = x.redistribute(placements=placements).permute(0, 2, 1).view(12, 2)
            same(joined.full_tensor(), whole.permute(0, 2, 1).reshape(12, 2), "joined")

    on_ranks(on_rank, 2)


# Local tensors of any order.


def test_from_local_of_turned_blocks() -> None:
    """They say the order that they have, and a view of what is contiguous works."""
    def on_rank(mesh: Any) -> None:
        rank = mesh.here[0]
        whole = torch.arange(24.0).view(4, 6)
        x = ShardTensor.from_local(whole.t()[:, 2 * rank : 2 * rank + 2], mesh, [Shard(1)])
        assert x.stride() == (1, 6) and not x.is_contiguous()
        same(x.t().view(24).full_tensor(), whole.view(24), "turned")
        # Of one element, on a rank: where nobody is asked it does not know, so it is contiguous.
        one = whole.t()[:, : 1 + rank]
        assert ShardTensor.from_local(one, mesh, [Shard(1)]).stride() == (1, 6)
        y = ShardTensor.from_local(one, mesh, [Shard(1)], sizes={1: (1, 2)})
        assert y.is_contiguous() and y._local.is_contiguous()
        assert y.view(18).shape == (18,)
        # Gaps are closed.
        z = ShardTensor.from_local(whole[:, 3 * rank : 3 * rank + 3], mesh, [Shard(1)])
        assert z.is_contiguous()
        same(z.view(2, 2, 6).full_tensor(), whole.view(2, 2, 6), "gaps")

    on_ranks(on_rank, 2)


def test_from_local_of_given_strides() -> None:
    """The local tensor is brought to them, and stays in its graph."""
    def on_rank(mesh: Any) -> None:
        local = torch.arange(6.0).view(2, 3).requires_grad_()
        x = ShardTensor.from_local(local, mesh, [Shard(0)], shape=(4, 3), stride=(1, 4))
        assert x.stride() == (1, 4)
        x.t().view(12).square().sum().backward()
        assert local.grad is not None
        same(local.grad, 2 * local.detach(), "gradient")
        turned = torch.arange(6.0).view(3, 2).t()
        y = ShardTensor.from_local(turned, mesh, [Shard(0)], shape=(4, 3), stride=(3, 1))
        assert y.view(12).full_tensor().tolist() == [0, 2, 4, 1, 3, 5] * 2

    on_ranks(on_rank, 2)


# A model of images, as many write it.


class Quantizing(nn.Module):
    """A resnet block, attention over places, and the nearest code of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 8, 3, padding=1)
        self.short, self.norm_2 = nn.Conv2d(4, 8, 1), nn.GroupNorm(4, 8)
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))
        self.to_out, self.codes = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.short(x) + self.conv(F.silu(self.norm(x)))
        batch, channels, height, width = x.shape
        y = self.norm_2(x.view(batch, channels, height * width)).transpose(1, 2)
        q, k, v = (
            to(y).view(batch, -1, 2, channels // 2).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.to_out(y.transpose(1, 2).reshape(batch, -1, channels))
        x = x + y.transpose(-1, -2).reshape(batch, channels, height, width)
        places = x.permute(0, 2, 3, 1).contiguous()
        nearest = torch.cdist(places.view(-1, channels), self.codes.weight).argmin(1)
        found = self.codes(nearest).view(places.shape)
        return (places + (found - places).detach() + found).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("cut", range(4))
@pytest.mark.parametrize("channels_cut", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_quantizing(num_ranks: int, channels_cut: bool, cut: int) -> None:
    torch.manual_seed(0)
    model, image = Quantizing().double(), torch.randn(3, 4, 4, 5, dtype=torch.float64)
    due = model(image)
    due.square().sum().backward()
    shardings = {"conv.*": P("tp"), "to_*.*": P("tp")} if channels_cut else {}

    def on_rank(mesh: Any) -> None:
        mine: Any = weft.distribute_module(copy.deepcopy(model), mesh, shardings=shardings)
        mine.zero_grad()
        out = mine(weft.distribute_tensor(image, mesh, P(*[None] * cut, "tp")))
        same(out.full_tensor().detach(), due.detach(), "images")
        out.square().sum().backward()
        for one, other in zip(mine.parameters(), model.parameters()):
            assert other.grad is not None
            same(one.grad.full_tensor(), other.grad, "gradient")

    on_ranks(on_rank, num_ranks)
