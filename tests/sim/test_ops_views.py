"""Views and their bases see each other's writes as in one process, in every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.cases import Trial, trials_of
from tests.cases.views import CASES
from tests.harness import check_trial
from weft import P, ShardTensor


@pytest.mark.parametrize("trial", trials_of(CASES), ids=lambda trial: trial.id)
def test_views(trial: Trial) -> None:
    check_trial(trial)


AS_PAIRS = {
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(5, 2, 2)),
    "view_as_complex_alone": lambda x: torch.view_as_complex(x.reshape(5, 1, 2, 2)),
    "view": lambda x: x.detach().reshape(5, 1, 4).view(torch.complex64),
}


@pytest.mark.parametrize("start", [0, 8, 10])
@pytest.mark.parametrize("name", AS_PAIRS)
def test_pairs_in_a_line_of_odd_length(name: str, start: int) -> None:
    """One rank has all of the columns, inside a line of 7, or from its 4th place on."""
    def full(x: Tensor) -> Tensor:
        return (x.full_tensor() if isinstance(x, ShardTensor) else x).detach().clone()

    def program(mesh: Any) -> list[Tensor]:
        x = torch.arange(5 * 14.0).view(5, 14)
        if mesh is not None:
            x = weft.distribute_tensor(x, mesh, P(None, "x"))
        x.requires_grad_()
        pairs = AS_PAIRS[name](x[:, start : start + 4])
        seen = [full(pairs)]
        if pairs.requires_grad:
            (torch.view_as_real(pairs) ** 2).sum().backward()
            seen.append(full(x.grad))  # type: ignore[arg-type]
        base = x.detach().clone()
        pairs = AS_PAIRS[name](base[:, start : start + 4])
        pairs.mul_(2)
        seen.append(full(base))
        base[:, start + 1] = 7
        return [*seen, full(pairs)]

    expected = program(None)
    for number in (2, 3):
        for mine in weft.testing.run(program, mesh={"x": number}):
            assert all(map(torch.equal, mine, expected))


def test_views_that_move_where_a_rank_has_nothing() -> None:
    x = torch.arange(6.0).reshape(1, 3, 2)

    def on_rank(mesh: weft.Mesh) -> None:
        u = weft.distribute_tensor(x, mesh, P("dp", None, "tp"))
        for made, due in zip(u.unbind(-1), x.unbind(-1)):
            assert torch.equal(made.contiguous().view(-1).full_tensor(), due.reshape(-1))

    weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2})


def test_a_write_to_windows_that_moved_raises() -> None:
    """In one process it would reach every window that shows the element."""
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def on_rank(mesh: weft.Mesh) -> None:
        for grad in (False, True):
            u = weft.distribute_tensor(x.clone(), mesh, P(None, ("b", "a"))).requires_grad_(grad)
            u = u * 1
            windows = u.unfold(0, 2, 1).unflatten(1, (-1, 2))
            with pytest.raises(weft.UnsupportedOpError, match="has no known inverse"):
                windows.relu_()
            with pytest.raises(weft.UnsupportedOpError, match="has no known inverse"):
                windows[0].add_(1.0)
            assert torch.equal(u.full_tensor(), x)
            assert torch.equal(windows.full_tensor(), x.unfold(0, 2, 1).unflatten(1, (-1, 2)))

    weft.testing.run(on_rank, mesh={"a": 2, "b": 2})


def test_windows_that_moved_claim_memory_of_their_own() -> None:
    """Where torch would join dims of windows, ranks raise alike, those that hold nothing too."""
    x = torch.randn(3, 7, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    due = x.unfold(2, 2, 1).flatten(0, 1)

    def on_rank(mesh: weft.Mesh) -> None:
        layout = weft.Layout(mesh, x.shape, P(None, ("a", "b")), sizes={1: (0, 0, 3, 4)})
        u = weft.distribute_tensor(x, mesh, layout, src_data_rank=None)
        rows = u.unfold(2, 2, 1).flatten(0, 1)
        assert not rows.is_contiguous()
        for part, of in zip((rows, *rows.split(9), *rows.split(1, 3)),
                            (due, *due.split(9), *due.split(1, 3))):
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                part.view(part.shape[0], -1, part.shape[3])
            assert torch.equal(part.flatten(1, 2).full_tensor(), of.flatten(1, 2))
            assert torch.equal(part.contiguous().view(-1).full_tensor(), of.reshape(-1))

    weft.testing.run(on_rank, mesh={"a": 2, "b": 2})
