"""`torch.optim` on ShardTensors: the very parameters and state of one process, at its cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.overrides import TorchFunctionMode

import weft
from tests.effort import EFFORT
from tests.sharded import Make, agree, layout_for
from weft import P, ShardTensor, StrictError

X = torch.arange(1.0, 26.0, dtype=torch.float64).view(5, 5) / 16

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "adam maximize": (torch.optim.Adam, {"maximize": True}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "asgd": (torch.optim.ASGD, {"t0": 1.0, "lambd": 0.1}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
FUSED = ("adagrad", "adam", "adam maximize", "adamw", "sgd", "sgd momentum")
WRITTEN = [(name, how) for name in OPTIMIZERS for how in ("for-loop", "foreach")]
WRITTEN += [(name, "fused") for name in FUSED]


def made(name: str, how: str, params: list[Any], **more: Any) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[name]
    flags = {"foreach": how == "foreach"} | ({"fused": True} if how == "fused" else {})
    return cls(params, lr=0.05, **options, **flags, **more)


def train(optimizer: torch.optim.Optimizer, num_steps: int = 3) -> list[Any]:
    """Parameters and state after some steps; not every parameter has a gradient at the first,
    where torch allows for that."""
    params = optimizer.param_groups[0]["params"]
    late = 0 if optimizer.defaults.get("fused") else 1
    for step in range(num_steps):
        optimizer.zero_grad()
        used = params[late:] if step == 0 else params
        loss = sum(((p - 0.3).abs() ** 2 * (place + 1)).sum() for place, p in enumerate(used))
        loss.backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    state = [sorted(optimizer.state[p].items()) for p in params]
    assert all(
        value.sharding == p.sharding
        for p, items in zip(params, state) if type(p) is ShardTensor and not p.sharding.is_partial
        for _, value in items if isinstance(value, Tensor) and value.dim() and p.dim()
    )
    return [params, [[value for _, value in items] for items in state]]


def leaves(make: Make) -> list[Any]:
    turned = make(X * 2, False).t().detach().requires_grad_()
    return [make(X), make(X[0]), make(X[0, 0]), turned, make(X[1:].flip(0)), make(X[4])]


TRIALS = [
    (*written, way) for at, written in enumerate(WRITTEN)
    for turn, way in enumerate(("partial", "empty", "both"))
    if (written[1], way) != ("fused", "partial")  # gathered, with a warning: it has no rule
    and (EFFORT >= 1 or (at + turn) % 3 == 0 or written[1] == "fused")
]


@pytest.mark.parametrize(("name", "how", "way"), TRIALS)
def test_optimizer(name: str, how: str, way: str) -> None:
    agree(lambda make: train(made(name, how, leaves(make))), way)


def mixed(make: Make) -> Any:
    """Plain parameters among the sharded ones."""
    plain = [X.clone().requires_grad_(), X[0].clone().requires_grad_()]
    params = [plain[0], *leaves(make), plain[1]]
    return [train(made(name, how, params)) for name, how in WRITTEN if how != "fused"]


def moved_state(make: Make) -> Any:
    """State that a user redistributed, or put back as full tensors."""
    moves: list[Callable[[Any], Any]] = [
        lambda state: state.redistribute(placements=P()), lambda state: state.full_tensor(),
    ]
    seen = []
    for how in ("for-loop", "foreach"):
        for move in moves:
            params = leaves(make)
            optimizer = made("adamw", how, params)
            train(optimizer, 2)
            if isinstance(params[0], ShardTensor):
                state = optimizer.state[params[0]]
                state["exp_avg"] = move(state["exp_avg"])
            optimizer.zero_grad()
            sum((p**2).sum() for p in params).backward()
            optimizer.step()
            seen.append(params)
    return seen


def tensor_learning_rate(make: Make) -> Any:
    rate = torch.tensor(0.05, dtype=torch.float64)
    params = leaves(make)
    return train(torch.optim.AdamW(params, lr=rate, weight_decay=0.1))


def update_function(make: Make) -> Any:
    """The function itself, with its lists by place and by name."""
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.1,
               "eps": 1e-8, "maximize": False}
    seen = []
    for num_by_place in (6, 2):
        param, *others = [make(X / k, False) for k in (1, 2, 3, 4)]
        lists = [[param.requires_grad_()], *[[one] for one in others], [], [torch.tensor(1.0)]]
        by_name = dict(zip(names[num_by_place:], lists[num_by_place:]))
        with torch.no_grad():
            adamw(*lists[:num_by_place], **by_name, foreach=True, **options)
        seen.append(lists)
    return seen


def clipped(make: Make) -> Any:
    params = [*leaves(make), X.clone().requires_grad_()]
    sum((p**2).sum() for p in params).backward()
    norms = [
        torch.nn.utils.clip_grad_norm_(some, 0.3, foreach=True) for some in (params[:6], params)
    ]
    return [norms, [p.grad for p in params]]


def complex_parameters(make: Make) -> Any:
    seen = []
    for how in ("for-loop", "foreach"):
        params = [make(torch.complex(X, X * 2), False).requires_grad_() for _ in range(2)]
        optimizer = made("adam", how, params)
        for _ in range(2):
            optimizer.zero_grad()
            sum((torch.view_as_real(p) ** 2).sum() for p in params).backward()
            optimizer.step()
        seen.append(params)
    return seen


def differentiable(make: Make) -> Any:
    """The optimizer's steps in the graph: gradients with respect to where it started, and to what
    a gradient was made of."""
    start, source = make(X[0]), make(X[1] / 2)
    seen = []
    for moved, grad in ((start * 1, make(X[0] * 2, False)), (make(X[0], False), source * 2)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(X)], lr=0.1, differentiable=True)
        optimizer.param_groups[0]["params"] = [moved]
        moved.grad = grad
        optimizer.step()
        assert not isinstance(moved, ShardTensor) or moved._meta.requires_grad
        seen.append(moved.requires_grad)
        (moved[:, None] ** 2 * make(X, False)).sum().backward()
    return [seen, start.grad, source.grad]


PROGRAMS = (mixed, moved_state, update_function, clipped, complex_parameters, differentiable)


@pytest.mark.parametrize("way", ["uneven", "partial", "empty", "both"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Callable[[Make], Any], way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("way", ["uneven", "both"])
def test_a_learning_rate_that_is_a_tensor(way: str) -> None:
    agree(tensor_learning_rate, way)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda state: state.full_tensor(),
    "as they lie": lambda state: state,
    "of other layouts": lambda state: state.redistribute(placements=P()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "how"), [
    ("adamw", "foreach"), ("sgd momentum", "for-loop"), *((name, "fused") for name in FUSED)])
def test_state_of_every_kind_is_loaded(name: str, how: str, kind: str) -> None:
    """It comes to lie as the parameters do, and steps move nothing."""
    def run(make: Make) -> Any:
        params = leaves(make)
        saved = made(name, how, params)
        train(saved, 2)
        state = copy.deepcopy(saved.state_dict())
        for values in state["state"].values() if isinstance(params[0], ShardTensor) else ():
            values.update({key: KINDS[kind](value) for key, value in values.items()
                           if isinstance(value, ShardTensor)})
        optimizer = made(name, how, params)
        optimizer.load_state_dict(state)
        for p in params:
            p.grad = None
        return train(optimizer, 2)

    for way in ("empty", "both"):
        agree(run, way)


def test_a_fused_update_of_full_state_is_written() -> None:
    """torch has no kernel without data for some, and counts no version of what they write to."""
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        optimizer = torch.optim.SGD([x], lr=0.5, momentum=0.9, fused=True)
        for _ in range(2):
            x.grad = torch.ones_like(x)
            optimizer.step()
            state = optimizer.state[x]
            if type(state["momentum_buffer"]) is ShardTensor:
                state["momentum_buffer"] = state["momentum_buffer"].full_tensor()
        return x.detach().full_tensor(), state["momentum_buffer"]

    with pytest.warns(weft.WeftWarning, match="_fused_sgd_"):
        ranks = weft.testing.run(on_rank, mesh={"x": 2})
    for found, buffer in ranks:
        torch.testing.assert_close(found, X - 0.5 - 0.5 * 1.9)
        torch.testing.assert_close(buffer, torch.full_like(X, 1.9))


class Seen(TorchFunctionMode):
    """The names of the functions that are called on ShardTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if ShardTensor in types:
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def names_of_a_step(mesh: Any, name: str, how: str, move: bool) -> set[str]:
    params = [
        weft.distribute_tensor(one, mesh, layout_for(mesh, one.shape, (5, 0))).requires_grad_()
        for one in (X, X[0], X[1:])
    ]
    optimizer = made(name, how, params)
    train(optimizer)
    if move:
        state = optimizer.state[params[0]]
        state["exp_avg"] = state["exp_avg"].redistribute(placements=P())
    with Seen() as seen:
        optimizer.step()
    return seen.names


