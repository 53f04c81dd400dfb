"""Functions written for local tensors, called on global ones.

`local_map` opens a region: outside are ShardTensors; inside are each rank's plain tensors and the
collectives that the function itself calls. The idea is that of JAX's `shard_map` (and torch's
`local_map`). Sizes need not divide evenly: blocks may be ragged or empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from weft.core.arguments import MeshLike
from weft.core.names import also_called
from weft.errors import ShardTypeError
from weft.local.sides import (
    entered,
    leaves_of,
    left,
    mesh_of,
    placed,
    region,
    spread,
    values_of,
)
from weft.tensor import ShardTensor
from weft.tensor.modes import inside_region

__all__ = ["local_map"]


@also_called(
    f="fn", func="fn", device_mesh="mesh", check_vma="check", check_rep="check")
def local_map(
    fn: Callable[..., Any] | None = None,
    *positional: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    mesh: MeshLike | None = None,
    check: bool = False,
    sizes: Any = "infer",
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """`fn` as a function of ShardTensors: it is called with, and returns, local tensors.

    Arguments are first resharded to `in_specs`; a plain tensor counts as replicated.
    Gradients are those of the whole. For an argument that is replicated over an axis, the gradients
    of the ranks are summed; for a result that is replicated over an axis, the gradient counts once.
    Inside, `weft.collectives` run over the axes of the mesh, and a ShardTensor may not meet a plain
    tensor.

    Args:
        fn: a function of plain tensors and other values, also accepted as `func`; None makes a
            decorator. All other arguments are keywords, because torch and JAX have them in opposite
            orders.
        in_specs: a spec for each positional argument, or one for all of them. A spec applies to all
            tensors in a nested argument. None passes an argument as it is, which
            must then contain no ShardTensor. Keyword arguments are passed like that.
        out_specs: a spec for each result, or one for all of them. With a partial one (placements
            with `Partial()`) the ranks return partial values.
        mesh: the mesh, also accepted as `device_mesh`; None takes that of the first ShardTensor,
            else the current one.
        check: compare over the ranks that results agree in shape and dtype, and that results
            declared replicated are equal, and raise on all ranks if not.
        sizes: how a result's blocks make up its shape, as in `ShardTensor.from_local`: "infer"
            and "chunk" ask the ranks, and "chunk" raises if the cuts are not the default ones; a
            map tensor dim -> sizes needs no exchange.
        in_placements: instead of `in_specs`, with torch's meaning: one for each leaf of the nested
            arguments. None takes ShardTensors in their layouts. Plain tensors are passed as they
            are; if no argument is a ShardTensor, `fn` is called directly.
        out_placements: instead of `out_specs`, one for each leaf of the nested results.
        redistribute_inputs: reshard arguments to `in_placements`; else they must already have
            these placements.
        in_grad_placements: the placements of the gradients of arguments, one for each leaf, as in
            `to_local`; gradients of results are then as in `from_local`. None: gradients of the
            whole.

    Returns:
        The function of ShardTensors, or a decorator.

    Raises:
        LayoutError: a number of specs different from that of arguments or results; an argument that
            does not have its `in_placements`.
        ShardTypeError: more than one positional argument; something given by two names; an argument
            without a spec that contains a ShardTensor; a result that is one.
        MeshError: a rank outside the mesh calls it.

    >>> normalize = local_map(
    ...     lambda x: x / psum(x.sum(), "dp"), in_specs=P("dp"), out_specs=P("dp")
    ... )  # doctest: +SKIP
    """
    _refuse_positional(positional)
    torchs = (in_placements, out_placements, in_grad_placements) != (None, None, None)
    if torchs:
        _refuse_mixed(in_specs, out_specs)
    if fn is None:
        return functools.partial(
            local_map, in_specs=in_specs, out_specs=out_specs, mesh=mesh, check=check, sizes=sizes,
            in_placements=in_placements, out_placements=out_placements,
            in_grad_placements=in_grad_placements, redistribute_inputs=redistribute_inputs,
        )
    name = f"local_map({getattr(fn, '__name__', type(fn).__name__)})"
    ins, outs, of = ("in_placements", "out_placements", "leaves of ") if torchs else (
        "in_specs", "out_specs", "")
    parts_of = leaves_of if torchs else values_of
    grads_as_placed = in_grad_placements is not None

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        given, joined = parts_of(args)
        if torchs and not any(isinstance(one, ShardTensor) for one in given):
            return fn(*args, **kwargs)
        bound = mesh_of(mesh, given, name)
        if torchs:
            specs = placed(in_placements, given, bound, f"{name}({ins})", redistribute_inputs)
        else:
            specs = spread(in_specs, given, f"{name}({ins})", "arguments")
        grads = spread(in_grad_placements, given, f"{name}(in_grad_placements)", f"{of}arguments")
        blocks = [
            entered(one, spec, bound, name, grads_as_placed, grad)
            for one, spec, grad in zip(given, specs, grads)
        ]
        entered(kwargs, None, bound, name)
        with region(bound), inside_region(name):
            out = fn(*joined(blocks), **kwargs)
        results, joined = parts_of(out)
        specs = spread(
            out_placements if torchs else out_specs, results, f"{name}({outs})", f"{of}results")
        return joined([
            left(one, spec, bound, name, check, sizes, grads_as_placed)
            for one, spec in zip(results, specs)
        ])

    return mapped


def _refuse_positional(positional: tuple[Any, ...]) -> None:
    if positional:
        raise ShardTypeError(
            "local_map(fn, ...)", f"{len(positional)} positional arguments follow fn",
            "torch's order is (out_placements, in_placements), JAX's is (in_specs, "
            "out_specs): what follows fn is given by name",
            [repr(one) for one in positional],
            "local_map(fn, in_specs=..., out_specs=...), or in_placements=..., "
            "out_placements=...")


def _refuse_mixed(in_specs: Any, out_specs: Any) -> None:
    ours = {"in_specs": in_specs, "out_specs": out_specs}
    given = [name for name, one in ours.items() if one is not None]
    if given:
        raise ShardTypeError(
            "local_map()", f"{', '.join(given)} stands beside torch's names",
            "in_specs and out_specs are for arguments and results, in_placements and "
            "out_placements for each leaf of them, as in torch", given,
            "local_map(fn, in_placements=..., out_placements=...)")
