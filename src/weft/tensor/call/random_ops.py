"""Random ops on ShardTensors: each as draws of weft's own and ordinary ops.

A draw fills each rank's box of the global tensor (`weft.tensor.placing.draw`) and is made anew at
every call; what is done with it are calls on ShardTensors, so transitions and gradients are those
of `mul`, `where` and their kin. Dropout, for one, multiplies by a mask that is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.propagate import decide
from weft.rng import Source, samples
from weft.rules import Call, TensorArg
from weft.rules.pointwise import elementwise
from weft.tensor.call.recipe import Function
from weft.tensor.placing.draw import draw_into, drawn
from weft.tensor.placing.enter import Named, enter, transition_between
from weft.tensor.placing.layouts import as_sharded, layout_of
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import dtype_text, facts, target_of
from weft.tensor.trace.capture import Op, Trace, slots_of
from weft.tensor.trace.trees import fill, flatten

__all__ = ["FILLS", "RANDOM", "recipe"]

Sample = Callable[[Source], Tensor]


def recipe(trace: Trace, is_leaf: bool) -> Function | None:
    """What carries out a random op, drawing anew at every call; None where it is not known.

    `is_leaf`: the call asks for a result that requires a gradient.
    """
    op = trace.ops[0]
    _, name, overload = facts(op.overload).name.split(".")
    target = target_of(op)
    fill_with = _found(FILLS, name, overload)
    if fill_with is not None:
        return Function(_filling(trace, op, fill_with, target))
    function = _found(RANDOM, name, overload)
    if function is None:
        return None

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        out = function(*fill(op.args, tensors), **fill(op.kwargs, tensors))
        if target is not None:
            tensors[target].copy_(out)
            return fill(trace.result, tensors)
        if is_leaf:
            out.requires_grad_()
        values: dict[int, Any] = dict(enumerate(tensors))
        values.update(zip([slot.index for slot in slots_of(op.results)], flatten(out)))
        return fill(trace.result, values)

    return Function(run)


def _found(table: dict[str, Any], name: str, overload: str) -> Any:
    """The entry of an op: of its overload, its name, or that of the op that is not in place."""
    for key in (f"{name}.{overload}", name, name.removesuffix("_")):
        if key in table:
            return table[key]
    return None


def _filling(
    trace: Trace, op: Op, sampler: Callable[..., Sample], target: int | None
) -> Callable[..., Any]:
    """A call that fills a tensor like its first operand, or that operand itself."""
    first, *rest = op.args
    options = {name: value for name, value in op.kwargs.items() if name != "generator"}
    generator = op.kwargs.get("generator")

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        x = tensors[first.index]
        sample = sampler(x, *rest, **options)
        if target is not None:
            draw_into(x, sample, generator)
            return fill(trace.result, tensors)
        made = torch.empty_like(x)
        draw_into(made, sample, generator)
        return fill(trace.result, [*tensors, made])

    return run


# Draws.


def _like(
    x: Tensor, sample: Sample, dtype: torch.dtype | None = None, generator: Any = None
) -> ShardTensor:
    """A draw that lies as x does, terms of a sum apart: those have one value together."""
    assert type(x) is ShardTensor
    layout = x._meta.layout
    if layout.is_partial:
        layout = layout.replace(partial=(None,) * layout.mesh.ndim)
    return drawn(sample, x._meta.mesh, layout, dtype or x.dtype, generator)


def _jointly(
    name: str, sample: Callable[[Source, list[Tensor]], Tensor], parameters: Sequence[Tensor],
    dtype: torch.dtype, generator: Any, shape: Sequence[int] | None = None,
) -> Tensor:
    """A draw whose elements depend on those of parameters, which broadcast against each other.

    Its gradient with respect to them is zero, as torch has it.
    """
    mesh = next(one._meta.mesh for one in parameters if type(one) is ShardTensor)
    shape = torch.broadcast_shapes(*(one.shape for one in parameters)) if shape is None else shape
    layout = _joint_layout(parameters, tuple(shape), mesh)

    def with_parameters(source: Source) -> Tensor:
        locals_ = [_local(name, one, layout, mesh) for one in parameters]
        return sample(source, locals_)

    return _with_zero_gradients(
        drawn(with_parameters, mesh, layout, dtype, generator), parameters
    )


def _joint_layout(parameters: Sequence[Tensor], shape: tuple[int, ...], mesh: Any) -> Layout:
    """The layout in which they meet, element by element."""
    args = tuple([TensorArg(tuple(one.shape), dtype_text(one.dtype)) for one in parameters])
    call = Call("aten.add.Tensor", args, {}, (TensorArg(shape, args[0].dtype),))
    layouts = [layout_of(one, mesh) for one in parameters]
    layout = decide(elementwise(call), call, layouts, [False] * len(args)).results[0]
    return layout.replace(partial=(None,) * mesh.ndim) if layout.is_partial else layout


def _local(name: str, parameter: Tensor, layout: Layout, mesh: Any) -> Tensor:
    """The parameter at the box of a layout that it broadcasts to; no gradient goes through it."""
    whole = as_sharded(parameter.detach(), mesh)
    skip = layout.ndim - whole.ndim
    one = [length == 1 for length in whole.shape]
    wanted = Layout.make(
        mesh, whole.shape, [() if one[at] else layout.dims[skip + at] for at in range(whole.ndim)],
        [None if one[at] else layout.cuts[skip + at] for at in range(whole.ndim)],
    )
    move = transition_between(mesh, whole._meta.layout, wanted)
    local = whole._local if move is None else enter(whole, move, Named(name, "it is drawn with"))
    return local.expand(layout.local_shape_at(mesh.here))


# Samplers that fill a tensor like x, in place or not. Arguments as in torch's schemas.


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Sample:
    if low > high:
        raise RuntimeError("uniform_ expects to return a [from, to) range, but found "
                           f"from={low} > to={high}")
    return lambda source: samples.uniform(source, x.dtype, low, high)


def _normal_like(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Sample:
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    return lambda source: samples.normal(source, x.dtype, mean, std)


def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Sample:
    if std <= 0:
        raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}")
    return lambda source: samples.normal(source, samples.wide(x.dtype), mean, std).exp_()


def _exponential(x: Tensor, rate: float = 1.0) -> Sample:
    if rate <= 0.0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    return lambda source: samples.exponential(source, x.dtype, rate)


def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Sample:
    if sigma <= 0.0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    return lambda source: samples.cauchy(source, x.dtype, median, sigma)


def _geometric(x: Tensor, p: float) -> Sample:
    if not 0.0 < p < 1.0:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    return lambda source: samples.geometric(source, x.dtype, p)


def _random(x: Tensor, first: int | None = None, second: int | None = None) -> Sample:
    """`random_()`, `random_(to)`, `random_(from, to)`."""
    if first is None:
        low, high = samples.random_range(x.dtype)
    elif second is None:
        low, high = 0, first
    else:
        low, high = first, second
    if low >= high:
        raise RuntimeError("random_ expects 'from' to be less than 'to', but got "
                           f"from={low} >= to={high}")
    return lambda source: samples.integers(source, low, high, x.dtype)


def _bernoulli(x: Tensor, p: float) -> Sample:
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"bernoulli expects p to be in [0, 1], but got p={p}")
    return lambda source: samples.bernoulli(source, p, x.dtype)


FILLS: dict[str, Callable[..., Sample]] = {
    "uniform": _uniform,
    "normal_functional": _normal_like,
    "normal_": _normal_like,
    "log_normal": _log_normal,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "random": _random,
    "bernoulli.p": _bernoulli,
    "bernoulli_.float": _bernoulli,
}
"""Op -> the sampler that its arguments mean for a tensor."""


# Draws whose elements depend on parameters.


def _normal(first: Any, second: Any = 1.0, *more: Any, generator: Any = None) -> Tensor:
    """torch.normal: of tensors of means, of deviations, or both."""
    parameters = [one for one in (first, second) if isinstance(one, Tensor)]
    shape = torch.broadcast_shapes(*(one.shape for one in parameters))
    dtype = parameters[0].dtype
    mesh = next(one._meta.mesh for one in parameters if type(one) is ShardTensor)
    layout = _joint_layout(parameters, tuple(shape), mesh)
    noise = drawn(lambda source: samples.normal(source, dtype), mesh, layout, dtype, generator)
    found = noise * (second.detach() if isinstance(second, Tensor) else second)
    found = found + (first.detach() if isinstance(first, Tensor) else first)
    return _with_zero_gradients(found, parameters)


def _with_zero_gradients(out: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The tensor, depending on the parameters as torch's random ops do: by zero."""
    for one in parameters:
        if one.requires_grad and torch.is_grad_enabled():
            out = torch.where(torch.ones_like(out, dtype=torch.bool), out, one.to(out.dtype))
    return out


