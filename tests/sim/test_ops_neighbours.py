"""Gradients, adaptive means, spectrograms and runs of rows equal the one-process result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.neighbours import CASES
from tests.harness import check_trial, ranks
from weft import P

SEGMENT_ERRORS = [
    ([2, 2], "to sum to data.size"),
    ([7, -1, 0], "negative value"),
]


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_neighbours(trial: Trial) -> None:
    check_trial(trial)


@ranks(x=2)
def test_running_statistics_are_written(mesh: Any) -> None:
    """native_batch_norm writes to them, though its schema does not say so."""
    full = torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    due = torch.zeros(3).double(), torch.ones(3).double()
    got = [one.clone() for one in due]
    x = weft.distribute_tensor(full, mesh, P("x"))
    for name, op in (("native", torch.ops.aten.native_batch_norm),
                     ("legit", torch.ops.aten._native_batch_norm_legit)):
        expected = op(full, None, None, *due, True, 0.1, 1e-5)
        results = op(x, None, None, *got, True, 0.1, 1e-5)
        for one, other in zip((*results, *got), (*expected, *due)):
            one = one.full_tensor() if isinstance(one, weft.ShardTensor) else one
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


@ranks(x=2)
def test_dtypes_of_statistics(mesh: Any) -> None:
    """Of bfloat16: that of the input, unless a parameter or a running statistic is float32."""
    full = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = weft.distribute_tensor(full, mesh, P("x"))
    for weight, running in ((None, None), (torch.bfloat16, None), (torch.float32, None),
                            (None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        w = None if weight is None else torch.ones(3, dtype=weight)

        def made(x: Any, w: Any = w, running: Any = running) -> Any:
            kept = (None, None) if running is None else (
                torch.zeros(3, dtype=running), torch.ones(3, dtype=running))
            return torch.ops.aten.native_batch_norm(x, w, w, *kept, True, 0.1, 1e-5)

        for one, other in zip(made(x), made(full)):
            assert one.dtype is other.dtype is one.to_local().dtype
            torch.testing.assert_close(one.full_tensor(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lengths, said", SEGMENT_ERRORS)
def test_segments_that_do_not_fit(lengths: list[int], said: str) -> None:
    """torch's own errors, whichever dim is sharded."""
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(6, 2), mesh, P("x"))
        torch.segment_reduce(x, "sum", lengths=torch.tensor(lengths))

    with pytest.raises(RuntimeError, match=said):
        torch.segment_reduce(torch.ones(6, 2), "sum", lengths=torch.tensor(lengths))
    with pytest.raises(RuntimeError, match=said):
        weft.testing.run(on_rank, mesh={"x": 2})


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_extrema_of_segments_by_their_other_names(reduce: str) -> None:
    full, lengths = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0]), torch.tensor([2, 1, 3])
    ways: Any = {}, {"initial": 0.5}

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(full, mesh, P("x"))
        for options in ways:
            due = torch.segment_reduce(full, reduce, lengths=lengths, **options)
            found = torch.segment_reduce(x, reduce, lengths=lengths, **options)
            assert torch.equal(found.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 2})


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=str)
@pytest.mark.parametrize("of_lengths", [P(), P("x")], ids=str)
def test_segments_of_one_batch_that_do_not_fit(spec: P, of_lengths: P) -> None:
    """All ranks raise, also those whose batches fit; right lengths are sent nowhere if whole."""
    def reduced(x: Any, lengths: Any) -> Any:
        return torch.segment_reduce(x, "sum", lengths=lengths, axis=1)

    def on_rank(mesh: Any) -> tuple[str, int]:
        def lengths(*last: int) -> Any:
            return weft.distribute_tensor(torch.tensor([[4, 2], last]), mesh, of_lengths)

        x = weft.distribute_tensor(full, mesh, spec)
        with pytest.raises(RuntimeError) as told:
            reduced(x, lengths(5, 2))
        right = lengths(3, 3)
        with weft.explain() as log:
            found = reduced(x, right)
        assert torch.equal(found.full_tensor(), due)
        return str(told.value), len(log.events)

    full = torch.arange(24.0).view(2, 6, 2)
    due = reduced(full, torch.tensor([[4, 2], [3, 3]]))
    with pytest.raises(RuntimeError) as plain:
        reduced(full, torch.tensor([[4, 2], [5, 2]]))
    for said, num in weft.testing.run(on_rank, mesh={"x": 2}):
        assert said == str(plain.value)
        assert num == (of_lengths == P("x"))


def test_a_window_that_says_nothing() -> None:
    """torch's own error, of frames that leave elements out."""
    spectra = torch.zeros(3, 4, dtype=torch.complex128)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(spectra, mesh, P(None, "x"))
        torch.istft(x, 4, window=torch.zeros(4, dtype=torch.float64))

    with pytest.raises(RuntimeError, match="window overlap add min"), pytest.warns(
        weft.WeftWarning
    ):
        weft.testing.run(on_rank, mesh={"x": 2})


@pytest.mark.parametrize("edge_order", [1, 2])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_gradient_is_one_exchange(uneven: bool, edge_order: int) -> None:
    """From its first call on, of the two rows beside a shard; the same bits each time."""
    x = torch.randn(17, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = torch.linspace(0, 1, 17, dtype=torch.float64) ** 2
    spacing: Any = (places,) if uneven else 0.1

    def on_rank(mesh: weft.Mesh) -> None:
        whole = x.clone().requires_grad_()
        found = []
        for _ in range(3):
            u = weft.distribute_tensor(x, mesh, P("x")).requires_grad_()
            pairs = []
            with weft.explain() as log:
                for one in (u, whole):
                    (out,) = torch.gradient(one, spacing=spacing, dim=0, edge_order=edge_order)
                    pairs.append((out, *torch.autograd.grad((out ** 2).sum(), one)))
            halos = [event for event in log.events if "Halo" in event.collective]
            assert [event.nbytes for event in halos] == [2 * 5 * 8] * 2 or mesh.rank in (0, 3)
            assert [event.direction for event in halos] == ["forward", "backward"]
            assert not any("Exchange" in event.collective for event in log.events)
            found.append([one.full_tensor() for one in pairs[0]])
            for mine, due in zip(found[-1], pairs[1]):
                torch.testing.assert_close(mine, due, rtol=1e-12, atol=1e-12)
        for again in found[1:]:
            assert all(map(torch.equal, found[0], again))

    weft.testing.run(on_rank, mesh={"x": 4})


def test_gradients_along_several_dims_and_repeated_differences_are_one_exchange() -> None:
    x = torch.randn(17, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def on_rank(mesh: weft.Mesh) -> None:
        u = weft.distribute_tensor(x, mesh, P("x", "y"))
        with weft.explain() as log:
            made = [*torch.gradient(u), u.diff(n=3, dim=0)]
        assert [event.collective for event in log.events] == ["Halo", "Halo"]
        for one, due in zip(made, [*torch.gradient(x), x.diff(n=3, dim=0)]):
            assert torch.equal(one.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
