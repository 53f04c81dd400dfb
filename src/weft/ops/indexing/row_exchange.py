"""Exchanges units of a sharded tensor between the ranks that hold them and the ranks that request
them.

Indices into sharded dims name *units*: rows of a table, or single elements. The layout determines
who holds a unit (`Units.locate`), so only units are sent, by one all-to-all. `fetch` brings units
from their holders, each once to every rank that names it, however often. `deliver` brings values to
the holders. Each is the gradient of the other. Where all ranks of the group know all the indices
(`plan_together`), every rank computes all requests; where each knows only its own
(`plan_by_request`), it tells the holders first how many it names, then which: along with the
values, if it has values for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator
from weft.comm.communicator import as_bytes
from weft.core import Layout
from weft.ops.all_to_all import AllToAll
from weft.ops.places import apart
from weft.transport.nodes import with_gradient

__all__ = [
    "Routes", "RowExchange", "Units", "first_told", "from_front", "out_of_bounds", "outside",
    "plan_by_request", "plan_together",
]


@dataclass(frozen=True)
class RowExchange(AllToAll):
    """Sends rows between the ranks of a group.

    Args:
        op: the op that it serves, for errors.
        names: the dtype in which units are named, the same on all ranks.
    """

    what: ClassVar[str] = "units by index"
    of_gradient: ClassVar[str] = "gradient of units by index"

    comm: Communicator
    op: str
    names: torch.dtype = torch.int64

    def send_named(
        self, rows: Tensor, values: Tensor, send: Sequence[int], recv: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Values and the rows that they are for, in one message; differentiable in the values."""
        if not (values.requires_grad and torch.is_grad_enabled()):
            return self._named(rows, values, send, recv)
        got: list[Tensor] = []

        def do(values: Tensor) -> Tensor:
            named, given = self._named(rows, values, send, recv)
            got.append(named)
            return given

        values = with_gradient(
            values, do, lambda grad: self.send(grad, recv, send), why=self.of_gradient)
        return got[0], values

    def _named(
        self, rows: Tensor, values: Tensor, send: Sequence[int], recv: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Each row's bytes lie before those of its values."""
        sent = (rows.to(self.names), values.detach())
        parts = [
            as_bytes(one).view(len(rows), math.prod(one.shape[1:]) * one.element_size())
            for one in sent]
        got = self.all_to_all(torch.cat(parts, 1), send, recv)
        named, given = [
            as_bytes(part.clone()).view(one.dtype).view(len(got), *one.shape[1:])
            for part, one in zip(got.split([part.shape[1] for part in parts], 1), sent)]
        return named.to(torch.int64), given


class Units:
    """The units of a tensor, as indices into `dims` of its layout name them.

    Indices into `global_dims` (all of them, if None) are global, others count in this rank's block.
    `axes` shard these dims, `comm` is the group over them, in the order of the shards. `lengths`
    are those of the block in `dims`.
    """

    __slots__ = ("axes", "comm", "lengths", "tables")

    def __init__(
        self, mesh: BoundMesh, layout: Layout, dims: Sequence[int],
        global_dims: Sequence[int] | None = None,
    ) -> None:
        assert mesh.here is not None
        cut = dims if global_dims is None else global_dims
        self.axes = tuple([axis for dim in dims if dim in cut for axis in layout.dims[dim]])
        self.comm = mesh.line(self.axes)
        local = layout.local_shape_at(mesh.here)
        self.lengths = tuple(local[dim] for dim in dims)
        self.tables: list[tuple[Tensor, Tensor] | None] = []
        for dim in dims:
            if dim not in cut or not layout.dims[dim]:
                self.tables.append(None)
                continue
            cuts = torch.tensor(layout.cuts_of(dim), device=mesh.device)
            self.tables.append((cuts, cuts.diff()))

    @property
    def names(self) -> torch.dtype:
        """The narrowest dtype that can name a row of any block in the group."""
        most = [
            length if table is None else int(table[1].max())
            for length, table in zip(self.lengths, self.tables)
        ]
        return torch.int32 if math.prod(most) <= 2**31 else torch.int64

    def locate(self, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Who holds each unit (a position in the group), and which row of its block it is."""
        holder, row = torch.zeros_like(indices[0]), torch.zeros_like(indices[0])
        for index, table, length in zip(indices, self.tables, self.lengths):
            if table is None:
                row = row * length + index
                continue
            cuts, lengths = table
            shard = torch.searchsorted(cuts, index.contiguous(), right=True) - 1
            holder = holder * len(lengths) + shard
            row = row * lengths[shard] + index - cuts[shard]
        return holder, row

    def split(self, row: Tensor) -> tuple[Tensor, ...]:
        """Rows of this rank's block as one index per dim."""
        return tuple(apart(row, [max(length, 1) for length in self.lengths]))


def out_of_bounds(op: str) -> type[Exception]:
    """The exception that torch raises for this op if an index is out of bounds."""
    base = op.split(".")[1]
    told = ("gather", "scatter", "index_add", "max_unpool")
    return RuntimeError if base.startswith(told) else IndexError


def outside(indices: Sequence[Tensor], shape: Sequence[int | None], wraps: bool) -> str:
    """torch's message for an index out of bounds, or "". Indices on an accelerator are not read."""
    for dim, (index, length) in enumerate(zip(indices, shape)):
        if length is not None and index.device.type == "cpu" and index.numel():
            low, high = int(index.min()), int(index.max())
            if low < (-length if wraps else 0) or high >= length:
                wrong = high if high >= length else low
                return f"index {wrong} is out of bounds for dimension {dim} with size {length}"
    return ""


def first_told(comm: Communicator, wrong: str) -> str:
    """The error text of the first rank that has one, with the rank; "" if there is none. A
    collective: all ranks of the group call it, once they know that some may have a fault."""
    told = zip(comm.ranks, comm.exchange(wrong))
    return next((f"{text} (on rank {rank})" for rank, text in told if text), "")


def from_front(
    indices: Sequence[Tensor], shape: Sequence[int | None], device: torch.device
) -> list[Tensor]:
    """The indices as int64 on this device, negative ones counted from the end."""
    out = []
    for index, length in zip(indices, shape):
        index = index.to(device, torch.int64)
        out.append(index if length is None else torch.where(index < 0, index + length, index))
    return out


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of units between ranks.

    Args:
        exchange: carries them.
        rows: the requested rows of this rank's block, by requesting rank; where values are
            delivered of which only their rank knows the places, the rows that it names.
        serves: the number of rows for each requesting rank.
        gets: the number of units from each holder, in the order of holders.
        order: for delivered values, which of this rank's values goes at each position of that
            order; for fetched units, where in it each of this rank's positions finds its unit,
            which is sent only once.
        moves: whether a unit goes to another rank, as the whole group knows.
        names: whether `rows` are those that this rank names.
    """

    exchange: RowExchange
    rows: Tensor
    serves: Sequence[int]
    gets: Sequence[int]
    order: Tensor
    moves: bool = True
    names: bool = False

    def fetch(self, block: Tensor) -> Tensor:
        """The units that this rank names, in its order; `block` holds its own, one per row."""
        got = block.index_select(0, self.rows)
        if self.moves:
            got = self.exchange.send(got, self.serves, self.gets)
        return got.index_select(0, self.order)

    def deliver(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of this rank's block that are named, and all ranks' values for them; `values`
        are in this rank's own order."""
        values = values.index_select(0, self.order)
        if self.names:
            return self.exchange.send_named(self.rows, values, self.gets, self.serves)
        if self.moves:
            values = self.exchange.send(values, self.gets, self.serves)
        return self.rows, values


_STRIDE = 2**40
"""More rows than any block has."""


def _sorted(rank: Tensor, row: Tensor, once: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Units by rank (and row), each named only `once` if so; and `order` of Routes."""
    if not once:
        order = rank.argsort(stable=True)
        return rank, row[order], order
    keys, order = torch.unique(rank * _STRIDE + row, return_inverse=True)
    return keys // _STRIDE, keys % _STRIDE, order


def plan_together(
    exchange: RowExchange, holder: Tensor, row: Tensor, asker: Tensor, once: bool
) -> Routes:
    """Routes where the whole group knows the indices. `asker` says which rank names each of them.

    `once`: to fetch units, each of which is sent once however often it is named; else to deliver.
    """
    size, me = exchange.comm.size, exchange.comm.index
    holder, row, asker = holder.reshape(-1), row.reshape(-1), asker.reshape(-1)
    mine, served = asker == me, holder == me
    named, _, order = _sorted(holder[mine], row[mine], once)
    asked, rows, _ = _sorted(asker[served], row[served], once)
    moving = (holder != asker).long().bincount(minlength=2)
    serves, gets, [_, away] = _counts(
        asked.bincount(minlength=size), named.bincount(minlength=size), moving)
    return Routes(exchange, rows, serves, gets, order, away != 0)


def plan_by_request(
    exchange: RowExchange, holder: Tensor, row: Tensor, wrong: str, once: bool
) -> Routes:
    """Routes where each rank knows only the indices that it names, and requests them; `once` as
    in `plan_together`.

    Raises:
        IndexError: (or what torch raises for the op) on all ranks of the group, if one of them
            reports that its indices are `wrong`. Only then do they exchange which.
    """
    size = exchange.comm.size
    named, row, order = _sorted(holder.reshape(-1), row.reshape(-1), once)
    one = [1] * size
    wanted = named.bincount(minlength=size) if not wrong else named.new_full((size,), -1)
    serves, gets = _counts(exchange.all_to_all(wanted, one, one), wanted)
    if -1 in serves:
        raise out_of_bounds(exchange.op)(first_told(exchange.comm, wrong))
    if not once:
        return Routes(exchange, row, serves, gets, order, names=True)
    rows = exchange.all_to_all(row.to(exchange.names), gets, serves).to(torch.int64)
    return Routes(exchange, rows, serves, gets, order)


def _counts(*counts: Tensor) -> list[list[int]]:
    """Counts read together, so that an accelerator is waited for only once."""
    read = iter(torch.cat(counts).tolist())
    return [[next(read) for _ in range(one.numel())] for one in counts]
