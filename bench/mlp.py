"""The batch-sharded MLP: two linears and a relu, forward and backward, rows sharded over all ranks.

What is due at the end is the same for all: every parameter's gradient summed over ranks, and the
loss. Hand-written code sums them in one bucket (one all-reduce and the copies in and out), which
is what one writes for a real network. One by one is faster where collectives are free, as here: it
is shown, and judged by nothing, since five latencies would be its price elsewhere. DTensor leaves
the gradients partial; it is shown so, and with the redistribute that sums them, and judged by the
first, which does less.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from bench import world
from bench.timing import Figure, Row, Times, timed
from bench.training.by_hand import in_one_bucket

ROWS, WIDTH = 8, 8
TO_HAND_WRITTEN, TO_DTENSOR = 1.35, 0.4


def _data() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    shapes = ((WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,))
    return torch.randn(ROWS, WIDTH), [torch.randn(shape) for shape in shapes]


def _step(x: Tensor, parameters: list[Tensor]) -> Tensor:
    for parameter in parameters:
        parameter.grad = None
    w1, b1, w2, b2 = parameters
    loss = F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2).sum()
    loss.backward()
    return loss


def _plain():
    x, parameters = _data()
    parameters = [parameter.requires_grad_() for parameter in parameters]
    return lambda: _step(x, parameters)


def _one_bucket():
    x, parameters = _data()
    parameters = [parameter.requires_grad_() for parameter in parameters]
    summed = in_one_bucket(parameters)
    return lambda: summed(_step(x, parameters).detach())


def _one_by_one():
    x, parameters = _data()
    parameters = [parameter.requires_grad_() for parameter in parameters]

    def run() -> Tensor:
        loss = _step(x, parameters).detach()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss)
        return loss

    return run


def _dtensor(summed: bool):
    x, parameters = _data()
    lay, whole = world.lay_dtensor(world.line()), [Replicate()]
    cut = lay(x, 0)
    leaves = [lay(one, None).requires_grad_() for one in parameters]

    def run() -> Tensor:
        loss = _step(cut, leaves).detach()
        if summed:
            for leaf in leaves:
                leaf.grad = leaf.grad.redistribute(placements=whole)  # type: ignore[union-attr]
            loss = loss.redistribute(placements=whole)  # type: ignore[attr-defined]
        return loss

    return run


def _weft(wrapped: bool):
    x, parameters = _data()
    lay = world.lay_weft(world.weft_line())
    cut = lay(x, 0)
    leaves = [(lay(one, None) if wrapped else one).requires_grad_() for one in parameters]
    return lambda: _step(cut, leaves)


def _judge(times: Times) -> list[Figure]:
    return [
        Figure("to hand-written", times.ratio("weft", "hand-written"), TO_HAND_WRITTEN),
        Figure("to DTensor", times.ratio("weft", "DTensor"), TO_DTENSOR),
    ]


def measure(num_rounds: int) -> list[Row]:
    systems = {
        "plain": _plain(),
        "hand-written": _one_bucket(),
        "hand-written, 5 all-reduces": _one_by_one(),
        "weft": _weft(wrapped=True),
        "weft, plain parameters": _weft(wrapped=False),
        "DTensor": _dtensor(summed=False),
        "DTensor, gradients summed": _dtensor(summed=True),
    }
    return [timed("MLP forward+backward", systems, num_rounds, _judge)]
