"""Slices, splits, diagonals and triangles; writes into the elements of a view.

The operand's cuts decide: a slice of a sharded dim and its pieces stay where they are, with
ragged cuts, and every coordinate calls the op with its own numbers. Nothing is sent. A call that
aligns slices with each other reads the rows that it lacks from the sliced tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.elementwise import result_like
from weft.rules import Call, Decision, Length, TensorArg, op, page, rule
from weft.rules.factors import one_dim, sharded_along

__all__ = ["PAGE"]

Layouts = Sequence[Layout]


# One dim of one operand gets new cuts; the others, and partial values of every kind, stay.


def _slice(call: Call, layouts: Layouts, wants_grad: Any = ()) -> Decision:
    """`slice(x, dim, start, stop, step)`: each shard keeps the elements within its offsets."""
    source = call.tensors[0]
    dim = one_dim(call.get("dim", 0), len(source.shape))
    bounds = slice(call.get("start"), call.get("end"), call.get("step", 1))
    start, _, step = bounds.indices(source.shape[dim])
    return _sliced(call, layouts[0], dim, start, step, bounds)


def _narrow(call: Call, layouts: Layouts, wants_grad: Any) -> Decision | None:
    """`narrow(x, dim, start, length)`; a start given as a tensor is known only at run time."""
    source = call.tensors[0]
    dim = one_dim(call.get("dim"), len(source.shape))
    start = call.get("start")
    if not isinstance(start, int):
        return None
    stop = start + call.get("length")
    bounds = slice(start, None if start < 0 <= stop else stop)
    return _sliced(
        call, layouts[0], dim, start + source.shape[dim] if start < 0 else start, 1, bounds)


def _sliced(
    call: Call, layout: Layout, dim: int, start: int, step: int, bounds: slice
) -> Decision:
    """`bounds`: as the call names them."""
    count = call.results[0].shape[dim]
    starts = lengths = None
    if step == 1:
        starts = tuple([start if at == dim else 0 for at in range(layout.ndim)])
        kept = _kept(dim, layout.shape[dim], bounds)
        lengths = kept and tuple([
            kept if at == dim else Length(((0, at),)) for at in range(layout.ndim)])
    if not layout.dims[dim]:
        return Decision(
            (layout,), (layout.recut(dim, count),), by_form=True, starts=starts, lengths=lengths)
    old = layout.cuts_of(dim)
    # How many kept elements lie before each offset.
    new = tuple(min(max(-(-(cut - start) // step), 0), count) for cut in old)
    result = layout.recut(dim, count, new)
    source = call.tensors[0]

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = layout.shard_index(dim, coordinate)
        first = start + new[index] * step - old[index]
        kept = new[index + 1] - new[index]
        if kept == 0:
            return (source, dim, 0, 0, 1), {}
        return (source, dim, first, first + (kept - 1) * step + 1, step), {}

    return Decision(
        (layout,), (result,), args, "aten.slice.Tensor", starts=starts, lengths=lengths)


def _kept(dim: int, length: int, bounds: slice) -> Length | None:
    """How long a slice of a dim of this length is; None where it is not as long for all lengths
    from some on, this one among them: none of its bounds is beyond the dim, or at its end."""
    ends: list[tuple[int, int]] = []
    least = 1
    for bound, otherwise in ((bounds.start, (0, 0)), (bounds.stop, (1, 0))):
        if bound is None or bound >= sys.maxsize:
            ends.append(otherwise)
        else:
            ends.append((int(bound < 0), bound))
            least = max(least, abs(bound) + 1)
    (from_end, start), (to_end, stop) = ends
    if length < least or to_end < from_end or stop - start + (to_end - from_end) * least < 0:
        return None
    terms = ((0, dim),) if to_end > from_end else ()
    return Length(terms, stop - start, least=((0, dim, least),))


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    """Of a sharded dim, the slice of length 1 stays where it is; one element comes to all ranks."""
    return x.narrow(dim, index % x.shape[dim], 1).squeeze(dim)


def _split(call: Call, layouts: Layouts, wants_grad: Any) -> Decision:
    """`split`, `split_with_sizes`, `chunk` and their kin: consecutive pieces."""
    layout, source = layouts[0], call.tensors[0]
    dim = one_dim(call.get("dim", 0), len(source.shape))
    lengths = [result.shape[dim] for result in call.results]
    if not layout.dims[dim]:
        return Decision((layout,), tuple(layout.recut(dim, size) for size in lengths))
    old = layout.cuts_of(dim)
    borders = list(accumulate(lengths))[:-1]
    pieces = tuple(
        layout.recut(dim, size, tuple(min(max(cut - start, 0), size) for cut in old))
        for start, size in zip([0, *borders], lengths)
    )

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = layout.shard_index(dim, coordinate)
        first, end = old[index : index + 2]
        inside = [min(max(border, first), end) - first for border in borders]
        sizes = [stop - start for start, stop in pairwise([0, *inside, end - first])]
        return (source, sizes, dim), {}

    kind = "unsafe_" if call.base.startswith("unsafe") else ""  # to autograd they are no views
    return Decision((layout,), pieces, args, f"aten.{kind}split_with_sizes.default")


def _diagonal(call: Call, layouts: Layouts, wants_grad: Any = ()) -> Decision:
    """`diagonal(x, offset, dim1, dim2)`, shifted by the shard's position. Along it rows and columns
    increase, so the pieces of blocks follow one another in the order of rows, then columns."""
    layout, source = layouts[0], call.tensors[0]
    ndim = len(source.shape)
    offset = call.get("offset", 0)
    one = one_dim(call.get("dim1", 0), ndim)
    other = one_dim(call.get("dim2", 1), ndim)
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
    """The diagonal of that number, or one that is also outside: a shard's offset fits into 64
    bits."""
    return max(-rows, min(diagonal, columns))


def _triangle(call: Call, layouts: Layouts, wants_grad: Any) -> Decision:
    """`tril`, `triu`: the diagonal shifts by the shard's position. Zeros reduce to zero in every
    kind, so partial values pass."""
    layout, source = layouts[0], call.tensors[0]
    if not layout.dims[-1] and not layout.dims[-2]:
        return Decision((layout,), (layout,))
    diagonal = _within(call.get("diagonal", 0), *source.shape[-2:])

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        *_, rows, columns = layout.box_at(coordinate)
        return (source, diagonal + rows[0] - columns[0]), {}

    return Decision((layout,), (layout,), args)


# Writes into what a view would show: the source is moved to the ranks that hold the view's
# elements, and each shard writes its own.


def _written(view: Callable[..., Decision]) -> Callable[..., Decision]:
    def decide(call: Call, layouts: Layouts, wants_grad: Any) -> Decision:
        """The second tensor is written where a view of the same arguments would read."""
        target, source = call.tensors
        named = {name: call.get(name) for name in call.names[2:]}
        layout = _as_source(layouts[0].without_partial(), layouts[1])
        shown = view(
            Call("", (target,), named, (TensorArg(source.shape, target.dtype),)), (layout,))
        of_view = shown.args

        def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            assert of_view is not None
            (_, *numbers), named = of_view(coordinate)
            return (target, source, *numbers), named

        return Decision((layout, shown.results[0]), (layout,), of_view and args)

    return decide


def _as_source(target: Layout, source: Layout) -> Layout:
    """A target that ranks have whole becomes sharded as what is written to it, evenly in a dim of
    another length: nothing is sent but what is written there."""
    taken = {axis for axes in target.dims for axis in axes}
    if source.ndim != target.ndim:
        return target
    dims, cuts = list(target.dims), list(target.cuts)
    for dim, axes in enumerate(source.dims):
        if axes and not dims[dim] and taken.isdisjoint(axes):
            alike = source.shape[dim] == target.shape[dim]
            dims[dim], cuts[dim] = axes, source.cuts[dim] if alike else None
    return target.replace(dims=dims, cuts=cuts)


# Compositions.


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """A `slice_scatter` of one slice: any dim may be sharded; only the slice is sent."""
    length = x.shape[dim]
    if not -length <= index < length:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(x.shape)} at "
            f"dimension {dim}"
        )
    at = index % length
    return torch.slice_scatter(x, source.unsqueeze(dim), dim, at, at + 1)


def _split_where(x: Tensor, *args: Any, dim: int = 0, **named: Any) -> Any:
    """A tensor of places is read, for lengths follow from it."""
    where, *rest = (*args, *named.values())
    if not isinstance(where, Tensor):
        return NotImplemented
    return torch.tensor_split(x, where.tolist(), *rest or [dim])


def _fits(view: Any) -> Callable[..., Tensor | None]:
    """Check that a value has the shape of the view that it is written to; torch's meta kernels do
    not."""
    def form(x: Tensor, source: Tensor, *args: Any, **named: Any) -> None:
        slot = view(x, *args, **named)
        if source.shape != slot.shape:
            raise RuntimeError(
                "expected src to have a size equal to the slice of self. src size = "
                f"{list(source.shape)}, slice size = {list(slot.shape)}"
            )

    return form


_aten = torch.ops.aten

def _triangle_result(x: Tensor, diagonal: int = 0) -> Tensor | None:
    return result_like(x, x.dtype) if x.ndim > 1 and x.is_contiguous() else None


PAGE = page(
    op("slice slice_copy", layouts=_slice),
    op("narrow", layouts=_narrow),
    op("select", rule("... s! -> ...", along="dim", linear=[0], moves=True,
                      serves=lambda call: not sharded_along(call)), compose=_select),
    op("select_copy", rule("... s! -> ...", along="dim", linear=[0], moves=True)),
    op("unbind unbind_copy", rule("... s! -> {...}", along="dim", linear=[0], moves=True)),
    op("chunk split split_copy split_with_sizes split_with_sizes_copy unsafe_chunk unsafe_split "
       "unsafe_split_with_sizes", layouts=_split),
    op("torch.tensor_split torch.Tensor.tensor_split", compose=_split_where),
    op("diagonal diagonal_copy", layouts=_diagonal),
    op("tril triu", layouts=_triangle, result=_triangle_result),
    op("slice_scatter", layouts=_written(_slice), result=_fits(_aten.slice.Tensor)),
    op("diagonal_scatter", layouts=_written(_diagonal), result=_fits(_aten.diagonal.default)),
    op("select_scatter", compose=_select_scatter, result=_fits(_aten.select.int)),
)