def _bernoulli_of(x: Tensor, p: Tensor | None = None, *, generator: Any = None) -> Tensor:
    """`bernoulli(x)` with x of probabilities, `bernoulli_(p)` with a tensor of them."""
    def sample(source: Source, parameters: list[Tensor]) -> Tensor:
        return samples.bernoulli_of(source, parameters[0]).to(x.dtype)

    return _jointly("bernoulli", sample, [x if p is None else p], x.dtype, generator, x.shape)


def _filled(x: Tensor, options: dict[str, Any], fill_: Callable[[Tensor], Any]) -> Tensor:
    """A tensor like x, made by torch's rules for `*_like`, then filled."""
    options = {name: value for name, value in options.items() if value is not None}
    options.pop("device", None)
    made = torch.empty_like(x, **options)
    with torch.no_grad():
        fill_(made)
    return made


def _rand_like(x: Tensor, *, generator: Any = None, **options: Any) -> Tensor:
    return _filled(x, options, lambda made: made.uniform_(generator=generator))


def _randn_like(x: Tensor, *, generator: Any = None, **options: Any) -> Tensor:
    return _filled(x, options, lambda made: made.normal_(generator=generator))


def _randint_like(
    x: Tensor, first: Any, second: Any = None, *, generator: Any = None, **options: Any
) -> Tensor:
    low, high = (0, first) if second is None else (first, second)
    return _filled(x, options, lambda made: made.random_(
        int(low), int(high), generator=generator
    ))


