"""Which of the ops that are promised not to gather make a dim whole (`tests/cases/named.py`)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import weft
from tests.cases.named import EVERY, MADE_WHOLE, Named, Way, by_name
from tests.harness import flat
from weft import P
from weft.core import Layout

MOVING = {"shape", "order"}
"""Groups whose ops bring elements to other ranks: among 4 ranks, one may receive half of them."""


def num_ranks(one: Named) -> int:
    return 8 if one.group in MOVING else 4


def received(one: Named, way: Way, on: Any) -> tuple[int, int]:
    """Bytes that this rank receives, forward and backward."""
    given: list[torch.Tensor] = []
    first = next((place for place, dim in enumerate(way) if dim is not None), None)
    for place, full in enumerate(one.operands()):
        dim = way[place] if place < len(way) else None
        spec = P() if dim is None else P(*(None,) * dim, "x")
        layout = Layout(on.abstract, tuple(full.shape), spec)
        operand = weft.distribute_tensor(full, on, layout, src_data_rank=None)
        wanted = one.grad and place == first and full.is_floating_point()
        given.append(operand.requires_grad_(wanted))
    with weft.explain() as log:
        out = one.fn(*given)
        for result in flat(out):
            if isinstance(result, weft.ShardTensor) and result.requires_grad:
                dual = result.sharding.replace(cuts=result.sharding.cuts, partial=None)
                gradient = torch.ones_like(result.to_local().detach())
                result.backward(
                    weft.ShardTensor.from_local(gradient, on, dual), retain_graph=True
                )
    totals = {"forward": 0, "backward": 0}
    for event in log.events:
        totals[event.direction] += event.nbytes
    return totals["forward"], totals["backward"]


def made_whole(one: Named) -> list[str]:
    """The ways in which some rank receives half of what a whole operand is, or more."""
    found, size = [], num_ranks(one)
    for way in one.ways:
        of_ranks = weft.testing.run(functools.partial(received, one, way), mesh={"x": size})
        most = tuple(map(max, zip(*of_ranks)))
        cut = [(shape, place) for place, (shape, dim) in enumerate(zip(one.shapes, way))
               if dim is not None]
        nbytes = [math.prod(shape) * one.operands()[place].element_size() for shape, place in cut]
        if max(most) >= max(nbytes) * (size - 1) / size / 2:
            found.append(f"{way}: {most} of {max(nbytes)}")
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", dict.fromkeys(one.group for one in EVERY))
def test_nothing_else_is_made_whole(group: str) -> None:
    found = {
        name: said for name, calls in by_name().items() if name.startswith(f"{group}: ")
        if (said := [text for one in calls for text in made_whole(one)])
    }
    known = {name for name in MADE_WHOLE if name.startswith(f"{group}: ")}
    assert found.keys() == known, {name: found.get(name) for name in found.keys() ^ known}


def test_the_share_of_ops() -> None:
    names = by_name().keys()
    assert MADE_WHOLE.keys() <= names
    others = {name for name in names if not name.startswith(("pointwise", "conversion"))}
    assert 1 - len(MADE_WHOLE) / len(names) >= 0.9
    assert 1 - len(MADE_WHOLE.keys() & others) / len(others) >= 0.9
