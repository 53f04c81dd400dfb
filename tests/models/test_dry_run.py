"""A dry run of a model says what a run says: the same collectives, and the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.models.training import WAYS, distributed
from weft.testing import peak_memory


def step(mesh: Any, name: str, way: str, size: str, attention: str) -> tuple[Any, int]:
    """Two steps; what the second says."""
    model, inputs = distributed(mesh, WAYS[way], name, size, attention, 0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    events, peak = [], 0
    for _ in range(2):
        with peak_memory(model, optimizer, *inputs.values()) as memory, weft.explain() as log:
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            del loss
        optimizer.zero_grad()
        events, peak = log.events, memory.peak
    return [facts(event) for event in events], peak


def facts(event: Any) -> tuple[Any, ...]:
    return (event.op, event.line, event.module, event.transition, event.axes, event.collective,
            event.nbytes, event.direction)


@pytest.mark.parametrize("name, way, size, attention", [
    ("llama", "dp x tp", "uneven", "sdpa"),
    ("bert", "tp with sequences", "uneven", "sdpa"),
])
def test_as_a_run(name: str, way: str, size: str, attention: str) -> None:
    """Bytes are equal, collective by collective; memory within 1 %."""
    def program(mesh: Any) -> Any:
        return step(mesh, name, way, size, attention)

    shape = WAYS[way].mesh
    real = weft.testing.run(program, mesh=shape)
    dry = weft.dry_run(program, shape, rank=3)
    expected, peak = real[3]
    assert [facts(event) for event in dry.log.events] == expected
    assert dry.nbytes > 0
    assert dry.memory.peak == pytest.approx(peak, rel=0.01)
