"""Running a trial on ranks and comparing what comes out with the one-process result.

`on_rank` runs inside each rank, whatever carries it (simulated or gloo), and returns plain data;
`verify` runs in one place and asks the oracle.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import weft
from tests.cases import Case, Operand, Trial, seed_of
from tests.oracle import Held, block, check, check_gradient, same
from weft import MeshError, ShardTensor
from weft.core import Layout, Mesh


def ranks(**axes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on simulated ranks: on each, its body gets the `mesh` with these axes.

    It stands right above the test; pytest gives the other arguments.
    """
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(**given: Any) -> None:
            weft.testing.run(lambda mesh: test(mesh=mesh, **given), mesh=axes)

        known = inspect.signature(test)
        others = [one for name, one in known.parameters.items() if name != "mesh"]
        on_all.__signature__ = known.replace(parameters=others)  # type: ignore[attr-defined]
        return on_all

    return decorate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank made of a trial: its results, the gradients of its operands, and what it knows
    of both without their data, which is all that a rank outside the mesh has."""

    results: list[Held | object]
    gradients: list[Held | None]
    facts: list[object]


def check_op(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    mesh: Mapping[str, int],
    layouts: Sequence[Layout | None],
    grad: bool = True,
) -> list[Outcome]:
    """Run `fn` on `tensors` laid out on a simulated mesh and compare with the dense result."""
    operands = tuple(Operand(tuple(t.shape), lambda _, t=t: t.clone()) for t in tensors)
    case = Case(getattr(fn, "__name__", "fn"), fn, operands, grad)
    trial = Trial(case, tuple(mesh.items()), ("given",), tuple(layouts))
    return check_trial(trial, outside=False)


def check_trial(
    trial: Trial, device_type: str = "cpu", outside: bool = True
) -> list[Outcome]:
    """Run a trial on simulated ranks and compare it with the dense result, which is the CPU's.

    With `outside`, a mesh of two has a third rank beside it, which knows of every result what those
    inside know, but the data; or has a MeshError, where data say what the result is. A refusal that
    the case allows for comes back as no outcomes.
    """
    axes = dict(trial.axes)
    mesh = Mesh(axes)
    beside = outside and mesh.size() == 2
    if beside:
        mesh = Mesh(axes, (2, 1))

    def run(world: Any) -> Any:
        on = weft.init_mesh(mesh, device_type=device_type) if beside else world
        try:
            return on_rank(trial, on)
        except (MeshError, weft.UnsupportedOpError) as error:
            if on.here is not None:
                raise
            return type(error)

    with allowances(trial.case):
        try:
            outcomes = weft.testing.run(
                run, mesh={"world": 3} if beside else axes, device_type=device_type)
        except weft.UnsupportedOpError:
            if not trial.case.may_refuse:
                raise
            return []
    if beside:
        other, *outcomes = outcomes[0], outcomes[2], outcomes[1]
        assert outcomes[0].facts == outcomes[1].facts, trial.id
        assert other is MeshError or other.facts == outcomes[0].facts, f"{trial.id}: {other}"
    verify(trial, outcomes)
    return outcomes


@contextmanager
def allowances(case: Case) -> Iterator[None]:
    """Let a case that may fall back do so; of the process, so not inside a simulated rank."""
    with warnings.catch_warnings():
        if case.falls_back:
            warnings.simplefilter("ignore", weft.WeftWarning)
        yield


def verify(trial: Trial, outcomes: Sequence[Outcome]) -> None:
    """Compare every rank's outcome with the dense result and gradients."""
    results, gradients = dense_outcome(trial.case)
    for place, expected in enumerate(results):
        mine = [outcome.results[place] for outcome in outcomes]
        assert all(len(outcome.results) == len(results) for outcome in outcomes)
        what = f"{trial.id}: result {place}"
        if isinstance(expected, Tensor):
            assert all(isinstance(one, Held) for one in mine), f"{what}: no tensor, {mine}"
            check(expected, mine, what)  # type: ignore[arg-type]
        else:
            for one in mine:
                same(torch.tensor(one), torch.tensor(expected), what)
    for place, (expected, layout) in enumerate(zip(gradients, trial.layouts)):
        mine = [outcome.gradients[place] for outcome in outcomes]
        check_gradient(expected, layout, mine, f"{trial.id}: gradient {place}")


@functools.lru_cache(maxsize=8)  # the trials of a case follow each other
def dense_outcome(case: Case) -> tuple[list[Any], list[Tensor | None]]:
    """The results and gradients of the case on plain tensors."""
    operands = case.tensors()
    leaves = _want_gradients(case, operands)
    results = flat(case.fn(*operands))
    _backward(case, results)
    return (
        [one.detach() if isinstance(one, Tensor) else one for one in results],
        [None if leaf is None else leaf.grad for leaf in leaves],
    )


def on_rank(trial: Trial, mesh: Any) -> Outcome:
    """The trial as one rank of `mesh` runs it, or one outside of it."""
    case = trial.case
    operands = [
        dense.to(mesh.device) if layout is None else _operand(
            dense, mesh, layout, seed_of(trial.id, place))
        for place, (dense, layout) in enumerate(zip(case.tensors(), trial.layouts))
    ]
    leaves = _want_gradients(case, operands)
    results = flat(case.fn(*operands))
    _backward(case, results)
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    known = [one for leaf, one in zip(leaves, gradients) if type(leaf) is ShardTensor]
    facts = [_facts(one) for one in (*results, *known)]
    if mesh.here is None:
        return Outcome([], [], facts)
    return Outcome(
        [held(one.detach()) if isinstance(one, Tensor) else one for one in results],
        [None if one is None else held(one) for one in gradients],
        facts,
    )


