"""Writes by index: index_put, index_add, index_copy, index_fill, index_reduce, put, the scatters.

Rules cover writes in whole dims; writes in sharded dims are in `indexing.write`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local, received
from weft.ops.indexing.index_layouts import IndexLayout
from weft.ops.indexing.rows import (
    element_layouts,
    matching,
    named_dims,
    reads_nothing,
    unraveled,
)
from weft.ops.indexing.write import Write, Writer, adding_axes, as_partial
from weft.ops.places import counted
from weft.ops.scatter_reductions import index_reduce, joins, scatter_reduce, scatter_text
from weft.rules import Call, Decision, op, page, rule

__all__ = ["PAGE", "check_values"]


def _index_put(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """`x[i, :, j] = values` by integers; values are added if it accumulates."""
    x, values = layouts[0], layouts[-1]
    indices = list(call.args[1])
    named = [index for index in indices if index is not None]
    if not named or any(index.dtype == "uint8" for index in named):
        return None
    masks = [index for index in named if index.dtype == "bool"]
    if masks:
        return Composite(_at_masks) if all(mask.shape for mask in masks) else None
    if reads_nothing(call, x, indices):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in named))
    dims, first = named_dims(indices)
    kept = [length for dim, length in enumerate(x.shape) if dim not in dims]
    check_values(values.shape, (*kept[:first], *shape, *kept[first:]))
    accumulate = bool(call.args[3])
    adds = accumulate and call.tensors[0].dtype != "bool"

    def write(block: Tensor, rows: tuple[Tensor, ...], new: Any, in_place: bool) -> Tensor:
        put = block.index_put_ if in_place else block.index_put
        return put(rows, new, accumulate)

    return Write(
        call.op, x, dims, layouts[1:-1], values, tuple(shape), first, True, adds, True, write,
    ).algorithm()


def check_values(values: Sequence[int], result: Sequence[int]) -> None:
    """Raise torch's error of values that do not broadcast to what indices name."""
    behind = result[max(len(result) - len(values), 0):]
    if len(values) > len(result) or any(one not in (1, due) for one, due in zip(values, behind)):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values)} cannot be broadcast to "
            f"indexing result of shape {list(result)}")


