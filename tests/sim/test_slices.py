"""Slices of one sharded tensor that calls align: gradients of the slices, writes in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft import P
from weft.testing import peak_memory


def gradients_of_slices(u: Tensor) -> list[Tensor]:
    """The gradient of a slice is its own, whoever asks for it, before it is used or after."""
    a, b, seen = u[2:], u[:-2], []
    out = (a - b) ** 2
    a.register_hook(seen.append)
    found = [*torch.autograd.grad(out.sum() + a.sum(), [a, u]), *seen]
    c = u[1:-1]
    c.retain_grad()
    (c * u[2:] - u[:-2] * c).sum().backward()
    assert c.grad is not None and u.grad is not None
    found += [c.grad, u.grad]
    outer = u[1:]
    cubes = (outer[1:] - u[:-2]) ** 3
    found += torch.autograd.grad(cubes.sum(), outer)
    dropped = u[4:]
    dropped.register_hook(seen.append)
    out = (dropped * u[:-4]).sum()
    del dropped
    found += [*torch.autograd.grad(out, u), seen[-1]]
    d = u[3:]
    return [*found, *torch.autograd.grad((d * u[:-3]).sum(), d, create_graph=True)]


def writes_in_between(u: Tensor) -> list[Tensor]:
    """What is read is what stands there."""
    u = u.detach().clone()
    after, found = u[2:], []
    for write in (lambda: None, lambda: u[4:9].fill_(7.0), lambda: u.data.mul_(2),
                  lambda: after.add_(1), lambda: u.copy_(u.flip(0))):
        write()
        found.append(after - u[:-2])
    before = u[2:]
    u.data = u.data * 3
    found.append(before - u[:-2])
    detached = after.detach()
    return [*found, detached - u[:-2], u[1:].t()[:, 1:] - u[:-2].t()]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("program", [gradients_of_slices, writes_in_between])
def test_as_on_one_rank(program: Any, ranks: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 5, dtype=torch.float64)

    def on_rank(mesh: Any) -> list[Tensor]:
        u = weft.distribute_tensor(x, mesh, P("x"), src_data_rank=None).requires_grad_()
        return [one.detach().full_tensor() for one in program(u)]

    due = [one.detach() for one in program(x.clone().requires_grad_())]
    for found in weft.testing.run(on_rank, mesh={"x": ranks}):
        for mine, one in zip(found, due, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)


def collectives(mesh: Any, step: Any, times: int) -> list[list[tuple[str, int]]]:
    torch.manual_seed(0)
    u = weft.distribute_tensor(torch.randn(16, 4), mesh, P("x"))
    found = []
    for _ in range(times):
        with weft.explain() as log:
            u = step(u)
        found.append([(event.collective, event.nbytes) for event in log.events])
    return found


def one_sided(u: Tensor) -> Tensor:
    return u - 0.1 * (u - u.roll(1, 0)) * (u.roll(1, 0) - u.roll(2, 0))


def far_apart(u: Tensor) -> Tensor:
    return u.roll(1, 0) + u.roll(8, 0)


def test_reads_are_joined_as_they_were() -> None:
    """Nothing that nobody reads: rows on one side; a box with a wide gap is none."""
    row = 4 * 4
    *_, last = weft.testing.run(lambda mesh: collectives(mesh, one_sided, 4), mesh={"x": 4})[1]
    assert last == [("Halo", 2 * row)]
    *_, last = weft.testing.run(lambda mesh: collectives(mesh, far_apart, 4), mesh={"x": 4})[1]
    assert last == [("Halo", row), ("Halo", 4 * row)]


def test_another_program_after_a_loop() -> None:
    """What was foreseen wrongly costs rows at most; a tensor that is read less often keeps none."""
    def program(mesh: Any) -> Tensor:
        u = weft.distribute_tensor(torch.arange(24.0), mesh, P("x"))
        for times in (4, 1, 4):
            for _ in range(times):
                u = one_sided(u) if times == 4 else u.roll(1, 0)
        return u.full_tensor()

    due = weft.testing.run(program, mesh={"x": 1})[0]
    for found in weft.testing.run(program, mesh={"x": 3}):
        assert torch.equal(found, due)


def test_what_is_written_to_a_whole_tensor_stays_sharded() -> None:
    """By ops that return another tensor: it becomes sharded as what is written to it."""
    whole, part = torch.randn(6, 8), torch.randn(6, 3)
    due = torch.slice_scatter(whole, part, 1, 2, 5), torch.select_scatter(whole, part[:, 0], 1, 7)

    def program(mesh: Any) -> tuple[list[str], int]:
        rows, columns = [
            weft.distribute_tensor(part, mesh, spec) for spec in (P("x"), P(None, "x"))]
        with weft.explain() as log:
            made: list[Any] = [
                torch.slice_scatter(whole, rows, 1, 2, 5),
                torch.slice_scatter(whole, columns, 1, 2, 5),
                torch.select_scatter(whole, rows[:, 0], 1, 7),
            ]
        for one, other in zip(made, (due[0], *due)):
            assert torch.equal(one.full_tensor(), other)
        return [str(one.sharding) for one in made], log.nbytes

    for layouts, nbytes in weft.testing.run(program, mesh={"x": 3}):
        assert layouts == ["[6@x, 8]", "[6, 8@x]", "[6@x, 8]"]
        assert nbytes <= 6 * 4  # at most one of the columns


def test_a_graph_does_not_keep_what_it_read() -> None:
    """Nothing is saved for the backward of a linear stencil, so each step's field is freed."""
    def march(u: Any) -> int:
        with peak_memory(u.requires_grad_()) as memory:
            for _ in range(6):
                new = u.clone()
                new[1:-1] += u[2:] + u[:-2]
                u = new
            u.sum().backward()
        return memory.peak

    x = torch.randn(64, 16)
    alone = march(x.clone())
    for peak in weft.testing.run(
        lambda mesh: march(weft.distribute_tensor(x, mesh, P("x"))), mesh={"x": 2}
    ):
        assert peak < 1.25 * alone / 2, peak / alone


