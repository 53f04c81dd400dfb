"""Slicing, splitting, joining, padding and indexing.

Where one operand's cuts decide all, the functions here give the decision itself: a slice of a
sharded dim, its pieces and its padding stay where they are, with ragged cuts, and every
coordinate calls the op with numbers of its own. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from weft.core import Layout
from weft.rules.factors import IDENTITY, broadcast, dims, names, one_dim
from weft.rules.notation import Call, Decision, FactorDims, Rule

__all__ = ["DECISIONS", "RULES", "diagonal_decision", "slice_decision"]


# One dim of one operand is cut anew; the others, and terms of every kind, stay.


def _recut(layout: Layout, dim: int, length: int, cuts: tuple[int, ...] | None) -> Layout:
    """The layout of a result that differs from its source in the length and cuts of one dim."""
    shape = (*layout.shape[:dim], length, *layout.shape[dim + 1 :])
    new = (*layout.cuts[:dim], cuts, *layout.cuts[dim + 1 :])
    return Layout.make(layout.mesh, shape, layout.dims, new, layout.partial)


def slice_decision(call: Call, layouts: Sequence[Layout]) -> Decision:
    """`slice(x, dim, start, stop, step)`: each shard keeps what lies between its borders."""
    source = call.tensors[0]
    dim = one_dim(call.arg(1, "dim", 0), len(source.shape))
    bounds = slice(call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1))
    start, _, step = bounds.indices(source.shape[dim])
    return _sliced(call, layouts[0], dim, start, step)


def _narrow(call: Call, layouts: Sequence[Layout]) -> Decision | None:
    """`narrow(x, dim, start, length)`; a start that is a tensor is known only at run time."""
    source = call.tensors[0]
    dim = one_dim(call.arg(1, "dim"), len(source.shape))
    start = call.arg(2, "start")
    if not isinstance(start, int):
        return None
    return _sliced(call, layouts[0], dim, start + source.shape[dim] if start < 0 else start, 1)


def _sliced(call: Call, layout: Layout, dim: int, start: int, step: int) -> Decision:
    count = call.results[0].shape[dim]
    if not layout.dims[dim]:
        return Decision((layout,), (_recut(layout, dim, count, None),))
    old = layout.cuts_of(dim)
    # How many kept elements lie before each border.
    new = tuple(min(max(-(-(cut - start) // step), 0), count) for cut in old)
    result = _recut(layout, dim, count, new)
    source = call.tensors[0]

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = layout.shard_index(dim, coordinate)
        first = start + new[index] * step - old[index]
        kept = new[index + 1] - new[index]
        if kept == 0:
            return (source, dim, 0, 0, 1), {}
        return (source, dim, first, first + (kept - 1) * step + 1, step), {}

    return Decision((layout,), (result,), args, "aten.slice.Tensor")


def _select(call: Call, layouts: Sequence[Layout]) -> Decision | Rule:
    """`select(x, dim, i)`: free on a dim that is whole. A sharded one comes to whole; `weft.ops`
    knows better (slice it to length 1, where it lies, and gather that)."""
    return _without(call, layouts[0], one_dim(call.arg(1, "dim", 0), len(call.tensors[0].shape)))


def _unbind(call: Call, layouts: Sequence[Layout]) -> Decision | Rule:
    return _without(call, layouts[0], one_dim(call.arg(1, "dim", 0), len(call.tensors[0].shape)))


def _without(call: Call, layout: Layout, dim: int) -> Decision | Rule:
    if layout.dims[dim]:
        kinds, factors = dims(len(layout.shape)), names(len(layout.shape))
        result = kinds[:dim] + kinds[dim + 1 :]
        return Rule((kinds,), (result,) * len(call.results), dict(zip(factors, layout.shape)),
                    whole=frozenset({factors[dim]}), linear=IDENTITY, moves=True)
    result = Layout.make(
        layout.mesh, layout.shape[:dim] + layout.shape[dim + 1 :],
        layout.dims[:dim] + layout.dims[dim + 1 :], layout.cuts[:dim] + layout.cuts[dim + 1 :],
        layout.partial,
    )
    return Decision((layout,), (result,) * len(call.results))


_SPLIT_DIM = {"hsplit": 1, "vsplit": 0, "dsplit": 2}


def _borders(indices: Any, length: int) -> list[int]:
    """Where the pieces of `tensor_split` but the first begin. They need not follow one another:
    where an index is less than the one before, pieces overlap."""
    return [min(max(at + length if at < 0 else at, 0), length) for at in indices]


def _split(call: Call, layouts: Sequence[Layout]) -> Decision:
    """`split`, `split_with_sizes`, `chunk`, `tensor_split` and its kin: pieces follow one
    another."""
    layout = layouts[0]
    source = call.tensors[0]
    named = _SPLIT_DIM.get(call.op.split(".")[1])
    dim = (
        one_dim(call.arg(2, "dim", 0), len(source.shape)) if named is None
        else min(named, len(source.shape) - 1)
    )
    lengths = [result.shape[dim] for result in call.results]
    if not layout.dims[dim]:
        return Decision((layout,), tuple(_recut(layout, dim, size, None) for size in lengths))
    old = layout.cuts_of(dim)
    # To autograd pieces of `tensor_split` are views of their own, those of `split` are not.
    apart = named is not None or call.op.startswith("aten.tensor_split")
    given = call.arg(1, "indices", None)
    borders = (
        _borders(given, source.shape[dim]) if apart and isinstance(given, (list, tuple))
        else list(accumulate(lengths))[:-1]
    )
    pieces = tuple(
        _recut(layout, dim, size, tuple(min(max(cut - start, 0), size) for cut in old))
        for start, size in zip([0, *borders], lengths)
    )

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = layout.shard_index(dim, coordinate)
        first, end = old[index : index + 2]
        inside = [min(max(border, first), end) - first for border in borders]
        if apart:
            return (source, inside, dim), {}
        sizes = [stop - start for start, stop in pairwise([0, *inside, end - first])]
        return (source, sizes, dim), {}

    op = "aten.tensor_split.indices" if apart else "aten.split_with_sizes.default"
    return Decision((layout,), pieces, args, op)


def diagonal_decision(call: Call, layouts: Sequence[Layout]) -> Decision:
    """`diagonal(x, offset, dim1, dim2)`: it shifts by the shard's place. Along it rows and columns
    grow, so the pieces of blocks follow one another in the order of rows, then columns."""
    layout, source = layouts[0], call.tensors[0]
    ndim = len(source.shape)
    offset = call.arg(1, "offset", 0)
    one = one_dim(call.arg(2, "dim1", 0), ndim)
    other = one_dim(call.arg(3, "dim2", 1), ndim)
    kept = [dim for dim in range(ndim) if dim not in (one, other)]
    count = call.results[0].shape[-1]
    axes = layout.dims[one] + layout.dims[other]
    cuts = [0]
    for row in layout.cuts_of(one)[1:]:
        for column in layout.cuts_of(other)[1:]:
            stop = min(row - max(-offset, 0), column - max(offset, 0), count)
            cuts.append(max(cuts[-1], stop))
    result = Layout.make(
        layout.mesh, call.results[0].shape, [*(layout.dims[dim] for dim in kept), axes],
        [*(layout.cuts[dim] for dim in kept), tuple(cuts) if axes else None], layout.partial,
    )
    if not axes:
        return Decision((layout,), (result,))
    shift = _within(offset, source.shape[one], source.shape[other])

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        box = layout.box_at(coordinate)
        return (source, shift + box[one][0] - box[other][0], one, other), {}

    return Decision((layout,), (result,), args)


def _within(diagonal: int, rows: int, columns: int) -> int:
    """The diagonal of that number, or one outside as well: a shard's place fits into 64 bits."""
    return max(-rows, min(diagonal, columns))