@pytest.mark.parametrize(("name", "how"), WRITTEN)
def test_a_step_calls_torch_on_local_tensors(name: str, how: str) -> None:
    run = partial(names_of_a_step, name=name, how=how, move=False)
    for names in weft.testing.run(run, mesh={"x": 2}):
        assert names <= {"is_complex", "is_floating_point"}


def test_a_step_on_moved_state_goes_call_by_call() -> None:
    run = partial(names_of_a_step, name="adamw", how="foreach", move=True)
    for names in weft.testing.run(run, mesh={"x": 2}):
        assert "_foreach_lerp_" in names


def refusals(mesh: Any) -> list[str]:
    x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
    y = weft.distribute_tensor(X, mesh["y"], P("y")).requires_grad_()
    z = X.clone().requires_grad_()
    for one in (x, y, z):
        one.grad = torch.ones_like(one)
    with weft.strict(), pytest.raises(StrictError) as plain:
        torch.optim.AdamW([x, z], foreach=True).step()
    before = x.detach().full_tensor().clone()
    torch.optim.SGD([x, y, z], lr=0.5).step()
    assert torch.equal(x.detach().full_tensor(), before - 0.5)
    return [str(error.value).splitlines()[1] for error in (plain,)]


def test_refusals() -> None:
    said = weft.testing.run(refusals, mesh={"x": 2, "y": 2})
    assert said == [[
        "  Rule: under weft.strict() every operand is a ShardTensor.",
    ]] * 4


