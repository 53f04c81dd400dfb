"""Writes of values at positions that indices name, in sharded dims.

Each rank writes the values that fall into its own shard. If the values are sharded over the axes
that shard the dim, they are delivered to the ranks that hold their positions; if every rank has all
values, each takes its own. Several values for one position are written in the order of a single
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local
from weft.ops.indexing.index_layouts import IndexLayout, held, index_layout
from weft.ops.indexing.row_exchange import Units, from_front, out_of_bounds, outside
from weft.ops.indexing.rows import bounds, named_along, router
from weft.rules import Decision

__all__ = ["Write", "adding_axes", "as_partial"]

Writer = Callable[[Tensor, tuple[Tensor, ...], Any, bool], Tensor]
"""(block with the named dims first, an index for each of them, values, whether in place)."""


@dataclass(frozen=True, slots=True)
class Write:
    """A write of values at positions that indices name.

    Args:
        op: for the traffic log.
        x: the layout of the target.
        dims: the named dims of the target.
        indices, values: layouts of the operands; `values` is None for a number.
        shape: of the positions.
        first: where they come among the kept dims in the values.
        wraps: whether indices may be negative.
        linear: whether target and values are added.
        broadcasts: whether `write` takes values that broadcast to what is written.
        along: where single elements are written, the one dim that the index names; their places in
            the other dims are those in the index. `shape` is then that of the index.
    """

    op: str
    x: Layout
    dims: tuple[int, ...]
    indices: Sequence[Layout]
    values: Layout | None
    shape: tuple[int, ...]
    first: int
    wraps: bool
    linear: bool
    broadcasts: bool
    write: Writer
    along: int | None = None

    def algorithm(self) -> Local:
        """The function of local tensors that carries it out, between its layouts."""
        x = self._target()
        cutting = {axis for dim in self.dims for axis in x.dims[dim]}
        kept = [dim for dim in range(x.ndim) if dim not in self.dims]
        operand = [] if self.values is None else [self._at_positions(self.values)]
        over = {axis for one in operand for axis in one.sharded_axes}
        beside = adding_axes(x, self.values, over) if self.linear else set[int]()
        if cutting.isdisjoint(over):
            places = None
            lying = Layout.make(x.mesh, self.shape, *held(self.shape, operand, beside))
        else:
            places = index_layout(x, self.dims, self.shape, operand, beside)
            lying = places.parted
        x = as_partial(x, lying)
        named = lying if places is None else places.shared
        operands = [x, *(named.fitted(index.shape) for index in self.indices)]
        if self.values is not None:
            operands.append(self._values(x, kept, lying))
        return self.local(operands, lying, places)

    def local(
        self, operands: Sequence[Layout], lying: Layout, places: IndexLayout | None,
        in_place: bool = True,
    ) -> Local:
        """The write for operands that come to these layouts. Values are delivered to `places`, or
        every rank takes its own of those that it has by `lying`; `in_place`, if asked for."""
        x = operands[0]

        def bind(mesh: BoundMesh, in_place: bool = False) -> Callable[..., Tensor]:
            if places is None:
                return self.own(mesh, x, lying, in_place)
            return self.delivered(mesh, x, places, in_place)

        axes = () if places is None else sorted(axis for dim in self._cut for axis in x.dims[dim])
        writes = (lambda mesh: bind(mesh, True)) if in_place else None
        return Local(Decision(tuple(operands), (x,)), bind, tuple(axes), writes)

    def _target(self) -> Layout:
        x = self.x
        if not x.is_partial or (self.linear and set(x.partial) <= {None, "sum"}):
            return x
        return x.without_partial()

    def _at_positions(self, values: Layout) -> Layout:
        """The dims of the values that correspond to positions."""
        stop = values.ndim - (self.x.ndim - len(self.dims) - self.first)
        return values.take(range(max(stop - len(self.shape), 0), max(stop, 0)))

    def _values(self, x: Layout, kept: Sequence[int], lying: Layout) -> Layout:
        assert self.values is not None
        whole = x.take(kept).insert(self.first, lying)
        lent = x.without_partial(lying.sharded_axes).partial
        return whole.fitted(self.values.shape).replace(partial=lent)

    # The functions that run.

    @property
    def _cut(self) -> tuple[int, ...]:
        """The dims that indices name globally."""
        return self.dims if self.along is None else (self.along,)

    def _names(self, indices: Sequence[Tensor]) -> Sequence[Tensor]:
        """An index for each of the dims."""
        return indices if self.along is None else named_along(indices[0], self.along)

    def own(
        self, mesh: BoundMesh, x: Layout, lying: Layout, in_place: bool
    ) -> Callable[..., Tensor]:
        """Every rank of the group knows all indices and values, and takes its own."""
        assert mesh.here is not None
        units = Units(mesh, x, self.dims, self._cut)
        shape = lying.local_shape_at(mesh.here)
        lengths, num = bounds(x, self.dims, self._cut), len(self.indices)

        def local(block: Tensor, *others: Tensor) -> Tensor:
            indices, values = self._names(others[:num]), others[num:]
            wrong = outside(indices, lengths, self.wraps)
            if wrong:
                raise out_of_bounds(self.op)(wrong)
            spread = torch.broadcast_tensors(*from_front(indices, lengths, block.device))
            holder, row = units.locate(spread)
            row, mine = row.reshape(-1), None
            if units.comm.size > 1:
                mine = (holder == units.comm.index).reshape(-1).nonzero().squeeze(1)
                row = row[mine]
            rows = units.split(row)
            taken = self._taken(block, values[0], mine, shape) if values else None
            return self._written(block, rows, taken, in_place)

        return local

    def _taken(
        self, block: Tensor, values: Tensor, mine: Tensor | None, shape: Sequence[int]
    ) -> Tensor:
        """The values of some of the positions, joined into one leading dim."""
        if not values.dim() or (self.broadcasts and values.numel() == 1):
            return values.reshape(())
        behind = block.dim() - len(self.dims) - self.first
        new = values.shape[max(values.dim() - behind - len(self.shape), 0) :
                           max(values.dim() - behind, 0)]
        if self.broadcasts and not self.first and all(length == 1 for length in new):
            # If every position gets the same value, only one is made.
            return values.reshape(values.shape[max(values.dim() - behind, 0) :])
        front = self._in_front(block, values, shape)
        return front if mine is None else front.index_select(0, mine)

    def _in_front(self, block: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
        """The values with the positions, of this shape, joined into one leading dim; they
        broadcast."""
        rest = [length for dim, length in enumerate(block.shape) if dim not in self.dims]
        if self.along is not None:  # there may be more of them than of indices
            values = values[tuple(map(slice, shape))]
        full = values.expand(*rest[: self.first], *shape, *rest[self.first :])
        new = range(len(shape))
        full = full.movedim(tuple(self.first + dim for dim in new), tuple(new))
        return full.reshape(math.prod(shape), *rest)

    def delivered(
        self, mesh: BoundMesh, x: Layout, places: IndexLayout, in_place: bool
    ) -> Callable[..., Tensor]:
        """Values are sent to the ranks that hold their positions."""
        assert mesh.here is not None
        units = Units(mesh, x, self.dims, self._cut)
        route = router(mesh, self.op, x, self.dims, self._cut, places, self.wraps, once=False)
        mine = places.parted.local_shape_at(mesh.here)
        num = len(self.indices)

        def local(block: Tensor, *others: Tensor) -> Tensor:
            routes = route(self._names(others[:num]))
            rows, values = routes.deliver(self._in_front(block, others[num], mine))
            return self._written(block, units.split(rows), values, in_place)

        return local

    def _written(
        self, block: Tensor, rows: tuple[Tensor, ...], values: Any, in_place: bool
    ) -> Tensor:
        order = tuple(range(len(self.dims)))
        front = block.movedim(self.dims, order)
        out = self.write(front, rows, values, in_place)
        return block if in_place else out.movedim(order, self.dims)


def adding_axes(x: Layout, values: Layout | None, over: Collection[int]) -> set[int]:
    """The axes, of those that shard the values, over which ranks add their own to partial values of
    the target: it has such, or they are reduced later, whereas the values would be gathered now."""
    found = {axis for axis in over if x.partial[axis] == "sum"}
    if values is not None and 2 * math.prod(x.shape) <= math.prod(values.shape):
        found |= set(x.free_axes).intersection(over)
    return found


def as_partial(x: Layout, lying: Layout) -> Layout:
    """The target, partial over the axes that shard the positions but not the target."""
    return x.with_partial(set(lying.sharded_axes) & set(x.free_axes))