def _operand(dense: Tensor, mesh: Any, layout: Layout, seed: int) -> ShardTensor:
    """On the ranks of this mesh: the trial's have the same axes."""
    layout = Layout.make(
        mesh.abstract, layout.shape, layout.dims, layout.cuts, layout.partial)
    if mesh.here is None:
        return ShardTensor.from_local(dense.new_empty(0).to(mesh.device), mesh, layout)
    local = local_part(layout, dense, mesh.here, seed)
    return ShardTensor.from_local(local.to(mesh.device), mesh, layout)


def _facts(one: Any) -> object:
    """All that a rank knows of a result without data; of its own shard, that it is as it says."""
    if type(one) is not ShardTensor:
        return type(one)
    meta, local = one._meta, tuple(one._local.shape)
    assert local == meta.local_shape, f"{local}: {one.sharding}"
    return (str(one.sharding), tuple(one.shape), one.dtype, tuple(one.stride()), one.requires_grad,
            meta.requires_grad, meta.alias)


def local_part(layout: Layout, dense: Tensor, coordinate: Sequence[int], seed: int) -> Tensor:
    """A rank's block, or its term of a sum: terms are unequal and vary in sign."""
    if not any(layout.partial):
        return block(layout, dense, coordinate)
    kinds = {kind for kind in layout.partial if kind is not None}
    assert kinds == {"sum"}, f"no terms for {kinds}"
    axes = [axis for axis, kind in enumerate(layout.partial) if kind is not None]
    first = all(coordinate[axis] == 0 for axis in axes)
    others = [
        at for at in _coordinates([layout.mesh.axis_sizes[axis] for axis in axes]) if any(at)
    ]
    if dense.dtype.to_real().itemsize < 8 and (dense.is_floating_point() or dense.is_complex()):
        terms = dict(zip(others, _exact_terms(dense, len(others))))
    else:
        terms = {at: _noise(dense, seed_of(seed, at), len(others)) for at in others}
    term = dense - sum(terms.values()) if first else terms[tuple(coordinate[a] for a in axes)]
    return block(layout, term, coordinate)


def held(tensor: Tensor) -> Held:
    """A result as plain data. A collective: every rank gathers the whole."""
    meta = (tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))
    if not isinstance(tensor, ShardTensor):
        return Held(None, tensor.clone().cpu(), tensor.clone().cpu(), *meta)
    local, full = (one.clone().cpu() for one in (tensor.to_local(), tensor.full_tensor()))
    return Held(tensor.sharding, local, full, *meta)


def flat(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [leaf for one in value for leaf in flat(one)]
    return [value]


def _want_gradients(case: Case, operands: Sequence[Tensor]) -> list[Tensor | None]:
    wanted: list[Tensor | None] = []
    for operand, tensor in zip(case.operands, operands):
        real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if case.grad and real and not operand.fixed:
            wanted.append(tensor.requires_grad_())
        else:
            wanted.append(None)
    return wanted


def _backward(case: Case, results: Sequence[Any]) -> None:
    """Backward from every result that has a gradient, from the same cotangent on all ranks."""
    if not case.grad:
        return
    live = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
    assert live, f"{case.name}: no result requires a gradient"
    for place, one in enumerate(live):
        generator = torch.Generator().manual_seed(seed_of("cotangent", place))
        steps = torch.randint(-512, 513, one.shape, generator=generator)
        gradient = (steps / 256).to(one.device, one.dtype)
        one.backward(gradient=gradient, retain_graph=place + 1 < len(live))


def _exact_terms(dense: Tensor, count: int) -> list[Tensor]:
    """Terms that, with twice the tensor, make it up without rounding in narrow floats.

    What is not finite stands in one term alone.
    """
    dense = torch.where(dense.isfinite(), dense, 0)
    return [-dense, *[dense, -dense] * ((count - 1) // 2), *[dense * 0] * ((count - 1) % 2)]


def _noise(dense: Tensor, seed: int, count: int) -> Tensor:
    """One of `count` terms that, with what is left of the tensor, make it up without rounding,
    whatever is added first: quarters in [-2, 2], whole numbers for integers.

    Quarters would round beside a number that is no multiple of 2**-20. There a term is a part of
    that number's first ten bits, all terms together at most twice it: so no sum of some of them
    has more bits than it has.
    """
    if dense.is_complex():
        return torch.view_as_complex(_noise(torch.view_as_real(dense.resolve_conj()), seed, count))
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-8, 9, dense.shape, generator=generator)
    if not dense.dtype.is_floating_point:
        return steps.to(dense.dtype)
    size = dense.abs()
    coarse = (size < 2**20) & ((size * 2**20).frac() == 0)
    absorbs = ~(size < 2.0**1000)  # so large that quarters vanish beside it; not finite
    mantissa, exponent = torch.frexp(dense)
    first = (mantissa * 2**10).trunc().ldexp(exponent.double() - 10)
    parts = (steps + 8) / 8 / 2 ** (count - 1).bit_length()
    return torch.where(coarse | absorbs, steps / 4, first * parts).to(dense.dtype)


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for size in sizes:
        places = [(*place, digit) for place in places for digit in range(size)]
    return places
