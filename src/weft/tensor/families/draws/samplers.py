"""Draws whose elements depend on parameters, which are moved to the layout of the result.

On a CPU torch reads the parameters, and refuses impossible ones. So does each rank, of those that
it draws with, which costs no communication: where others have none of these, they go on, and are
told why this rank does not come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.elementwise import broadcast_result
from weft.propagate import decide
from weft.rng import Source, rejection, samples
from weft.rules import Call, TensorArg, bind, op, page, parse
from weft.tensor.placing.draw import Sample, drawn
from weft.tensor.placing.layouts import layout_of
from weft.tensor.placing.operands import entered
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import dtype_text
from weft.tensor.trace.trees import local_of

__all__ = ["PAGE", "like", "with_zero_gradients", "without_derivative"]


def like(
    x: Tensor, sample: Sample, dtype: torch.dtype | None = None, generator: Any = None
) -> ShardTensor:
    """A draw in the layout of x. Partial values are reduced first: together they are one value."""
    assert type(x) is ShardTensor
    layout = x._meta.layout.without_partial()
    return drawn(sample, x._meta.mesh, layout, dtype or x.dtype, generator)


def _jointly(
    name: str, sample: Callable[..., Tensor], parameters: Sequence[Tensor], dtype: torch.dtype,
    generator: Any, shape: Sequence[int] | None = None,
) -> Tensor:
    """A draw whose elements depend on those of parameters, which broadcast against each other.

    Its gradient with respect to them is zero, as torch has it.
    """
    mesh, layout = _joint_layout(parameters, shape)
    here = mesh.here is not None
    locals_ = [_local(name, one, layout, mesh) for one in parameters] if here else []
    if name in _RANGES and here:
        _check_range(getattr(torch, name), locals_[0], *_RANGES[name])
    found = drawn(
        lambda source: sample(source, *locals_).to(dtype), mesh, layout, dtype, generator)
    return with_zero_gradients(found, parameters)


_RANGES = {"bernoulli": (0.0, 1.0), "poisson": (0.0, math.inf)}
"""The parameters that torch takes on a CPU."""


def _may_read(values: Tensor) -> bool:
    """Whether there are values that torch would read: an accelerator it does not wait for."""
    return values.is_cpu and values.numel() > 0


def _check_range(refuse: Callable[[Tensor], Any], local: Tensor, low: float, high: float) -> None:
    """Raise torch's error, by torch's op, if something is out of a range, or nan."""
    if _may_read(local):
        least, most = torch.aminmax(local)
        if not (low <= float(least) and float(most) <= high):
            refuse(local)


def _joint_layout(
    parameters: Sequence[Tensor], given: Sequence[int] | None = None
) -> tuple[BoundMesh, Layout]:
    """The mesh and the layout in which they meet, element by element."""
    mesh = next(one._meta.mesh for one in parameters if type(one) is ShardTensor)
    shape = torch.broadcast_shapes(*(one.shape for one in parameters)) if given is None else given
    args = tuple([TensorArg(tuple(one.shape), dtype_text(one.dtype)) for one in parameters])
    call = Call("aten.add.Tensor", args, {}, (TensorArg(tuple(shape), args[0].dtype),))
    layouts = [layout_of(one, mesh) for one in parameters]
    rule = bind(parse("{...} -> ..."), [one.shape for one in args], [shape])
    decision = decide(rule, call, layouts, [False] * len(args))
    return mesh, decision.results[0].without_partial()


def _local(name: str, parameter: Tensor, layout: Layout, mesh: Any) -> Tensor:
    """The parameter at the box of a layout that it broadcasts to; no gradient goes through it."""
    fitted = layout.fitted(parameter.shape)
    (local,) = entered(name, mesh, (parameter.detach(),), (fitted,), "it is drawn with")
    return local.expand(layout.local_shape_at(mesh.here))


def _normal(first: Any, second: Any = 1.0, *more: Any, generator: Any = None) -> Tensor:
    """Of tensors of means, of deviations, or both: drawn where they meet, element by element."""
    parameters = [one for one in (first, second) if isinstance(one, Tensor)]
    dtype = parameters[0].dtype
    mesh, layout = _joint_layout(parameters)
    if isinstance(second, Tensor) and not layout_of(second, mesh).is_partial:
        _check_range(partial(torch.normal, 0.0), local_of(second.detach()), 0.0, math.inf)
    noise = drawn(lambda source: samples.normal(source, dtype), mesh, layout, dtype, generator)
    if isinstance(second, Tensor):
        second = second.detach()
        found = noise * torch.where(second >= 0.0, second, torch.nan)
    else:
        found = noise * second
    found = found + (first.detach() if isinstance(first, Tensor) else first)
    return with_zero_gradients(found, parameters)


def with_zero_gradients(out: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The tensor, depending on the parameters as torch's random ops do: by zero."""
    for one in parameters:
        if one.requires_grad and torch.is_grad_enabled():
            out = torch.where(torch.ones_like(out, dtype=torch.bool), out, one.to(out.dtype))
    return out


def without_derivative(out: Tensor, name: str) -> Tensor:
    """The tensor; a backward through it raises, as torch's does of the op of this name."""
    def refuse(grad: Tensor) -> None:
        raise RuntimeError(f"derivative for aten::{name} is not implemented")

    if out.requires_grad:
        out.register_hook(refuse)
    return out