def _pad(call: Call, layouts: Sequence[Layout]) -> Decision | Rule:
    """`constant_pad_nd(x, pad, value)`: the first shard pads in front, the last one behind."""
    if call.op.startswith("aten.pad.") and call.arg(2, "mode", "constant") != "constant":
        return _bordered(call)
    value = call.arg(3 if call.op.startswith("aten.pad.") else 2, "value", 0) or 0
    layout, source = layouts[0], call.tensors[0]
    if value != 0 and layout.is_partial:
        layout = layout.replace(partial=(None,) * layout.mesh.ndim)
    ndim, shape = len(source.shape), call.results[0].shape
    pad = list(call.arg(1, "pad"))
    before = [0] * ndim
    before[ndim - len(pad) // 2 :] = pad[::2][::-1]
    cuts: list[tuple[int, ...] | None] = list(layout.cuts)
    padded = [dim for dim in range(ndim) if layout.dims[dim] and (
        before[dim] or shape[dim] != layout.shape[dim]
    )]
    for dim in padded:
        moved = [min(max(cut + before[dim], 0), shape[dim]) for cut in layout.cuts_of(dim)]
        cuts[dim] = (0, *moved[1:-1], shape[dim])
    result = Layout.make(layout.mesh, shape, layout.dims, cuts, layout.partial)
    if not padded:  # cuts that stay say nothing: what one end loses the other may gain
        return Decision((layout,), (result,))

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        local: list[int] = []
        for dim, (old, new) in enumerate(zip(layout.box_at(coordinate), result.box_at(coordinate))):
            # The shard's place in the padded dim, against the box of the result. A shard that
            # is cropped away altogether is cropped from the front, then padded behind.
            start, stop = old[0] + before[dim], old[1] + before[dim]
            gone = min(stop, new[1]) <= max(start, new[0])
            local[:0] = (start - stop, new[1] - new[0]) if gone else (start - new[0], new[1] - stop)
        return (source, local, value), {}

    return Decision((layout,), (result,), args, "aten.constant_pad_nd.default")


def _bordered(call: Call) -> Rule:
    """`pad` with what stands in the tensor: padded dims are whole."""
    source, result, pad = call.tensors[0].shape, call.results[0].shape, call.arg(1, "pad")
    kinds, factors = dims(len(source)), names(len(source))
    # A dim may keep its length: what one end loses the other gains.
    padded = {len(source) - 1 - at // 2 for at, width in enumerate(pad) if width}
    new = {dim: f"new{dim}" for dim in padded}
    sizes = dict(zip(factors, source)) | {new[dim]: result[dim] for dim in padded}
    out = tuple((new[dim],) if dim in new else kinds[dim] for dim in range(len(source)))
    whole = frozenset((*new.values(), *(factors[dim] for dim in padded)))
    # Of a batch, if there is one, torch takes nothing as well.
    several = len(pad) // 2 == len(source) - 2
    return Rule((kinds,), (out,), sizes, whole=whole, linear=IDENTITY, moves=True,
                nonempty=frozenset(factors[1 if several else 0 :]) - whole)


def _triangle(call: Call, layouts: Sequence[Layout]) -> Decision:
    """`tril`, `triu`: the diagonal shifts by the shard's place. Zero terms reduce to zero in
    every kind, so partial passes."""
    layout, source = layouts[0], call.tensors[0]
    if not layout.dims[-1] and not layout.dims[-2]:
        return Decision((layout,), (layout,))
    diagonal = _within(call.arg(1, "diagonal", 0), *source.shape[-2:])

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        *_, rows, columns = layout.box_at(coordinate)
        return (source, diagonal + rows[0] - columns[0]), {}

    return Decision((layout,), (layout,), args)


# Joining, and indexing with tensors, are rules.


def _cat(call: Call) -> Rule:
    """The operands' dims are stretches of the result's, side by side."""
    result = call.results[0].shape
    tensors = call.tensors
    ndim = len(result)
    dim = one_dim(call.arg(1, "dim", 0), ndim)
    kinds, factors = dims(ndim), names(ndim)
    # An operand of shape (0,) may stand among others of any shape and adds nothing.
    operands: list[FactorDims] = [
        kinds if len(tensor.shape) == ndim else (("nothing",),) for tensor in tensors
    ]
    lengths = [tensor.shape[dim] if len(tensor.shape) == ndim else 0 for tensor in tensors]
    sizes = dict(zip(factors, result), nothing=0)
    same = all(tensor.dtype == call.results[0].dtype for tensor in tensors)
    return Rule(
        tuple(operands), (kinds,), sizes, whole=frozenset({"nothing"}),
        linear=(tuple(range(len(tensors))),) if same else (), moves=same,
        offsets={factors[dim]: tuple([0, *accumulate(lengths)][:-1])},
    )


def _unfold(call: Call) -> Rule:
    """`unfold(x, dim, size, step)`: windows of a dim that is whole."""
    source, result = call.tensors[0].shape, call.results[0].shape
    ndim = len(source)
    dim = one_dim(call.arg(1, "dimension"), ndim)
    kinds, factors = dims(ndim), names(ndim)
    sizes = dict(zip(factors, source), windows=result[dim] if ndim else 1, inside=result[-1])
    windows = (("windows",),) if ndim else ()  # of a tensor without dims, the inside alone
    return Rule(
        (kinds,), ((*kinds[:dim], *windows, *kinds[dim + 1 :], ("inside",)),), sizes,
        whole=frozenset({*factors[dim : dim + 1], "windows", "inside"}), linear=IDENTITY,
        moves=True,
    )


def _stack(call: Call) -> Rule:
    result = call.results[0].shape
    dim = one_dim(call.arg(1, "dim", 0), len(result))
    kinds, factors = dims(len(result) - 1), names(len(result) - 1)
    tensors = call.tensors
    same = all(tensor.dtype == call.results[0].dtype for tensor in tensors)
    return Rule(
        (kinds,) * len(tensors), ((*kinds[:dim], ("new",), *kinds[dim:]),),
        dict(zip(factors, tensors[0].shape), new=len(tensors)),
        linear=(tuple(range(len(tensors))),) if same else (), moves=same,
    )


def _index_select(call: Call) -> Rule:
    """`index_select(x, dim, index)`: the indexed dim whole, the places pass."""
    source, index = call.tensors
    ndim = len(source.shape)
    dim = one_dim(call.arg(1, "dim"), ndim)
    kinds, factors = dims(ndim), names(ndim)
    place = (("i",),) if index.shape else ()
    out = (*kinds[:dim], ("i",), *kinds[dim + 1 :]) if ndim else ()
    sizes = dict(zip(factors, source.shape), i=call.results[0].shape[dim] if ndim else 1)
    return Rule((kinds, place), (out,), sizes,
                whole=frozenset(factors[dim : dim + 1]), linear=IDENTITY, moves=True)


def _gather(call: Call) -> Rule | None:
    """`gather(x, dim, index)`: dims other than the read one pass; along it the index may be cut."""
    if len({len(tensor.shape) for tensor in call.tensors}) > 1:
        return None  # an index without elements may have any shape
    return _picked(call, 1, IDENTITY, moves=True)


def _scatter(call: Call) -> Rule | None:
    """`scatter`, `scatter_add`, `scatter_reduce`: linear in target and source unless it reduces."""
    if len({len(tensor.shape) for tensor in call.tensors}) > 1:
        return None  # an index without elements may have any shape
    reduces = "reduce" in call.kwargs or "scatter_reduce" in call.op
    if len(call.tensors) > 2:
        return _picked(call, 0, () if reduces else ((0, 2),))
    zero = call.arg(3, "value") == 0 and not reduces
    return _picked(call, 0, IDENTITY if zero else ())


def _picked(
    call: Call, shaped: int, linear: tuple[tuple[int, ...], ...], moves: bool = False
) -> Rule:
    """Tensors that correspond outside of one dim; the result has the dims of operand `shaped`.

    Where lengths differ (an index may be shorter) places do not correspond: whole.
    """
    shapes = [tensor.shape for tensor in call.tensors]
    ndim = len(call.results[0].shape)
    dim = one_dim(call.arg(1, "dim"), ndim)
    shared = {
        other for other in range(ndim)
        if other != dim and len({shape[other : other + 1] for shape in shapes}) == 1
    }
    sizes: dict[str, int] = {}
    named: list[FactorDims] = []
    for place, shape in enumerate(shapes):
        factors = [
            f"d{other}" if other in shared else f"{place}.{other}" for other in range(len(shape))
        ]
        sizes.update(zip(factors, shape))
        named.append(tuple((name,) for name in factors))
    free = f"{shaped}.{dim}" if shaped else None
    whole = frozenset(name for name in sizes if name[0] != "d" and name != free)
    return Rule(tuple(named), (named[shaped],), sizes, whole=whole, linear=linear, moves=moves)


def _index(call: Call) -> Rule | None:
    """`x[i, :, j]`: indexed dims whole; the dims of the indices broadcast and stand where the
    indices do, or in front where they are apart. A mask has a size that depends on the data."""
    source = call.tensors[0]
    indices = list(call.arg(1, "indices"))
    places = [place for place, index in enumerate(indices) if index is not None]
    if any(indices[place].dtype in ("bool", "uint8") for place in places):
        return None
    ndim, result = len(source.shape), call.results[0].shape
    kinds, factors = dims(ndim), names(ndim)
    kept = [dim for dim in range(ndim) if dim not in places]
    num_new = len(result) - len(kept)
    adjacent = places == list(range(places[0], places[0] + len(places)))
    first = places[0] if adjacent else 0
    new = tuple((f"i{dim}",) for dim in range(num_new))
    new_shape = result[first : first + num_new]
    rest = tuple(kinds[dim] for dim in kept)
    sizes = dict(zip(factors, source.shape))
    sizes.update((f"i{dim}", length) for dim, length in enumerate(new_shape))
    return Rule(
        (kinds, *(broadcast(indices[place].shape, new_shape, new) for place in places)),
        (rest[:first] + new + rest[first:],), sizes,
        whole=frozenset(factors[place] for place in places), linear=IDENTITY, moves=True,
    )


def _index_written(call: Call) -> Rule:
    """`index_add(x, dim, index, source)`, `index_copy`: linear in target and source together."""
    source = call.tensors[0]
    ndim = len(source.shape)
    dim = one_dim(call.arg(1, "dim"), ndim)
    kinds, factors = dims(ndim), names(ndim)
    written = call.tensors[2:]
    index = (("i",),) * len(call.tensors[1].shape)
    operands = [kinds, index]
    for tensor in written:
        along = (("i",),) if len(tensor.shape) == ndim and ndim else ()
        operands.append((*kinds[:dim], *along, *kinds[dim + 1 :]) if tensor.shape else ())
    sizes = dict(zip(factors, source.shape), i=call.tensors[1].shape[0] if index else 1)
    linear = ((0, 2),) if len(written) == 1 and written[0].shape and "reduce" not in call.op else ()
    return Rule(tuple(operands), (kinds,), sizes, whole=frozenset(("i", *factors[dim : dim + 1])),
                linear=linear)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **{f"aten.{name}": _cat for name in ("cat", "concat", "concatenate")},
    "aten.stack": _stack,
    "aten.unfold": _unfold,
    "aten.index_select": _index_select,
    "aten.gather": _gather,
    **{f"aten.{name}": _scatter for name in ("scatter", "scatter_add", "scatter_reduce")},
    "aten.index": _index,
    **{f"aten.{name}": _index_written for name in (
        "index_add", "index_copy", "index_fill", "index_reduce",
    )},
}

DECISIONS: dict[str, Callable[[Call, Sequence[Layout]], Decision | Rule | None]] = {
    "aten.slice": slice_decision,
    "aten.narrow": _narrow,
    "aten.select": _select,
    "aten.unbind": _unbind,
    **{f"aten.{name}": _split for name in (
        "chunk", "dsplit", "hsplit", "split", "split_with_sizes", "tensor_split", "unsafe_chunk",
        "unsafe_split", "unsafe_split_with_sizes", "vsplit",
    )},
    "aten.diagonal": diagonal_decision,
    "aten.pad": _pad,
    "aten.constant_pad_nd": _pad,
    "aten.tril": _triangle,
    "aten.triu": _triangle,
}
