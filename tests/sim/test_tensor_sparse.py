"""Plain operands that are sparse, nested or quantized: the result is torch's, or a clear refusal;
sparse gradients come to be dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.harness import ranks
from tests.sharded import WAYS, Make, agree
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
@ranks(x=2)
def test_refused(mesh: Any, name: str, place: str) -> None:
    x = weft.distribute_tensor(X, mesh, PLACES[place]).requires_grad_()
    with pytest.raises(UnsupportedOpError, match="dense"):
        REFUSED[name](x)


QUANTIZED: dict[str, Callable[[Any, Any], Any]] = {
    "an operand": lambda x, q: x + q,
    "a target": lambda x, q: q.copy_(x),
    "distribute_tensor": lambda x, q: weft.distribute_tensor(q, x.device_mesh, P("x")),
    "from_local": lambda x, q: weft.ShardTensor.from_local(q, x.device_mesh, P("x")),
    "per tensor": lambda x, q: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
    "per channel": lambda x, q: torch.quantize_per_channel(
        x, torch.ones(6), torch.zeros(6), 1, torch.qint8
    ),
    "dynamic": lambda x, q: torch.quantize_per_tensor_dynamic(x, torch.quint8, False),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_refused_before_anything_is_sent(name: str) -> None:
    def fn(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"))
        quantized = torch.quantize_per_tensor(X, 0.1, 3, torch.quint8)
        with weft.explain() as log, pytest.raises(UnsupportedOpError) as raised:
            QUANTIZED[name](x, quantized)
        assert not log.events
        return str(raised.value)

    (said, _) = weft.testing.run(fn, mesh={"x": 2})
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
        "Rule", "Offenders", "Fix"]
    assert "quant" in said


INDEX = torch.tensor([[0, 4, 1], [3, 3, 2]])
SPARSE: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": lambda w, i: F.embedding(i, w, sparse=True),
    "embedding, padded": lambda w, i: F.embedding(i, w, 3, sparse=True),
    "embedding by position": lambda w, i: torch.embedding(w, i, -1, False, True),
    "embedding of plain indices": lambda w, i: F.embedding(INDEX, w, sparse=True),
    "bags": lambda w, i: F.embedding_bag(i, w, mode="sum", sparse=True),
    "mean bags": lambda w, i: F.embedding_bag(i, w, sparse=True),
    "gather": lambda w, i: torch.gather(w, 0, i, sparse_grad=True),
    "method": lambda w, i: w.gather(1, i, sparse_grad=True),
    "twice": lambda w, i: F.embedding(i, w * 2, sparse=True) + w[:2, None],
}


@pytest.mark.filterwarnings("ignore:(embedding|gather).* gathered:weft.WeftWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_dense(name: str, way: str) -> None:
    def program(make: Make) -> Any:
        w, i = make(X.double()), make(INDEX)
        out = SPARSE[name](w, i)
        (out * out.detach()).sum().backward()
        grad = w.grad
        return [out, grad.to_dense() if grad.is_sparse else grad]

    agree(program, way)


def test_sparse_gradients_of_local_code() -> None:
    w = X.clone().requires_grad_()
    (F.embedding(INDEX, w) ** 2).sum().backward()

    def fn(mesh: Any) -> Any:
        found = []
        for place in PLACES.values():
            x = weft.distribute_tensor(X, mesh, place).requires_grad_()
            rows = weft.local_map(
                lambda table: F.embedding(INDEX, table, sparse=True), in_specs=(P(),),
                out_specs=P(), mesh=mesh,
            )
            for asked in (False, True):
                loss = (rows(x) ** 2).sum()
                grad = torch.autograd.grad(loss, x)[0] if asked else loss.backward() or x.grad
                found.append(grad.full_tensor())
        return found

    for rank in weft.testing.run(fn, mesh={"x": 2}):
        for grad in rank:
            torch.testing.assert_close(grad, w.grad)
