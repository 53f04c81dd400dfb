"""torch.func's transforms of functions of ShardTensors, given or closed over: values are those of
one process, on uneven shards and empty ones; results are in a graph where
torch's are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

import weft
from tests.harness import ranks
from weft import P, ShardTensor, UnsupportedOpError


def _made(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w) * x[:, :1]


def _transposed(x: Tensor, w: Tensor) -> Any:
    out, pull = vjp(_made, x, w)[:2]
    return out, pull(out * 2), pull(out)


def _in_layers(x: Tensor, w: Tensor) -> Any:
    def inner(a: Tensor) -> Tensor:
        return grad(lambda b: (torch.sin(b @ w) * a.sum()).sum())(x).square().sum()

    return grad(inner)(x * 2)


def _written(x: Tensor, w: Tensor) -> Tensor:
    """Written through views of parts, and of what was written before."""
    made = x.new_zeros(len(x), 5)
    made[:, 1:4] = x
    made[:, ::4] = w[0, :2] * x[:, :1]
    (made * 1)[1:].copy_(x[:1, :1])
    made[1:].mul_(x[:1, :1])
    return F.pad(made, (1, 2), mode="circular").square()


pytestmark = pytest.mark.filterwarnings(  # torch's forward AD of plain tensors
    "ignore:.*torch.jit.script. is deprecated:DeprecationWarning")

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda x, w: grad(lambda a: _made(a, w).sum())(x),
    "grad of a part": lambda x, w: grad(lambda a: _made(x, a)[1:, :2].sum())(w),
    "grad, two arguments": lambda x, w: grad(
        lambda a, b: _made(a, b).square().mean(), (0, 1))(x, w),
    "grad and value": lambda x, w: grad_and_value(
        lambda a: (_made(a, w).sum(), a * 2), has_aux=True)(x),
    "grad in grad": _in_layers,
    "grad in place": lambda x, w: grad(lambda a: (a * 1).mul_(x).add_(a).sum())(x),
    "grad of writes": lambda x, w: grad(lambda a: _written(a, w).sum())(x),
    "grad in grad of writes": lambda x, w: grad(
        lambda a: grad(lambda b: _written(b, w).sum())(a).square().sum())(x),
    "grad of a batch norm": lambda x, w: grad(
        lambda a: F.batch_norm(a, w[:, 0], w[:, 1].square() + 1, w[:, 2].exp()).square().sum())(x),
    "grad of vmap": lambda x, w: grad(
        lambda a: vmap(lambda row: (row @ a).sin().sum())(x).sum())(w),
    "vmap of grad": lambda x, w: vmap(grad(lambda row: (row @ w[:, :1]).sin().sum()))(x),
    "vmap of hessian": lambda x, w: vmap(hessian(lambda row: (row @ w).sin().sum()))(x),
    "vjp": _transposed,
    "jvp": lambda x, w: jvp(_made, (x, w), (x * 3, w + 1)),
    "jvp with more": lambda x, w: jvp(
        lambda a: (_made(a, w), a * 2), (x,), (x * 3,), has_aux=True),
    "jacrev": lambda x, w: jacrev(lambda a: _made(a, w).sum(0))(x),
    "jacrev in parts": lambda x, w: jacrev(lambda a: _made(a, w).sum(0), chunk_size=2)(x),
    "jacfwd": lambda x, w: jacfwd(lambda a: _made(x, a).sum(0))(w),
    "hessian": lambda x, w: hessian(lambda a: _made(x, a).sum())(w),
    "closed over alone": lambda x, w: grad(
        lambda a: (a * w[:, :2].cumsum(0)).sum() * x.sum())(w[:, 2:]),
}
SPECS = {
    "rows": (P("x"), P()), "columns": (P(None, "x"), P("x", "y")),
    "both": (P("x", "y"), P(None, "x")), "whole": (P(), P()),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", CALLS)
def test_as_in_one_process(name: str, spec: str) -> None:
    """Two rows on three ranks, four columns on two."""
    torch.manual_seed(0)
    full = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    due = tree_leaves(CALLS[name](*full))

    @ranks(x=3, y=2)
    def run(mesh: Any) -> None:
        found = tree_leaves(CALLS[name](
            *(weft.distribute_tensor(one, mesh, at) for one, at in zip(full, SPECS[spec]))))
        assert len(found) == len(due)
        for one, wanted in zip(found, due):
            assert type(one) is ShardTensor and not one.requires_grad
            torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)

    run()


@pytest.mark.parametrize(
    "shardings", [{}, {"*": P("dp")}, {"0.*": P("tp"), "2.weight": P(None, "tp")}])
def test_gradients_of_parameters_and_of_single_samples(shardings: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(7, 3, dtype=torch.float64)

    def results(model: nn.Module, x: Tensor) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return functional_call(model, params, (x,)).square().mean()

        params = {name: one.detach() for name, one in model.named_parameters()}
        return (grad(loss)(params, x), vmap(grad(loss), (None, 0))(params, x),
                jvp(lambda params: loss(params, x), (params,), (params,)))

    due = tree_leaves(results(model, x))

    @ranks(dp=2, tp=2)
    def run(mesh: Any) -> None:
        mine = copy.deepcopy(model)
        weft.distribute_module(mine, mesh, shardings=shardings)
        found = results(mine, weft.distribute_tensor(x, mesh, P("dp")))
        for one, wanted in zip(tree_leaves(found), due, strict=True):
            torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
        mine(weft.distribute_tensor(x, mesh, P("dp"))).sum().backward()  # as before
        assert all(one.grad is not None for one in mine.parameters())

    run()


AROUND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "jvp": lambda x, w: jvp(lambda a: _made(x, a * torch.rand(4)), (w,), (w + 1,)),
    "jacfwd": lambda x, w: jacfwd(lambda a: _made(x, a).sum(0))(w),
    "jacfwd in jacfwd": lambda x, w: jacfwd(jacfwd(lambda a: _made(x, a).sum()))(w),
    "hessian": lambda x, w: hessian(lambda a: _made(x, a).sum())(w),
}


@pytest.mark.parametrize("name", AROUND)
def test_of_plain_arguments_around_sharded_tensors(name: str) -> None:
    """The function begins anew, and draws what it has drawn."""
    torch.manual_seed(0)
    x, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3), (3, 4)))

    def drawing(x: Tensor, w: Tensor) -> Any:
        torch.manual_seed(1)
        return *tree_leaves(AROUND[name](x, w)), torch.randn(2)

    @ranks(x=3)
    def run(mesh: Any) -> None:
        found = drawing(weft.distribute_tensor(x, mesh, P("x")), w)
        for one, wanted in zip(found, drawing(x, w), strict=True):
            whole = one.full_tensor() if type(one) is ShardTensor else one
            torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)

    run()


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layers": lambda x: F.layer_norm(x, (3, 2), torch.arange(6.0).double().view(3, 2)),
    "batch": lambda x: F.batch_norm(x, None, None, torch.arange(3.0).double(), training=True),
    "batch, fixed": lambda x: F.batch_norm(x, x.detach()[0, :, 0], torch.ones(3).double()),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_backward_through_gradients_of_norms(name: str) -> None:
    """The statistics that a norm saves for its gradient depend on its operand."""
    full = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 3, 2).sin()

    def slopes(x: Tensor) -> Any:
        x.requires_grad_()
        found = grad(lambda a: (NORMS[name](a) ** 3).sum())(x)
        found.square().sum().backward()
        return found, x.grad

    due = slopes(full.clone())

    @ranks(x=3)
    def run(mesh: Any) -> None:
        for spec in (P("x"), P(None, "x"), P(None, None, "x")):
            for one, wanted in zip(slopes(weft.distribute_tensor(full, mesh, spec)), due):
                torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-10, atol=1e-10)

    run()


_TARGETS = torch.tensor([1, 0, 2, 1, 1, 0, 2])
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x.sin(), is_causal=True),
    "losses": lambda x: F.mse_loss(x, x.detach() * 2, reduction="none") + F.huber_loss(
        x, x.detach() * 2, reduction="none") + F.smooth_l1_loss(x, x.detach().sin()),
    "activations": lambda x: F.leaky_relu(x) + F.softplus(x) + F.logsigmoid(x) + F.glu(
        torch.cat([x, x], -1)) + F.softshrink(x) + F.hardtanh(x),
    "pool": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "samples of a grid": lambda x: F.grid_sample(x, x.mT[:, :, :2, :2].tanh(), align_corners=False),
    "resized": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "reflected": lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"),
    "convolution": lambda x: F.conv2d(x, torch.linspace(-1, 1, 54).view(3, 2, 3, 3), padding=1),
    "slices": lambda x: torch.stack([x, -x])[:, :, 1:, 2:, 1:].sin() * x[:, :1, 2:, 3, None],
    "distances": lambda x: torch.cdist(x, x.detach() + 1),
    "systems": lambda x: torch.linalg.solve(x.mT @ x + torch.eye(4), x.mT[..., :2]),
    "diagonals": lambda x: x[..., :4].diagonal(1, -2, -1).sin() * x.diagonal(-2, 2, 3)[..., :1],
    "spectra": lambda x: torch.linalg.eigvalsh(x @ x.mT)[..., -1] + torch.linalg.svdvals(x)[..., 0],
    "determinants": lambda x: torch.linalg.slogdet(x.mT @ x + torch.eye(4))[1],
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_stay_where_the_samples_are(name: str) -> None:
    """Of seven samples on four ranks, each rank computes its own: no more than sums is sent."""
    torch.manual_seed(0)
    x = torch.randn(7, 2, 5, 4)

    def pulled(x: Tensor) -> Tensor:
        return grad(lambda a: (LAYERS[name](a) * 0.7).sin().sum())(x)

    due = pulled(x)

    @ranks(dp=4)
    def run(mesh: Any) -> None:
        sharded = weft.distribute_tensor(x, mesh, P("dp"))
        with weft.explain() as log:
            found = pulled(sharded)
        assert found.spec == P("dp", None, None, None)
        assert max([event.nbytes for event in log.events], default=0) < x.nbytes // 2
        torch.testing.assert_close(found.full_tensor(), due, rtol=1e-5, atol=1e-5)

    run()


def test_gradients_of_class_scores_stay_where_the_samples_are() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 3).double(), torch.tensor([1.0, 2.0, 0.5]).double()

    def pulled(x: Tensor, targets: Tensor) -> Tensor:
        return grad(lambda a: F.cross_entropy(a, targets, w, ignore_index=2) + F.cross_entropy(
            a.sin(), targets, reduction="none").square().sum())(x)

    due = pulled(x, _TARGETS)

    @ranks(dp=4)
    def run(mesh: Any) -> None:
        found = pulled(*(weft.distribute_tensor(one, mesh, P("dp")) for one in (x, _TARGETS)))
        assert found.spec == P("dp", None)
        torch.testing.assert_close(found.full_tensor(), due)

    run()


def test_the_loss_of_each_sample_stays_where_it_is() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3)
    due = vmap(F.cross_entropy)(x, _TARGETS)

    @ranks(dp=4)
    def run(mesh: Any) -> None:
        logits = weft.distribute_tensor(x, mesh, P("dp"))
        found = vmap(F.cross_entropy)(logits, weft.distribute_tensor(_TARGETS, mesh, P("dp")))
        assert found.spec == P("dp")
        torch.testing.assert_close(found.full_tensor(), due)

    run()


def test_what_is_closed_over_has_its_own_gradient() -> None:
    """The result belongs to the graph of what was closed over, and plain arguments serve, too."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def results(x: Tensor, w: Tensor) -> list[Tensor]:
        penalty = grad(lambda a: (x @ a).sin().sum())(w)
        return [penalty, *torch.autograd.grad(penalty.square().sum(), x)]

    due = results(x.clone().requires_grad_(), w)

    @ranks(x=3)
    def run(mesh: Any) -> None:
        for given in (w, weft.distribute_tensor(w, mesh, P())):
            found = results(weft.distribute_tensor(x, mesh, P("x")).requires_grad_(), given)
            for one, wanted in zip(found, due):
                torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)

    run()