def outside(mesh: Any) -> list[tuple[int, ...]]:
    params = [weft.distribute_tensor(X, mesh, P("x")).requires_grad_() for _ in range(2)]
    for how in ("for-loop", "foreach", "fused"):
        train(made("adamw", how, params))
    return [tuple(p.to_local().shape) for p in params]


def test_ranks_outside_the_mesh_hold_nothing() -> None:
    shapes = weft.testing.run(outside, 3, mesh={"x": 2})
    assert shapes == [[(3, 5)] * 2, [(2, 5)] * 2, [(0,)] * 2]


def terms(mesh: Any) -> list[Tensor]:
    """Parameters of which every rank holds a term: an update of terms is no update of their sum."""
    def lists(make: Callable[[Tensor], Any]) -> list[Any]:
        return [[make(X)], [make(X * 2)], [make(X - 1)], [make(X**2)], [], [torch.tensor(1.0)]]

    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.1,
               "eps": 1e-8, "maximize": False}
    sharded = lists(lambda full: ShardTensor.from_local(
        full * (1.5 if mesh.rank else -0.5), mesh, P(partial={"x": "sum"})
    ))
    plain = lists(torch.clone)
    with torch.no_grad():
        adamw(*sharded, **options)
        adamw(*plain, **options)
    return [(one[0].full_tensor() - due[0]).abs().max() for one, due in zip(sharded[:4], plain)]


def test_terms_are_reduced_first() -> None:
    for gaps in weft.testing.run(terms, mesh={"x": 2}):
        assert max(gaps) < 1e-12
