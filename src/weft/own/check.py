"""`check_rule`: a rule against the plain call, by brute force over small shapes.

On meshes of 2 and of 3 ranks the operands get every layout that the rule asks for (each factor
sharded, each linear set partial), with default, ragged and empty shards; on a mesh of two axes all
pairs of these; and every possible layout (every operand replicated, sharded in each of its dims, or
partial, in all combinations; of very many, every n-th). Value, shape and dtype of every result,
what was written to operands, and the gradients of all operands must be those of one plain call, on
every rank. The ranks are simulated, and one run carries out many trials, as long as none raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft import propagate
from weft.comm import run_simulated
from weft.errors import CommunicationError, LayoutError, ShardTypeError
from weft.own.targets import known
from weft.own.trials import Trial, Trials, part
from weft.rules import Call, OwnRule, Rule, TensorArg
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import dtype_text
from weft.tensor.trace.trees import flatten, map_tensors

__all__ = ["BruteForce", "check_rule"]

_LENGTHS = (5, 4, 6, 3, 7, 2)
"""Lengths of the factors of generated operands: divisible by 2, by 3, and by neither."""

_TOLERANCE = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4,
    torch.float16: 1e-2, torch.bfloat16: 5e-2,
}


_NO_GRADIENT = (
    "no autograd formula was registered", "is not differentiable", "derivative for ",
    "not implemented",
)
"""torch's message if an op has no gradient to check."""


def check_rule(op: Any, *example: Any, **named: Any) -> None:
    """Compare an op under its registered rule with the plain call, in every layout of its operands.

    Args:
        op: what was passed to `register_rule`.
        example: arguments of a call, with small plain tensors (lengths of 4 to 8). Without any,
            float64 tensors are made from the rule's first factor string.
        named: further arguments, by name.

    Raises:
        LayoutError: the rule is wrong; says for which factors and partial values, and the fix.
        ShardTypeError: no rule is registered, or an example is needed.
    """
    own = known(op)
    if own is None or own.function.rule is None:
        raise ShardTypeError(
            "check_rule(op)", f"{op!r} has no rule", "a rule is registered, then checked",
            [getattr(op, "__qualname__", str(op))], 'weft.register_rule(op, "b i -> b i")')
    rule = own.function.rule
    call: Callable[..., Any] = op.apply if isinstance(op, type) else op
    if not example and not named:
        example = _example(rule)
    if named:
        example, named = own.in_order(example, named)
    found = BruteForce(rule, call, example, named).faults()
    if found:
        raise LayoutError(
            f"check_rule({rule.name})", f"by the rule {_text(rule)} the op gives "
            f"another result than the plain call in {len(found)} of its ways",
            "where a rule lets a mesh axis shard a factor or pass partial values, local "
            "results are the parts of the whole one", list(found.values()),
            _fix(rule, found))


