"""torch.autocast: forward and backward, nested, disabled, in users' Functions, with a GradScaler.

Operands are small integers, so that narrow floats carry every product exactly and no tolerance
hides a term that is missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.sharded import WAYS, Make, agree, layout_for
from weft import P, UnsupportedOpError
from weft.tensor.call.autocast import cast_of

X = (torch.arange(30.0).view(5, 6) * 7) % 4
W = (torch.arange(30.0).view(5, 6) * 5) % 3
B = torch.arange(5.0)
DTYPES = (torch.bfloat16, torch.float16)

OPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "matmul": lambda x, w, b: x @ w.t(),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm alpha, beta": lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2, beta=3),
    "addmv": lambda x, w, b: torch.addmv(b, x, w[0]),
    "mv": lambda x, w, b: x.mv(w[1]),
    "bmm": lambda x, w, b: torch.bmm(x[None], w.t()[None]),
    "baddbmm": lambda x, w, b: torch.baddbmm(b[None, None], x[None], w.t()[None]),
    "einsum": lambda x, w, b: torch.einsum("ik,jk->ij", x, w),
    "einsum of two dtypes": lambda x, w, b: torch.einsum("ik,jk->ij", x, w.bfloat16()),
    "tensordot": lambda x, w, b: torch.tensordot(x, w, ([1], [1])),  # type: ignore
    "cat": lambda x, w, b: torch.cat([x.bfloat16(), w]),
    "stack": lambda x, w, b: torch.stack([x.half(), w.half()]),
    "sum": lambda x, w, b: (x @ w.t()).sum(0),
    "prod": lambda x, w, b: (x.bfloat16() / 2).prod(0),
    "cumsum": lambda x, w, b: x.half().cumsum(0),
    "cumprod": lambda x, w, b: x.bfloat16().cumprod(1),
    "norm": lambda x, w, b: (x @ w.t()).norm(p=1),
    "mse": lambda x, w, b: F.mse_loss(x.bfloat16(), w, reduction="sum"),
    "l1": lambda x, w, b: F.l1_loss(x.half(), w.half(), reduction="sum"),
    "pow": lambda x, w, b: (x @ w.t()) ** 2,
    "double": lambda x, w, b: x.double() @ w.double().t(),
    "grouped_mm": lambda x, w, b: F.grouped_mm(F.pad(x, (0, 2)), F.pad(w, (0, 2)).mT[None].repeat(
        1, 1, 8)[..., :8], offs=b[4:].int() + 1),
    "a length that is a tensor": lambda x, w, b: (x @ w.t()).view(torch.tensor(25)),
    "gather back": lambda x, w, b: (x @ w.t()).float() @ x,
}


def wide(x: Tensor) -> Tensor:
    """In a dtype that a rank's reductions do not round."""
    return x.double() if x.is_floating_point() else x


def run(op: Any, make: Make, dtype: torch.dtype) -> list[Any]:
    operands = make(X), make(W), make(B)
    with torch.autocast("cpu", dtype=dtype):
        y = op(*operands)
        again = op(*operands)
    wide(y).sum().backward()
    grads = [one.grad for one in operands]
    return [str(y.dtype), wide(y), str(again.dtype), again - y, *grads]


