"""`local_map` by torch's names: its specs are for each leaf of the arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, ShardTypeError
from weft.local.region import region
from weft.local.sides import entered, left, mesh_of, spread
from weft.tensor import ShardTensor
from weft.tensor.modes import inside_region
from weft.tensor.placing.border import into_local
from weft.tensor.placing.layouts import as_layout

__all__ = ["ByTorchsNames"]


@dataclass
class ByTorchsNames:
    """The function that `local_map` returns for `in_placements`, `out_placements`,
    `in_grad_placements`."""

    fn: Callable[..., Any]
    name: str
    mesh: Any
    in_placements: Any
    out_placements: Any
    in_grad_placements: Any
    redistribute_inputs: bool
    check: bool
    sizes: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.name
        given, form = _pytree.tree_flatten(args)
        if not any(isinstance(one, ShardTensor) for one in given):
            return self.fn(*args, **kwargs)
        bound = mesh_of(self.mesh, given, name)
        layouts = self._layouts(given, bound)
        grads_as_placed = self.in_grad_placements is not None
        grads = spread(
            self.in_grad_placements, given, f"{name}(in_grad_placements)", "leaves of arguments")
        blocks = [
            one if layout is None else
            into_local(
                one, bound, layout, name, grads_as_placed=grads_as_placed, grad_placements=grad
            )
            for one, layout, grad in zip(given, layouts, grads)
        ]
        entered(kwargs, None, bound, name)
        with region(bound), inside_region(name):
            out = self.fn(*_pytree.tree_unflatten(blocks, form), **kwargs)
        results, form = _pytree.tree_flatten(out)
        specs = spread(self.out_placements, results, f"{name}(out_placements)", "leaves of results")
        return _pytree.tree_unflatten([
            left(one, spec, bound, name, self.check, self.sizes, grads_as_placed)
            for one, spec in zip(results, specs)
        ], form)

    def _layouts(self, given: list[Any], mesh: BoundMesh) -> list[Layout | None]:
        """The layout for each leaf, as it has one or is to have; None for leaves that are not
        ShardTensors."""
        call = f"{self.name}(in_placements)"
        specs = given if self.in_placements is None else spread(
            self.in_placements, given, call, "leaves of arguments")
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
            elif not self.redistribute_inputs:
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
                moved,
                "local_map(..., redistribute_inputs=True)")
        return found
