"""One of the ranks of `weft bench attention`: weft and what it is compared with, in turns.

Started as `weft run -n N attention_ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object
per program. One process alone is rank 0, while the others wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from bench.by_turns import as_rank, fault_of, medians

__all__ = ["PROGRAMS", "SYSTEMS", "Program", "measure"]

WIDTH = 64

SYSTEMS = ("one process", "weft", "zig-zag", "keys gathered", "DTensor")

Attend = Callable[..., Any]

_attention: Any = F.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Program:
    """Attention of so many heads of queries, and of keys."""

    heads: int
    key_heads: int
    is_causal: bool

    def operands(self, length: int) -> list[Tensor]:
        """Queries, keys and values: the same everywhere."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(1, heads, length, WIDTH, generator=generator)
                for heads in (self.heads, self.key_heads, self.key_heads)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of whole or sharded sequences."""
        return _attention(query, key, value, is_causal=self.is_causal,
                          enable_gqa=self.heads != self.key_heads)


PROGRAMS = {
    "1 head": Program(1, 1, False),
    "1 head, causal": Program(1, 1, True),
    "4 heads": Program(4, 4, False),
    "4 heads, causal": Program(4, 4, True),
    "8 on 2 heads, causal": Program(8, 2, True),
}


def _measured(asked: Any) -> Iterator[Mapping[str, Any]]:
    mesh = weft.init_mesh({"x": int(os.environ["WORLD_SIZE"])})
    for name, program in PROGRAMS.items():
        times, fault = measure(program, asked["length"], asked["rounds"], mesh)
        yield {"program": name, "milliseconds": times, "fault": fault}


def measure(
    program: Program, length: int, rounds: int, mesh: Any
) -> tuple[dict[str, list[float]], str | None]:
    """Milliseconds per system, and why DTensor is not among them; results are compared first."""
    turns = _turns(program, length, mesh)
    due = turns["one process"]()
    for system in [one for one in SYSTEMS[1:] if one in turns]:
        found = turns[system]().full_tensor()
        if system == "zig-zag":
            found = weft.zigzag(length, mesh.size()).restore(found, 2)
        torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
    dtensor = _dtensor(program, length)
    fault = fault_of(lambda: dtensor().full_tensor(), due)
    if fault is None:
        turns["DTensor"] = dtensor
    if mesh.get_rank():
        turns["one process"] = lambda: None
    return medians(turns, rounds), fault


def _turns(program: Program, length: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Per system a turn, forward and backward, which gives the result."""
    whole = program.operands(length)
    on_sequence = weft.P(None, None, "x")

    def sharded(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [weft.distribute_tensor(one, mesh, on_sequence) for one in tensors]

    def gathered(query: Tensor, key: Any, value: Any) -> Tensor:
        return program.attend(query, *[one.redistribute(placements=weft.P())
                                       for one in (key, value)])

    found: dict[str, Callable[[], Any]] = {
        "one process": _turn(program.attend, whole), "weft": _turn(program.attend, sharded(whole)),
    }
    if program.is_causal:
        order = weft.zigzag(length, mesh.size())
        found["zig-zag"] = _turn(order.attend, sharded([order.apply(one, 2) for one in whole]))
    found["keys gathered"] = _turn(gathered, sharded(whole))
    return found


def _dtensor(program: Program, length: int) -> Callable[[], Any]:
    """By torch's plain products: its DTensor has no gradient of fused attention on CPUs."""
    line = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def attend(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return program.attend(*tensors)

    return _turn(attend, [distribute_tensor(one, line, [Shard(2)])
                          for one in program.operands(length)])


def _turn(attend: Attend, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    tensors = [one.detach().requires_grad_() for one in tensors]

    def turn() -> Any:
        for one in tensors:
            one.grad = None
        out = attend(*tensors)
        (out * out).sum().backward()
        return out.detach()

    return turn


if __name__ == "__main__":
    as_rank(_measured)
