"""Handlers of users' own ops: they get ShardTensors and return ShardTensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.cases.own import own_ops, unregister
from tests.sharded import Make, agree
from weft import P, ShardTensor, ShardTypeError
from weft.own.beneath import BENEATH

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 16

WAYS = ("even", "uneven", "partial", "empty", "both", "half partial")


@contextmanager
def handler(op: Any, function: Any) -> Iterator[Any]:
    """A handler for a while."""
    weft.register_handler(op, function)
    try:
        yield op
    finally:
        weft.unregister_handler(op)


def running_sum(x: Tensor) -> Tensor:
    """Along dim 0: no rule says it, for a shard needs the sums of those before it."""
    assert type(x) is Tensor or not x.sharding.dims[0]
    return x.cumsum(0)


class RunningSum(torch.autograd.Function):
    """The same with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().cumsum(0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0).cumsum(0).flip(0)


@torch.library.custom_op("weft_tests::running_sum", mutates_args=())
def library_sum(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().cumsum(0))


@library_sum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


library_sum.register_autograd(lambda ctx, grad: grad.flip(0).cumsum(0).flip(0))

FORMS: dict[str, tuple[Any, Any]] = {
    "function": (running_sum, running_sum),
    "Function": (RunningSum, RunningSum.apply),
    "apply": (RunningSum.apply, RunningSum.apply),
    "custom_op": (library_sum, library_sum),
    "packet": (torch.ops.weft_tests.running_sum, library_sum),
    "torch": (torch.cumsum, lambda x: torch.cumsum(x, 0)),
    "aten": (torch.ops.aten.cumsum.default, lambda x: x.cumsum(0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_handler_carries_out_the_op(form: str, way: str) -> None:
    """Each shard sums its own rows; the sums of those before come by one small exchange."""
    op, call = FORMS[form]
    seen: list[type] = []

    def scan(x: Any, *_: Any, **__: Any) -> Any:
        seen.append(type(x))
        cut = x.sharding.dims[0]
        if x.sharding.is_partial or len(cut) > 1:  # bring it to what is dealt with below
            dims = [cut[:1], *x.sharding.dims[1:]]
            whole = [None] * x.device_mesh.ndim
            return scan(x.redistribute(placements=x.sharding.replace(dims=dims, partial=whole)))
        mesh, layout = x.device_mesh, x.sharding
        local = call(x.to_local())  # on a plain tensor: the op itself
        if not cut:
            return ShardTensor.from_local(local, mesh, layout)
        size = mesh.axis_sizes[cut[0]]
        each = layout.replace(dims=[(), *layout.dims[1:]])
        totals = ShardTensor.from_local(
            x.to_local().sum(0, keepdim=True), mesh,
            weft.Layout(mesh, (size, 6), P(cut_name(x), *each.spec.entries[1:])),
        )
        known = totals.redistribute(placements=P(None, *each.spec.entries[1:]))
        before = known.to_local(grad_placements=varying(known, cut[0]))
        return ShardTensor.from_local(
            local + before[: mesh.here[cut[0]]].sum(0, keepdim=True), mesh, layout
        )

    def program(make: Make) -> Any:
        x = make(X)
        y = call(x * 2)
        (y * y).sum().backward()
        with torch.no_grad():
            free = call(x)
        return [y, x.grad, free]

    with handler(op, scan):
        agree(program, way)
    assert set(seen) == {ShardTensor}


def cut_name(x: Any) -> Any:
    return x.spec.entries[0]


def varying(x: Any, axis: int) -> Any:
    """The gradient of a replicated tensor that each rank of `axis` uses in its own way."""
    places = list(x.placements)
    places[axis] = weft.Partial("sum")
    return places


def test_not_implemented_goes_on_without() -> None:
    calls: list[str] = []

    def double(x: Tensor) -> Tensor:
        calls.append("op")
        return x * 2

    def declines(x: Any) -> Any:
        calls.append("handler")
        return NotImplemented

    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        torch.testing.assert_close(double(x).full_tensor(), X * 2)
        torch.testing.assert_close(torch.tanh(x).full_tensor(), X.tanh())
        torch.testing.assert_close(x.tanh().full_tensor(), X.tanh())
        return str(double(x).sharding)

    with handler(double, declines), handler(torch.tanh, declines), handler(
        torch.ops.aten.tanh.default, declines
    ):
        for _ in range(2):
            calls.clear()
            assert weft.testing.run(on_rank, 1, {"x": 1}) == ["[5@x, 6]"]
            # torch.tanh and the method both consist of the ATen op.
            assert calls == ["handler", "op", *["handler"] * 3, "handler", "op"]


def test_the_op_within_its_handler_means_what_it_would_without() -> None:
    """With a rule as well, the handler adds to what the rule does."""
    def scaled(x: Tensor, k: float) -> Tensor:
        assert type(x) is Tensor
        return x * k

    def twice(x: Any, k: float) -> Any:
        assert type(x) is ShardTensor
        return scaled(scaled(x, k), k)

    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        outs = [scaled(x, 3.0), scaled(x, k=2.0)]
        return [one.full_tensor() for one in outs]

    weft.register_rule(scaled, "a b -> a b", linear=[0])
    try:
        with handler(scaled, twice):
            for found in weft.testing.run(on_rank, mesh={"x": 2}):
                torch.testing.assert_close(found, [X * 9, X * 4])
        for found in weft.testing.run(on_rank, mesh={"x": 2}):
            torch.testing.assert_close(found, [X * 3, X * 2])
    finally:
        weft.unregister_rule(scaled)
    torch.testing.assert_close(scaled(X, 2.0), X * 2)


def test_recipes_are_forgotten() -> None:
    def on_rank(mesh: Any) -> list[float]:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        found = []
        for function in (None, lambda x: x * 0, lambda x: x * 0 + 1, None):
            mesh.comm((0,)).exchange(0)  # all ranks have come
            if function is None:
                weft.unregister_handler(torch.sinh)
            else:
                weft.register_handler(torch.sinh, function)
            found.append(round(torch.sinh(x).full_tensor()[0, 0].item(), 4))
        return found

    value = round(X.sinh()[0, 0].item(), 4)
    assert weft.testing.run(on_rank, mesh={"x": 2}) == [[value, 0.0, 1.0, value]] * 2


def test_results_of_any_kind() -> None:
    def parts(x: Tensor) -> Any:
        return {"whole": x, "rows": [x[:1], x[1:]], "n": 3}

    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P(None, "x"), src_data_rank=None)
        out = parts(x)
        assert out["whole"] is x and out["n"] == 3
        return [one.full_tensor() for one in out["rows"]]

    with handler(parts, lambda x: {"whole": x, "rows": [x[:1], x[1:]], "n": 3}):
        for found in weft.testing.run(on_rank, mesh={"x": 2}):
            torch.testing.assert_close(found, [X[:1], X[1:]])


def test_plain_results_are_refused() -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        with pytest.raises(ShardTypeError) as info:
            RunningSum.apply(x)
        return str(info.value).splitlines()

    with handler(RunningSum, lambda x: x.full_tensor()):
        assert weft.testing.run(on_rank, mesh={"x": 2})[0] == [
            "the handler of RunningSum: it returned 1 plain tensors.",
            "  Rule: a handler gets ShardTensors and returns ShardTensors, whose layouts say what "
            "each rank holds.",
            "  Offenders: shape (5, 6)",
            "  Fix: ShardTensor.from_local(local, x.device_mesh, x.sharding)",
        ]


def test_a_handler_that_raises_leaves_nothing_behind() -> None:
    def fails(x: Any) -> Any:
        raise ArithmeticError

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P(None, "x"), src_data_rank=None)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                running_sum(x)

    with handler(running_sum, fails):
        weft.testing.run(on_rank, mesh={"x": 2})


def test_what_cannot_have_a_handler() -> None:
    with pytest.raises(ShardTypeError, match="cannot have a rule or a handler"):
        weft.register_handler(len, lambda x: x)
    with pytest.raises(ShardTypeError, match="handler is 3"):
        weft.register_handler(running_sum, 3)  # type: ignore[arg-type]
    with pytest.raises(ShardTypeError, match="weft answers it from a tensor's layout"):
        weft.register_handler(torch.Tensor.size, lambda x: x)


def test_a_decorator() -> None:
    def shift(x: Tensor) -> Tensor:
        return x + 1

    @weft.register_handler(shift)
    def shifted(x: Any) -> Any:
        return x + 2

    def on_rank(mesh: Any) -> Any:
        return shift(weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)).full_tensor()

    torch.testing.assert_close(weft.testing.run(on_rank, mesh={"x": 2})[0], X + 2)
    weft.unregister_handler(shift)
    weft.unregister_handler(shift)
    torch.testing.assert_close(weft.testing.run(on_rank, mesh={"x": 2})[0], X + 1)
    assert callable(shifted) and shift(X).equal(X + 1)


