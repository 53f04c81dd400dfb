"""An AdamW step over 50 parameters, foreach, and how many torch calls it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import world
from bench.timing import Figure, Row, Times, timed

NUM_PARAMETERS, SIDE = 50, 8
TO_PLAIN = 1.3


class Count(TorchDispatchMode):
    """Counts the ATen calls that reach the kernels of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


_LAYS: dict[str, Callable[[], world.Lay]] = {
    "plain": lambda: lambda local, dim: local,
    "weft": lambda: world.lay_weft(world.weft_line()),
    "DTensor": lambda: world.lay_dtensor(world.line()),
}


def optimizer(system: str) -> torch.optim.Optimizer:
    """AdamW whose parameters have gradients, after its first step."""
    torch.manual_seed(0)
    lay, leaves = _LAYS[system](), []
    for _ in range(NUM_PARAMETERS):
        leaf = lay(torch.randn(SIDE, SIDE), 0).requires_grad_()
        leaf.grad = lay(torch.randn(SIDE, SIDE), 0)
        leaves.append(leaf)
    made = torch.optim.AdamW(leaves, lr=1e-3, foreach=True)
    made.step()
    return made


def num_calls(system: str) -> int:
    """ATen calls of one step."""
    made = optimizer(system)
    with Count() as count:
        made.step()
    return count.calls


def measure(num_rounds: int) -> list[Row]:
    systems = {name: optimizer(name).step for name in ("plain", "weft", "DTensor")}
    calls = {name: num_calls(name) for name in ("plain", "weft")}

    def judge(times: Times) -> list[Figure]:
        return [
            Figure("to plain", times.ratio("weft", "plain"), TO_PLAIN),
            Figure("torch calls", calls["weft"], calls["plain"], "calls"),
        ]

    name = f"AdamW step, {NUM_PARAMETERS} parameters"
    return [timed(name, systems, num_rounds, judge, f"torch calls: {calls}")]
