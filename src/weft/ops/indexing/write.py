"""Writes by index into cut dims: index_put, index_add, index_copy, index_fill, index_reduce, put,
and the scatters.

Each rank writes what falls into its own block. Where the values are cut over the axes that cut the
dim, they are delivered to the holders of their places, as reads by index fetch from there; where
every rank has them all, each takes its own. What is written to one place by several values comes
in the order in which one process would have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.indexing.named import Axes, Cuts, Places, Spread, fitted, held, places_of, unused
from weft.ops.indexing.read import (
    element_places,
    element_router,
    grid,
    named_dims,
    reads_nothing,
    router,
    unraveled,
)
from weft.ops.indexing.routes import Units, from_front, out_of_bounds, outside
from weft.rules import Call, Decision

__all__ = ["index_put_lookup", "index_write_lookup", "put_lookup", "scatter_lookup"]

Writer = Callable[[Tensor, tuple[Tensor, ...], Any, bool], Tensor]
"""(block with the named dims in front, an index for each of them, values, whether in place)."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A write of values at places that indices name.

    Args:
        op: for the traffic log. x: the layout of the target. dims: which of its dims are named.
        indices, values: layouts of the operands; `values` is None for a number.
        shape: of the places. first: where they stand among the kept dims in the values.
        wraps: whether indices may be negative. linear: whether target and values are added.
        broadcasts: whether `write` takes values that broadcast to what is written.
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

    def algorithm(self) -> Local | Decision:
        """How it is carried out."""
        x = self._target()
        cutting = {axis for dim in self.dims for axis in x.dims[dim]}
        kept = [dim for dim in range(x.ndim) if dim not in self.dims]
        new = self._new_dims()
        over = {axis for dim in new for axis in self.values.dims[dim]} if self.values else set()
        operand = [self._spread(new)] if self.values is not None else []
        beside = over & unused(x) if self.linear and adds_terms(x, self.values) else set()
        if cutting.isdisjoint(over):
            places = None
            lying = Layout.make(x.mesh, self.shape, *held(self.shape, operand, beside))
        else:
            places = places_of(x, self.dims, self.shape, operand, beside)
            lying = places.parted
        x = as_terms(x, lying)
        named = lying if places is None else places.shared
        operands = [x, *(fitted(index, named) for index in self.indices)]
        if self.values is not None:
            operands.append(self._values(x, kept, lying))
        decision = Decision(tuple(operands), (x,))
        if places is None:
            def bind(mesh: BoundMesh, in_place: bool = False) -> Callable[..., Tensor]:
                return self._own(mesh, x, lying, in_place)

            return Local(decision, bind, writes=lambda mesh: bind(mesh, True))

        def deliver(mesh: BoundMesh, in_place: bool = False) -> Callable[..., Tensor]:
            return self._delivered(mesh, x, places, in_place)

        return Local(decision, deliver, tuple(sorted(cutting)), lambda mesh: deliver(mesh, True))

    def _target(self) -> Layout:
        x = self.x
        if not x.is_partial or (self.linear and set(x.partial) <= {None, "sum"}):
            return x
        return x.replace(cuts=x.cuts, partial=(None,) * x.mesh.ndim)

    def _new_dims(self) -> list[int]:
        """Those dims of the values that correspond to places."""
        if self.values is None:
            return []
        behind = self.x.ndim - len(self.dims) - self.first
        stop = self.values.ndim - behind
        return list(range(max(stop - len(self.shape), 0), max(stop, 0)))

    def _spread(self, new: Sequence[int]) -> Spread:
        values = self.values
        assert values is not None
        axes: list[Axes] = [values.dims[dim] for dim in new]
        cuts: list[Cuts] = [values.cuts[dim] for dim in new]
        return [values.shape[dim] for dim in new], axes, cuts

    def _values(self, x: Layout, kept: Sequence[int], lying: Layout) -> Layout:
        rest = [x.shape[dim] for dim in kept]
        axes, cuts = [x.dims[dim] for dim in kept], [x.cuts[dim] for dim in kept]
        at = self.first
        assert self.values is not None
        lent = [None if axis in lying.sharded_axes else kind for axis, kind in enumerate(x.partial)]
        whole = Layout.make(
            x.mesh, (*rest[:at], *lying.shape, *rest[at:]),
            (*axes[:at], *lying.dims, *axes[at:]), (*cuts[:at], *lying.cuts, *cuts[at:]),
        )
        return fitted(self.values, whole).replace(partial=lent)

    # What runs.

    def _own(
        self, mesh: BoundMesh, x: Layout, lying: Layout, in_place: bool
    ) -> Callable[..., Tensor]:
        """Every rank of the group knows the indices and values, and takes what is its own."""
        assert mesh.here is not None
        units = Units(mesh, x, self.dims)
        shape = lying.local_shape_at(mesh.here)
        lengths = [x.shape[dim] for dim in self.dims]
        num = len(self.indices)

        def local(block: Tensor, *others: Tensor) -> Tensor:
            indices, values = others[:num], others[num:]
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
        """The values of some of the places, which stand in front, in one dim."""
        if not values.dim() or (self.broadcasts and values.numel() == 1):
            return values.reshape(())
        behind = block.dim() - len(self.dims) - self.first
        new = values.shape[max(values.dim() - behind - len(self.shape), 0) :
                           max(values.dim() - behind, 0)]
        if self.broadcasts and not self.first and all(length == 1 for length in new):
            # Of the same value at every place no more than one is made.
            return values.reshape(values.shape[max(values.dim() - behind, 0) :])
        front = self._in_front(block, values, shape)
        return front if mine is None else front.index_select(0, mine)

    def _in_front(self, block: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
        """The values with the places, of this shape, in front, in one dim; they broadcast."""
        rest = [length for dim, length in enumerate(block.shape) if dim not in self.dims]
        full = values.expand(*rest[: self.first], *shape, *rest[self.first :])
        new = range(len(shape))
        full = full.movedim(tuple(self.first + dim for dim in new), tuple(new))
        return full.reshape(math.prod(shape), *rest)

    def _delivered(
        self, mesh: BoundMesh, x: Layout, places: Places, in_place: bool
    ) -> Callable[..., Tensor]:
        """Values go to the ranks that hold their places."""
        assert mesh.here is not None
        units = Units(mesh, x, self.dims)
        lengths = [x.shape[dim] for dim in self.dims]
        route = router(
            mesh, self.op, x, self.dims, self.dims, places, lengths, self.wraps, once=False
        )
        mine = places.parted.local_shape_at(mesh.here)
        num = len(self.indices)

        def local(block: Tensor, *others: Tensor) -> Tensor:
            routes = route(others[:num])
            values = routes.deliver(self._in_front(block, others[num], mine))
            return self._written(block, units.split(routes.rows), values, in_place)

        return local

    def _written(
        self, block: Tensor, rows: tuple[Tensor, ...], values: Any, in_place: bool
    ) -> Tensor:
        order = tuple(range(len(self.dims)))
        front = block.movedim(self.dims, order)
        out = self.write(front, rows, values, in_place)
        return block if in_place else out.movedim(order, self.dims)


def adds_terms(x: Layout, values: Layout | None) -> bool:
    """Whether ranks had better add the values that they have to terms of the target: these are
    reduced later, of which the values would be gathered now."""
    return values is not None and 2 * math.prod(x.shape) <= math.prod(values.shape)


def as_terms(x: Layout, lying: Layout) -> Layout:
    """The target as terms over the axes that cut the places and not the target."""
    partial = list(x.partial)
    for axis in set(lying.sharded_axes) & unused(x):
        partial[axis] = "sum"
    return x.replace(cuts=x.cuts, partial=partial)


def index_put_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """`x[i, :, j] = values`, by integers; added, where it accumulates."""
    x, values = layouts[0], layouts[-1]
    indices = list(call.args[1])
    named = [index for index in indices if index is not None]
    if not named or any(index.dtype in ("bool", "uint8") for index in named):
        return None
    if reads_nothing(call, x, indices):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in named))
    dims, first = named_dims(indices, len(shape))
    accumulate = bool(call.args[3])
    adds = accumulate and call.tensors[0].dtype != "bool"

    def write(block: Tensor, rows: tuple[Tensor, ...], new: Any, in_place: bool) -> Tensor:
        put = block.index_put_ if in_place else block.index_put
        return put(rows, new, accumulate)

    return _Write(
        call.op, x, dims, layouts[1:-1], values, tuple(shape), first, True, adds, True, write,
    ).algorithm()


