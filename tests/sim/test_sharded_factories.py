"""`weft.sharded_factories()`: plain code's own tensors follow what is written to them."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import weft
from weft import P
from weft.testing import peak_memory

X = torch.arange(48, dtype=torch.float64).view(8, 6) / 7


def ranks(program: Any, size: int = 4) -> list[Any]:
    """What `program(x)` gives on each rank: x is X, its rows sharded."""
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with weft.sharded_factories():
            out = program(x)
        return tree_map_only(weft.ShardTensor, seen, out)

    return weft.testing.run(on_rank, mesh={"x": size})


def seen(x: Any) -> tuple[str, Tensor]:
    """The layout and the value."""
    return str(x.sharding), x.full_tensor()


def same(out: tuple[str, Tensor], due: Tensor, layout: str) -> None:
    assert out[0] == layout
    torch.testing.assert_close(out[1], due)


def put(out: Tensor, x: Any, at: Any) -> Tensor:
    out[at] = x
    return out


@pytest.mark.parametrize("make, layout", [
    (lambda x: put(torch.zeros(3, 8, 6, dtype=x.dtype), x, 1), "[3, 8@x, 6]"),
    (lambda x: put(torch.ones([8, 9], dtype=x.dtype), x, (..., slice(2, 8))), "[8@x, 9]"),
    (lambda x: put(torch.full((10, 6), 2.5, dtype=x.dtype), x, slice(1, 9)), "[10@x, 6]"),
    (lambda x: put(torch.zeros(size=(2, 8, 6), dtype=x.dtype), x, slice(None)), "[2, 8@x, 6]"),
    (lambda x: put(torch.zeros(8, 6, 2, dtype=x.dtype), x, (..., 1)), "[8@x, 6, 2]"),
    (lambda x: torch.zeros(8, 6, dtype=x.dtype).copy_(x), "[8@x, 6]"),
    (lambda x: put(torch.zeros_like(torch.zeros(2, 8, 6, dtype=x.dtype)), x, 1), "[2, 8@x, 6]"),
    (lambda x: put(torch.zeros(3).new_ones(8, 6, dtype=x.dtype), x, slice(None)) + x, "[8@x, 6]"),
    (lambda x: put(torch.ones_like(torch.zeros(2, 8, 6), dtype=x.dtype), x, 1), "[2, 8@x, 6]"),
    (lambda x: put(torch.empty(9, dtype=x.dtype).new_zeros((8, 9)), x, (..., slice(6))),
     "[8@x, 9]"),
    (lambda x: torch.zeros(8, 6, dtype=x.dtype).add_(x, alpha=2), "[8@x, 6]"),
    (lambda x: torch.zeros(5, 6, dtype=x.dtype).index_add_(
        0, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), x), "[5@x, 6]"),
    (lambda x: torch.mul(x, 3, out=torch.zeros(8, 6, dtype=x.dtype)), "[8@x, 6]"),
])
def test_a_written_tensor_has_the_axes_of_the_value(make: Any, layout: str) -> None:
    for out in ranks(make):
        same(out, make(X), layout)


def test_values_of_the_parts_that_are_not_written() -> None:
    def program(x: Any) -> Any:
        return put(torch.full((2, 8, 6), 7, dtype=torch.float64), x, 1)

    for out in ranks(program):
        same(out, torch.stack([torch.full_like(X, 7), X]), "[2, 8@x, 6]")


def test_blocks_wait_with_their_base() -> None:
    def program(x: Any) -> Any:
        out = torch.zeros(2, 8, 6, dtype=x.dtype)
        first, rows = out[0], out[1][2:5]
        out[1, :, :] += x
        rows *= 2
        first.copy_(x)
        return out, rows

    due = torch.stack([X, X])
    due[1, 2:5] *= 2
    for out, rows in ranks(program):
        same(out, due, "[2, 8@x, 6]")
        same(rows, 2 * X[2:5], "[3@x{0,2,1,0}, 6]")


def test_ragged_shards_stay_where_lengths_agree() -> None:
    def on_rank(mesh: Any) -> Any:
        layout = weft.Layout(mesh.abstract, (8, 6), P("x"), sizes={0: (5, 0, 3)})
        x = weft.distribute_tensor(X, mesh, layout)
        with weft.sharded_factories():
            out = torch.zeros(2, 8, 6, dtype=x.dtype)
            out[0] = x
        return seen(out)

    for out in weft.testing.run(on_rank, mesh={"x": 3}):
        same(out, torch.stack([X, 0 * X]), "[2, 8@x{5,0,3}, 6]")


def test_gradients_pass_through_writes_and_blocks() -> None:
    def program(x: Any) -> Any:
        x.requires_grad_()
        out = torch.zeros(3, 8, 6, dtype=x.dtype)
        out[0] = x * x
        block = out[1]
        block += 3 * x
        out.data[2] = x.detach()
        out.square().sum().backward()
        return x.grad

    x = X.clone().requires_grad_()
    ((x * x).square() + (3 * x).square()).sum().backward()
    for grad in ranks(program):
        same(grad, x.grad, "[8@x, 6]")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("use", [
    lambda x: torch.ones(3).tolist(),
    lambda x: torch.tensor(torch.ones(3)).tolist(),
    lambda x: np.asarray(torch.ones(3)).tolist(),
    lambda x: torch.ones(3).numpy().tolist(),
    lambda x: repr(torch.ones(2)),
    lambda x: copy.deepcopy(torch.ones(3)).tolist(),
    lambda x: (torch.zeros(2, 3) == torch.zeros(2, 3)).all().item(),
    lambda x: [row.sum().item() for row in torch.ones(2, 3)],
    lambda x: torch.func.vmap(lambda a: a * 2)(torch.ones(3)).tolist(),
    lambda x: (torch.zeros(3, dtype=torch.int8).dtype, torch.zeros(2, 3).shape, len(torch.ones(4))),
    lambda x: torch.ones(3).requires_grad_().is_leaf,
    lambda x: put(torch.zeros(4), torch.ones(2), slice(2)).tolist(),
    lambda x: put(torch.zeros(3), 2.0, torch.tensor([True, False, True])).tolist(),
])
def test_other_uses_see_a_plain_tensor(use: Any) -> None:
    for out in ranks(use, 2):
        assert out == use(X)


@pytest.mark.filterwarnings("ignore:__setitem__")
def test_a_plain_tensor_stays_one() -> None:
    """Scalars, leaves, what has been read before it is written, replicated values."""
    def program(x: Any) -> list[Any]:
        read, whole, scalar = torch.zeros(8, 6), torch.zeros(2, 8, 6), torch.zeros(())
        assert read.sum() == 0
        read[...] = x
        whole[0] = x.redistribute(placements=P())
        scalar += x.sum()
        buffer = io.BytesIO()
        torch.save(made := torch.ones(2), buffer)
        return [read, whole, made, torch.zeros(3, requires_grad=True), torch.zeros(0, 3)]

    for outs in ranks(program, 2):
        assert {type(out) for out in outs} == {Tensor}
        torch.testing.assert_close(outs[0], X.float())


def test_what_a_users_function_returns_keeps_its_graph() -> None:
    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.ones(2)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0].sum() * torch.ones(3)

    def program(x: Any) -> Any:
        leaf = torch.zeros(3, requires_grad=True)
        Ones.apply(leaf).sum().backward()
        return leaf.grad

    assert [grad.tolist() for grad in ranks(program, 2)] == [[2, 2, 2]] * 2


def test_errors_are_torchs_and_attributes_stay() -> None:
    def program(x: Any) -> Any:
        with pytest.raises(RuntimeError, match="non-negative"):
            torch.zeros(-1, 2)
        out: Any = torch.zeros(8, 6, dtype=x.dtype)
        out.unit = "m"
        out += x
        return out.unit, type(out)

    assert ranks(program, 2) == [("m", weft.ShardTensor)] * 2


def test_outside_it_is_plain_again() -> None:
    def program(x: Any) -> Any:
        return torch.zeros(8, 6)

    waiting = ranks(program, 2)[0]
    assert torch.equal(waiting, torch.zeros(8, 6)) and type(waiting) is Tensor
    assert type(torch.zeros(2)) is Tensor


def test_strict_allows_it_and_nothing_is_sent() -> None:
    def program(x: Any) -> int:
        with weft.strict(), weft.explain() as log:
            states = torch.empty(4, 8, 6, dtype=x.dtype)
            for step in range(4):
                states[step] = x * step
        return log.nbytes

    assert ranks(program) == [0] * 4


def test_a_dry_run_follows_too() -> None:
    def program(mesh: Any) -> None:
        x = weft.ones(64, 4096, mesh=mesh, placements=P("x"))
        with weft.sharded_factories():
            out = torch.empty(16, *x.shape)
            for at in range(16):
                out[at] = x

    report = weft.dry_run(program, {"x": 64})
    assert report.log.nbytes == 0 and report.memory.peak < 18 * 4096 * 4


def fourier(x: Any, weights: Any, modes: int) -> Tensor:
    """A Fourier layer as its authors write it."""
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros(*spectrum.shape, dtype=spectrum.dtype, device=x.device)
    for rows, weight in zip((slice(modes), slice(-modes, None)), weights):
        part = spectrum[:, :, rows, :modes]
        out[:, :, rows, :modes] = torch.einsum("bixy,ioxy->boxy", part, weight)
    return torch.fft.irfft2(out, s=x.shape[-2:])


def windows(x: Any) -> Tensor:
    """Predictions of windows, added up and divided by how many there are."""
    out, count = torch.zeros(x.shape, dtype=x.dtype), torch.zeros(x.shape[-2:], dtype=x.dtype)
    for row in range(0, x.shape[-2] - 7, 4):
        out[0, :, row : row + 8] += x[0, :, row : row + 8].sin()
        count[row : row + 8] += 1
    return out / count


def steps(x: Any) -> Tensor:
    states = torch.empty(6, *x.shape, dtype=x.dtype, device=x.device)
    for step in range(6):
        states[step] = x = torch.roll(x, 1, -2) + x.sin()
    return states


FIELD = torch.linspace(-1, 1, 4 * 64 * 48, dtype=torch.float64).view(1, 4, 64, 48).sin()


@pytest.mark.parametrize("program", [
    lambda x: fourier(x, torch.randn(
        2, 4, 4, 3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)), 3),
    windows, steps,
], ids=["fourier", "windows", "steps"])
@pytest.mark.parametrize("dim", [2, 3])
def test_memory_falls_with_the_ranks(program: Any, dim: int) -> None:
    def trained(x: Any) -> tuple[int, Tensor, Tensor]:
        x.requires_grad_()
        with peak_memory(x) as memory:
            out = program(x)
            out.square().sum().backward()
        return memory.peak, out.detach(), x.grad  # type: ignore[return-value]

    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(FIELD, mesh, P(*[None] * dim, "x"))
        with weft.sharded_factories():
            mine, out, grad = trained(x)
        return mine, out.full_tensor(), grad.full_tensor()  # type: ignore[attr-defined]

    peak, due, due_grad = trained(FIELD.clone())
    for mine, out, grad in weft.testing.run(on_rank, mesh={"x": 4}):
        torch.testing.assert_close(out, due)
        torch.testing.assert_close(grad, due_grad)
        assert mine <= 1.5 * peak / 4, f"{mine / peak:.2f} of one process"
