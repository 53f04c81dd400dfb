"""Modes of torch and of others around weft: function modes, dispatch modes, devices, flags."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import weft
from tests.sharded import Make, agree
from weft import P, Shard, ShardTensor, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
WAYS = ["uneven", "replicated", "half partial"]


def program(x: Tensor) -> Tensor:
    """Operators, methods, functions, a module's function."""
    y = ((x + 1) * x / 2 - 1).sum(0).relu().view(2, 3).reshape(-1).softmax(0)
    return torch.relu(F.linear(x, x)).mean() + F.layer_norm(x, (6,)).sum() + y.max() + x[1:3].sum()


class Names(TorchFunctionMode):
    """Writes down the functions and the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "__set__"):
            shapes = [list(arg.shape) for arg in args if isinstance(arg, Tensor)]
            self.calls.append([func.__name__, shapes])
        return func(*args, **(kwargs or {}))


class MultiplyInstead(TorchFunctionMode):
    """Another function in the place of the one called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.add, Tensor.add, Tensor.__add__):
            func = torch.mul
        return func(*args, **(kwargs or {}))


class SumOfDoubled(TorchFunctionMode):
    """Other arguments than those given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.sum:
            args = (args[0] * 2, *args[1:])
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Counts what reaches the dispatcher: the ops on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def seen_calls(make: Make) -> Any:
    """The very calls of the plain program, global shapes, on a miss and on a hit."""
    x = make(X)
    seen = []
    for _ in range(2):
        with Names() as mode:
            program(x).backward()
            x.detach().tolist()
            x[0, 0].item()
            x.requires_grad_()
        seen.append(mode.calls)
    return seen


def nested_modes(make: Make) -> Any:
    x = make(X)
    with Names() as outer:
        with MultiplyInstead(), Names() as inner:
            y = x + x
        z = x + x
    return [outer.calls, inner.calls, y, z]


def other_functions(make: Make) -> Any:
    x, seen = make(X), []
    for _ in range(2):
        seen.append(x + x)
        with MultiplyInstead():
            seen += [x + x, torch.add(x, x), x.add(x), x + 2]
        seen.append(x + x)
    return seen


def other_arguments(make: Make) -> Any:
    x = make(X)
    with SumOfDoubled():
        y, z = x.sum(0), x.sum()
        (y.sum() + z).backward()
    return [y, z, x.grad]


def in_a_device(make: Make) -> Any:
    """What makes tensors without a device makes them there; ours stay where they are."""
    x, w, targets = make(X), make(X.t().contiguous()), torch.arange(5)
    seen: list[Any] = []
    with torch.device("meta"):
        y = x + 1
        seen += [y, x @ w, x.softmax(0), F.cross_entropy(x, targets), x.sum().item(), x.cumsum(0),
                 x[1:3], x.sort(0).values, torch.where(x > 1, x, 0.0), torch.cat([x, x]),
                 x.argmax().item(), torch.zeros_like(x), x.new_zeros(3), x.norm(), x.tolist(),
                 x.std(0), x.triu(), x.flip(0), torch.zeros(2).device.type]
        (y * y).sum().backward()
        torch.optim.Adam([x], lr=0.1).step()
        made = make(X)
    return [*seen, x.grad, x, made * 2]


def with_a_default_device(make: Make) -> Any:
    x, seen = make(X), []
    for device in ("meta", "cpu"):
        torch.set_default_device(device)
        try:
            y = (x @ x.t()).softmax(0)
            y.sum().backward()
            seen += [y, x.grad.clone()]
        finally:
            torch.set_default_device(None)
    return seen


def in_a_dispatch_mode(make: Make) -> Any:
    x, seen = make(X), []
    for _ in range(2):
        with Ops() as mode:
            y = (x @ x.t()).softmax(0).sum()
            y.backward()
        seen += [y, x.grad.clone(), mode.num > 3]
    return seen


def counted_flops(make: Make) -> Any:
    x = make(X)
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(0.25)
    with FlopCounterMode(display=False) as mode:
        module(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters()), mode.get_total_flops() > 0]


PROGRAMS = [
    nested_modes, other_functions, other_arguments, in_a_device, with_a_default_device,
    in_a_dispatch_mode, counted_flops,
]


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_function_mode_sees_the_calls_of_the_program(way: str) -> None:
    agree(seen_calls, way)


def test_flops_are_those_of_the_rank() -> None:
    def on_rank(mesh: Any) -> int:
        x = weft.distribute_tensor(torch.ones(8, 6), mesh, P("x"))
        with FlopCounterMode(display=False) as mode:
            x @ torch.ones(6, 4)
        return mode.get_total_flops()

    assert weft.testing.run(on_rank, mesh={"x": 4}) == [2 * 2 * 6 * 4] * 4


def flags_change(make: Make) -> Any:
    """Between calls that are otherwise the same."""
    x, seen = make(X), []

    def run() -> list[Tensor]:
        index = torch.tensor([0, 0, 3])
        y = x.clone().index_add_(0, index, make(torch.ones(3, 6).double(), False))
        return [y, x.cumsum(0), x[index], x.scatter_add(0, index[None, :], X[:1, :3])]

    for flags in ((False, False), (True, False), (True, True), (False, False)):
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
        try:
            seen.append(run())
        finally:
            torch.use_deterministic_algorithms(False)
    return seen


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize("way", WAYS)
def test_deterministic_algorithms(way: str) -> None:
    agree(flags_change, way)


def test_what_has_no_deterministic_kernel_is_refused_by_torch_at_once() -> None:
    """Also when the recipe is known already."""
    def on_rank(mesh: Any) -> list[bool]:
        x = weft.distribute_tensor(torch.rand(2, 1, 4, 4), mesh, P("x"))
        y, places = F.max_pool2d(x, 2, return_indices=True)
        refused = []
        for strict in (False, True, False):
            torch.use_deterministic_algorithms(strict)
            try:
                F.max_unpool2d(y, places, 2)  # type: ignore
                refused.append(False)
            except RuntimeError as error:
                refused.append("deterministic" in str(error))
            finally:
                torch.use_deterministic_algorithms(False)
        return refused

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", weft.WeftWarning)
        assert weft.testing.run(on_rank, mesh={"x": 2}) == [[False, True, False]] * 2


def test_inference_is_a_fact_of_the_tensor() -> None:
    def program(make: Make) -> Any:
        x = make(X, False)
        with torch.inference_mode():
            y, z = x * 2, x.view(5, 6)
            inside = [y.is_inference(), z.is_inference(), torch.is_inference(x)]
        again = y + 1
        return [inside, y.is_inference(), again.is_inference(), again, x.is_inference()]

    for way in WAYS:
        agree(program, way)


def test_conjugates_are_known() -> None:
    def program(make: Make) -> Any:
        x = make(torch.complex(X, X), False)
        y = x.conj()
        resolved, negated = y.resolve_conj(), torch.resolve_neg(y.imag)
        return [
            x.is_conj(), y.is_conj(), torch.is_conj(y), (y * x).is_conj(), y.is_neg(),
            x.resolve_conj() is x, resolved, resolved.is_conj(), y.imag.is_neg(), negated,
            negated.is_neg(),
        ]

    for way in ("uneven", "replicated"):
        agree(program, way)


def test_blocks_are_conjugates_on_all_ranks_or_on_none() -> None:
    """What shares memory with what must not differ between ranks."""
    def on_rank(mesh: Any) -> tuple[bool, bool, Tensor]:
        block = torch.full((1, 2), 1j)
        x = ShardTensor.from_local(block.conj() if mesh.here == (1,) else block, mesh, [Shard(0)])
        return x.is_conj(), x.resolve_conj() is x, x.full_tensor()

    for lazy, same, full in weft.testing.run(on_rank, mesh={"x": 2}):
        assert not lazy and same and full.tolist() == [[1j, 1j], [-1j, -1j]]


@pytest.mark.parametrize("warm", [False, True])
def test_tracing_is_refused(warm: bool) -> None:
    """A graph would hold this rank's blocks as constants, also where recipes are known."""
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        if warm:
            x * torch.ones(5, 6)
        with pytest.raises(UnsupportedOpError) as caught:
            make_fx(lambda a: x * a)(torch.ones(5, 6))
        return str(caught.value).splitlines()

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        assert said[0].startswith("mul: at ") and said[0].endswith(
            " a ShardTensor is used while make_fx, torch.export, torch.func.linearize or torch.jit "
            "traces."
        )
        assert said[1:] == [
            "  Rule: a traced graph knows ops on plain tensors, and neither layouts nor "
            "communication.",
            "  Offenders: mul",
            "  Fix: trace the program on plain tensors, and run it on ShardTensors untraced",
            "       of linearize: torch.func.jvp(fn, (x,), (tangent,))",
        ]