def _bernoulli_of(x: Tensor, p: Tensor | None = None, *, generator: Any = None) -> Tensor:
    """Of probabilities, drawn in their layout."""
    return _jointly("bernoulli", samples.bernoulli_of, [x if p is None else p], x.dtype, generator,
                    x.shape)


def _poisson(rate: Tensor, generator: Any = None) -> Tensor:
    """Of rates, drawn in their layout."""
    return _jointly("poisson", rejection.poisson, [rate], rate.dtype, generator)


def _binomial(count: Tensor, p: Tensor, generator: Any = None) -> Tensor:
    """Of counts and probabilities, drawn where they meet, element by element."""
    found = _jointly("binomial", rejection.binomial, [count, p], count.dtype, generator)
    return without_derivative(found, "binomial")


def _standard_gamma(shape: Tensor, generator: Any = None) -> Tensor:
    """Drawn in the layout of the shapes; its gradient comes from the distribution function's."""
    def sample(source: Source, local: Tensor) -> Tensor:
        tiny = torch.finfo(shape.dtype).tiny
        return rejection.gamma(source, local).to(shape.dtype).clamp_(min=tiny)

    found = _jointly("_standard_gamma", sample, [shape.detach()], shape.dtype, generator)
    if not (shape.requires_grad and torch.is_grad_enabled()):
        return found
    slope = torch._standard_gamma_grad(shape.detach(), found)  # type: ignore[attr-defined]
    return found + (shape - shape.detach()) * slope


def _dirichlet(concentration: Tensor, generator: Any = None) -> Tensor:
    """Draws of gamma by their sum over the last dim."""
    parts = _standard_gamma(concentration, generator)
    return parts / parts.sum(-1, keepdim=True)


def _multinomial(
    x: Tensor, num: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Without replacement, the largest of weights over exponentials (Efraimidis and Spirakis,
    2006), which is done with global ops; with it, each sample by its own uniform.

    Where a row is no distribution (something negative, nan or infinite, or all of it zero), torch's
    error on a CPU, else the number of categories, which names none.
    """
    assert type(x) is ShardTensor
    wide = x.detach().to(samples.wide(x.dtype))
    wide = torch.where(wide >= 0.0, wide, torch.nan)
    if num == 1 or not replacement:
        total = wide.sum(-1, keepdim=True)
        assert type(total) is ShardTensor
        total = redistribute_to(total, total._meta.layout.without_partial(), "multinomial")
        wrong = _wrong(total)
        _check_rows(local_of(total)[local_of(wrong)], False)
        noise = like(wide, lambda source: samples.exponential(source, wide.dtype),
                     generator=generator)
        weights = wide / noise
        found = weights.argmax(-1, keepdim=True) if num == 1 else weights.topk(num).indices
        return found.masked_fill(wrong, x.shape[-1])
    mesh, last = x._meta.mesh, x.dim() - 1
    rows = x._meta.layout.without_partial().gathered((last,))
    sums = x._local
    if mesh.here is not None:
        sums = _local("multinomial", wide, rows, mesh).double().cumsum(-1)
        _check_rows(sums[..., -1:][_wrong(sums[..., -1:])], True)

    def sample(source: Source) -> Tensor:
        places = samples.unit(source, torch.float64) * sums[..., -1:]
        found = torch.searchsorted(sums, places, right=True)
        found = found.clamp_(max=x.shape[-1] - 1)
        return found.masked_fill_(_wrong(sums[..., -1:]), x.shape[-1])

    return drawn(sample, mesh, rows.recut(last, num), torch.int64, generator)


def _check_rows(totals: Tensor, replacement: bool) -> None:
    """Raise torch's error of rows whose sums are those of no distribution, if there are any."""
    if _may_read(totals):
        torch.multinomial(totals[:1], 1 + replacement, replacement)


def _wrong(total: Tensor) -> Tensor:
    """Which sums of probabilities are none of a distribution."""
    return ~((total > 0.0) & (total < torch.inf))


def _filled(fill: str) -> Callable[..., Tensor]:
    def draw(x: Tensor, *bounds: Any, generator: Any = None, **options: Any) -> Tensor:
        options = {name: value for name, value in options.items() if value is not None}
        options.pop("device", None)
        made = torch.empty_like(x, **options)
        with torch.no_grad():
            getattr(made, fill)(*map(int, bounds), generator=generator)
        return made

    draw.__doc__ = f"A tensor in x's layout, filled by `{fill}`."
    return draw


PAGE = page(
    op("normal", compose=_normal, each_call=True),
    op("bernoulli", compose=_bernoulli_of, each_call=True),
    op("poisson", compose=_poisson, each_call=True),
    op("binomial", compose=_binomial, each_call=True, result=broadcast_result),
    op("_standard_gamma", compose=_standard_gamma, each_call=True, result=broadcast_result),
    op("_sample_dirichlet", compose=_dirichlet, each_call=True, result=broadcast_result),
    op("multinomial", compose=_multinomial, each_call=True),
    op("rand_like", compose=_filled("uniform_"), each_call=True),
    op("randn_like", compose=_filled("normal_"), each_call=True),
    op("randint_like", compose=_filled("random_"), each_call=True),
)
