"""Random ops on ShardTensors: each as draws of weft's own and ordinary ops.

A draw fills each rank's box of the global tensor (`weft.tensor.placing.draw`) and is made anew at
every call; what is done with it are calls on ShardTensors, so transitions and gradients are those
of `mul`, `where` and their kin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.tensor.call.random.dropout import DROPOUT
from weft.tensor.call.random.fills import FILLS
from weft.tensor.call.random.recurrent import RECURRENT
from weft.tensor.call.random.samplers import SAMPLERS, with_zero_gradients, without_derivative
from weft.tensor.call.recipe import Function
from weft.tensor.placing.draw import Sample, draw_into
from weft.tensor.placing.refusals import refuse
from weft.tensor.trace.calls import facts, target_of
from weft.tensor.trace.capture import Op, Trace
from weft.tensor.trace.trees import fill, flatten, slots_of

__all__ = ["recipe"]

_WITHOUT_DERIVATIVE = frozenset(("bernoulli", "normal_functional"))
"""Of ops that fill: a backward raises in torch; those of the others give zero."""

_OPS: dict[str, Callable[..., Any]] = {**SAMPLERS, **DROPOUT, **RECURRENT}


def recipe(trace: Trace, is_leaf: bool) -> Function | None:
    """What carries out a random op, drawing anew at every call; None where it is not known.

    `is_leaf`: the call asks for a result that requires a gradient.
    """
    op = trace.ops[0]
    _, name, overload = facts(op.overload).name.split(".")
    target = target_of(op)
    fill_with = _found(FILLS, name, overload)
    if fill_with is not None:
        refuse(op, trace.metas)
        return Function(_filling(trace, op, fill_with, target))
    function = _found(_OPS, name, overload)
    if function is None or not _draws(op, name):
        return None
    if _found(SAMPLERS, name, overload) is not None or name == "rrelu":
        refuse(op, trace.metas)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        given = list(tensors)
        if target is not None and torch.is_grad_enabled():
            given[target] = tensors[target].clone()  # ops may save its old value for backward
        out = function(*fill(op.args, given), **fill(op.kwargs, given))
        if target is not None:
            if out is not given[target]:
                tensors[target].copy_(out)
            return fill(trace.result, tensors)
        if is_leaf:
            out.requires_grad_()
        values: dict[int, Any] = dict(enumerate(tensors))
        values.update(zip([slot.index for slot in slots_of(op.results)], flatten(out)))
        return fill(trace.result, values)

    return Function(run)


def _draws(op: Op, name: str) -> bool:
    """Whether the op draws with these arguments: attention does only where it drops out."""
    return name != "scaled_dot_product_attention" or bool(op.args[4])


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
    name = facts(op.overload).name.split(".")[1]
    options = {name: value for name, value in op.kwargs.items() if name != "generator"}
    generator = op.kwargs.get("generator")
    (slot, *_) = slots_of(op.results)
    turned = not trace.metas[slot.index].is_contiguous()
    lies = torch.preserve_format if turned else torch.contiguous_format

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flatten((args, kwargs))
        x = tensors[first.index]
        sample = sampler(x, *rest, **options)
        if target is not None:
            draw_into(x, sample, generator)
            return fill(trace.result, tensors)
        made = torch.empty_like(x, memory_format=lies)
        draw_into(made, sample, generator)
        made = with_zero_gradients(made, [x])
        if name in _WITHOUT_DERIVATIVE:
            made = without_derivative(made, name)
        return fill(trace.result, [*tensors, made])

    return run
