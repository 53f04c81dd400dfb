"""What the cookbook and README say that layouts cost is what a run on four ranks receives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft import P

REPOSITORY = Path(__file__).parents[2]
COOKBOOK = (REPOSITORY / "docs" / "cookbook.md").read_text()
NUM_RANKS = 4
ACTIVATION, HIDDEN = (4, 8, 8), (4, 8, 32)
NUM_BYTES = 4 * 4 * 8 * 8
"""Of an activation: batch, sequence, width."""


class Attention(nn.Module):
    """Four heads of width two, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [one(x).unflatten(-1, (4, 2)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def pair() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def received(
    make: Callable[[], nn.Module], table: Mapping[str, Any], spec: P, given: Tensor,
    activations: Mapping[str, Any] | None = None, axes: Mapping[str, int] | None = None,
) -> int:
    """Bytes that rank 0 receives, forward and backward, but for those of the loss."""

    def program(mesh: Any) -> int:
        model = weft.distribute_module(make(), mesh, shardings=table, activations=activations)
        x = weft.distribute_tensor(given, mesh, spec)
        x.requires_grad_(x.is_floating_point())
        with weft.explain() as log:
            model(x).square().sum().backward()
        return sum(event.nbytes for event in log.events if event.collective != "AllReduce"
                   or event.op != "backward")

    return weft.testing.run(program, mesh=axes or {"tp": NUM_RANKS})[0]


def said(layer: str) -> list[int]:
    """The bytes per byte of what the row of a layer names: c (1 - 1/g) for each `c n (1 - 1/g)`."""
    cell = re.findall(rf"^\| {layer} \|.*\| (.*?) \|$", COOKBOOK, re.MULTILINE)
    found = re.findall(r"(?:(\d) )?n \(1 - 1/g\)", cell[0])
    assert found, cell
    return [int(times or 1) * (NUM_RANKS - 1) for times in found]


def due(*terms: tuple[int, int]) -> int:
    """The bytes of terms: what `said` gives, and the bytes of that tensor."""
    return sum(times * num_bytes for times, num_bytes in terms) // NUM_RANKS


def test_pairs_of_linears_receive_what_the_cookbook_says() -> None:
    x, hidden, columns, rows = torch.randn(ACTIVATION), torch.randn(HIDDEN), P("tp"), P(None, "tp")
    (first,), (second,) = said("first linear of a pair"), said("second linear of a pair")
    assert received(lambda: nn.Linear(8, 32), {"*": columns}, P(), x) == due((first, NUM_BYTES))
    assert received(lambda: nn.Linear(32, 8), {"weight": rows}, P(None, None, "tp"), hidden) == (
        due((second, NUM_BYTES)))
    both = due((first, NUM_BYTES), (second, NUM_BYTES))
    assert received(Attention, {"[qkv].*": columns, "out.*": rows}, P(), x) == both
    table = {"1.*": columns, "3.weight": rows}
    assert received(pair, table, P(), x) == both
    (norms,) = said("norms between pairs")
    assert received(pair, table, P(None, "tp"), x, {"": P(None, "tp")}) == (
        both + due((norms, 2 * 4 * 8)))


def test_an_embedding_receives_what_the_cookbook_says() -> None:
    tokens, (times,) = torch.arange(32).view(4, 8) % 16, said("embedding")
    assert received(lambda: nn.Embedding(16, 8), {"weight": P("tp")}, P(), tokens) == (
        due((times, NUM_BYTES)))
    assert received(lambda: nn.Embedding(16, 8), {"weight": P(None, "tp")}, P(), tokens) == 0


def test_a_convolution_receives_what_the_cookbook_says() -> None:
    (times,) = said("convolution, pool, interpolation")
    halo = 4 * 2 * (3 + 4 + 1)  # a row, a column and a corner of the 4 x 3 shards of a 8 x 6 field
    assert received(
        lambda: nn.Conv2d(2, 4, 3, padding=1), {}, P(None, None, "y", "x"), torch.randn(4, 2, 8, 6),
        axes={"y": 2, "x": 2},
    ) == 2 * 4 * halo + due((times, 4 * (4 * 2 * 9 + 4)))


def test_a_whole_model_receives_what_the_cookbook_says() -> None:
    num_bytes = 4 * (8 + 8 + 8 * 32 + 32 + 32 * 8 + 8)
    x, axes = torch.randn(ACTIVATION), {"dp": NUM_RANKS}
    (small,), large = said("whole model, small"), said("whole model, too large")
    assert received(pair, {}, P("dp"), x, axes=axes) == due((small, num_bytes))
    assert received(pair, {"*": P("dp")}, P("dp"), x, axes=axes) == (
        due(*((times, num_bytes) for times in large)))


def test_a_move_receives_what_the_readme_says() -> None:
    """Exactly the bytes that a rank lacks."""

    def move(mesh: Any) -> tuple[int, int]:
        x = weft.distribute_tensor(torch.arange(35.0).view(7, 5), mesh, P("dp", "tp"))
        with weft.explain() as log:
            moved = x.redistribute(P("tp", "dp"))
        (rows, columns), (held_rows, held_columns) = moved.sharding.box(mesh.rank), (
            x.sharding.box(mesh.rank))
        both = [max(0, min(one[1], other[1]) - max(one[0], other[0]))
                for one, other in ((rows, held_rows), (columns, held_columns))]
        return log.nbytes, 4 * (moved.to_local().numel() - both[0] * both[1])

    assert "a rank receives exactly the bytes that it lacks" in (
        REPOSITORY / "README.md").read_text()
    for got, lacking in weft.testing.run(move, mesh={"dp": 2, "tp": 4}):
        assert got == lacking