def test_without_rule_or_handler_a_library_op_falls_back() -> None:
    @torch.library.custom_op("weft_tests::bare", mutates_args=())
    def bare(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 3)

    def on_rank(mesh: Any) -> Any:
        return bare(weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)).full_tensor()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = weft.testing.run(on_rank, mesh={"x": 2})
    torch.testing.assert_close(found[0], X * 3)
    assert "weft.register_rule(op, ...)" in str(said[0].message)


def test_rules_and_handlers_together() -> None:
    due = own_ops(None)
    try:
        for found in weft.testing.run(own_ops, mesh={"dp": 2, "tp": 2}):
            torch.testing.assert_close(found, due)
    finally:
        unregister()


# Ops that calls do not come as.


I4 = torch.arange(16.0).view(4, 4)

SEEN: dict[str, Any] = {
    "aten.matmul.default": lambda x: x @ x,
    "aten.linear.default": lambda x: F.linear(x, x, x[0]),
    "aten.einsum.default": lambda x: torch.einsum("ij,jk->ik", x, x),
    "aten.conv1d.default": lambda x: F.conv1d(x[None], torch.ones(4, 4, 1)),
    "aten.conv2d.default": lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 2, 2)),
    "aten.conv3d.default": lambda x: F.conv3d(x[None, None, None], torch.ones(1, 1, 1, 1, 1)),
    "aten.conv_transpose1d.default": lambda x: F.conv_transpose1d(x[None], torch.ones(4, 4, 1)),
    "aten.conv_transpose2d.input":
        lambda x: F.conv_transpose2d(x[None, None], torch.ones(1, 1, 2, 2)),
    "aten.conv_transpose3d.input":
        lambda x: F.conv_transpose3d(x[None, None, None], torch.ones(1, 1, 1, 1, 1)),
    "aten.softmax.int": lambda x: x.softmax(0),
    "aten.log_softmax.int": lambda x: x.log_softmax(0),
    "aten.layer_norm.default": lambda x: F.layer_norm(x, (4,)),
    "aten.group_norm.default": lambda x: F.group_norm(x, 2),
    "aten.rms_norm.default": lambda x: F.rms_norm(x, (4,)),
    "aten.batch_norm.default": lambda x: F.batch_norm(x, None, None, training=True),
    "aten.dropout.default": lambda x: F.dropout(x),
    "aten.scaled_dot_product_attention.default":
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "aten.cross_entropy_loss.default": lambda x: F.cross_entropy(x, torch.zeros(4).long()),
    "aten.nll_loss_nd.default": lambda x: F.nll_loss(x, torch.zeros(4).long()),
    "aten.adaptive_avg_pool2d.default": lambda x: F.adaptive_avg_pool2d(x[None], 2),
    "aten.adaptive_avg_pool3d.default": lambda x: F.adaptive_avg_pool3d(x[None, None], 1),
    "aten.max_pool2d.default": lambda x: F.max_pool2d(x[None], 2),
    "aten.cdist.default": lambda x: torch.cdist(x, x),
    "aten._weight_norm.default": lambda x: torch._weight_norm(x, x[:, :1], 0),
}
"""What an op that is named instead is seen in."""


