"""How many collectives a call makes, forward and backward, and how few bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.oracle import block
from weft import P, ShardTensor
from weft.core import Layout, Mesh

LINE, GRID = {"x": 2}, {"dp": 2, "tp": 2}
NOTHING = (0, 0)
sdpa = F.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Count:
    """A call on zero-filled operands, and the collectives that it may make, forward, backward."""

    name: str
    fn: Callable[..., Any]
    operands: list[tuple[Any, ...]]
    collectives: tuple[int, int] = NOTHING
    mesh: tuple[tuple[str, int], ...] = tuple(LINE.items())
    max_nbytes: int | None = None


def _qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(x, q) + F.linear(x, k) * F.linear(x, v)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 2)).transpose(1, 2) * 2


def _attend(x: Tensor) -> Tensor:
    h = _heads(x)
    return sdpa(h, h, h, is_causal=True).transpose(1, 2).flatten(-2)


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, up)), down)


ROWS, COLUMNS, WHOLE = P("x"), P(None, "x"), P()
RAGGED = {0: (5, 2)}

COUNTS = [
    Count("same_layout", lambda a, b: (a + b).relu() * b, [((6, 4), ROWS), ((6, 4), ROWS)]),
    Count("ragged_alike", lambda a, b: a * b, [((7, 4), ROWS, RAGGED), ((7, 4), ROWS, RAGGED)]),
    Count("row_vector", lambda a, b: a * b, [((6, 4), ROWS), ((4,), WHOLE)], (0, 1)),
    Count("column_vector", lambda a, b: a * b, [((6, 4), ROWS), ((6, 1), ROWS)]),
    Count("data_parallel", F.linear, [((6, 4), ROWS), ((5, 4), WHOLE), ((5,), WHOLE)], (0, 2)),
    Count("by_output", F.linear, [((6, 4), WHOLE), ((5, 4), ROWS), ((5,), ROWS)], (0, 1)),
    Count("by_input", F.linear, [((6, 4), COLUMNS), ((5, 4), COLUMNS)]),
    Count("one_view_of_x", _qkv,
          [((6, 4), WHOLE), ((5, 4), ROWS), ((5, 4), ROWS), ((5, 4), ROWS)], (0, 1)),
    Count("mlp_block", _mlp, [((6, 4), WHOLE), ((8, 4), ROWS), ((4, 8), COLUMNS)], (1, 1)),
    Count("sum_rows", lambda a: a.sum(0), [((6, 4), ROWS)]),
    # A mean is left partial; backward() makes the value of a one-element tensor known everywhere.
    Count("mean_all", lambda a: a.mean(), [((7, 4), ROWS, RAGGED)], (0, 1)),
    Count("mean_rows", lambda a: a.mean(0), [((7, 4), ROWS, RAGGED)]),
    Count("sum_columns", lambda a: a.sum(1), [((6, 4), ROWS)]),
    Count("slice", lambda a: a[2:5], [((7, 4), ROWS)]),
    Count("slice_other_dim", lambda a: a[:, 1:3], [((7, 4), ROWS)]),
    Count("narrow", lambda a: a.narrow(0, 3, 2), [((7, 4), ROWS, RAGGED)]),
    Count("split", lambda a: a.split(3), [((7, 4), ROWS)]),
    Count("chunk_other_dim", lambda a: a.chunk(2, -1), [((7, 4), ROWS)]),
    Count("unbind_other_dim", lambda a: a.unbind(1), [((7, 4), ROWS)]),
    Count("transpose", lambda a: a.t() + 1, [((7, 4), ROWS)]),
    Count("heads", _heads, [((3, 5, 8), P(None, None, "x"))]),
    Count("attention_of_heads", _attend, [((3, 5, 8), P(None, None, "x"), {2: (2, 6)})]),
    Count("attention_of_batch", _attend, [((3, 5, 8), P("x"))]),
    Count("flatten_head", lambda a: a.flatten(0, 1), [((3, 5, 4), ROWS)]),
    Count("merge_tail", lambda a: a.flatten(1), [((3, 5, 4), ROWS)]),
    Count("cat_other_dim", lambda a, b: torch.cat([a, b], 1), [((7, 4), ROWS), ((7, 2), ROWS)]),
    Count("layer_norm", lambda a, w, b: F.layer_norm(a, (4,), w, b),
          [((7, 4), ROWS), ((4,), WHOLE), ((4,), WHOLE)], (0, 2)),
    Count("softmax_rows", lambda a: F.softmax(a, -1), [((7, 4), ROWS)]),
    Count("softmax_cut", lambda a: F.softmax(a, -1), [((4, 64), COLUMNS)], (2, 1),
          max_nbytes=3 * 4 * 8),
    Count("clone_detach", lambda a: a.clone().detach() + a, [((7, 4), ROWS)]),
    Count("zeros_like", lambda a: torch.zeros_like(a) + a, [((7, 4), ROWS)]),
    # What is written to keeps its layout: it would move there and back.
    Count("clamp_in_place", lambda a, b, c: a.clone().clamp_(b, c),
          [((3, 10), ROWS), ((10,), ROWS), ((10,), ROWS)], (2, 2), max_nbytes=4 * 5 * 8),
    Count("one_line_read_by_all", lambda a, b: torch.take_along_dim(a, (b * 0).long(), 1),
          [((1, 40), WHOLE), ((40, 3), ROWS)], (0, 1), max_nbytes=40 * 8),
    # As many bytes as whole, of which each rank would hold all.
    Count("recut", lambda a: a.reshape(5, 50), [((50, 5), COLUMNS)], (1, 1)),
    Count("two_axes", lambda x, w: F.linear(x, w), [((6, 4), P("dp")), ((8, 4), P("tp"))], (0, 2),
          tuple(GRID.items())),
]


def _events(count: Count, on: Any) -> list[tuple[str, str, int]]:
    operands = []
    for shape, spec, *sizes in count.operands:
        layout = Layout(Mesh(dict(count.mesh)), shape, spec, sizes=sizes[0] if sizes else None)
        local = block(layout, torch.zeros(shape, dtype=torch.float64), on.here)
        operands.append(ShardTensor.from_local(local, on, layout).requires_grad_())
    with weft.explain() as log:
        out = count.fn(*operands)
        for one in out if isinstance(out, (tuple, list)) else [out]:
            dual = one.sharding.replace(partial=None)
            gradient = ShardTensor.from_local(torch.zeros_like(one.to_local()), on, dual)
            one.backward(gradient, retain_graph=True)
    return [(event.direction, event.collective, event.nbytes) for event in log.events]


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.name)
def test_collectives(count: Count) -> None:
    mesh = dict(count.mesh)
    for events in weft.testing.run(lambda on: _events(count, on), Mesh(mesh).size(), mesh):
        forward = [event for event in events if event[0] == "forward"]
        assert (len(forward), len(events) - len(forward)) == count.collectives, events
        if count.max_nbytes is not None:
            assert sum(event[2] for event in events) <= count.max_nbytes, events


def test_a_vocabulary_is_not_gathered() -> None:
    """The loss over 1,000 words moves a few numbers per row, not the logits."""
    rows, words = 8, 1000
    count = Count("cross_entropy", lambda a: F.cross_entropy(a, torch.zeros(rows).long()),
                  [((rows, words), COLUMNS)])
    for events in weft.testing.run(lambda on: _events(count, on), 2, LINE):
        assert events and sum(event[2] for event in events) <= 10 * rows * 8, events


def test_reading_what_is_known_moves_nothing() -> None:
    def on_rank(on: Any) -> int:
        whole = ShardTensor.from_local(torch.tensor(3.0), on, P())
        cut = ShardTensor.from_local(torch.ones(3, 2), on, ROWS, sizes="chunk")
        with weft.explain() as log:
            assert whole.item() == 3.0 and bool(whole) and float(whole) == 3.0
            assert "6" in repr(cut) and cut.shape == (6, 2) and len(cut) == 6
            assert cut.stride() == (2, 1) and cut.numel() == 12 and cut.is_leaf
        return len(log.events)

    assert weft.testing.run(on_rank, 2, LINE) == [0, 0]


def test_operands_of_other_cuts_meet_where_the_busiest_rank_lacks_least() -> None:
    """Three parts of a cut dim lie on the first rank, on both, and on the second: they meet in the
    middle, where each rank lacks half of one. At the cuts of the first one rank would hold all."""
    def on_rank(mesh: Any) -> tuple[int, list[str]]:
        x = weft.ones(4, 24, mesh=mesh, spec=P(None, "tp"), dtype=torch.float64)
        with weft.explain() as log:
            one, other, third = x.split(8, 1)
            out = torch.addcmul(one, other, third)
        return log.nbytes, [str(each.sharding) for each in (one, other, third, out)]

    for nbytes, layouts in weft.testing.run(on_rank, mesh={"tp": 2}):
        assert nbytes == 4 * 4 * 8
        assert layouts == ["[4, 8@tp{8,0}]", "[4, 8@tp]", "[4, 8@tp{0,8}]", "[4, 8@tp]"]
