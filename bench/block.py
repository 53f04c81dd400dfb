"""A transformer block, forward and backward, on dp=2 x tp=2, cut as Megatron-LM does.

Queries, keys, values and the first linear of the MLP are sharded by output over tp, the two linears
that follow by input; their terms are summed. The local shapes are the same in every system.
Hand-written: one identity that sums gradients, one sum that passes them, as autograd Functions,
and all gradients summed over dp in one bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from bench import world
from bench.timing import Figure, Row, Times, timed
from bench.training.by_hand import Enter, Leave, in_one_bucket
from weft import ShardTensor

BATCH, LENGTH, WIDTH, HEADS = 8, 16, 64, 4
TO_HAND_WRITTEN = 1.25
BY_OUTPUT, BY_INPUT, WHOLE = "output", "input", "whole"

PARAMETERS: dict[str, tuple[tuple[int, ...], str]] = {
    "norm1.weight": ((WIDTH,), WHOLE), "norm1.bias": ((WIDTH,), WHOLE),
    **{f"{name}.weight": ((WIDTH, WIDTH), BY_OUTPUT) for name in "qkv"},
    **{f"{name}.bias": ((WIDTH,), BY_OUTPUT) for name in "qkv"},
    "out.weight": ((WIDTH, WIDTH), BY_INPUT), "out.bias": ((WIDTH,), WHOLE),
    "norm2.weight": ((WIDTH,), WHOLE), "norm2.bias": ((WIDTH,), WHOLE),
    "up.weight": ((4 * WIDTH, WIDTH), BY_OUTPUT), "up.bias": ((4 * WIDTH,), BY_OUTPUT),
    "down.weight": ((WIDTH, 4 * WIDTH), BY_INPUT), "down.bias": ((WIDTH,), WHOLE),
}
"""Global shape and how tp cuts it."""

Named = dict[str, Any]


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    q, k, v = (one.unflatten(-1, (heads, WIDTH // HEADS)).transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def _block(p: Named, x: Tensor) -> Tensor:
    """What a user writes; nothing in it is parallel."""
    h = F.layer_norm(x, (WIDTH,), p["norm1.weight"], p["norm1.bias"])
    q, k, v = (F.linear(h, p[f"{name}.weight"], p[f"{name}.bias"]) for name in "qkv")
    x = x + F.linear(_attend(q, k, v, HEADS), p["out.weight"], p["out.bias"])
    h = F.layer_norm(x, (WIDTH,), p["norm2.weight"], p["norm2.bias"])
    h = F.gelu(F.linear(h, p["up.weight"], p["up.bias"]))
    return x + F.linear(h, p["down.weight"], p["down.bias"])


def _by_hand(p: Named, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
    h = enter(F.layer_norm(x, (WIDTH,), p["norm1.weight"], p["norm1.bias"]))
    q, k, v = (F.linear(h, p[f"{name}.weight"], p[f"{name}.bias"]) for name in "qkv")
    mixed = F.linear(_attend(q, k, v, HEADS // 2), p["out.weight"])
    x = x + (leave(mixed) + p["out.bias"])
    h = enter(F.layer_norm(x, (WIDTH,), p["norm2.weight"], p["norm2.bias"]))
    h = F.gelu(F.linear(h, p["up.weight"], p["up.bias"]))
    return x + (leave(F.linear(h, p["down.weight"])) + p["down.bias"])


def _summed(terms: Any) -> Tensor:
    return terms.redistribute(placements=[Shard(0), Replicate()])


def _with_dtensor(p: Named, x: Tensor) -> Tensor:
    """Attention on local tensors between the linears, as torch's own plans for it do."""
    mesh = world.device_mesh()
    h = F.layer_norm(x, (WIDTH,), p["norm1.weight"], p["norm1.bias"])
    q, k, v = (F.linear(h, p[f"{name}.weight"], p[f"{name}.bias"]) for name in "qkv")
    mixed = _attend(*(one.to_local() for one in (q, k, v)), HEADS // 2)  # type: ignore[attr-defined]
    spread = DTensor.from_local(mixed, mesh, [Shard(0), Shard(2)])
    x = x + _summed(F.linear(spread, p["out.weight"], p["out.bias"]))
    h = F.layer_norm(x, (WIDTH,), p["norm2.weight"], p["norm2.bias"])
    h = F.gelu(F.linear(h, p["up.weight"], p["up.bias"]))
    return x + _summed(F.linear(h, p["down.weight"], p["down.bias"]))


def _locals() -> tuple[Named, Tensor]:
    """This rank's parts of the parameters, and of the input."""
    torch.manual_seed(0)
    parameters = {}
    for name, (shape, how) in PARAMETERS.items():
        mine = list(shape)
        if how != WHOLE:
            mine[0 if how == BY_OUTPUT else 1] //= 2
        parameters[name] = (torch.randn(mine) / 8).requires_grad_()
    return parameters, torch.randn(BATCH // 2, LENGTH, WIDTH).requires_grad_()


def _step(forward: Callable[..., Tensor], p: Named, x: Tensor) -> Tensor:
    x.grad = None
    for parameter in p.values():
        parameter.grad = None
    loss = forward(p, x).sum()
    loss.backward()
    return loss


def _local_work():
    p, x = _locals()
    return lambda: _step(lambda p, x: _by_hand(p, x, lambda h: h, lambda h: h), p, x)


def _hand_written():
    p, x = _locals()
    group, across = (world.device_mesh().get_group(axis) for axis in ("tp", "dp"))
    summed = in_one_bucket(p.values(), group=across)

    def forward(p: Named, x: Tensor) -> Tensor:
        return _by_hand(p, x, lambda h: Enter.apply(h, group), lambda h: Leave.apply(h, group))

    return lambda: summed(_step(forward, p, x).detach())


def _dtensor(summed: bool):
    parameters, x = _locals()
    mesh = world.device_mesh()
    cuts = {WHOLE: Replicate(), BY_OUTPUT: Shard(0), BY_INPUT: Shard(1)}
    p: Named = {
        name: DTensor.from_local(one.detach(), mesh, [Replicate(), cuts[PARAMETERS[name][1]]])
        .requires_grad_()
        for name, one in parameters.items()
    }
    cut = DTensor.from_local(x.detach(), mesh, [Shard(0), Replicate()]).requires_grad_()

    def run() -> Tensor:
        loss = _step(_with_dtensor, p, cut).detach()
        if summed:
            for parameter in p.values():
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            loss = loss.redistribute(placements=[Replicate()] * 2)  # type: ignore[attr-defined]
        return loss

    return run


def _weft():
    p, x = _locals()
    mesh = world.weft_mesh()
    specs = {WHOLE: weft.P(), BY_OUTPUT: weft.P("tp"), BY_INPUT: weft.P(None, "tp")}
    p = {
        name: ShardTensor.from_local(
            one.detach(), mesh, specs[PARAMETERS[name][1]], sizes="chunk",
            shape=PARAMETERS[name][0],
        ).requires_grad_()
        for name, one in p.items()
    }
    cut = ShardTensor.from_local(x.detach(), mesh, weft.P("dp"), sizes="chunk",
                                 shape=(BATCH, LENGTH, WIDTH)).requires_grad_()
    return lambda: _step(_block, p, cut)


def _judge(times: Times) -> list[Figure]:
    return [Figure("to hand-written", times.ratio("weft", "hand-written"), TO_HAND_WRITTEN)]


def measure(num_rounds: int) -> list[Row]:
    systems = {
        "plain": _local_work(),
        "hand-written": _hand_written(),
        "weft": _weft(),
        "DTensor": _dtensor(summed=False),
        "DTensor, gradients summed": _dtensor(summed=True),
    }
    note = f"batch {BATCH}, length {LENGTH}, width {WIDTH}, {HEADS} heads; plain: the local work"
    return [timed("block forward+backward", systems, num_rounds, _judge, note)]
