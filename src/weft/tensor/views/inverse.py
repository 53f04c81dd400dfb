"""Writes a value to the part of a tensor that a view call shows.

The call is captured, and its ops are followed from the base to the result. An op that shows all
elements (`view`, `permute`) has an inverse. One that shows some of them (`select`, `slice`, a piece
of a `split`, `diagonal`) is a ragged view of its source and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.errors import UnsupportedOpError
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import NotCapturable, Op, Trace, capture, meta_like
from weft.tensor.trace.trees import flatten, slots_of, substitute
from weft.transport.order import shares_elements

__all__ = ["OVERLAP", "write"]

Change = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that shows every element of its source; `back` is its inverse."""

    show: Change
    back: Change


@dataclass(frozen=True, slots=True)
class Part:
    """A step that shows some elements; `show` never moves data."""

    show: Change


Step = Whole | Part


def write(
    func: Any, args: Any, kwargs: Any, place: int, base: Tensor, value: ShardTensor
) -> None:
    """Write `value` to the elements of `base`, the call's first tensor, that result `place` shows.

    Raises:
        UnsupportedOpError: the call has no known inverse, or elements of the view share memory.
        RuntimeError: what torch raises for such a write: the base is a leaf that requires grad, or
            elements of what is expanded are written to.
    """
    if not value.numel():
        return
    tensors = flatten((args, kwargs))
    metas = [meta_like(tensor) for tensor in tensors]
    feed = iter(metas)
    try:
        trace = capture(func, substitute(args, feed), substitute(kwargs, feed), metas)
    except NotCapturable:
        _refuse(getattr(func, "__name__", str(func)), value)
    result = slots_of(trace.result)[place].index
    start = next(at for at, tensor in enumerate(tensors) if tensor is base)
    steps = [
        step for op, source, result in _path(trace, start, result)
        for step in _steps(op, trace.metas[source], result, value)
    ]
    seen = trace.metas[result]
    if shares_elements(seen.shape, seen.stride()):  # what is written shows in the others
        _refuse(getattr(func, "__name__", str(func)), value)
    _write(base, steps, value)


def _write(source: Any, steps: Sequence[Step], value: Any) -> None:
    if all(isinstance(step, Whole) for step in steps):
        for step in reversed(steps):
            assert isinstance(step, Whole)
            value = step.back(value)
        source.view_as(source).copy_(value)
        return
    _write(steps[0].show(source), steps[1:], value)


def _path(trace: Trace, start: int, end: int) -> list[tuple[Op, int, int]]:
    """The ops from one slot to another: (op, slot of its source, which of its results)."""
    made = {
        slot.index: (op, place) for op in trace.ops
        for place, slot in enumerate(slots_of(op.results))
    }
    path: list[tuple[Op, int, int]] = []
    while end != start:
        op, place = made[end]
        end = slots_of((op.args, op.kwargs))[0].index
        path.append((op, end, place))
    return path[::-1]


def _steps(op: Op, source: Tensor, place: int, value: Any) -> Sequence[Step]:
    """One op of a view call as steps; `source` is a meta tensor, `place` says which result."""
    name = facts(op.overload).name
    base = name.split(".")[1]
    rest = op.args[1:]
    shape = source.shape

    def show(tensor: Any) -> Any:
        return op.overload(tensor, *rest, **op.kwargs)

    if name == "aten.view.dtype":
        return [Whole(show, lambda tensor: tensor.view(source.dtype))]
    if base in _RESHAPING:
        return [Whole(show, lambda tensor: tensor.reshape(shape))]
    if base in _PERMUTING:
        order = _order(show, source.dim())
        return [Whole(show, lambda tensor: tensor.permute(order))]
    if base in _SAME:
        return []
    if base in _CONJUGATE:
        return [Whole(show, _CONJUGATE[base])]
    if base in _PAIRS:
        return [Whole(show, _PAIRS[base])]
    if base in ("real", "imag"):
        return [Whole(torch.view_as_real, torch.view_as_complex),
                *_row(-1, 0 if base == "real" else 1)]
    if base in ("slice", "narrow"):
        return [Part(show)]
    if base == "select":
        return _row(rest[0], rest[1])
    if base == "unbind":
        return _row(rest[0], place)
    if base in _SPLITTING:
        return [_piece(show, op, source, place)]
    if base == "diagonal":
        return [Part(show)]
    if base == "unfold" and rest[1] == rest[2]:
        return _windows(rest[0] % source.dim(), rest[1], shape)
    if base in ("expand", "expand_as", "broadcast_to", "broadcast_tensors"):
        return [Whole(show, lambda tensor: _first(tensor, shape))]
    _refuse(name, value)


