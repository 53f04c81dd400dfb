"""Units of a cut tensor on their way between the ranks that hold them and those that name them.

Indices into dims that are cut name *units*: rows of a table, or single elements. Who holds a unit
follows from the layout (`Units.locate`), so only units travel, by one all-to-all. `fetch` brings
them from their holders, each once to whoever names it, however often; `deliver` brings values to
them, and each is the gradient of the other. Where all ranks of the group know all the indices
(`plan_together`), everybody works out what everybody asks for; where each knows its own
(`plan_by_request`), it asks: first how many, then which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.comm import BoundMesh, Communicator
from weft.core import Layout
from weft.transport import traffic

__all__ = [
    "Routes", "RowExchange", "Units", "from_front", "out_of_bounds", "outside", "plan_by_request",
    "plan_together",
]


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Sends rows between the ranks of a group.

    Args:
        op: whom they serve, for errors.
        names: the dtype in which units are asked for, the same on all ranks.
    """

    comm: Communicator
    op: str
    names: torch.dtype = torch.int64

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Rows of `x`, `send[i]` of them to each rank i; those received, in the order of ranks."""
        row = math.prod(x.shape[1:])
        if not traffic.STATE.on:
            return self._exchange(x, send, recv, row)
        nbytes = (sum(recv) - recv[self.comm.index]) * row * x.element_size()
        traffic.emit(_TEXT, tuple(map(str, self.comm.axes)), "all_to_all", nbytes)
        with traffic.moving(_TEXT):
            return self._exchange(x, send, recv, row)

    def _exchange(self, x: Tensor, send: Sequence[int], recv: Sequence[int], row: int) -> Tensor:
        with _DisableAutocast():
            got = self.comm.all_to_all(
                x.contiguous().view(-1), [count * row for count in send],
                [count * row for count in recv],
            )
        return got.view(sum(recv), *x.shape[1:])

    def send(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """`all_to_all`, differentiable to any order."""
        if x.requires_grad and torch.is_grad_enabled():
            return _Sent.apply(x, self, send, recv)  # type: ignore[return-value]
        return self.all_to_all(x, send, recv)


_TEXT = "units by index"


class _Sent(torch.autograd.Function):
    """Rows sent to other ranks; gradients are sent back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, rows: RowExchange, send: Sequence[int], recv: Sequence[int]
    ) -> Tensor:
        ctx.route = rows, recv, send
        ctx.note = traffic.note() if traffic.STATE.on else None
        return rows.all_to_all(x, send, recv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        rows, send, recv = ctx.route
        if not traffic.STATE.on:
            return rows.send(grad, send, recv), None, None, None
        with traffic.resume(ctx.note, "gradient of units by index"):
            return rows.send(grad, send, recv), None, None, None


class Units:
    """The units of a tensor, as indices into `dims` of its layout name them.

    Indices into `global_dims` (all of them, if it is None) are global, others count in my block.
    `axes` cut these dims, `comm` is the group over them; `lengths` are those of my block in `dims`.
    """

    __slots__ = ("axes", "comm", "lengths", "tables")

    def __init__(
        self, mesh: BoundMesh, layout: Layout, dims: Sequence[int],
        global_dims: Sequence[int] | None = None,
    ) -> None:
        assert mesh.here is not None
        cut = dims if global_dims is None else global_dims
        self.axes = axes = tuple(sorted(axis for dim in cut for axis in layout.dims[dim]))
        self.comm = mesh.comm(axes)
        local = layout.local_shape_at(mesh.here)
        self.lengths = tuple(local[dim] for dim in dims)
        sizes = layout.mesh.axis_sizes
        self.tables: list[tuple[Tensor, Tensor, Tensor] | None] = []
        for dim in dims:
            if dim not in cut or not layout.dims[dim]:
                self.tables.append(None)
                continue
            places = [0]  # in the group, shard by shard: its ranks stand in mesh order
            for axis in layout.dims[dim]:
                step = math.prod(sizes[other] for other in axes if other > axis)
                places = [place + step * at for place in places for at in range(sizes[axis])]
            cuts = torch.tensor(layout.cuts_of(dim), device=mesh.device)
            self.tables.append((cuts, torch.tensor(places, device=mesh.device), cuts.diff()))

    @property
    def names(self) -> torch.dtype:
        """The narrowest dtype that names a row of any block in the group."""
        most = [
            length if table is None else int(table[2].max())
            for length, table in zip(self.lengths, self.tables)
        ]
        return torch.int32 if math.prod(most) <= 2**31 else torch.int64

    def locate(self, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Who holds each unit (a place in the group), and which row of that rank's block it is."""
        holder, row = torch.zeros_like(indices[0]), torch.zeros_like(indices[0])
        for index, table, length in zip(indices, self.tables, self.lengths):
            if table is None:
                row = row * length + index
                continue
            cuts, places, lengths = table
            shard = torch.searchsorted(cuts, index.contiguous(), right=True) - 1
            holder = holder + places[shard]
            row = row * lengths[shard] + index - cuts[shard]
        return holder, row

    def split(self, row: Tensor) -> tuple[Tensor, ...]:
        """Rows of my block as one index for each dim."""
        found = []
        for length in reversed(self.lengths[1:]):
            found.append(row % max(length, 1))
            row = row // max(length, 1)
        return (row, *reversed(found))


def out_of_bounds(op: str) -> type[Exception]:
    """What torch raises of an op whose index lies outside."""
    base = op.split(".")[1]
    return RuntimeError if base.startswith(("gather", "scatter", "index_add")) else IndexError


def outside(indices: Sequence[Tensor], shape: Sequence[int | None], wraps: bool) -> str:
    """torch's words for an index that lies outside, or "". An accelerator's are not looked at."""
    for dim, (index, length) in enumerate(zip(indices, shape)):
        if length is not None and index.device.type == "cpu" and index.numel():
            low, high = int(index.min()), int(index.max())
            if low < (-length if wraps else 0) or high >= length:
                wrong = high if high >= length else low
                return f"index {wrong} is out of bounds for dimension {dim} with size {length}"
    return ""


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
    """Which units go where.

    Args:
        exchange: who carries them.
        rows: the rows of my block that are asked for, by asker. serves: how many of each.
        gets: how many units from each holder, in the order of holders.
        order: of what is delivered, which of my values goes at each place of that order; of what is
            fetched, where in it each of my places finds its unit, which travels once for all.
    """

    exchange: RowExchange
    rows: Tensor
    serves: Sequence[int]
    gets: Sequence[int]
    order: Tensor

    def fetch(self, block: Tensor) -> Tensor:
        """The units that I name, in my order; `block` holds mine, one in each row."""
        got = self.exchange.send(block.index_select(0, self.rows), self.serves, self.gets)
        return got.index_select(0, self.order)

    def deliver(self, values: Tensor) -> Tensor:
        """What all ranks have for my units, in the order of `rows`; `values` are in my order."""
        return self.exchange.send(values.index_select(0, self.order), self.gets, self.serves)


_STRIDE = 2**40
"""More rows than a block has."""


def _sorted(rank: Tensor, row: Tensor, once: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Units by rank (and row), each named `once`, if so; and Routes' `order` of them."""
    if not once:
        order = rank.argsort(stable=True)
        return rank, row[order], order
    keys, order = torch.unique(rank * _STRIDE + row, return_inverse=True)
    return keys // _STRIDE, keys % _STRIDE, order


def plan_together(
    exchange: RowExchange, holder: Tensor, row: Tensor, asker: Tensor, once: bool = False
) -> Routes:
    """Routes where the whole group knows the indices. `asker` says who names each of them.

    `once`: to fetch units, of which each comes once however often it is named; else to deliver.
    """
    size, me = exchange.comm.size, exchange.comm.index
    holder, row, asker = holder.reshape(-1), row.reshape(-1), asker.reshape(-1)
    mine, served = asker == me, holder == me
    named, _, order = _sorted(holder[mine], row[mine], once)
    asked, rows, _ = _sorted(asker[served], row[served], once)
    serves, gets = _counts(asked.bincount(minlength=size), named.bincount(minlength=size))
    return Routes(exchange, rows, serves, gets, order)


def plan_by_request(
    exchange: RowExchange, holder: Tensor, row: Tensor, wrong: str = "", once: bool = False
) -> Routes:
    """Routes where each rank knows the indices that it names, and asks for them; `once` as above.

    Raises:
        IndexError: (or what torch raises of the op) on all ranks of the group, where one says that
            its indices are `wrong`.
    """
    size = exchange.comm.size
    named, row, order = _sorted(holder.reshape(-1), row.reshape(-1), once)
    one = [1] * size
    wanted = named.bincount(minlength=size) if not wrong else named.new_full((size,), -1)
    serves, gets = _counts(exchange.all_to_all(wanted, one, one), wanted)
    if -1 in serves:
        raise out_of_bounds(exchange.op)(wrong or "index out of bounds on another rank")
    rows = exchange.all_to_all(row.to(exchange.names), gets, serves).to(torch.int64)
    return Routes(exchange, rows, serves, gets, order)


def _counts(one: Tensor, other: Tensor) -> list[list[int]]:
    """Two counts read at once: an accelerator is waited for once."""
    return torch.stack((one, other)).tolist()