# Dropout.


def _noise(
    x: Tensor, keep: float, num_dims: int | None = None, scaled: bool = True
) -> ShardTensor:
    """1 / keep (or 1, where not scaled) with probability `keep`, else 0.

    For each element, or one for all of those that share their place in the first dims of x.
    """
    assert type(x) is ShardTensor

    def sample(source: Source) -> Tensor:
        found = samples.bernoulli(source, keep, x.dtype)
        return found.div_(keep) if scaled and keep else found

    if num_dims is None:
        return _like(x, sample)
    layout = x._meta.layout
    kept = min(num_dims, x.ndim)
    rest = x.ndim - kept
    whole = Layout.make(
        layout.mesh, (*x.shape[:kept], *[1] * rest), (*layout.dims[:kept], *[()] * rest),
        (*layout.cuts[:kept], *[None] * rest),
    )
    return drawn(sample, x._meta.mesh, whole, x.dtype)


def _dropout_p(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    _dropout_p(p)
    return x * _noise(x, 1.0 - p) if train and p else x


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    _dropout_p(p)
    if x.ndim < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return x * _noise(x, 1.0 - p, 2) if train and p else x


def _alpha_dropout(x: Tensor, p: float, train: bool, num_dims: int | None = None) -> Tensor:
    """Klambauer et al., "Self-normalizing neural networks" (2017)."""
    _dropout_p(p)
    if not (train and p):
        return x
    if p == 1.0:
        return x * 0.0
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    noise = _noise(x, 1.0 - p, num_dims, scaled=False)
    return x * (noise * a) + ((noise - 1.0) * (alpha * a) + alpha * a * p)


def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha_dropout(x, p, train, 2)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The result, and the mask."""
    if train is False or not p:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _noise(x, 1.0 - p)
    return x * noise, noise != 0.0


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = _like(
        x, lambda source: samples.uniform(source, x.dtype, lower, upper), generator=generator
    )
    return torch.where(x <= 0.0, x * slope, x)


RANDOM: dict[str, Callable[..., Any]] = {
    "normal": _normal,
    "bernoulli": _bernoulli_of,
    "rand_like": _rand_like,
    "randn_like": _randn_like,
    "randint_like": _randint_like,
    "dropout": _dropout,
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _feature_alpha_dropout,
    "native_dropout": _native_dropout,
    "rrelu": _rrelu,
}
"""Op -> what carries it out: it takes the op's arguments, all of them, and returns its results."""