def test_no_state_is_left_after_an_error() -> None:
    @ranks(x=2)
    def run(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(4, 3), mesh, P("x"))
        with pytest.raises(RuntimeError, match="scalar"):
            grad(lambda a: a * 2)(x)
        with pytest.raises(UnsupportedOpError):
            torch.func.functionalize(lambda a: a * 2)(x)
        assert (x * 2).sum().item() == 24

    run()


def _with_what_it_makes(x: Any, w: Tensor, moved: Any, made: Any) -> Tensor:
    """Of w, and of tensors that are closed over or made on the way."""
    return (moved(x) * made(torch.arange(20.0, dtype=x.dtype).view(5, 4) / 7) * w).sin().sum()


@pytest.mark.parametrize("to", [P(), P(None, "x")], ids=str)
def test_what_a_function_makes_or_moves_is_like_what_it_closes_over(to: P) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)

    def results(x: Any, w: Any, moved: Any, made: Any) -> list[Tensor]:
        def of(w: Tensor) -> Tensor:
            return _with_what_it_makes(x, w, moved, made)

        g = grad(of)(w)
        return [
            g, torch.autograd.grad(g.square().sum(), x)[0], jvp(of, (w,), (w,))[1],
            vmap(of)(torch.stack([w, w * 2])), grad(lambda w: grad(of)(w).square().sum())(w)]

    same: Any = lambda given: given  # noqa: E731
    due = results(x.clone().requires_grad_(), w, same, same)

    @ranks(x=3)
    def run(mesh: Any) -> None:
        def made(full: Any) -> ShardTensor:
            ones = weft.ones(4, mesh=mesh, spec=P("x"), dtype=full.dtype)
            cut = weft.from_callback((5, 4), mesh, P("x"), lambda at: torch.ones(5, 4)[at])
            rows = ShardTensor.from_local(cut.to_local(), mesh, P("x"), sizes={0: (2, 2, 1)})
            return weft.distribute_tensor(full, mesh, to) * ones.full_tensor() * ones * rows

        for given in (w, weft.distribute_tensor(w, mesh, P(None, "x"))):
            found = results(
                weft.distribute_tensor(x, mesh, P("x")).requires_grad_(), given,
                lambda x: x.redistribute(placements=to), made)
            for one, wanted in zip(found, due):
                torch.testing.assert_close(one.full_tensor(), wanted, rtol=1e-12, atol=1e-12)

    run()


@pytest.mark.parametrize("transform", [grad, vmap])
def test_what_is_transformed_is_distributed_before(transform: Any) -> None:
    @ranks(x=2)
    def run(mesh: Any) -> None:
        with pytest.raises(UnsupportedOpError, match="call it before the transform"):
            transform(lambda w: weft.distribute_tensor(w, mesh, P("x")).sum())(torch.ones(4, 4))

    run()
