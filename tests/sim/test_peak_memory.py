"""`weft.testing.peak_memory`: live bytes of tensors, per rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft import P
from weft.testing import peak_memory

KIB = 1024


def test_what_is_alive_together_counts_and_what_is_gone_does_not() -> None:
    x = torch.ones(KIB, dtype=torch.uint8)
    with peak_memory(x) as memory:
        assert memory.start == memory.live == KIB
        y = x + 1
        assert memory.live == 2 * KIB
        del y
        assert memory.live == KIB
        z = (x + 1)[:1]  # a view keeps all of it
        assert memory.live == 2 * KIB
    assert memory.peak == 2 * KIB
    del z
    assert memory.live == KIB


def test_saved_tensors_count_until_the_backward_has_passed() -> None:
    x = torch.ones(KIB, dtype=torch.float32, requires_grad=True)
    with peak_memory(x) as memory:
        loss = x.exp().exp().sum()
        kept = memory.live
        loss.backward()
        del loss
        assert memory.live == 2 * 4 * KIB  # x and its gradient
    assert kept >= 3 * 4 * KIB
    assert 4 * 4 * KIB <= memory.peak <= 5 * 4 * KIB


def test_memory_that_is_freed_by_resizing_and_filled_again() -> None:
    x = torch.zeros(4 * KIB, dtype=torch.uint8)
    with peak_memory(x) as memory:
        x.untyped_storage().resize_(0)
        assert memory.live == 0
        torch.zeros(2 * KIB, dtype=torch.uint8)
        x.untyped_storage().resize_(4 * KIB)
        x.fill_(1)
        assert memory.live == 4 * KIB
    assert memory.peak == 4 * KIB


def test_modules_optimizers_and_their_state() -> None:
    linear = torch.nn.Linear(16, 16, bias=False)
    linear(torch.ones(1, 16)).sum().backward()
    optimizer = torch.optim.SGD(linear.parameters(), momentum=0.9)
    optimizer.step()
    assert peak_memory(linear).start == 2 * 4 * 256
    assert peak_memory(linear, optimizer).start == 3 * 4 * 256


def test_ranks_of_a_simulated_run_measure_their_own() -> None:
    """Rows of 1, 2 and 3 KiB; a gather makes the whole on each."""
    def on_rank(mesh: Any) -> tuple[int, int, int]:
        layout = weft.Layout(mesh, (6, KIB), P("x"), sizes={0: (1, 2, 3)})
        x = weft.zeros(6, KIB, dtype=torch.uint8, mesh=mesh, placements=layout)
        with peak_memory(x) as memory:
            y = x + 1
            stays = memory.peak
            y.full_tensor()
        return memory.start, stays, memory.peak

    for rank, (start, stays, peak) in enumerate(weft.testing.run(on_rank, mesh={"x": 3}), 1):
        assert (start, stays) == (rank * KIB, 2 * rank * KIB)
        assert peak >= (2 * rank + 6) * KIB


def test_a_storage_that_grows_and_shrinks_counts_as_it_is() -> None:
    """As those of gathered parameters do, which are emptied after their module."""
    x = torch.empty(0)
    with peak_memory() as memory:
        y = x.detach()
        y.untyped_storage().resize_(4 * KIB)
        x.detach()
        assert memory.live == 4 * KIB
        y.untyped_storage().resize_(0)
        x.detach()
        assert (memory.live, memory.peak) == (0, 4 * KIB)


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, "x")])
def test_what_is_saved_of_an_expanded_operand(spec: P) -> None:
    """A rank's part of it is expanded, too, and holds nothing of the other ranks' parts."""
    def on_rank(mesh: Any) -> int:
        x = weft.ones(8, 64, 64, mesh=mesh, placements=spec).requires_grad_()
        once = torch.arange(64 * 64).view(1, 64, 64) % 64
        with peak_memory(x) as memory:
            y = x * once.float().expand(8, -1, -1)
            del once
            assert y.sharding.spec == spec
            return memory.live - memory.start

    of_result, of_part = 8 * 16 * 64 * 4, 16 * 64 * 4
    assert weft.testing.run(on_rank, mesh={"x": 4}) == [of_result + of_part] * 4


def test_an_expanded_tensor_that_is_redistributed_can_be_written() -> None:
    """Each element of the part has a place of its own."""
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.arange(6.0), mesh, P()).expand(4, 6)
        x = x.redistribute(P(None, "x"))
        x[1] = 9.0
        due = torch.arange(6.0).expand(4, 6).clone()
        due[1] = 9.0
        assert torch.equal(x.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 2})


TRANSFORMED: dict[str, Any] = {
    "vmap": (2, lambda x: torch.vmap(torch.sin)(x)),  # with its result
    "grad": (3, lambda x: torch.func.grad(lambda y: y.sin().sum())(x)),
    "jacobian": (8, lambda x: torch.func.jacrev(lambda y: y.sin().sum(0))(x)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_a_transform(name: str) -> None:
    """The mode is off while it handles an op of a transform; its local tensors count all the same.
    """
    least, transform = TRANSFORMED[name]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    due = transform(x)

    def on_rank(mesh: Any) -> int:
        given = weft.distribute_tensor(x, mesh, P("x"))
        with peak_memory(given) as memory:
            out = transform(given)
        torch.testing.assert_close(out.full_tensor(), due)
        assert out.sharding.sharded_axes
        return memory.peak

    share = x.nbytes // 4
    for peak in weft.testing.run(on_rank, mesh={"x": 4}):
        assert least * share <= peak <= 2 * least * share


def test_other_modes_under_a_transform() -> None:
    x = torch.randn(8, 4)

    def on_rank(mesh: Any) -> None:
        given = weft.distribute_tensor(x, mesh, P("x"))
        with FlopCounterMode(display=False):
            out: Any = torch.func.grad(lambda y: (y @ y.mT).sum())(given)
        torch.testing.assert_close(out.full_tensor(), 2 * x.sum(0).expand(8, -1))

    weft.testing.run(on_rank, mesh={"x": 2})
