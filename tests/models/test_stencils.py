"""Unmodified solvers on sharded fields: bits, one exchange per field and step, bytes, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from bench.field import counted
from tests.models.peaks import SHARE, largest
from tests.models.stencils import SOLVERS, start
from weft import Layout, P
from weft.testing import peak_memory

SHAPE = 50, 41

LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...], dict[int, tuple[int, ...]]]] = {
    "rows": ({"x": 4}, ("x",), {}),
    "grid": ({"x": 2, "y": 2}, ("x", "y"), {}),
    "ragged": ({"x": 3}, ("x",), {0: (18, 0, 32)}),
    "ragged grid": ({"x": 2, "y": 2}, ("x", "y"), {0: (20, 30), 1: (25, 16)}),
}

FIRST = 2
"""Steps after which all reads of a step are known."""


def fields_on(mesh: Any, way: str) -> list[Any]:
    _, names, sizes = LAYOUTS[way]
    layout = Layout(mesh.abstract, SHAPE, P(*names), sizes=sizes)
    return [weft.distribute_tensor(one, mesh, layout, src_data_rank=None) for one in start(*SHAPE)]


def solved(mesh: Any, name: str, way: str) -> tuple[Any, ...]:
    """The fields after some steps, what was received in the last one, and the peak."""
    fields = fields_on(mesh, way)
    layout = fields[0].sharding
    with peak_memory(fields) as memory:
        for _ in range(FIRST):
            fields = SOLVERS[name](*fields)
        with weft.explain() as log:
            fields = SOLVERS[name](*fields)
    assert [one.sharding for one in fields] == [layout] * 3
    received = [(event.collective, event.nbytes) for event in log.events]
    return [one.full_tensor() for one in fields], received, memory.peak, layout


def halo_nbytes(layout: Layout, rank: int, is_torus: bool) -> int:
    """Bytes of the rows, columns and corners around a rank's shard, by plain arithmetic."""
    around = own = 1
    for length, (first, last), axes in zip(layout.shape, layout.box(rank), layout.dims):
        read = last - first
        if axes and read and is_torus:
            read += 2
        elif axes and read:
            read = min(last + 1, length) - max(first - 1, 0)
        around, own = around * read, own * (last - first)
    return 8 * (around - own)


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("name", SOLVERS)
def test_one_exchange_per_field_and_step(name: str, way: str) -> None:
    share, fields, ranks = measured(name, way)
    for rank, (found, received, _, layout) in enumerate(ranks):
        for mine, due in zip(found, fields):
            assert torch.equal(mine, due)
        nbytes = halo_nbytes(layout, rank, name == "rolls")
        assert received == [("Halo", nbytes)] * 3
    assert share <= SHARE


def measured(name: str, way: str) -> tuple[float, Any, list[Any]]:
    """The peak of a rank in the largest shard's part of one process's, and what both found."""
    fields: Any = start(*SHAPE)
    with peak_memory(list(fields)) as alone:
        for _ in range(FIRST + 1):
            fields = SOLVERS[name](*fields)
    ranks = weft.testing.run(lambda mesh: solved(mesh, name, way), mesh=LAYOUTS[way][0])
    return max(run[2] for run in ranks) / alone.peak / largest(ranks[0][-1]), fields, ranks


@pytest.mark.parametrize("name", SOLVERS)
def test_one_sum_per_field_and_step_in_backward(name: str) -> None:
    def trained(mesh: Any) -> tuple[Any, ...]:
        given = [one.requires_grad_() for one in (
            start(*SHAPE) if mesh is None else fields_on(mesh, "grid"))]
        fields: Any = given
        for _ in range(FIRST):
            fields = SOLVERS[name](*fields)
        last = [one.detach().requires_grad_() for one in fields]
        with weft.explain() as log, peak_memory(last) as memory:
            sum((one * one).sum() for one in SOLVERS[name](*last)).backward()  # type: ignore
        return [getattr(one.grad, "full_tensor", lambda one=one: one.grad)() for one in last], [
            (event.collective, event.nbytes) for event in log.events
            if event.collective != "AllReduce"], memory.peak

    due, _, alone = trained(None)
    for rank, (found, received, peak) in enumerate(
        weft.testing.run(trained, mesh=LAYOUTS["grid"][0])
    ):
        for mine, one in zip(found, due):
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)
        assert peak <= SHARE * alone * 25 / 50 * 21 / 41
        halos = [nbytes for collective, nbytes in received if collective == "Halo"]
        sums = [nbytes for collective, nbytes in received if collective == "HaloSum"]
        assert len(halos) == len(sums) == 3 and len(received) == 6, (rank, received)
        assert sum(halos) == sum(sums)


def test_a_step_of_the_bench_receives_its_rows() -> None:
    """One exchange, of one row from each side."""
    found = weft.testing.run(lambda mesh: counted(mesh, "stencil", 32), mesh={"x": 4})
    assert [(nbytes, exchanges) for nbytes, exchanges, _ in found] == [
        (128, 1), (256, 1), (256, 1), (128, 1)]


def gray_scott(u: Any) -> Any:
    """Reaction and diffusion, by rolls that are added up: one process keeps none of them."""
    v = u * 0.5
    for _ in range(FIRST):
        lap_u, lap_v = [sum(one.roll(by, dim) for by in (1, -1) for dim in (0, 1)) - 4 * one
                        for one in (u, v)]
        made = u * v * v
        u, v = u + 0.16 * lap_u - made, v + 0.08 * lap_v + made
    return u + v


def prolonged(u: Any) -> Any:
    """A coarse grid inside of a border, then on a finer grid, both written by slices."""
    rows, columns = u.shape
    padded = u.new_zeros(rows + 2, columns + 2)
    padded[1:-1, 1:-1] = u
    fine = padded.new_zeros(2 * rows + 3, 2 * columns + 3)
    fine[::2, ::2] = padded
    fine[1::2, ::2] = (padded[1:] + padded[:-1]) / 2
    return fine * fine


def recorded(u: Any) -> Any:
    """The states of some steps, written into one tensor."""
    states = u.new_empty((4, *u.shape))
    for step in range(4):
        u = u + 0.1 * (u.roll(1, 0) - 2 * u + u.roll(-1, 0))
        states[step] = u
    return states


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("program", [gray_scott, prolonged])
def test_programs_take_a_part_of_the_memory(program: Any, way: str) -> None:
    """Forward and backward, from the first step on."""
    axes, names, sizes = LAYOUTS[way]
    torch.manual_seed(0)
    whole = torch.rand(SHAPE, dtype=torch.float64).requires_grad_()
    with peak_memory(whole) as one:
        due = program(whole)
        due.sum().backward()
    assert whole.grad is not None

    def on_rank(mesh: Any) -> tuple[Any, ...]:
        layout = Layout(mesh.abstract, SHAPE, P(*names), sizes=sizes)
        field: Any = weft.distribute_tensor(whole.detach(), mesh, layout).requires_grad_()
        with peak_memory(field) as memory:
            out: Any = program(field)
            out.sum().backward()
        return out.full_tensor(), field.grad.full_tensor(), memory.peak, layout, out.sharding

    for out, grad, peak, layout, made in weft.testing.run(on_rank, mesh=axes):
        torch.testing.assert_close(out, due)
        torch.testing.assert_close(grad, whole.grad)
        share = peak / one.peak / max(largest(layout), largest(made))
        assert share <= (1.2 if program is gray_scott else SHARE), f"{share:.2f} of {made}"