@pytest.mark.parametrize("way", ["even", "uneven", "ragged", "half partial"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, dtype: torch.dtype, way: str) -> None:
    agree(lambda make: run(OPS[name], make, dtype), way)


def test_a_bias_is_added_once_where_the_contraction_is_cut() -> None:
    """A row-parallel linear: ranks hold columns of the weight, the bias is whole."""
    def on_rank(mesh: Any) -> tuple[Any, ...]:
        x = weft.distribute_tensor(X, mesh, P(None, "x"))
        w = weft.distribute_tensor(W, mesh, P(None, "x"))
        b = weft.distribute_tensor(B, mesh, P())
        found = []
        for bias in (b, B.clone(), weft.distribute_tensor(B, mesh, P("x"))):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = F.linear(x, w, bias)
            found.append(y.full_tensor())
            assert y.dtype is torch.bfloat16 and y.sharding.is_partial
        return tuple(found)

    for results in weft.testing.run(on_rank, mesh={"x": 2}):
        for result in results:
            assert torch.equal(result.float(), F.linear(X, W, B))


def test_what_torch_composes_with_writes_stays_sharded_under_autocast() -> None:
    """Autocast casts the operands of the loss, whose parts write to tensors of their own."""
    def on_rank(mesh: Any) -> Tensor:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.margin_ranking_loss(x.bfloat16(), -x, torch.ones(1, 1), 1.0, reduction="none")
        assert loss.dtype is torch.float32 and loss.sharding == x.sharding
        return loss.full_tensor()

    due = F.margin_ranking_loss(X.bfloat16().float(), -X, torch.ones(1, 1), 1.0, reduction="none")
    for loss in weft.testing.run(on_rank, mesh={"x": 2}):
        assert torch.equal(loss, due)


def nested(make: Make) -> Any:
    x, w = make(X), make(W)

    def product() -> Tensor:
        return x @ w.t()

    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        seen.append(product())
        with torch.autocast("cpu", enabled=False):
            seen.append(product())
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                seen.append(product())
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            seen.append(product())
        seen.append(product())
    seen.append(product())
    sum(wide(one).sum() for one in seen).backward()
    return [*(str(one.dtype) for one in seen), *map(wide, seen), x.grad, w.grad]


def decorated(make: Make) -> Any:
    @torch.autocast("cpu", dtype=torch.float16)
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    x, w = make(X), make(W)
    y = forward(x, w)
    wide(y).sum().backward()
    return [str(y.dtype), wide(y), x.grad, w.grad]


def backward_inside(make: Make) -> Any:
    """As torch advises against; gradients are reduced in the dtype that they have."""
    x, w = make(X), make(W)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x.half() * 2 + w.half()).sum(0)
        z = x.half() @ w.half().t()
        (y.double().sum() + z.double().sum()).backward()
    return [str(y.dtype), wide(y), x.grad, w.grad]


class CastUp(torch.autograd.Function):
    """A product in float32, whatever autocast says."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        assert a.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
        return a @ b.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad @ b, grad.t() @ a


class AsItIs(torch.autograd.Function):
    """A product under the autocast of the forward, in backward too."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu")
        return (grad @ b).float(), (grad.t() @ a).float()


def custom_functions(make: Make) -> Any:
    seen = []
    for function in (CastUp, AsItIs):
        x, w = make(X), make(W)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function.apply(x, w)
        wide(y).sum().backward()
        seen += [str(y.dtype), wide(y), x.grad, w.grad]
    return seen