def _first(tensor: ShardTensor, shape: Sequence[int]) -> ShardTensor:
    """Of an expanded tensor, whose equal elements share memory, those of this shape."""
    lead = tensor.dim() - len(shape)
    for dim, length in enumerate((*[1] * lead, *shape)):
        if tensor.shape[dim] != length:
            if tensor.sharding.dims[dim]:  # each rank has changed its own
                raise RuntimeError(OVERLAP)
            tensor = tensor.narrow(dim, 0, length)
    return tensor.reshape(shape)


def _row(dim: int, index: int) -> list[Step]:
    """Element `index` of a dim, which the result lacks."""
    return [
        Part(lambda tensor: tensor.narrow(dim, index % tensor.shape[dim], 1)),
        Whole(lambda tensor: tensor.squeeze(dim), lambda tensor: tensor.unsqueeze(dim)),
    ]


def _windows(dim: int, length: int, shape: Sequence[int]) -> list[Step]:
    """`unfold` with adjacent windows: what they cover, in two dims of which one is moved last."""
    count = shape[dim] // length
    return [
        Part(lambda tensor: tensor.narrow(dim, 0, count * length)),
        Whole(lambda tensor: tensor.unflatten(dim, (count, length)).movedim(dim + 1, -1),
              lambda tensor: tensor.movedim(-1, dim + 1).flatten(dim, dim + 1)),
    ]


def _piece(show: Change, op: Op, source: Tensor, place: int) -> Part:
    pieces = show(source)
    dims = [dim for dim in range(source.dim()) if pieces[0].shape[dim] != source.shape[dim]]
    dim = op.args[2] if len(op.args) > 2 and isinstance(op.args[2], int) else (dims or [0])[0]
    lengths = [piece.shape[dim] for piece in pieces]
    start = [0, *accumulate(lengths)][place]
    return Part(lambda tensor: tensor.narrow(dim, start, lengths[place]))


def _order(show: Change, ndim: int) -> list[int]:
    """The inverse of a permutation, found by its effect on lengths that differ."""
    lengths = list(range(2, 2 + ndim))
    moved = show(torch.empty(lengths, device="meta")).shape
    return [list(moved).index(length) for length in lengths]


def _refuse(name: str, value: Any) -> NoReturn:
    raise UnsupportedOpError(
        name, f"it was written to through a view {value.sharding} whose data had to move, "
        "and has no known inverse",
        "a write through a view reaches its base where they share memory, or by the "
        "inverse of the view op", [name],
        "write to the base, or clone() the view first")


OVERLAP = (  # torch's own words
    "unsupported operation: more than one element of the written-to tensor refers to a single "
    "memory location. Please clone() the tensor before performing the operation."
)

_RESHAPING = frozenset((
    "view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "ravel", "unflatten",
    "squeeze", "unsqueeze", "view_as", "reshape_as", "atleast_1d", "atleast_2d", "atleast_3d",
))
_PERMUTING = frozenset((
    "t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "numpy_T", "mT",
))
_SAME = frozenset(("alias", "detach", "contiguous", "to", "lift", "lift_fresh", "positive"))
_CONJUGATE: dict[str, Change] = {
    "conj": torch.conj, "_conj": torch.conj, "_neg_view": torch.neg,
    "mH": lambda tensor: tensor.mH, "adjoint": lambda tensor: tensor.mH,
    "matrix_H": lambda tensor: tensor.mH,
}
_PAIRS: dict[str, Change] = {
    "view_as_real": torch.view_as_complex, "view_as_complex": torch.view_as_real,
}
_SPLITTING = frozenset((
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk",
    "unsafe_split_with_sizes", "hsplit", "vsplit", "dsplit",
))
