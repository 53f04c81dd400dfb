"""A region, in which code runs on local tensors, and its two sides: arguments become local tensors,
and results become ShardTensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _pytree

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout, P, is_placements
from weft.core.arguments import MeshLike
from weft.core.scopes import setting
from weft.errors import LayoutError, MeshError, ShardTypeError, WeftError
from weft.tensor import ShardTensor
from weft.tensor.placing.border import into_local, out_of_local
from weft.tensor.placing.layouts import as_layout
from weft.tensor.trace.trees import leaves, map_tensors

__all__ = [
    "Joined", "Spec", "entered", "leaves_of", "left", "mesh_of", "mesh_of_region", "placed",
    "region", "spread", "values_of",
]

Spec = Any
"""A P, placements or a Layout; None for an argument or result without tensors."""

Joined = Callable[[Sequence[Any]], Any]


class _Innermost(threading.local):
    mesh: BoundMesh | None = None


_innermost = _Innermost()


def region(mesh: BoundMesh) -> AbstractContextManager[None]:
    """Inside, collectives run over the axes of this mesh."""
    return setting(_innermost, mesh=mesh)


def mesh_of_region(mesh: MeshLike | None, call: str) -> BoundMesh:
    """A given mesh, else that of the innermost region of this thread, else the current one; else
    MeshError."""
    if mesh is None and _innermost.mesh is not None:
        return _innermost.mesh
    return as_bound_mesh(mesh, f"{call}(mesh=)")


def mesh_of(mesh: Any, args: Sequence[Any], name: str) -> BoundMesh:
    """The given mesh, or that of the first ShardTensor among the arguments, or the current one."""
    found = leaves(args, ShardTensor)
    bound = found[0].device_mesh if mesh is None and found else mesh_of_region(mesh, name)
    if bound.here is None:
        raise MeshError(
            name, f"rank {bound.rank} is outside {bound.abstract!r}",
            "the ranks of the mesh run it, each on its local tensors", [bound.rank],
            "if mesh.get_coordinate() is not None: ...")
    return bound


def _is_spec(spec: Any) -> bool:
    return spec is None or isinstance(spec, (P, Layout)) or is_placements(spec)


def spread(specs: Any, values: Sequence[Any], call: str, what: str) -> list[Spec]:
    """A spec for each value."""
    if _is_spec(specs):
        return [specs] * len(values)
    if not isinstance(specs, (list, tuple)) or not all(map(_is_spec, specs)):
        raise ShardTypeError(
            call, f"it is {specs!r}", "a spec is a P, a list of placements, a Layout or "
            "None", [repr(specs)], 'P("dp"), or (P("dp"), P())')
    if len(specs) != len(values):
        raise LayoutError(
            call, f"there are {len(specs)} specs and {len(values)} {what}",
            f"one spec is for all {what}, several are one for each",
            [str(spec) for spec in specs],
            f"{len(values)} specs; None for what is no tensor")
    return list(specs)


def values_of(given: Any) -> tuple[list[Any], Joined]:
    """The values of a tuple or list, or the one value; and what makes the same of others."""
    if type(given) in (tuple, list):
        return list(given), type(given)
    return [given], lambda parts: parts[0]


def leaves_of(tree: Any) -> tuple[list[Any], Joined]:
    """The leaves of nested values; and what makes the same of others."""
    found, form = _pytree.tree_flatten(tree)
    return found, lambda parts: _pytree.tree_unflatten(parts, form)


def placed(
    placements: Any, given: Sequence[Any], mesh: BoundMesh, call: str, moves: bool
) -> list[Layout | None]:
    """The layout for each leaf, as it has one or is to have; None for leaves that are not
    ShardTensors. Unless it `moves` them, those already have their layouts."""
    specs = given if placements is None else spread(placements, given, call, "leaves of arguments")
    found: list[Layout | None] = []
    bare, moved = [], []
    for at, (one, spec) in enumerate(zip(given, specs)):
        if not isinstance(one, ShardTensor):
            found.append(None)
            continue
        if spec is None:
            bare.append(f"leaf {at}: {one.sharding}")
        lies, due = one.sharding, as_layout(mesh, one.shape, spec, call)
        if (lies.mesh, lies.dims, lies.partial) == (due.mesh, due.dims, due.partial):
            due = lies  # torch's placements contain no sizes
        elif not moves:
            moved.append(f"leaf {at}: {lies} for {due}")
        found.append(due)
    if bare:
        raise ShardTypeError(
            call, f"{len(bare)} ShardTensors have no placements",
            "None is for leaves that are no ShardTensors", bare,
            "in_placements=None takes all of them in their layouts")
    if moved:
        raise LayoutError(
            call, f"{len(moved)} of {len(given)} leaves have other placements",
            "without redistribute_inputs, arguments already have their in_placements",
            moved, "local_map(..., redistribute_inputs=True)")
    return found


def entered(
    arg: Any, spec: Spec, mesh: BoundMesh, name: str, grads_as_placed: bool = False,
    grad_placements: Any = None,
) -> Any:
    """An argument with its tensors replaced by their blocks; unchanged without a spec. Gradients
    are as in `into_local`."""
    if spec is None:
        held = leaves(arg, ShardTensor)
        if held:
            raise ShardTypeError(
                name, f"an argument without a spec holds {len(held)} ShardTensors",
                "a spec says which block of it a rank gets",
                [str(one.sharding) for one in held], "in_specs=(..., P())")
        return arg
    def enter(x: torch.Tensor) -> torch.Tensor:
        with _noted(f"{name}(in_specs)", "argument", x):
            return into_local(
                x, mesh, spec, name, grads_as_placed=grads_as_placed,
                grad_placements=grad_placements)

    return map_tensors(enter, arg)


@contextmanager
def _noted(call: str, what: str, x: torch.Tensor) -> Iterator[None]:
    """Errors of a spec, which knows of no call, say which one it was for."""
    try:
        yield
    except WeftError as error:
        if not str(error).startswith(call):
            error.add_note(f"  in {call}, for the {what} of shape {tuple(x.shape)}")
        raise


def left(
    result: Any, spec: Spec, mesh: BoundMesh, name: str, check: bool, sizes: Any,
    grads_as_placed: bool = False,
) -> Any:
    """A result in the layout of its spec; `grads_as_placed`: with a gradient as in `from_local`."""
    def leave(local: torch.Tensor) -> torch.Tensor:
        if isinstance(local, ShardTensor):
            raise ShardTypeError(
                f"{name}(out_specs)", f"a result is a ShardTensor {local.sharding}",
                "inside, tensors are local: a result is a rank's block",
                [str(local.sharding)], "return local tensors, and their spec in out_specs")
        with _noted(f"{name}(out_specs)", "result", local):
            return out_of_local(
                local, mesh, spec, sizes=sizes, run_check=check, region=f"{name}(out_specs)",
                grads_as_placed=grads_as_placed)

    return result if spec is None else map_tensors(leave, result)
