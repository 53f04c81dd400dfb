"""Bytes and memory of training steps, beside what one counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from bench.training.models import MODELS, Shape
from bench.training.systems import table_of
from weft import P

SHAPE = Shape(layers=2, width=64, batch=2, length=32)


def one_step(mesh: Any, spec: P) -> Any:
    """Blocks, fully sharded over dp and tensor parallel over tp: bytes that a rank receives, and
    of each parameter how many a rank of dp has."""
    torch.manual_seed(0)
    what = MODELS["blocks"]
    model = what.make(SHAPE)
    given = weft.distribute_tensor(what.given(SHAPE, SHAPE.batch * mesh.shape[0]), mesh, spec)
    weft.distribute_module(model, mesh, shardings=table_of("fully sharded x tensor", model))
    with weft.explain() as log:
        what.loss(model(given), given).backward()
    return log.nbytes, {
        name: 4 * one._local.numel() * mesh.shape[0] for name, one in model.named_parameters()}


@pytest.mark.parametrize("spec", [P("dp"), P("dp", "tp")], ids=["whole", "sequences"])
@pytest.mark.parametrize("dp", [2, 4])
def test_fully_sharded_and_tensor_parallel(spec: P, dp: int) -> None:
    found, held = weft.testing.run(
        lambda mesh: one_step(mesh, spec), mesh={"dp": dp, "tp": 2})[0]
    # Parameters come twice, and gradients go once; activations are summed, or scattered and
    # gathered, after attention and after the hidden units, and so are gradients before them.
    parameters = 3 * sum(held.values()) * (dp - 1) // dp
    activations = 4 * SHAPE.batch * SHAPE.length * SHAPE.width
    due = parameters + SHAPE.layers * 4 * activations + 2 * 4 * (dp - 1) // dp  # the loss
    if spec == P("dp"):
        assert abs(found - due) <= 4, (found, due)
        return
    due += sum(nbytes for name, nbytes in held.items()  # they have seen a part of the sequence
               if "norm" in name or name.endswith(("out.bias", "down.bias")))
    assert 0.98 * due < found < 1.02 * due


class Tables(nn.Module):
    """Rows of two tables, for ids of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(512, 32), nn.Embedding(64, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, ids: Any) -> Any:
        return self.head(self.token(ids) + self.place(torch.arange(ids.shape[1])))


def of_tables(mesh: Any, gather: bool | None) -> tuple[int, int, Tensor]:
    torch.manual_seed(0)
    model: Any = Tables()
    held = 4 * sum(one.numel() for one in model.parameters())
    weft.distribute_module(model, mesh, shardings={"*": P("dp")}, gather=gather)
    ids = weft.randint(512, (4 * mesh.size(), 64), mesh=mesh, spec=P("dp"))
    with weft.explain() as log, weft.testing.peak_memory(model, ids) as memory:
        model(ids).square().mean().backward()
    return log.nbytes, memory.peak, torch.tensor(held)


@pytest.mark.parametrize("gather", [None, False], ids=["groups", "each by itself"])
def test_a_table_sharded_as_the_batch_is(gather: bool | None) -> None:
    """Where ids are sharded over the axis that shards the rows, no rank makes rows of the global
    batch: each has four sequences, on any number of ranks."""
    found = {num: weft.testing.run(lambda mesh: of_tables(mesh, gather), mesh={"dp": num})[0]
             for num in (2, 4, 8)}
    peaks = [peak for _, peak, _ in found.values()]
    assert peaks == sorted(peaks, reverse=True), found
    for num, (nbytes, _, held) in found.items():
        gathered_and_reduced = 2 * int(held) * (num - 1) // num
        assert nbytes <= 1.1 * gathered_and_reduced, found
