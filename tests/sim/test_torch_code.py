"""Which autograd.Functions are known to consist of torch's operations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import weft
from tests.cases.own import Product
from tests.sim.test_own_autograd import Both, Rows
from tests.sim.test_tensor_functions import WithContext
from weft import P
from weft.tensor.grad.torch_code import is_torch_code

SCALE, DTYPES = 2.0, (torch.float32, torch.float64)


def _silu(x: Tensor, by: float = SCALE) -> Tensor:
    return x * torch.sigmoid(x * by)


def _to_numpy(x: Tensor) -> Any:
    return x.detach().numpy()


class Calls(torch.autograd.Function):
    """Functions of torch by several names, numbers, and code of the user's that is made of them."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor | None, at: Any = (..., 0)) -> Any:
        if w is None or x.dtype not in DTYPES:
            raise ValueError(f"no weight for {x.dtype}")
        ctx.shape, ctx.at, total = x.shape, at, 0.0
        ctx.save_for_backward(x, w)
        for row in range(min(len(x), 3)):
            total = total + F.gelu(x[row]) * math.sqrt(row)
        rows = [_silu(one) for one in x.unbind(0)]
        return torch.stack(rows) + einsum("i,i->", w, w), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_total: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.no_grad():
            out = torch.zeros(ctx.shape, dtype=grad.dtype)
            out[ctx.at] = grad[ctx.at] * x[ctx.at]
        return out, torch.linalg.norm(w) * grad.sum() if ctx.needs_input_grad[1] else None, None


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(_swish)


class Scripted(torch.autograd.Function):
    """A function that torch.jit.script has compiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return _scripted(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, = ctx.saved_tensors
        return grad * _scripted(x)  # type: ignore[no-any-return]


class Applies(torch.autograd.Function):
    """Another Function, which is asked itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return Scripted.apply(x) * 2  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.mark.parametrize(
    "cls", [Calls, Scripted, Applies, WithContext, Product, Rows, Both],
    ids=lambda cls: cls.__name__)
def test_code_of_torchs_operations(cls: Any) -> None:
    assert is_torch_code(cls) and is_torch_code(cls)


def _numpy(ctx: Any, x: Any) -> Any:
    return torch.from_numpy(np.sin(x.numpy()))


def _calls_what_it_is_given(ctx: Any, function: Any, x: Any) -> Any:
    return function(x)


def _calls_what_it_has_kept(ctx: Any, x: Any) -> Any:
    return ctx.layer(x)


def _calls_what_it_has_put_down(ctx: Any, x: Any) -> Any:
    layer = ctx.layer
    return layer(x)


def _method_of_what_it_has_kept(ctx: Any, x: Any) -> Any:
    return ctx.layer.forward(x)


def _kernel(ctx: Any, x: Any) -> Any:
    return torch.ops.package.kernel(x)


def _address(ctx: Any, x: Any) -> Any:
    return x * x.data_ptr()


def _indirectly(ctx: Any, x: Any) -> Any:
    return torch.as_tensor(_to_numpy(x))


def _by_code(ctx: Any, x: Any) -> Any:
    return (lambda one: one * 2)(x)


def _imports(ctx: Any, x: Any) -> Any:
    import numpy  # noqa: PLC0415

    return x + numpy.pi


def _by_name(ctx: Any, x: Any) -> Any:
    return getattr(x, "numpy")()  # noqa: B009


def _keeps(ctx: Any, x: Any) -> Any:
    global SCALE
    SCALE = 3.0
    return x


def _marks(ctx: Any, x: Any) -> Any:
    x.mark = 1
    return x * 1


