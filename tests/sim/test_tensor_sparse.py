"""Plain operands that are sparse or nested: the result is torch's, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from weft import P, UnsupportedOpError

X = torch.arange(30.0).view(5, 6) - 7
LEFT, RIGHT = torch.eye(5)[1:], torch.eye(6)[:, 2:]
SAME = (X > 3).float()
PLACES = {"rows": P("x"), "columns": P(None, "x"), "whole": P()}

EXACT: dict[str, Callable[[Any], Any]] = {
    "coo @ x": lambda x: LEFT.to_sparse() @ x,
    "mm": lambda x: torch.mm(LEFT.to_sparse(), x),
    "sparse.mm": lambda x: torch.sparse.mm(LEFT.to_sparse(), x),
    "csr @ x": lambda x: LEFT.to_sparse_csr() @ x,
    "x @ coo": lambda x: x @ RIGHT.to_sparse(),
    "x @ csr": lambda x: x @ RIGHT.to_sparse_csr(),
    "linear": lambda x: F.linear(x, RIGHT.T.to_sparse()),
    "x + coo": lambda x: x + SAME.to_sparse(),
    "in place": lambda x: x.clone().add_(SAME.to_sparse()),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "x * coo": lambda x: x * SAME.to_sparse(),
    "a dense operand before": lambda x: (
        x * torch.tensor(2.0).expand(5, 6), x * SAME.to_sparse()
    ),
    "nested": lambda x: F.linear(torch._nested_tensor_from_tensor_list([X]), x),
    "a gradient": lambda x: setattr(x, "grad", SAME.to_sparse()),
    "backward": lambda x: (x * 2).backward(SAME.to_sparse()),
    "distribute_tensor": lambda x: weft.distribute_tensor(SAME.to_sparse(), x.device_mesh, P("x")),
}
QUIET = pytest.mark.filterwarnings(
    "ignore:.*no dense tensor", "ignore:.*Sparse CSR", "ignore:.*nest"
)


@QUIET
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, place: str) -> None:
    op, dense = EXACT[name], X.clone().requires_grad_()
    due = op(dense)
    due.square().sum().backward()

    def on_rank(mesh: Any) -> tuple[torch.Tensor, ...]:
        x = weft.distribute_tensor(X, mesh, PLACES[place]).requires_grad_()
        y = op(x)
        y.square().sum().backward()
        return y.detach().full_tensor(), x.grad.full_tensor()  # type: ignore[union-attr]

    for y, grad in weft.testing.run(on_rank, mesh={"x": 2}):
        assert torch.equal(y, due) and torch.equal(grad, dense.grad)  # type: ignore[arg-type]


@QUIET
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, place: str) -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, PLACES[place]).requires_grad_()
        with pytest.raises(UnsupportedOpError, match="dense"):
            REFUSED[name](x)

    weft.testing.run(on_rank, mesh={"x": 2})