def a_module(make: Make) -> Any:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_((torch.arange(p.numel()).view(p.shape) * (k + 3)) % 3 - 1)
    x = make(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    y.double().sum().backward()
    return [str(y.dtype), wide(y), x.grad, *(p.grad for p in module.parameters())]


def policies(make: Make, dtype: torch.dtype) -> list[Tensor]:
    """Narrow tensors through ops that autocast widens or leaves, whole or within."""
    x, targets = make((X + W / 4).to(dtype)), torch.tensor([0, 1, 2, 3, 4])
    with torch.autocast("cpu", dtype=dtype):
        return [
            F.softmax(x, 1), F.log_softmax(x, 0), F.cross_entropy(x, targets),
            F.cross_entropy(x, targets, label_smoothing=0.25), F.smooth_l1_loss(x, x * 2),
            x.exp().sum(1), F.layer_norm(x, (6,)), torch.logsumexp(x, 1), x.std(0),
            F.normalize(x, dim=1), F.nll_loss(x, targets), F.rms_norm(x, (6,)), x.mean(0),
        ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_policies(dtype: torch.dtype, way: str) -> None:
    """To a rounding of the narrow dtype: torch rounds cross_entropy's log_softmax on its way."""
    due = policies(lambda full: full, dtype)
    axes, spec = WAYS[way]

    def on_rank(mesh: Any) -> list[Tensor]:
        def make(full: Tensor) -> Tensor:
            layout = layout_for(mesh, full.shape, spec)
            return weft.distribute_tensor(full, mesh, layout, src_data_rank=None)

        return [one.full_tensor() for one in policies(make, dtype)]

    for found in weft.testing.run(on_rank, mesh=axes):
        for mine, one in zip(found, due):
            assert mine.dtype is one.dtype
            torch.testing.assert_close(mine, one, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "program", [nested, decorated, backward_inside, custom_functions, a_module],
    ids=lambda program: program.__name__,
)
def test_programs(program: Any, way: str) -> None:
    agree(program, way)


def scaled_steps(make: Make) -> Any:
    """Three steps, the second of which meets an infinity in one element."""
    x, w = make(X), nn.Parameter(W.clone())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = torch.optim.SGD([x, w], lr=0.5)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        weights = torch.ones(5, 5)
        weights[4, 4] = factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ((x @ w.t()) * weights).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if factor == 1.0:
            seen += [x.grad.clone(), w.grad.clone()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [x.detach().clone(), w.detach().clone(), scaler.get_scale()]
    return seen


@pytest.mark.parametrize("way", [way for way in WAYS if "partial" not in way])
def test_grad_scaler(way: str) -> None:
    agree(scaled_steps, way)


def test_ops_without_a_kernel_for_meta_tensors_need_nothing_gathered() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.ones(6, 5, mesh=mesh, spec=P("x")).requires_grad_()
        with weft.strict(), torch.autocast("cpu", torch.bfloat16):
            torch.distributions.Gamma(x, x).rsample().sum().backward()
        return x.grad.full_tensor()  # type: ignore[union-attr]

    one, two = (weft.testing.run(on_rank, mesh={"x": n})[0] for n in (1, 2))
    torch.testing.assert_close(one, two)


def test_all_ranks_know_of_an_infinity_that_one_holds() -> None:
    def on_rank(mesh: Any) -> tuple[float, list[float]]:
        full = torch.ones(4, 2)
        full[3, 1] = float("nan")
        grad = weft.distribute_tensor(full, mesh, P("x"))
        found, plain = torch.zeros(1), torch.ones(3)
        with weft.explain() as log:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [grad, plain], found, torch.tensor(0.5)
            )
        assert not log.events and plain.tolist() == [0.5] * 3
        return found.item(), grad.full_tensor()[0].tolist()

    assert weft.testing.run(on_rank, mesh={"x": 4}) == [(1.0, [0.5, 0.5])] * 4


def test_partial_gradients_are_not_unscaled() -> None:
    def on_rank(mesh: Any) -> str:
        grad = weft.distribute_tensor(X, mesh, P(partial={"x": "sum"}))
        with pytest.raises(UnsupportedOpError) as caught:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [grad], torch.zeros(1), torch.tensor(0.5)
            )
        return str(caught.value)

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [
        "GradScaler.unscale_: 1 of 1 gradients are partial.\n"
        "  Rule: a partial gradient has no value to check before it is reduced, and the scale is "
        "plain.\n"
        "  Offenders: [5, 6] partial(sum@x)\n"
        "  Fix: x.grad = x.grad.redistribute(placements=[Replicate()])"
    ] * 2


_SHAPES = {"addbmm": [(4, 4), (2, 4, 4), (2, 4, 4)], "addmm": [(4, 4)] * 3, "bmm": [(2, 4, 4)] * 2,
           "baddbmm": [(2, 4, 4)] * 3, "conv1d": [(2, 4, 4), (4, 4, 1)],
           "conv2d": [(2, 4, 4, 4), (4, 4, 1, 1)], "conv3d": [(2, 4, 4, 4, 4), (4, 4, 1, 1, 1)],
           "linear": [(4, 4), (4, 4), (4,)], "matmul": [(4, 4)] * 2, "mm": [(4, 4)] * 2,
           "scaled_dot_product_attention": [(2, 4, 4)] * 3, "linalg_vecdot": [(4, 4)] * 2,
           "prelu": [(4, 4), (4,)]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ops_that_cast_are_those_of_torch(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    mesh: Any = SimpleNamespace(kernel_type=device)
    for name, shapes in _SHAPES.items():
        given = [torch.full(shape, 1.001, device=device) for shape in shapes]
        narrow = [one.bfloat16() for one in given]
        function = getattr(torch.ops.aten, name).default
        with torch.autocast(device, dtype=torch.bfloat16):
            due = function(*given)
            assert due.dtype is cast_of(str(function), due.dtype, mesh) is torch.bfloat16
            for at, one in enumerate(narrow):  # any of them may have been cast before
                assert torch.equal(function(*given[:at], one, *given[at + 1:]), due)
            for other in (torch.ops.aten.add.Tensor, torch.ops.aten.sum.default,
                          torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.exp.default):
                assert cast_of(str(other), torch.float32, mesh) is None
            assert cast_of("aten.sum.default", torch.bfloat16, mesh) is None  # sum(dtype=)


@pytest.mark.parametrize("product, shape, sends", [
    (F.linear, (12, 8), [("forward", "AllGather"), ("backward", "ReduceScatter")]),
    (torch.bmm, (2, 8, 12), [("forward", "Exchange"), ("backward", "Exchange")]),
    (lambda x, y: F.scaled_dot_product_attention(x, y, y), (2, 6, 8),
     [("forward", "Exchange"), ("backward", "Exchange")]),
])
def test_what_a_product_casts_is_cast_before_it_is_sent(
    product: Any, shape: tuple[int, ...], sends: list[tuple[str, str]]
) -> None:
    """All but partial gradients, which are summed in float32."""
    torch.manual_seed(0)
    plain = [torch.randn(2, 6, 8), torch.randn(shape)]

    def on_rank(mesh: Any) -> Any:
        sizes = []
        for enabled in (True, False):
            x, w = (weft.distribute_tensor(one, mesh, spec).requires_grad_()
                    for one, spec in zip(plain, (P(None, "x"), P("x"))))
            with torch.autocast("cpu", enabled=enabled), weft.explain() as log:
                y = product(x, w)
                y.float().square().sum().backward()
            sizes.append({(one.direction, one.collective): one.nbytes for one in log.events
                          if one.op.startswith("aten")})
            if enabled:
                found = y.full_tensor(), x.grad.full_tensor(), w.grad.full_tensor()
        return *sizes, found

    given = [one.clone().requires_grad_() for one in plain]
    with torch.autocast("cpu"):
        due = product(*given)
        due.float().square().sum().backward()
    for cast, whole, found in weft.testing.run(on_rank, mesh={"x": 2}):
        assert list(cast) == list(whole) == sends
        for way, nbytes in cast.items():
            assert nbytes == whole[way] // (1 if way[1] == "ReduceScatter" else 2)
        assert torch.equal(found[0], due)
        for mine, one in zip(found[1:], given):
            torch.testing.assert_close(mine, one.grad, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Simulated ranks on one GPU."""
    def on_rank(mesh: Any) -> list[Tensor]:
        x, w, b = (
            weft.distribute_tensor(one.cuda(), mesh, P("x")).requires_grad_() for one in (X, W, B)
        )
        with torch.autocast("cuda", dtype=dtype):
            y = F.linear(x, w, b)
        y.double().sum().backward()
        assert y.dtype is dtype
        return [one.full_tensor().cpu() for one in (y.detach(), x.grad, w.grad, b.grad)]

    x, w, b = (one.clone().requires_grad_() for one in (X, W, B))
    y = F.linear(x, w, b)
    y.sum().backward()
    for found in weft.testing.run(on_rank, mesh={"x": 2}, device_type="cuda"):
        for mine, due in zip(found, (y, x.grad, w.grad, b.grad)):
            assert torch.equal(mine.to(due.dtype), due)  # type: ignore