@pytest.mark.parametrize("forward", [
    _numpy, _calls_what_it_is_given, _calls_what_it_has_kept, _calls_what_it_has_put_down,
    _method_of_what_it_has_kept, _kernel, _address, _indirectly, _by_code, _imports, _by_name,
    _keeps, _marks, torch.exp, eval("lambda ctx, x: x * 2"),
], ids=lambda one: one.__name__)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_other_code_is_opaque(forward: Any, part: str) -> None:
    parts = {"forward": Product.forward, "backward": Product.backward, part: forward}
    methods = {name: staticmethod(function) for name, function in parts.items()}
    assert not is_torch_code(type("Opaque", (torch.autograd.Function,), methods))


class Greatest(torch.autograd.Function):
    """Its result is partial by max where rows are cut, and is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        out = x.amax(0)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, out = ctx.saved_tensors
        return (x == out) * grad


def test_a_result_that_is_partial_by_max_is_reduced() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    x.amax(0).square().sum().backward()

    def program(mesh: Any) -> Any:
        mine: Any = weft.distribute_tensor(x.detach(), mesh, P("x")).requires_grad_()
        Greatest.apply(mine).square().sum().backward()
        return mine.grad.full_tensor()

    for grad in weft.testing.run(program, mesh={"x": 3}):
        torch.testing.assert_close(grad, x.grad)


@pytest.fixture
def op_by_op() -> Iterator[Callable[[Any], None]]:
    """Says of a Function that it runs op by op, for one test."""
    with ExitStack() as said:
        def say(cls: Any) -> None:
            weft.op_by_op(cls)
            said.callback(weft.op_by_op, cls, None)

        yield say


@pytest.mark.parametrize("said", [False, True])
def test_a_weight_that_is_sharded_as_its_batch_is_gathered_once(said: bool, op_by_op: Any) -> None:
    if said:
        op_by_op(Product)
    x = torch.randn(24, 8, dtype=torch.float64)
    w = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    Product.apply(x, w).square().sum().backward()

    def program(mesh: Any) -> Any:
        mine: Any = weft.distribute_tensor(w.detach(), mesh, P("x")).requires_grad_()
        data: Any = weft.distribute_tensor(x, mesh, P("x")).requires_grad_()
        with weft.explain() as log:
            Product.apply(data, mine).square().sum().backward()
        collectives = [event.collective for event in log.events if event.nbytes > 8]
        return str(mine.grad.sharding), mine.grad.full_tensor(), collectives

    for layout, grad, collectives in weft.testing.run(program, mesh={"x": 2}):
        torch.testing.assert_close(grad, w.grad)
        assert layout == "[8@x, 4]" and collectives == ["AllGather", "AllReduce"]


def _layer(module: Any, z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(module(z) + x)


def _solved(ctx: Any, function: Any, parameters: Any, grad: Tensor) -> Any:
    """The gradients of a fixed point of a function."""
    x, fixed = (one.detach().requires_grad_() for one in ctx.saved_tensors)
    with torch.enable_grad():
        out = function(fixed, x)
    solved = grad
    for _ in range(5):
        solved = grad + torch.autograd.grad(out, fixed, solved, retain_graph=True)[0]
    of_x, *others = torch.autograd.grad(out, [x, *parameters], solved)
    return None, of_x, None, *others


class Implicit(torch.autograd.Function):
    """A fixed point of a module; its backward is the first to call the module."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Any, fixed: Any, *parameters: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(x, fixed)
        return fixed.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return _solved(ctx, partial(_layer, ctx.module), ctx.module.parameters(), grad)


