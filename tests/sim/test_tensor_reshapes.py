"""Changes of shape in place, as on plain tensors: values, strides, versions, gradients, aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.harness import ranks
from tests.sharded import WAYS, Make, agree, layout_for
from weft import P, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
ROW = X[:1].contiguous()
"""Of a cut in dim 0 one shard has it all."""
CUBE = torch.linspace(-2, 2, 5 * 1 * 6 * 1, dtype=torch.float64).view(5, 1, 6, 1)

EACH: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "t": (X, lambda x: x.t_()),
    "t of a row": (ROW[0], lambda x: x.t_()),
    "transpose": (CUBE, lambda x: x.transpose_(dim0=0, dim1=-2)),
    "swapaxes": (CUBE, lambda x: x.swapaxes_(-1, 0)),
    "swapdims": (CUBE, lambda x: x.swapdims_(1, 2)),
    "unsqueeze": (X, lambda x: x.unsqueeze_(0)),
    "unsqueeze last": (X, lambda x: x.unsqueeze_(-1)),
    "squeeze": (CUBE, lambda x: x.squeeze_()),
    "squeeze dim": (CUBE, lambda x: x.squeeze_(1)),
    "squeeze dims": (CUBE, lambda x: x.squeeze_((1, 3))),
    "transpose nothing": (CUBE, lambda x: x.transpose_(1, 1)),
    "squeeze nothing": (X, lambda x: x.squeeze_(0)),
    "squeeze a cut dim": (ROW, lambda x: x.squeeze_(0)),
    "squeeze what is cut": (ROW, lambda x: x.squeeze_()),
    "several": (CUBE, lambda x: x.squeeze_(1).transpose_(0, 1).unsqueeze_(2).t),
}


def facts(x: Any) -> Any:
    return [x, list(x.shape), list(x.stride()), x.is_leaf, x.requires_grad, x.is_contiguous(),
            x.nbytes, list(torch.empty_like(x).shape), len(x) if x.dim() else 0]


def values(make: Make) -> Any:
    seen = []
    for full, change in EACH.values():
        x = make(full, False)
        version = x._version
        change(x)
        seen += [*facts(x), x._version - version, x * 2, x.sum(-1)]
        x.mul_(3)
        x.data.add_(1)
        seen += [x, x.exp(), x.clone().stride()]
    return seen


def gradients(make: Make) -> Any:
    seen = []
    for full, change in EACH.values():
        x = make(full)
        y = x * x
        change(y)
        seen += facts(y)
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
        (y.exp() * make(weight, False)).sum().backward()
        seen.append(x.grad.transpose_(-1, -1))  # of itself: a gradient may keep its shape
    return seen


def aliases(make: Make) -> Any:
    """Views, `.data` and detached ones keep their shape, and all share the elements."""
    seen = []
    for full, change in EACH.values():
        x = make(full, False)
        flat, copy, data = x.transpose(0, -1), x.detach(), x.data
        version = flat._version
        change(x)
        seen += [flat._version - version]
        x.add_(1)
        seen += [x, flat, copy, data]
        flat.mul_(2)
        seen += [x, copy * 1, data, x.data, x.detach()]
        copy.sub_(3)
        data.div_(2)
        seen += [x, x.exp(), flat.sum(), list(flat.shape), list(data.shape), x.data + 1]
        x.data.add_(5)
        seen += [x * 1, flat, copy, x.exp()]
    return seen


def moved_views(make: Make) -> Any:
    """Rows that came to every rank follow what they are rows of, whatever shape that takes."""
    x = make(X, False)
    row, column = x[1], x[:, 2]
    x.t_()
    x.add_(1)
    seen = [row * 1, column * 1, x]
    row.mul_(2)
    column.unsqueeze_(0)
    column.sub_(1)
    seen += [x, row, column, x[0] * 1]
    x.unsqueeze_(1)
    row.zero_()
    return [*seen, x, row, column, *facts(column)]


def moved_views_of_a_history(make: Make) -> Any:
    x = make(X)
    y = x * 2
    row = y[1]
    y.t_()
    row.mul_(3)
    y.unsqueeze_(0)
    (y * y).sum().backward()
    return [x.grad, y, row]


def views_of_a_history(make: Make) -> Any:
    """A base and a view of it, the one changed in shape, the other written to."""
    seen = []
    for change, write in ((0, 1), (1, 0)):
        x = make(X)
        y = x * 2
        pair = y, y.transpose(0, 1)
        pair[change].t_().unsqueeze_(0)
        pair[write].mul_(3)
        (pair[change].exp().sum() + (pair[write] * pair[write]).sum()).backward()
        seen += [x.grad, *pair]
    return seen


def leaves(make: Make) -> Any:
    """In no_grad mode a leaf stays one, with its hooks."""
    x = make(X)
    seen: list[Any] = []
    x.register_hook(lambda grad: seen.append(grad * 1))
    with torch.no_grad():
        x.t_()
    (x * x).sum().backward()
    with torch.no_grad():
        x.grad = None
        x.unsqueeze_(0)
    seen += facts(x)
    torch.optim.SGD([x], 0.1).step()
    (x * x).exp().sum().backward()
    return [*seen, x.grad, *facts(x)]


def dropout(make: Make) -> Any:
    """It adds a dim in place, and takes it away."""
    x = make(CUBE)
    y = x * 1
    out = F.dropout3d(y, 0.5, training=False, inplace=True)
    assert out is y
    (out * out).sum().backward()
    return [*facts(y), x.grad]


def inference(make: Make) -> Any:
    with torch.inference_mode():
        x = make(X, False)
        x.t_().unsqueeze_(0)
        return facts(x)


def a_leaf(make: Make) -> Any:
    make(X).t_()


def a_view_of_a_leaf(make: Make) -> Any:
    make(X).t().unsqueeze_(0)


def one_of_several(make: Make) -> Any:
    (make(X) * 1).split(2, 1)[0].t_()


def a_row_of_several(make: Make) -> Any:
    (make(X) * 1).unbind(0)[0].unsqueeze_(0)


def a_view_of_no_grad(make: Make) -> Any:
    x = make(X)
    with torch.no_grad():
        view = x.t()
    view.requires_grad_() if not view.requires_grad else None
    view.t_()


def what_was_saved(make: Make) -> Any:
    y = make(X) * 1
    z = y * y
    y.t_()
    z.sum().backward()


def a_view_of_what_was_saved(make: Make) -> Any:
    y = make(X) * 1
    z = y.exp()
    z[1].unsqueeze_(0)
    z.sum().backward()


def outside_inference(make: Make) -> Any:
    with torch.inference_mode():
        x = make(X, False)
    x.t_()


def no_such_dim(make: Make) -> Any:
    make(X, False).unsqueeze_(5)


ERRORS = [a_leaf, a_view_of_a_leaf, one_of_several, a_row_of_several, a_view_of_no_grad,
          what_was_saved, a_view_of_what_was_saved, outside_inference, no_such_dim]
PROGRAMS = [values, gradients, aliases, moved_views, moved_views_of_a_history, views_of_a_history,
            leaves, dropout, inference]


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize(
    "way", ["even", "uneven", "partial", "empty", "ragged", "both", "half partial"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_plain_tensors(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("way", ["uneven", "replicated"])
@pytest.mark.parametrize("program", ERRORS, ids=lambda program: program.__name__)
def test_errors_are_torchs_own(program: Any, way: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as plain:
        program(lambda full, grad=True: full.clone().requires_grad_(grad))
    told = str(plain.value).split("[torch.")[0].split("modified inplace. ")[-1]

    def on_rank(mesh: Any) -> None:
        def make(full: Tensor, grad: bool = True) -> Any:
            layout = layout_for(mesh, full.shape, WAYS[way][1])
            return weft.distribute_tensor(full, mesh, layout).requires_grad_(grad)

        with pytest.raises(plain.type) as caught:
            program(make)
        assert told in str(caught.value)

    weft.testing.run(on_rank, mesh=WAYS[way][0])


def of_a_gradient(x: Any) -> None:
    (x * x).sum().backward()
    x.grad.t_()


def with_a_gradient(x: Any) -> None:
    (x * x).sum().backward()
    with torch.no_grad():
        x.t_()


def retained(x: Any) -> None:
    y = x * 1
    y.retain_grad()
    y.t_()


def unrecorded(x: Any) -> None:
    y = x * 1
    with torch.no_grad():
        y.t_()


def in_a_graph(x: Any) -> None:
    y = (x + 1).sum()
    with torch.no_grad():
        x.t_()
    assert x.shape == (6, 5)
    y.backward()


def memory(x: Any) -> None:
    torch.ops.aten.resize_as_.default(x.detach(), x.detach())


@pytest.mark.parametrize("spec", [P("x"), P(), P(partial={"x": "sum"})], ids=str)
@pytest.mark.parametrize(
    "program", [of_a_gradient, with_a_gradient, retained, unrecorded, in_a_graph, memory],
    ids=lambda program: program.__name__,
)
def test_refused_clearly(program: Any, spec: P) -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, spec).requires_grad_()
        with pytest.raises(UnsupportedOpError) as caught:
            program(x)
        return str(caught.value).splitlines()

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other
    assert [line.split(":")[0].strip() for line in first[1:]] == ["Rule", "Offenders", "Fix"]


@ranks(x=2)
def test_strict_mode_leaves_the_tensor_as_it_is(mesh: Any) -> None:
    x = weft.distribute_tensor(ROW[:, :1], mesh, P("x"))
    with weft.strict(), pytest.raises(weft.StrictError):
        x.squeeze_()
    assert x.shape == (1, 1) and x.sharding.spec == P("x") and x._version == 0
    x = weft.distribute_tensor(ROW, mesh, P("x"))
    with weft.strict():
        x.t_().unsqueeze_(0)
        assert x.shape == (1, 6, 1) and x.sharding.spec == P(None, None, "x")
    y = weft.distribute_tensor(ROW, mesh, P("x"))
    y.squeeze_(0)
    with weft.strict():  # what has moved need not move again
        torch.testing.assert_close((y * 2).full_tensor(), ROW[0] * 2)


def test_ranks_outside_the_mesh() -> None:
    def on_rank(mesh: Any) -> Any:
        part = weft.init_mesh({"x": 2}, ranks=[0, 2])
        x = weft.distribute_tensor(X, part, P("x")).requires_grad_()
        y = x * 2
        y.t_().unsqueeze_(0)
        (y * y).sum().backward()
        assert y.shape == (1, 6, 5)
        return None if part.here is None else x.grad.full_tensor()

    for rank, grad in enumerate(weft.testing.run(on_rank, mesh={"x": 3})):
        assert (grad is None) == (rank == 1)
        if grad is not None:
            torch.testing.assert_close(grad, 8 * X)


@ranks(x=2)
def test_a_tensor_that_has_the_broadcast_shape_is_itself_the_result(mesh: Any) -> None:
    x = weft.distribute_tensor(X, mesh, P(None, "x"))
    row, same = torch.broadcast_tensors(x[:1], x)
    assert same is x and row is not x
    x.t_()
    assert same.shape == (6, 5) and row.shape == (5, 6)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@ranks(x=2)
def test_the_product_of_one_matrix_is_a_copy(mesh: Any) -> None:
    x = weft.distribute_tensor(X, mesh, P("x"))
    torch.chain_matmul(x).zero_()
    assert torch.equal(x.full_tensor(), X)