def test_slices_meet_an_operand_whose_dim_has_more_factors() -> None:
    """Heads of queries in groups, of which slices of keys have one each."""
    q, k = torch.randn(2, 2, 4, 3, 2, generator=torch.Generator().manual_seed(0))

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :2], k[:, 2:], enable_gqa=True)

    def on_rank(mesh: Any) -> Tensor:
        return attend(*[weft.distribute_tensor(one, mesh, P(None, "x")) for one in (q, k)]
                      ).full_tensor()

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        torch.testing.assert_close(found, attend(q, k))


def test_a_slice_leaves_no_rank_without_what_the_op_needs() -> None:
    """Of the last columns the first rank has none; torch's `bilinear` takes no empty ones."""
    whole = torch.arange(60.0).view(5, 2, 6)

    def on_rank(mesh: Any) -> Tensor:
        weight = weft.distribute_tensor(whole, mesh, P(None, None, "x"))[:, :, 2:]
        return F.bilinear(torch.ones(2), torch.ones(4), weight).full_tensor()

    expected = F.bilinear(torch.ones(2), torch.ones(4), whole[:, :, 2:])
    for found in weft.testing.run(on_rank, mesh={"x": 3}):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("split", [
    lambda x: x.unsafe_chunk(2), lambda x: torch.unsafe_split(x, 2),
    lambda x: torch.unsafe_split_with_sizes(x, [1, 4]),
])
@pytest.mark.parametrize("written", [0, 2])
def test_writes_to_unsafe_pieces_are_those_of_torch(split: Any, written: int) -> None:
    """They share memory, of which autograd knows nothing."""
    def program(x: Any) -> tuple[list[Any], Any]:
        base = x * 1
        tensors = [base, *split(base)]
        tensors[written].mul_(10)
        loss: Any = sum((one * one).sum() * place for place, one in enumerate(tensors, 1))
        return tensors, torch.autograd.grad(loss, x)[0]

    x = torch.arange(10.0).view(5, 2)
    expected = program(x.clone().requires_grad_())

    def on_rank(mesh: Any) -> None:
        for spec in (P("x"), P(None, "x"), P()):
            tensors, grad = program(weft.distribute_tensor(x, mesh, spec).detach().requires_grad_())
            found = [one.full_tensor() for one in tensors], grad.full_tensor()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    weft.testing.run(on_rank, mesh={"x": 3})