def index_write_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """`index_add`, `index_copy`, `index_fill`, `index_reduce` in a cut dim."""
    x, index = layouts[:2]
    if not x.ndim or index.ndim != 1:
        return None
    dim = call.args[1] % x.ndim
    if reads_nothing(call, x, [*[None] * dim, index]):
        return None
    values = layouts[2] if len(layouts) > 2 else None
    base = call.op.split(".")[1]
    fills = base == "index_fill"
    if fills and values is not None and wants_grad[2]:
        return Composite(_filled)
    if base == "index_reduce" and x.ndim > 1 and call.tensors[0].dtype in ("bfloat16", "float16"):
        return Composite(_scattered)
    adds = base == "index_add" and call.tensors[0].dtype != "bool"
    if not (fills or (values is not None and values.ndim == x.ndim)):
        return None
    if not x.dims[dim] and not (
        adds and adds_terms(x, values) and values is not None and values.dims[dim]
    ):
        return None
    more = {name: value for name, value in call.kwargs.items() if name != "out"}
    is_bound = fills and values is None
    rest = call.args[3 if is_bound else 4 :]

    def write(block: Tensor, rows: tuple[Tensor, ...], new: Any, in_place: bool) -> Tensor:
        method = getattr(block, f"{base}_" if in_place else base)
        return method(0, rows[0], *(() if is_bound else (new,)), *rest, **more)

    return _Write(
        call.op, x, (dim,), [index], values, index.shape, dim, False, adds, False, write,
    ).algorithm()


