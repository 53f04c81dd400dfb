"""Views that join or split sharded dims whose blocks are no stretches of the joined dim.

The rows of all samples as one dim, of a sequence that is sharded: with fewer samples than ranks the
joined dim cannot be sharded by samples. Rows then change ranks, each once, and the joined dim is
sharded equally; split again, they return. The sharded dim stays sharded, and no other dim is
sharded.

Lines of one length as lines of another, as scores of relative positions are shifted: a line that a
border of shards would cut goes to the side that has more of it.

Every rank names all rows, so what is named is as long as cuts allow: runs of rows that no cut
divides. Where these are single elements (97 columns), the shards move to an earlier dim first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout, default_cuts
from weft.ops.algorithm import Local
from weft.ops.indexing.index_layouts import Axes, Cuts
from weft.ops.indexing.rows import known_rows
from weft.ops.nested_views import groups
from weft.ops.places import apart
from weft.rules import Call, Decision
from weft.transport import Transition

__all__ = ["regrouped"]


def regrouped(call: Call, layouts: Sequence[Layout]) -> Local | None:
    """One group of dims that is joined or split, of which the leading dim has fewer elements than
    there are shards; None for all others, of which a rule says enough."""
    x, source, result = layouts[0], call.tensors[0].shape, call.results[0].shape
    if 0 in source or not any(x.dims):
        return None
    dims: list[Axes] = [()] * len(result)
    cuts: list[Cuts] = [None] * len(result)
    found: tuple[range, range] | None = None
    for lefts, rights in groups(source, result):
        if len(lefts) == len(rights) == 1:
            dims[rights[0]], cuts[rights[0]] = x.dims[lefts[0]], x.cuts[lefts[0]]
        elif any(x.dims[dim] for dim in lefts):
            if found:
                return None
            found = lefts, rights
    if found is None:
        return None
    lefts, rights = found
    if min(len(lefts), len(rights)) > 1:
        return _other_lines(x, lefts, result, dims, cuts, rights)
    if len(rights) == 1:
        return _join(x, lefts, result, dims, cuts, rights[0])
    return _split(x, lefts[0], result, dims, cuts, rights)


def _join(
    x: Layout, lefts: Sequence[int], shape: Sequence[int], dims: list[Axes], cuts: list[Cuts],
    to: int,
) -> Local | None:
    """The rows of several dims as one."""
    sharded = [dim for dim in lefts if x.dims[dim]]
    axes = tuple([axis for dim in sharded for axis in x.dims[dim]])
    sizes = [x.mesh.axis_sizes[axis] for axis in axes]
    named = range(lefts[0], sharded[-1] + 1)
    lengths = [x.shape[dim] for dim in named]
    num, step = math.prod(lengths), math.prod([x.shape[dim] for dim in lefts if dim > sharded[-1]])
    if not _is_short(lengths, sizes):
        return None
    units = default_cuts(num, sizes)
    dims[to], cuts[to] = axes, tuple([unit * step for unit in units])
    out = Layout.make(x.mesh, shape, dims, cuts, x.partial)
    run = math.gcd(*units, *x.cuts_of(named[-1]))
    if run * step == 1 and (before := _moved_up(x, lefts, math.prod(sizes))) is not None:
        return _join(before, lefts, shape, dims, cuts, to)
    within = _in_runs(x, named[-1], run)
    parted = Layout.make(x.mesh, (num // run,), [axes], [tuple([unit // run for unit in units])])

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        names = apart(torch.arange(num // run), [*lengths[:-1], lengths[-1] // run])
        return known_rows(mesh, within, tuple(named), parted, 0, names, out)

    return Local(Decision((x,), (out,)), bind, communicates=axes)


def _moved_up(x: Layout, lefts: Sequence[int], num: int) -> Layout | None:
    """The layout with the axes of these dims on an earlier one that has an element for each shard,
    whose rows are whole: single elements are not named."""
    over = next((dim for dim in lefts if x.shape[dim] >= num), lefts[-1])
    later = [dim for dim in lefts if dim > over and x.dims[dim]]
    if not later:
        return None
    axes, cuts = list(x.dims), list(x.cuts)
    axes[over] += tuple([axis for dim in later for axis in x.dims[dim]])
    for dim in (over, *later):
        cuts[dim] = None
        if dim != over:
            axes[dim] = ()
    return Layout.make(x.mesh, x.shape, axes, cuts, x.partial)


def _split(
    x: Layout, dim: int, shape: Sequence[int], dims: list[Axes], cuts: list[Cuts], rights: range,
) -> Local | None:
    """The rows of one dim as several: each takes axes as far as it has elements for them."""
    axes = x.dims[dim]
    lengths = [shape[at] for at in rights]
    if not _is_short(lengths, [x.mesh.axis_sizes[axis] for axis in axes]):
        return None
    left, last = list(axes), -1
    while left and last + 1 < len(lengths):
        last += 1
        own: list[int] = []
        room = lengths[last]
        while left and x.mesh.axis_sizes[left[0]] <= room:
            room //= x.mesh.axis_sizes[left[0]]
            own.append(left.pop(0))
        dims[rights[0] + last] = tuple(own)
    step = math.prod(lengths[last + 1 :])
    if left or any(cut % step for cut in x.cuts_of(dim)):
        return None
    out = Layout.make(x.mesh, shape, dims, cuts, x.partial)
    within = _in_runs(x, dim, step)
    over = [at for at in range(last + 1) if dims[rights[0] + at]]
    if len(over) > 1:
        return None
    parted = Layout.make(x.mesh, lengths[: last + 1], [dims[at] for at in rights[: last + 1]])

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        places = torch.arange(within.shape[dim]).view(lengths[: last + 1])
        return known_rows(mesh, within, (dim,), parted, over[0], [places], out)

    return Local(Decision((x,), (out,)), bind, communicates=axes)


def _other_lines(
    x: Layout, lefts: range, shape: Sequence[int], dims: list[Axes], cuts: list[Cuts],
    rights: range,
) -> Local | None:
    """The leading one of several dims is sharded, and so is that of the result."""
    old = next((dim for dim in lefts if x.shape[dim] > 1), lefts[0])
    new = next((dim for dim in rights if shape[dim] > 1), rights[0])
    few, many = sorted((x.shape[old], shape[new]))
    axes = x.dims[old]
    if not many % few or few < math.prod([x.mesh.axis_sizes[axis] for axis in axes]) or any(
        x.partial) or not axes or any(x.dims[dim] for dim in lefts if dim != old):
        return None
    step, unit = math.prod(x.shape[old + 1 : lefts.stop]), math.prod(shape[new + 1 : rights.stop])
    places = tuple([cut * step for cut in x.cuts_of(old)])
    lines = tuple([(place + unit // 2) // unit for place in places])
    if all(place == line * unit for place, line in zip(places, lines)):
        return None  # a rule says so, and nothing moves
    dims[new], cuts[new] = axes, lines
    out = Layout.make(x.mesh, shape, dims, cuts, x.partial)
    line = Layout.make(x.mesh, (step * x.shape[old],), [axes], [places], x.partial)
    before = x.take([dim for dim in range(x.ndim) if dim not in lefts]).insert(lefts[0], line)
    after = before.recut(lefts[0], line.shape[0], tuple([one * unit for one in lines]))

    def bind(mesh: BoundMesh) -> Callable[[Tensor], Tensor]:
        varying = frozenset(x.sharded_axes)
        move = Transition(mesh, before, after, src_varying=varying, dst_varying=varying)
        assert mesh.here is not None
        joined, parted = before.local_shape_at(mesh.here), out.local_shape_at(mesh.here)
        return lambda local: move(local.reshape(joined)).reshape(parted)

    return Local(Decision((x,), (out,)), bind, communicates=axes)


def _in_runs(x: Layout, dim: int, run: int) -> Layout:
    """The layout with a dim split into runs of rows, which no cut divides: they are named and sent
    as one."""
    return x.take([other for other in range(x.ndim) if other != dim]).insert(
        dim, Layout.make(x.mesh, (x.shape[dim] // run, run), [x.dims[dim], ()],
                         [tuple([cut // run for cut in x.cuts_of(dim)]), None]))


def _is_short(lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the leading dim has fewer elements than there are shards, and all have enough."""
    num = math.prod(sizes)
    return next((one for one in lengths if one > 1), 1) < num <= math.prod(lengths)
