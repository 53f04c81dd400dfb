"""Fourier transforms, and glu: ops that mix all elements of their dims.

A dim is transformed where it is whole. Along a sharded dim another dim takes over the mesh axes by
one exchange, so the result is sharded as well. That other dim is one that has been transformed
already or never will be, whichever the axes divide best; so a transform of a slab and its inverse
lead from one layout to another and back (the slab and pencil decompositions of Dalcin, Mortensen
and Keyes, Fast parallel multidimensional FFT using advanced MPI, 2019). Where no other dim has
room, a long line is transformed in place (`weft.ops.long_lines`), or gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local
from weft.ops.long_lines import Step, is_less, long_line
from weft.ops.places import resized
from weft.rules import Call, Decision, op, page, rule
from weft.transport import Transition

__all__ = ["PAGE", "handed_over", "spread_over"]

_aten: Any = torch.ops.aten


EVEN = 1.25
"""How much more than its share the busiest rank may hold of dims that count as evenly divided."""


@dataclass(frozen=True, slots=True)
class _Transform:
    """One of `_fft_c2c`, `_fft_r2c`, `_fft_c2r`, dim by dim.

    Args:
        kind: "c2c", "r2c" or "c2r"; of the latter two, the last of `dims` is the real one.
        norm: torch's number of a normalisation, which is that of each dim.
        forward: the sign of the exponent.
        length: that of the last dim of the result; for "r2c" a half spectrum's or all of it.
        resized: the lengths that dims get, by zeros or without their last elements, before they
            are transformed.
    """

    kind: str
    dims: tuple[int, ...]
    norm: int
    forward: bool
    length: int
    resized: Mapping[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, call: Call) -> _Transform:
        """That of a call of one of the three."""
        kind = call.base.removeprefix("_fft_")
        shape = call.results[0].shape
        dims = tuple([dim % len(shape) for dim in call.args[1]])
        forward = bool(call.args[3]) if kind == "c2c" else kind == "r2c"
        return cls(kind, dims, call.args[2], forward, shape[dims[-1]])

    @property
    def real(self) -> int | None:
        """The dim that is real on one side."""
        return None if self.kind == "c2c" else self.dims[-1]

    def changed(self, layout: Layout, dims: Sequence[int]) -> Layout:
        """The layout after these dims, which are whole, have been transformed."""
        shape = list(layout.shape)
        for dim in dims:
            shape[dim] = self.length if dim == self.real else self.resized.get(dim, shape[dim])
        return layout.resized(tuple(shape), layout.cuts)

    def local(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """The transform of these dims of a block, in which they are whole."""
        real, others = self.real, [dim for dim in dims if dim != self.real]
        for dim in dims if self.resized else ():
            x = resized(x, dim, self.resized.get(dim, x.shape[dim]))
        if real is None or real not in dims:
            return _aten._fft_c2c(x, others, self.norm, self.forward) if x.numel() else x * 1
        if not x.numel():
            shape = [self.length if dim == real else length for dim, length in enumerate(x.shape)]
            x = x.to(x.dtype.to_complex()) if self.kind == "r2c" else x.real
            return x.reshape(shape)
        if self.kind == "r2c":
            return _aten._fft_r2c(x, [*others, real], self.norm, self.length != x.shape[real])
        x = resized(x, real, self.length // 2 + 1)
        return _aten._fft_c2r(x, [*others, real], self.norm, self.length)


def _steps(transform: _Transform, layout: Layout) -> list[Step] | None:
    """What a rank does from a layout on. Whole dims are transformed together, sharded ones by
    turns, the last one first; a real dim before the others if it comes, after them if it goes.

    None where a dim is to be resized for whose axes no other dim has room."""
    steps: list[Step] = []
    kind, real, pending = transform.kind, transform.real, list(transform.dims)
    while pending:
        whole = [dim for dim in pending if not layout.dims[dim]]
        if kind == "r2c" and real in pending and real not in whole:
            whole = []
        if kind == "c2r" and len(whole) < len(pending):
            whole = [dim for dim in whole if dim != real]
        if whole:
            pending = [dim for dim in pending if dim not in whole]
            changed = transform.changed(layout, whole)
            steps.append(Step(layout, partial(transform.local, dims=whole), changed))
        else:
            at = -2 if kind == "c2r" and len(pending) > 1 else -1
            dim = pending.pop(at)
            done = [other for other in transform.dims if other not in (dim, *pending)]
            layout = handed_over(layout, dim, done, pending)
            if layout.dims[dim] and dim in transform.resized:
                return None
            steps += _along(transform, dim, layout)
        layout = steps[-1].after
    return steps


def _along(transform: _Transform, dim: int, layout: Layout) -> list[Step]:
    """The steps of one dim, sharded over axes for which no other dim has room, if over any."""
    kind, rest = transform.kind, layout.dims[dim]
    if rest and is_less(layout, dim, kind, transform.length):
        return long_line(layout, dim, kind, transform.length, transform.norm, transform.forward)
    whole = layout.gathered((dim,))
    after = transform.changed(whole, (dim,))
    steps = [Step(whole, partial(transform.local, dims=(dim,)), after)]
    if rest:  # every rank has transformed the whole line, and keeps its part
        parted = after.divided(dim, rest)
        steps.append(Step(parted, None, parted))
    return steps


def handed_over(
    layout: Layout, dim: int, done: Sequence[int], pending: Sequence[int], even: float = EVEN
) -> Layout:
    """Each axis that shards `dim` goes to the dim that it divides best; without room it stays."""
    axes = layout.dims[dim]
    layout, stay = spread_over(layout.gathered((dim,)), axes, done, pending, even, but=dim)
    return layout.divided(dim, stay) if stay else layout


def spread_over(
    layout: Layout, axes: Sequence[int], done: Sequence[int], pending: Sequence[int],
    even: float, but: int | None = None,
) -> tuple[Layout, list[int]]:
    """Each axis goes to the dim, but one, that it divides best; and those that find no room."""
    stay: list[int] = []
    for axis in axes:
        places = [other for other in range(layout.ndim)
                  if other != but and max(layout.sizes_of(other)) > 1]
        if places:
            best = min(places, key=lambda at: _unfitness(layout, at, axis, done, pending, even))
            layout = layout.divided(best, (axis,))
        else:
            stay.append(axis)
    return layout, stay


def _unfitness(
    layout: Layout, dim: int, axis: int, done: Sequence[int], pending: Sequence[int], even: float
) -> tuple[float, ...]:
    """The cost, for ranking, of sharding `dim` by one more axis.

    A dim that has been transformed is best if shards come out about even: an inverse leads back.
    One that is still to be transformed would be exchanged again.
    """
    size = max(layout.mesh.axis_sizes[axis], 2)  # of one rank as of two
    busiest = -(-max(layout.sizes_of(dim)) // size)
    uneven = busiest * layout.num_shards(dim) * size / layout.shape[dim]
    kind = 2 if dim in pending else 0 if dim in done else 1
    if kind < 2 and uneven <= even:
        return 0, kind, uneven
    return (3 if uneven >= 2 else 2 if kind == 2 else 1), uneven, kind


def _by_exchanges(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """A sharded dim becomes whole while another takes over its axes, by one exchange."""
    (layout,) = layouts
    transform = _Transform.of(call)
    is_short = transform.kind == "c2r" and (
        layout.shape[transform.dims[-1]] != transform.length // 2 + 1)
    has_empty = any(0 in layout.sizes_of(dim) for dim in range(layout.ndim))
    if not is_short and not has_empty and not any(layout.dims[dim] for dim in transform.dims):
        return None
    return _carried_out(transform, layout)


def _carried_out(transform: _Transform, layout: Layout) -> Local | None:
    """The steps of a transform from a layout on."""
    if 0 in layout.shape:
        return None
    if not {*layout.partial} <= {None, "sum", "avg"}:
        layout = layout.without_partial()
    steps = _steps(transform, layout)
    if steps is None:
        return None
    moved = {axis for dim in transform.dims for axis in layout.dims[dim]}
    axes = frozenset(moved)
    return Local(
        Decision((steps[0].before,), (steps[-1].after,)),
        lambda mesh: _in_turn(mesh, steps, axes), tuple(sorted(moved)),
        why=_WHOLE_SPECTRUM if len(transform.dims) > 1 else "")


_WHOLE_SPECTRUM = (
    "dims are transformed by turns, and all of the spectrum changes ranks; inside of "
    "weft.sharded_factories() only the modes that slices read do"
)


def _in_turn(mesh: BoundMesh, steps: Sequence[Step], axes: frozenset[int]) -> Callable[..., Tensor]:
    """Steps on one rank: a function of its block. Over the axes that move results vary, so what is
    gathered there has a partial gradient."""
    moves: list[Callable[[Tensor], Tensor]] = []
    for at, step in enumerate(steps):
        if at and steps[at - 1].after != step.before:
            moves.append(Transition(
                mesh, steps[at - 1].after, step.before, src_varying=axes, dst_varying=axes))
        if step.local is not None:
            moves.append(partial(step.local, mesh) if step.on_mesh else step.local)

    def run(x: Tensor, *args: Any) -> Tensor:
        for move in moves:
            x = move(x)
        return x

    return run


# Zeros that follow need not travel: a dim is made longer where it is whole, and so is a half
# spectrum that is shorter than its length says.


def _longer(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """A sharded dim that is to be longer gets its zeros where it is whole, after the exchange."""
    (source,), (layout,), name = call.tensors, layouts, call.base
    is_half = name.startswith("fft_rfft")
    dtype: torch.dtype = getattr(torch, source.dtype)
    if not (dtype.is_floating_point if is_half else dtype.is_complex):
        return None
    told = call.get("n", call.get("s"))
    if told is None:
        return None
    lengths = [told] if isinstance(told, int) else told
    named = call.get("dim")
    named = range(-len(lengths), 0) if named is None else named
    dims = tuple([dim % layout.ndim for dim in ([named] if isinstance(named, int) else named)])
    resized = {dim: length for dim, length in zip(dims, lengths) if length != -1}
    if not any(layout.dims[dim] and length > layout.shape[dim]
               for dim, length in resized.items()):
        return None
    forward = not name.startswith("fft_ifft")
    norm = _NORMS[call.get("norm")]
    return _carried_out(_Transform(
        "r2c" if is_half else "c2c", dims, 2 - norm if forward else norm, forward,
        call.results[0].shape[dims[-1]], resized), layout)


def _irfftn(
    x: Tensor, s: int | Sequence[int] | None = None, dim: int | Sequence[int] | None = None,
    norm: str | None = None,
) -> Tensor:
    """Complex dims in their lengths, and the real one with as much of its spectrum as there is."""
    s, dim = ([one] if isinstance(one, int) else one for one in (s, dim))
    if dim is None:
        dim = range(x.dim()) if s is None else range(x.dim() - len(s), x.dim())
    dims = [at % x.dim() for at in dim]
    lengths = [x.shape[at] for at in dims[:-1]] if s is None else list(s[:-1])
    for at, length in zip(dims, lengths):
        x = resized(x, at, x.shape[at] if length == -1 else length)
    last = 2 * (x.shape[dims[-1]] - 1) if s is None or s[-1] == -1 else s[-1]
    if x.shape[dims[-1]] > last // 2 + 1:
        x = x.narrow(dims[-1], 0, last // 2 + 1)
    if not x.is_complex():
        x = x.to((x.dtype if x.is_floating_point() else torch.get_default_dtype()).to_complex())
    return _aten._fft_c2r(x, dims, _NORMS[norm], last)


_NORMS = {None: 2, "backward": 2, "ortho": 1, "forward": 0}
"""torch's numbers of what an inverse transform divides by: its length, the root of it, nothing."""


PAGE = page(
    op("fft_fft fft_ifft fft_rfft fft_fft2 fft_ifft2 fft_rfft2 fft_fftn fft_ifftn fft_rfftn",
       layouts=_longer),
    op("fft_irfft fft_irfft2 fft_irfftn", compose=_irfftn),
    op("_fft_c2c", rule("...>0 s! -> ... s", along="dim", linear=[0]), layouts=_by_exchanges),
    op("_fft_r2c", rule("...>0 s! -> ... t", along="dim", linear=[0]), layouts=_by_exchanges),
    # torch takes the spectrum to be as long as the length says, in its gradient on meta tensors.
    op("_fft_c2r", rule("...>0 s! -> ... t", along="dim", linear=[0]), layouts=_by_exchanges,
       has_meta_gradient=False),
    op("glu", rule("... s! -> ... t", along="dim", default=-1)),
)