def _filled(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """index_fill by a tensor with a gradient, whose formula in torch meta tensors do not know."""
    hit = torch.zeros_like(x, dtype=torch.bool).index_fill(dim, index, True)
    return torch.where(hit, value.to(x.dtype), x)


def _scattered(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """index_reduce in half precision, where torch's kernel fails on blocks of a single column."""
    places = index.view(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand_as(source)
    return x.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def put_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`put(x, index, source, accumulate)`: places in the flattened tensor."""
    return None if 0 in layouts[0].shape else Composite(_put)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    full = x if x.dim() else x.reshape(1)
    places = unraveled(index.reshape(-1), full.shape)
    return full.index_put(places, source.reshape(-1), accumulate).reshape(x.shape)


def scatter_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`scatter`, `scatter_add`, `scatter_reduce` along a cut dim, of a tensor or a number."""
    x, index, *sources = layouts
    if not x.ndim or any(one.ndim != x.ndim for one in layouts):
        return None
    dim = call.args[1] % x.ndim
    adds = call.op == "aten.scatter_add.default" and call.tensors[0].dtype != "bool"
    source = sources[0] if sources else None
    beside: set[int] = set()
    if adds and source is not None and adds_terms(x, source):
        beside = set(source.dims[dim]) & unused(x)
    if not x.dims[dim] and not (beside and source and source.shape[dim] == index.shape[dim]):
        return None
    if x.is_partial and not (adds and set(x.partial) <= {None, "sum"}):
        x = x.replace(cuts=x.cuts, partial=(None,) * x.mesh.ndim)
    delivers = source is not None and source.shape[dim] == index.shape[dim] and not (
        {*x.dims[dim], *beside}.isdisjoint(source.dims[dim])
    )
    x, places = element_places(
        x, index.shape, dim, [source] if delivers and source is not None else [], layouts[1:],
        beside,
    )
    if not delivers:
        own = Layout.make(
            x.mesh, index.shape,
            [() if at == dim else axes for at, axes in enumerate(places.shared.dims)],
            [None if at == dim else cuts for at, cuts in enumerate(places.shared.cuts)],
        )
        places = Places(own, own, None)
    lent = x.partial
    x = as_terms(x, places.parted)
    operands = [x, fitted(index, places.shared)]
    if source is not None:
        operands.append(fitted(source, places.parted).replace(partial=lent))
    how = _how(call)

    def bind(mesh: BoundMesh, in_place: bool = False) -> Callable[..., Tensor]:
        if delivers:
            return _delivered_elements(mesh, call.op, x, dim, places, how, in_place)
        return _own_elements(mesh, x, dim, how, in_place)

    writes = None if how.reduce else lambda mesh: bind(mesh, True)
    axes = x.dims[dim] if delivers else ()
    return Local(Decision(tuple(operands), (x,)), bind, axes, writes)


@dataclass(frozen=True, slots=True)
class _How:
    """What becomes of an element that is written: `value` is a number for all, where there is no
    source; `reduce` is one of scatter_reduce's."""

    value: Any
    adds: bool
    reduce: str | None
    include_self: bool

    def write(
        self, block: Tensor, units: Units, rows: Tensor, values: Tensor | None, in_place: bool
    ) -> Tensor:
        if values is None:
            values = block.new_full((), self.value)
        if self.reduce is None:
            put = block.index_put_ if in_place else block.index_put
            return put(units.split(rows), values, self.adds)
        out = block.reshape(-1).scatter_reduce(
            0, rows, values.expand(rows.shape), self.reduce, include_self=self.include_self
        )
        return out.view(block.shape)


_REDUCES = {"add": "sum", "multiply": "prod"}


def _how(call: Call) -> _How:
    value = call.args[3] if ".value" in call.op else None
    if "scatter_reduce" in call.op:
        return _How(None, False, call.args[4], bool(call.kwargs.get("include_self", True)))
    reduce = call.kwargs.get("reduce")
    adds = call.op == "aten.scatter_add.default"
    return _How(value, adds, None if reduce is None else _REDUCES[reduce], True)


def _own_elements(
    mesh: BoundMesh, x: Layout, dim: int, how: _How, in_place: bool
) -> Callable[..., Tensor]:
    units = Units(mesh, x, range(x.ndim), (dim,))
    length = x.shape[dim]

    def local(block: Tensor, index: Tensor, *sources: Tensor) -> Tensor:
        wrong = outside([index], [length], False)
        if wrong:
            raise RuntimeError(wrong)
        index = index.to(torch.int64)
        holder, row = units.locate([index if at == dim else grid(index, at)
                                    for at in range(index.dim())])
        mine = (holder == units.comm.index).reshape(-1).nonzero().squeeze(1)
        values = None
        if sources:
            part = sources[0][tuple(slice(length) for length in index.shape)]
            values = part.reshape(-1).index_select(0, mine)
        return how.write(block, units, row.reshape(-1)[mine], values, in_place)

    return local


def _delivered_elements(
    mesh: BoundMesh, op: str, x: Layout, dim: int, places: Places, how: _How, in_place: bool
) -> Callable[..., Tensor]:
    units = Units(mesh, x, range(x.ndim), (dim,))
    route = element_router(mesh, op, x, dim, places, once=False)
    assert mesh.here is not None
    mine = tuple(slice(length) for length in places.parted.local_shape_at(mesh.here))

    def local(block: Tensor, index: Tensor, source: Tensor) -> Tensor:
        routes = route([index])
        part = source[mine]
        return how.write(block, units, routes.rows, routes.deliver(part.reshape(-1)), in_place)

    return local