def overload(name: str) -> Any:
    _, packet, which = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), which)


def test_every_op_that_is_named_instead_is_tried() -> None:
    assert {one for seen in BENEATH.values() for one in seen} == set(SEEN)


@pytest.mark.parametrize("name", SEEN)
def test_the_op_that_is_named_instead_is_seen(name: str) -> None:
    calls: list[Any] = []

    def declines(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return NotImplemented

    def on_rank(mesh: Any) -> None:
        SEEN[name](weft.distribute_tensor(I4, mesh, P("x")))

    weft.register_handler(overload(name), declines)
    try:
        weft.testing.run(on_rank, mesh={"x": 1})
    finally:
        weft.unregister_handler(overload(name))
    assert calls


@pytest.mark.parametrize("register", [weft.register_handler, weft.register_rule])
@pytest.mark.parametrize("name", BENEATH)
def test_ops_beneath_others_are_refused(name: str, register: Any) -> None:
    packet = getattr(torch.ops.aten, name)
    for op in (packet, getattr(packet, packet.overloads()[0])):
        with pytest.raises(ShardTypeError, match="weft never sees aten") as told:
            register(op, lambda *args: NotImplemented)
        fix = str(told.value).split("Fix: ")[1]
        for seen in BENEATH[name]:
            assert f"{register.__name__}(torch.ops.{seen}, ...)" in fix


@pytest.mark.parametrize(("op", "said"), [
    (torch.ops.aten.threshold_backward.default, "backward is torch's own graph"),
    (torch.ops.aten._softmax_backward_data.default, "backward is torch's own graph"),
    (torch.ops.aten.native_layer_norm_backward, "backward is torch's own graph"),
    (torch.ops.aten.add.out, "register_handler(torch.ops.aten.add.Tensor, ...)"),
], ids=str)
def test_ops_of_gradients_and_of_out_are_refused(op: Any, said: str) -> None:
    with pytest.raises(ShardTypeError) as told:
        weft.register_handler(op, lambda *args: NotImplemented)
    assert said in str(told.value)


def test_what_is_called_by_itself_can_be_handled_by_its_function() -> None:
    with pytest.raises(ShardTypeError, match=r"register_handler\(torch.mm, ...\) for calls of"):
        weft.register_handler(torch.ops.aten.mm.default, lambda *args: NotImplemented)
    calls = []

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(I4, mesh, P("x"))
        torch.mm(x, x)

    weft.register_handler(torch.mm, lambda *args: calls.append(args) or NotImplemented)
    try:
        weft.testing.run(on_rank, mesh={"x": 1})
    finally:
        weft.unregister_handler(torch.mm)
    assert len(calls) == 1
