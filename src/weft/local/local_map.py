"""Functions written for local tensors, called on global ones.

`local_map` cuts a program open: outside, ShardTensors; inside, each rank's plain tensors and the
collectives that the function itself calls. The idea is JAX's `shard_map` (and torch's `local_map`),
without a size that must divide: blocks may be ragged or empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout, P
from weft.core.placement import Placement
from weft.errors import LayoutError, MeshError, ShardTypeError, message
from weft.local.region import mesh_of_region, region
from weft.tensor import ShardTensor
from weft.tensor.modes import inside_region
from weft.tensor.placing.border import into_local, out_of_local
from weft.tensor.trace.capture import map_tensors
from weft.tensor.trace.trees import leaves

__all__ = ["local_map"]

Spec = Any
"""A P, placements or a Layout; of an argument or a result that is no tensor also None."""


def local_map(
    fn: Callable[..., Any] | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    mesh: Any = None,
    *,
    check: bool = False,
    sizes: Any = "infer",
) -> Callable[..., Any]:
    """`fn` as a function of ShardTensors: it is called with, and returns, local tensors.

    Arguments are redistributed to `in_specs` first; a plain tensor is taken as replicated.
    Gradients are those of the whole: of an argument that is replicated over an axis, what the ranks
    find is summed; of a result that is replicated over an axis, the gradient counts once. Inside,
    `weft.collectives` run over the axes of the mesh, and a ShardTensor meets no plain tensor.

    Args:
        fn: a function of plain tensors and other values; None makes a decorator.
        in_specs: a spec for each positional argument, or one for all of them; a spec is for all
            tensors of an argument that nests them. None hands an argument over as it is, which
            then holds no ShardTensor. Keyword arguments are handed over so.
        out_specs: a spec for each result, or one for all of them. A partial one (placements with
            `Partial()`) says that the ranks return terms.
        mesh: the mesh; None takes that of the first ShardTensor, else the current one.
        check: compare over the ranks that results agree in shape and dtype, and that those declared
            replicated are equal, and raise on all of them when they are not.
        sizes: how a result's blocks make up its shape, as in `ShardTensor.from_local`: "infer"
            asks the ranks, "chunk" takes default cuts and asks nobody.

    Raises:
        LayoutError: another number of specs than of arguments or results.
        ShardTypeError: an argument without a spec that holds a ShardTensor; a result that is one.
        MeshError: a rank outside the mesh calls it.

    >>> normalize = local_map(lambda x: x / psum(x.sum(), "dp"), P("dp"), P("dp"))  # doctest: +SKIP
    """
    if fn is None:
        return functools.partial(
            local_map, in_specs=in_specs, out_specs=out_specs, mesh=mesh, check=check, sizes=sizes
        )
    name = f"local_map({getattr(fn, '__name__', type(fn).__name__)})"

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        bound = _mesh_of(mesh, args, name)
        specs = _spread(in_specs, args, f"{name}(in_specs)", "arguments")
        given = [_entered(arg, spec, bound, name) for arg, spec in zip(args, specs)]
        _entered(kwargs, None, bound, name)
        with region(bound), inside_region(name):
            out = fn(*given, **kwargs)
        several = type(out) in (tuple, list)
        results = list(out) if several else [out]
        outs = _spread(out_specs, results, f"{name}(out_specs)", "results")
        wrapped = [
            _left(result, spec, bound, name, check, sizes) for result, spec in zip(results, outs)
        ]
        return type(out)(wrapped) if several else wrapped[0]

    return mapped


def _mesh_of(mesh: Any, args: Sequence[Any], name: str) -> BoundMesh:
    found = leaves(args, ShardTensor)
    bound = found[0].device_mesh if mesh is None and found else mesh_of_region(mesh)
    if bound.here is None:
        raise MeshError(
            message(name, f"rank {bound.rank} is outside {bound.abstract!r}",
                    "the ranks of the mesh run it, each on its local tensors", [bound.rank],
                    "if mesh.get_coordinate() is not None: ...")
        )
    return bound


def _is_spec(spec: Any) -> bool:
    return spec is None or isinstance(spec, (P, Layout)) or (
        isinstance(spec, (list, tuple)) and bool(spec)
        and all(isinstance(one, Placement) for one in spec)
    )


def _spread(specs: Any, values: Sequence[Any], call: str, what: str) -> list[Spec]:
    """A spec for each value."""
    if _is_spec(specs):
        return [specs] * len(values)
    if not isinstance(specs, (list, tuple)) or not all(map(_is_spec, specs)):
        raise ShardTypeError(
            message(call, f"it is {specs!r}", "a spec is a P, a list of placements, a Layout or "
                    "None", [repr(specs)], 'P("dp"), or (P("dp"), P())')
        )
    if len(specs) != len(values):
        raise LayoutError(
            message(call, f"there are {len(specs)} specs and {len(values)} {what}",
                    f"one spec is for all {what}, several are one for each",
                    [str(spec) for spec in specs],
                    f"{len(values)} specs; None for what is no tensor")
        )
    return list(specs)


def _entered(arg: Any, spec: Spec, mesh: BoundMesh, name: str) -> Any:
    if spec is None:
        held = leaves(arg, ShardTensor)
        if held:
            raise ShardTypeError(
                message(name, f"an argument without a spec holds {len(held)} ShardTensors",
                        "a spec says which block of it a rank gets",
                        [str(one.sharding) for one in held], "in_specs=(..., P())")
            )
        return arg
    return map_tensors(lambda x: into_local(x, mesh, spec, name), arg)


def _left(
    result: Any, spec: Spec, mesh: BoundMesh, name: str, check: bool, sizes: Any
) -> Any:
    def leave(local: torch.Tensor) -> torch.Tensor:
        if isinstance(local, ShardTensor):
            raise ShardTypeError(
                message(f"{name}(out_specs)", f"a result is a ShardTensor {local.sharding}",
                        "inside, tensors are local: a result is a rank's block",
                        [str(local.sharding)], "return local tensors, and their spec in out_specs")
            )
        return out_of_local(local, mesh, spec, sizes=sizes, run_check=check)

    return result if spec is None else map_tensors(leave, result)