@pytest.mark.parametrize("table", [{}, {"*": P("x")}, {"weight": P(None, "x")}], ids=str)
def test_a_module_that_only_backward_calls(table: Any) -> None:
    def step(mesh: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, x = torch.nn.Linear(4, 4).double(), torch.randn(5, 4, dtype=torch.float64)
        if mesh is not None:
            module = weft.distribute_module(module, mesh, shardings=table)
            x = weft.distribute_tensor(x, mesh, P("x"))
        x.requires_grad_()
        with torch.no_grad():
            fixed = torch.tanh(module(x) + x)
        Implicit.apply(module, x, fixed, *module.parameters()).square().sum().backward()
        found: list[Any] = [x.grad, *(one.grad for one in module.parameters())]
        return found if mesh is None else [one.full_tensor() for one in found]

    wanted = step(None)
    for found in weft.testing.run(step, mesh={"x": 3}):
        torch.testing.assert_close(found, wanted)


class Solved(torch.autograd.Function):
    """As Implicit, of any function; it asks for gradients by the arguments that it was given."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Any, fixed: Any, *parameters: Any) -> Any:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x, fixed)
        return fixed.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return _solved(ctx, ctx.function, ctx.parameters, grad)


class _Layer(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return _layer(self.module, z, x)


class _Holder:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return _layer(self.module, z, x)


def _over_tensors(module: Any) -> Any:
    weight, bias = module.weight, module.bias
    return lambda z, x: torch.tanh(F.linear(z, weight, bias) + x)


def _of_itself(module: Any) -> Any:
    def layer(z: Tensor, x: Tensor, again: bool = True) -> Tensor:
        if again:
            return layer(z, x, False)
        return never if module is None else _layer(module, z, x)

    if module is None:
        never: Any = None  # an empty cell
    return layer


FUNCTIONS: dict[str, Any] = {
    "module": _Layer,
    "closure": lambda module: lambda z, x: _layer(module, z, x),
    "of closures": lambda module: (lambda inner: lambda z, x: inner(z, x))(
        lambda z, x: _layer(module, z, x)),
    "of itself": _of_itself,
    "of tensors": _over_tensors,
    "of a list": lambda module: (lambda layers: lambda z, x: _layer(layers[0], z, x))([module]),
    "default": lambda module: lambda z, x, module=module: _layer(module, z, x),
    "global": lambda module: eval("lambda z, x: f(m, z, x)", {"f": _layer, "m": module}),
    "partial": lambda module: partial(_layer, module),
    "method": lambda module: _Holder(module).step,
    "method of a module": lambda module: _Layer(module).forward,
}


@pytest.mark.parametrize("table", [{}, {"*": P("x")}, {"weight": P(None, "x")}], ids=str)
@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_that_only_backward_calls(
    kind: str, said: bool, table: Any, op_by_op: Any
) -> None:
    def step(mesh: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, x = torch.nn.Linear(4, 4).double(), torch.randn(5, 4, dtype=torch.float64)
        if mesh is not None:
            module = weft.distribute_module(module, mesh, shardings=table)
            x = weft.distribute_tensor(x, mesh, P("x"))
        function = FUNCTIONS[kind](module)
        x.requires_grad_()
        with torch.no_grad():
            fixed = function(x, x)
        Solved.apply(function, x, fixed, *module.parameters()).square().sum().backward()
        found: list[Any] = [x.grad, *(one.grad for one in module.parameters())]
        return found if mesh is None else [one.full_tensor() for one in found]

    if said:
        op_by_op(Solved)
    wanted = step(None)
    for found in weft.testing.run(step, mesh={"x": 3}):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("table", [{}, {"*": P("x")}, {"weight": P(None, "x")}], ids=str)
def test_a_function_over_a_module_is_checkpointed_on_plain_tensors(table: Any) -> None:
    def step(mesh: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, x = torch.nn.Linear(4, 4).double(), torch.randn(5, 4, dtype=torch.float64)
        if mesh is not None:
            module = weft.distribute_module(module, mesh, shardings=table)
        x.requires_grad_()
        out: Any = checkpoint(lambda one: module(one).tanh(), x, use_reentrant=True)
        out.square().sum().backward()
        found: list[Any] = [one.grad for one in module.parameters()]
        whole = found if mesh is None else [one.full_tensor() for one in found]
        assert x.grad is not None
        return [x.grad, *whole]

    wanted = step(None)
    for found in weft.testing.run(step, mesh={"x": 3}):
        torch.testing.assert_close(found, wanted)