def _example(rule: OwnRule) -> tuple[Tensor, ...]:
    """Tensors that fit the first factor string."""
    if not rule.by_shape:
        raise ShardTypeError(
            "check_rule(op)", f"the rule of {rule.name} is a function of the arguments",
            "an example says what to call it with", [rule.name],
            "check_rule(op, torch.randn(5, 4), 2)")
    call = Call(rule.name, (), {}, ())
    pattern = next(iter(rule.patterns(call)))
    lengths: dict[str, int] = {"...": 3}
    names = iter(itertools.cycle(_LENGTHS))
    for tensor in pattern.operands:
        for name in itertools.chain(*tensor):
            if name not in lengths:
                lengths[name] = int(name) if name.isdigit() else next(names)
    shapes = [
        [math.prod(lengths[name] for name in factors) for factors in tensor]
        for tensor in pattern.operands
    ]
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25 for shape in shapes
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Full tensors: results, operands afterwards, and gradients."""

    results: list[Any]
    operands: list[Tensor]
    gradients: list[Tensor | None]


class Bound(Protocol):
    """What `BruteForce` needs of a rule: its name, and the Rule for a call."""

    @property
    def name(self) -> str: ...

    def bind(
        self, call: Call, results_known: bool
    ) -> tuple[Rule, tuple[TensorArg, ...]] | None: ...


class BruteForce:
    """A call that is carried out in many ways."""

    def __init__(self, rule: Bound, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.rule, self.call, self.args, self.kwargs = rule, call, args, kwargs
        self.operands = [tensor.detach() for tensor in flatten((args, kwargs))]
        feed = iter([_arg(tensor) for tensor in self.operands])
        args, kwargs = (map_tensors(lambda _: next(feed), one) for one in (args, kwargs))
        self.plain = {False: self.run([one.clone() for one in self.operands], False)}
        if any(map(_differentiable, self.operands)):
            try:
                self.plain[True] = self.run([one.clone() for one in self.operands], True)
            except RuntimeError as error:  # NotImplementedError is one
                if not any(said in str(error) for said in _NO_GRADIENT):
                    raise
        results = tuple(_arg(one) for one in flatten(self.plain[False].results))
        described = Call(rule.name, args, kwargs, results)
        bound = rule.bind(described, bool(results))  # its results may be what it has written to
        if bound is None:
            raise ShardTypeError(
                "check_rule(op, ...)", f"the rule of {rule.name} does not cover this "
                "call", "an example is a call that the rule covers",
                [str(one.shape) for one in described.tensors], "another example")
        self.bound: Rule = bound[0]
        self.described = Call(rule.name, args, kwargs, bound[1])

    def run(self, operands: Sequence[Tensor], grad: bool) -> _Outcome:
        """The call on these operands, plain or sharded."""
        wanted = [
            one.requires_grad_() if grad and _differentiable(one) else one for one in operands
        ]
        # An operand that is written to must not be a leaf.
        given = [one * 1 if one.requires_grad else one for one in wanted]
        feed = iter(given)
        out = self.call(
            *map_tensors(lambda _: next(feed), self.args),
            **map_tensors(lambda _: next(feed), self.kwargs),
        )
        results = flatten(out)
        live = [one for one in results if one.requires_grad]
        if live:
            torch.autograd.backward(live, [_cotangent(one, at) for at, one in enumerate(live)])
        return _Outcome(
            [_full(one) for one in results], [_full(one) for one in given],
            [None if one.grad is None else _full(one.grad) for one in wanted],
        )

    def chosen(self, trial: Trial) -> tuple[str, ...]:
        """The choices of the mesh axes, in words."""
        wants = [trial.grad and _differentiable(one) for one in self.operands]
        decision = propagate.decide(self.bound, self.described, trial.layouts, wants)
        return tuple(sorted({
            "passing partial values" if what.startswith("partial(") else f"sharding {what}"
            for what in decision.chosen if what
        }))

    def faults(self, every: int = 1) -> dict[tuple[str, ...], str]:
        """What is wrong, by what the mesh axes do; only every n-th of all trials is made."""
        found: dict[tuple[str, ...], str] = {}
        trials = Trials(self.bound, self.operands, True in self.plain)
        some = itertools.islice(trials, 0, None, every)
        for _, group in itertools.groupby(some, lambda trial: trial.mesh):
            self._carry_out([(trial, self.chosen(trial)) for trial in group], found)
        return found

    def _carry_out(
        self, trials: list[tuple[Trial, tuple[str, ...]]],
        found: dict[tuple[str, ...], str],
    ) -> None:
        """Trials on one mesh; adds to `found`, by what the axes do, what is wrong."""
        place = 0
        while place < len(trials):
            raised: list[tuple[int, Exception]] = []

            def on_rank(mesh: Any, start: int = place, raised: Any = raised) -> list[str | None]:
                said: list[str | None] = []
                for at in range(start, len(trials)):
                    try:
                        said.append(self._wrong(mesh, trials[at][0]))
                    except Exception as found_out:
                        raised.append((at, found_out))
                        raise
                return said

            done: list[list[str | None]] = []
            try:
                done = run_simulated(on_rank, mesh=dict(trials[0][0].mesh))
            except Exception as error:
                at, error = raised[0] if raised else (place, error)
                lines = str(error).splitlines()
                at_odds = isinstance(error, CommunicationError) and len(lines) > 2
                said = f"{type(error).__name__}: {lines[2].strip() if at_odds else lines[0]}"
                self._learn(trials[at], said, found)
                place = at + 1
                continue
            for trial, *of_ranks in zip(trials[place:], *done):
                for rank, said in enumerate(of_ranks):
                    if said is not None:
                        self._learn(trial, f"{said} on rank {rank}", found)
            return

    def _learn(
        self, trial: tuple[Trial, tuple[str, ...]], said: str,
        found: dict[tuple[str, ...], str],
    ) -> None:
        way, chosen = trial
        # What is wrong over one axis is wrong whatever another one does.
        if chosen not in found and not any((word,) in found for word in chosen):
            mesh = ", ".join(f"{name}={size}" for name, size in way.mesh)
            layouts = ", ".join(map(str, way.layouts))
            what = " and ".join(chosen) or "nothing sharded"
            found[chosen] = f"{what}: {said} ({layouts} for {mesh})"

    def _wrong(self, mesh: Any, trial: Trial) -> str | None:
        """The faults that this rank finds."""
        operands: list[Any] = [
            ShardTensor.from_local(part(layout, one, mesh.here, at), mesh, layout)
            for at, (one, layout) in enumerate(zip(self.operands, trial.layouts))
        ]
        return _difference(self.run(operands, trial.grad), self.plain[trial.grad])


# Operands, and what comes out.


def _arg(tensor: Tensor) -> TensorArg:
    return TensorArg(tuple(tensor.shape), dtype_text(tensor.dtype))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _cotangent(result: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-512, 513, result.shape, generator=generator)
    return (steps / 256).to(result.dtype)


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor.clone()


def _difference(outcome: _Outcome, expected: _Outcome) -> str | None:
    groups = (
        ("result", outcome.results, expected.results),
        ("operand", outcome.operands, expected.operands),
        ("the gradient of operand", outcome.gradients, expected.gradients),
    )
    for what, given, due in groups:
        if len(given) != len(due):
            return f"{len(given)} {what}s instead of {len(due)}"
        for place, (one, other) in enumerate(zip(given, due)):
            said = _unequal(one, other)
            if said is not None:
                return f"{what} {place} {said}"
    return None


def _unequal(one: Tensor | None, other: Tensor | None) -> str | None:
    if one is None or other is None:
        return None if one is other else ("is missing" if one is None else "should be None")
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return (f"is {one.dtype} of shape {tuple(one.shape)} instead of {other.dtype} of shape "
                f"{tuple(other.shape)}")
    close = _TOLERANCE.get(other.dtype, 0.0)
    if torch.allclose(one, other, rtol=close, atol=close, equal_nan=True):
        return None
    if not _differentiable(other):
        return f"differs in {int((one != other).sum())} of {other.numel()} elements"
    return f"differs by up to {(one - other).abs().max().item():.3g}"


def _text(rule: OwnRule) -> str:
    return repr(rule.pattern) if rule.by_shape else f"of {rule.name}"


def _fix(rule: OwnRule, found: Iterable[tuple[str, ...]]) -> str:
    """The rule without the parts that were found wrong."""
    words = sorted({word for chosen in found for word in chosen})
    factors = [word.removeprefix("sharding ") for word in words if word.startswith("sharding ")]
    parts = []
    if factors:
        marked = ", ".join(f"{name}!" for name in factors)
        parts.append(f"write {marked} (whole) in the string, or the kind of reduction, as in s:max")
    if "passing partial values" in words:
        parts.append(f"leave operands out of linear={[list(one) for one in rule.linear]}")
    return "; ".join(parts) or "a rule is for functions that give the same for the same arguments"