def test_a_tracer_that_is_given_one_is_refused() -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(UnsupportedOpError) as caught:
            make_fx(lambda a: a * 2)(weft.distribute_tensor(X, mesh, P("x")))
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        assert "a ShardTensor is used while make_fx, torch.export, torch.func.linearize" in said


FAKES: dict[str, Callable[[Any, FakeTensorMode], Any]] = {
    "an op": lambda x, mode: x * 3.5,
    "in place": lambda x, mode: x.sub_(1),
    "a fake operand": lambda x, mode: x + torch.ones(5, 6),
    "conversion": lambda x, mode: mode.from_tensor(x),
}


@pytest.mark.parametrize("name", FAKES)
def test_fake_tensors_are_refused(name: str) -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, pytest.raises(UnsupportedOpError) as caught:
            FAKES[name](x, mode)
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        first, *rest = said.splitlines()
        assert first.endswith(" a ShardTensor is used under FakeTensorMode.")
        assert [line.partition(":")[0].strip() for line in rest] == ["Rule", "Offenders", "Fix"]


def test_num_threads_are_left_alone() -> None:
    before = torch.get_num_threads()

    def on_rank(mesh: Any) -> int:
        (weft.distribute_tensor(X, mesh, P("x")) @ torch.ones(6, 2).double()).sum().item()
        return torch.get_num_threads()

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [before] * 2
    assert torch.get_num_threads() == before