def _at_masks(
    x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Masks are the places of what is true in them, whose number is read."""
    places: list[Any] = []
    for one in indices:
        if one is not None and one.dtype is torch.bool:
            places += one.nonzero(as_tuple=True)
        else:
            places.append(one)
    return torch.ops.aten.index_put.default(x, places, values, accumulate)


def _index_write(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """`index_add`, `index_copy`, `index_fill`, `index_reduce` in a sharded dim."""
    x, index = layouts[:2]
    if "index_reduce" in call.op:
        _check_reduce(call)
    if not x.ndim or index.ndim != 1:
        return None
    dim = call.args[1] % x.ndim
    if reads_nothing(call, x, [*[None] * dim, index]):
        return None
    values = layouts[2] if len(layouts) > 2 else None
    base = call.base
    fills = base == "index_fill"
    if fills and values is not None and any(wants_grad[2:]):
        return Composite(_filled)
    if base == "index_reduce" and x.ndim > 1 and call.tensors[0].dtype in ("bfloat16", "float16"):
        return Composite(_scattered)
    adds = base == "index_add" and call.tensors[0].dtype != "bool"
    if not (fills or (values is not None and values.ndim == x.ndim)):
        return None
    if not x.dims[dim] and not (
        adds and values is not None and adding_axes(x, values, values.dims[dim])
    ):
        return None
    more = {name: value for name, value in call.kwargs.items() if name != "out"}
    is_bound = fills and values is None
    rest = call.args[3 if is_bound else 4 :]

    def write(block: Tensor, rows: tuple[Tensor, ...], new: Any, in_place: bool) -> Tensor:
        method = getattr(block, f"{base}_" if in_place else base)
        return method(0, rows[0], *(() if is_bound else (new,)), *rest, **more)

    return Write(
        call.op, x, (dim,), [index], values, index.shape, dim, fills, adds, False, write,
    ).algorithm()


def _check_reduce(call: Call) -> None:
    """Raise torch's errors of index_reduce, which its meta kernel does not, on all ranks."""
    x, index, source = call.tensors
    if index.dtype not in ("int32", "int64"):
        raise RuntimeError("index_reduce_(): Expected dtype int32/int64 for index but got: "
                           f"{index.dtype}")
    dim, num = call.args[1] % max(len(x.shape), 1), math.prod(index.shape)
    given = source.shape[dim] if source.shape else 1
    if given != num:
        raise RuntimeError(f"index_reduce_(): Number of indices ({num}) should be equal to "
                           f"source.size(dim): ({given}), for dim: {dim}")


def _one_filled(call: Call, wants_grad: Sequence[bool]) -> str | None:
    """`index_fill` at one place, by an index without dims."""
    more = "," * (len(call.tensors) - 1)
    return None if call.tensors[1].shape else f"... s!{more} -> ... s"


def _filled(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """index_fill by a tensor with a gradient, for which torch has no formula on meta tensors."""
    hit = torch.zeros_like(x, dtype=torch.bool).index_fill(dim, index, True)
    return torch.where(hit, value.to(x.dtype), x)


def _scattered(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """index_reduce in half precision, where torch's kernel fails on blocks of a single column."""
    places = index.view(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand_as(source)
    return x.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Values at positions in the flattened tensor, by `index_put`."""
    full = x if x.dim() and 0 not in x.shape else x.reshape(-1)
    places = unraveled(index.reshape(-1), full.shape)
    return full.index_put(places, source.reshape(-1), accumulate).reshape(x.shape)


def _scatter(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`scatter`, `scatter_add`, `scatter_reduce` along a sharded dim, of a tensor or a number."""
    x, index, *sources = layouts
    if not x.ndim or any(one.ndim != x.ndim for one in layouts):
        return None
    dim = call.args[1] % x.ndim
    adds = call.op == "aten.scatter_add.default" and call.tensors[0].dtype != "bool"
    source = sources[0] if sources else None
    beside: set[int] = set()
    if adds and source is not None:
        beside = adding_axes(x, source, source.dims[dim])
    served = x.dims[dim] or (beside and source and source.shape[dim] == index.shape[dim])
    others = [at for at in range(x.ndim) if at != dim]
    if adds and _names_rows(call, others):
        return Composite(_added_rows)
    if _falls_short(layouts, others if served else range(x.ndim), others):
        return Composite(_within(call.op, others))
    if not served:
        return None
    if x.is_partial and not (adds and set(x.partial) <= {None, "sum"}):
        x = x.without_partial()
    delivers = source is not None and source.shape[dim] == index.shape[dim] and not (
        {*x.dims[dim], *beside}.isdisjoint(source.dims[dim])
    )
    x, places = element_layouts(
        x, index.shape, dim, [source] if delivers and source is not None else [], layouts[1:],
        beside,
    )
    if not delivers:
        own = places.shared.gathered((dim,))
        places = IndexLayout(own, own, None)
    lent = x.without_partial(places.parted.sharded_axes).partial
    x = as_partial(x, places.parted)
    operands = [x, places.shared.fitted(index.shape)]
    if source is not None:
        operands.append(places.parted.fitted(source.shape).replace(partial=lent))
    if not x.dims[dim]:
        return _added_here(operands, dim)
    write = Write(
        call.op, x, tuple(range(x.ndim)), [index], source, index.shape, 0, False, adds, False,
        _element_writer(call), dim)
    local = write.local(
        operands, places.parted, places if delivers else None, "reduce" not in call.op)
    if not delivers and _moves_less(call, layouts, wants_grad, local):
        return None
    return local


def _moves_less(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool], local: Local
) -> bool:
    """Whether the rule, by which the target may come to the ranks of the indices, takes fewer bytes
    than to bring indices and values to the target."""
    bound = _BESIDE.bind(call, wants_grad)
    if bound is None or local.decision.operands[1] == layouts[1]:
        return False
    elsewhere = propagate.decide(bound, call, layouts, wants_grad, 0)
    returns = [True, *wants_grad[1:]]
    return received(call, layouts, elsewhere, returns) < received(
        call, layouts, local.decision, returns)


def _added_here(operands: Sequence[Layout], dim: int) -> Local:
    """`scatter_add` along a dim that is whole in the target: each rank adds its own values by
    torch's kernel, which makes no places of elements."""
    def adding(method: Any) -> Callable[[BoundMesh], Callable[..., Tensor]]:
        return lambda mesh: lambda block, index, values: method(block, dim, index, values)

    return Local(Decision(tuple(operands), (operands[0],)), adding(Tensor.scatter_add), (),
                 adding(Tensor.scatter_add_))


def _names_rows(call: Call, others: Sequence[int]) -> bool:
    """Whether an index is the same for all elements of a row: it was expanded to the shape of the
    values, as sums over the edges of a graph are written."""
    x, index, *sources = call.tensors
    return bool(others and sources) and sources[0].shape == index.shape and all(
        at in index.expanded and x.shape[at] == index.shape[at] for at in others)


def _added_rows(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    for at in range(index.dim() - 1, -1, -1):
        if at != dim % index.dim():
            index = index.select(at, 0)
    return x.index_add(dim, index, source)


def _falls_short(layouts: Sequence[Layout], dims: Iterable[int], others: Sequence[int]) -> bool:
    """Whether an index is shorter than what it writes to or reads, along dims other than its own,
    and one of `dims` is sharded: elements do not correspond."""
    x, index, *sources = layouts
    return any(one.dims[at] for one in layouts for at in dims) and not any(
        one.is_partial for one in layouts
    ) and any(one.shape[at] != index.shape[at] for one in (x, *sources) for at in others)


def _within(name: str, others: Sequence[int]) -> Callable[..., Tensor]:
    """The write into the first elements of all dims but its own, as many as it has indices: along
    the others the target may be sharded."""
    function = attrgetter(name)(torch.ops)

    def written(x: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Tensor:
        values = [
            _first(one, index, range(index.dim())) if isinstance(one, Tensor) else one
            for one in rest]
        out = function(_first(x, index, others), dim, index, *values, **named)
        for count in range(len(others), 0, -1):
            around = _first(x, index, others[: count - 1])
            at = others[count - 1]
            out = _put_first(around, out, at, index.shape[at])
        return out

    return written


def _put_first(x: Tensor, first: Tensor, dim: int, length: int) -> Tensor:
    """torch's `slice_scatter` has no gradient of complex numbers."""
    if not x.is_complex():
        return torch.slice_scatter(x, first, dim, 0, length)
    x, first = torch.view_as_real(x.resolve_conj()), torch.view_as_real(first)
    return torch.view_as_complex(torch.slice_scatter(x, first, dim, 0, length))


def _first(x: Tensor, index: Tensor, dims: Iterable[int]) -> Tensor:
    for dim in dims:
        x = x.narrow(dim, 0, index.shape[dim])
    return x


_REDUCES = {"add": "sum", "multiply": "prod"}


def _element_writer(call: Call) -> Writer:
    """How elements are written: by one of scatter_reduce's reductions, or put."""
    number: Any = call.args[3] if ".value" in call.op else None
    reduce, own = _REDUCES.get(call.kwargs.get("reduce", "")), True
    if "scatter_reduce" in call.op:
        reduce, own = call.args[4], bool(call.kwargs.get("include_self", True))
    adds = call.op == "aten.scatter_add.default"

    def write(block: Tensor, rows: tuple[Tensor, ...], values: Any, in_place: bool) -> Tensor:
        values = block.new_full((), number) if values is None else values
        if reduce is None:
            put = block.index_put_ if in_place else block.index_put
            return put(rows, values, adds)
        places = counted(rows, block.shape)
        out = block.reshape(-1).scatter_reduce(
            0, places, values.expand(places.shape), reduce, include_self=own)
        return out.view(block.shape)

    return write


_OTHERS = matching(0)
_BESIDE = rule(_OTHERS)

PAGE = page(
    op("index_put", layouts=_index_put),
    op("index_add index_copy", rule("... s!, i!, ... i! -> ... s", along="dim", linear=[(0, 2)]),
       layouts=_index_write),
    op("index_fill",
       rule(_one_filled, "... s!, i! -> ... s", "... s!, i!, -> ... s", along="dim"),
       layouts=_index_write, floats_flow=True),
    op("index_reduce",
       rule("... s!, i~, ... i~ -> ... s", along="dim", serves=joins, by_size=True),
       rule("... s!, i!, ... i! -> ... s", along="dim"),
       kernel=index_reduce, layouts=_index_write),
    op("put", compose=_put),
    op("scatter.src scatter_add", rule(_OTHERS, linear=[(0, 2)]), layouts=_scatter),
    op("scatter.value", rule(_OTHERS, linear=[0], serves=lambda call: call.args[3] == 0),
       _BESIDE, layouts=_scatter),
    op("scatter_reduce", rule(scatter_text, by_size=True), kernel=scatter_reduce, layouts=_scatter),
    op("scatter.reduce scatter.value_reduce", _BESIDE, layouts=_scatter),
)
