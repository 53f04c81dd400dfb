"""An operand without a gradient that many calls move, as a mask of all layers, moves twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import P

X = torch.arange(48, dtype=torch.float64).view(6, 8) / 7


def moves(mesh: Any, use: Any, given: Any = None) -> tuple[int, Any]:
    """How often `x`, sharded by columns, is gathered in five uses beside rows."""
    x: Any = weft.distribute_tensor(X, mesh, P(None, "x")) if given is None else given
    w: Any = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
    with weft.explain() as log:
        outs = [use(x, w, at) for at in range(5)]
        count = len([one for one in log.events if one.op != "full_tensor" and one.nbytes > 8])
    return count, [one.full_tensor() for one in outs]


def plain(use: Any) -> Any:
    x, w = X.clone(), X.clone().requires_grad_()
    return [use(x, w, at).detach() for at in range(5)]


def scores(x: Any, w: Any, at: int) -> Any:
    return (w * 3 @ torch.eye(8, dtype=w.dtype) + x).softmax(-1)


def written(x: Any, w: Any, at: int) -> Any:
    if at == 3:
        x.mul_(2)
    return (w * 3 @ torch.eye(8, dtype=w.dtype) + x).softmax(-1)


def result_written(x: Any, w: Any, at: int) -> Any:
    """A result that may share the memory of what has moved."""
    seen = x.redistribute(placements=P("x")) if isinstance(x, weft.ShardTensor) else x.clone()
    seen.add_(1)
    return (w * 3 @ torch.eye(8, dtype=w.dtype) + x).softmax(-1) + seen


@pytest.mark.parametrize("use", [scores, written, result_written], ids=lambda use: use.__name__)
def test_values_are_those_of_one_process(use: Any) -> None:
    for _, outs in weft.testing.run(lambda mesh: moves(mesh, use), mesh={"x": 2}):
        torch.testing.assert_close([one.detach() for one in outs], plain(use))


def test_it_moves_twice_and_again_after_a_write() -> None:
    assert {n for n, _ in weft.testing.run(lambda mesh: moves(mesh, scores), mesh={"x": 2})} == {2}
    assert {n for n, _ in weft.testing.run(lambda mesh: moves(mesh, written), mesh={"x": 2})} == {4}


def test_frozen_parameters_and_evaluations_keep_nothing() -> None:
    def frozen(mesh: Any) -> int:
        x = weft.distribute_tensor(X, mesh, P(None, "x"))
        return moves(mesh, scores, torch.nn.Parameter(x, requires_grad=False))[0]

    def evaluated(mesh: Any) -> int:
        with torch.no_grad():
            return moves(mesh, scores)[0]

    for program in (frozen, evaluated):
        assert set(weft.testing.run(program, mesh={"x": 2})) == {5}


def test_a_gradient_that_is_asked_for_later() -> None:
    def program(mesh: Any) -> Any:
        x: Any = weft.distribute_tensor(X, mesh, P(None, "x"))
        w: Any = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        for at in range(3):
            scores(x, w, at)
        x.requires_grad_()
        scores(x, w, 0).square().sum().backward()
        return x.grad.full_tensor()

    x, w = X.clone().requires_grad_(), X.clone()
    scores(x, w, 0).square().sum().backward()
    for grad in weft.testing.run(program, mesh={"x": 2}):
        torch.testing.assert_close(grad, x.grad)
