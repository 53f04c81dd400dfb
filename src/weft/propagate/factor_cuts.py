"""The cuts of one factor: at which offsets the axes that shard it divide it.

Axes that shard one factor must agree on one order and one vector of cuts. These come from the
operand with the most bytes that already has them, or from another operand if the busiest rank then
receives less. (Of three operands, held by one rank, by both, and by the other, the second one's.)
Where a factor leads a compound dim, its cuts are multiples of the product of the dim's other
factors. Cuts that are not move to the nearest multiples: an exchange of a few rows, not a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from weft.core import Layout, default_cuts, filled_cuts, finer_cuts
from weft.propagate.choose import Frame
from weft.propagate.local import Cut, in_full, window_of
from weft.rules import AnyWindow, Rule, Window

__all__ = [
    "Cuts", "cuts_of_factor", "default_of", "fairest", "scaled", "sole_shard", "spread_sole_shard",
]

Cuts = tuple[int, ...] | None
"""Cuts in units of a factor; None means the default."""

Held = Sequence[tuple[tuple[int, ...], float]]
"""The cuts that operands have, each with the bytes of a row."""


def cuts_of_factor(
    frame: Frame, layouts: Sequence[Layout], factor: str, axes: Sequence[int]
) -> tuple[tuple[int, ...], Cuts]:
    """(order of axes, cuts) for the axes that shard a factor. The last axis is dropped if the
    op refuses empty shards and the factor has too few elements."""
    places = frame.leads[factor]
    if factor in frame.finished:  # as in the operand that brings it sharded
        brings = frame.finished[factor]
        places = [place for place in places if place[0] in brings]

    def score(place: tuple[int, int, int]) -> tuple[int, float]:
        have = layouts[place[0]].dims[place[1]]
        return sum([axis in have for axis in axes]), frame.nbytes[place[0]]

    operand, dim, inner = max(places, key=score)
    layout = layouts[operand]
    have = layout.dims[dim]
    order = (*[axis for axis in have if axis in axes], *[axis for axis in axes if axis not in have])
    offsets = frame.rule.offsets.get(factor)
    length = frame.rule.sizes[factor]
    sizes = [frame.sizes[axis] for axis in order]
    if factor in frame.rule.nonempty:
        while sizes and length < math.prod(sizes):
            order, sizes = order[:-1], sizes[:-1]
    if offsets is not None:
        return order, _joined_cuts(frame, layouts, factor, offsets, order)
    if not order:
        return order, None
    if frame.slices and len(places) > 1:
        home = _home(frame, layouts, places, order, length)
        if home is not None and not (factor in frame.rule.nonempty and _leaves_empty(home)):
            return order, home
    cuts = _units(layout, dim, inner, order, length, sizes, window_of(frame.rule, operand, factor))
    if len(places) > 1:
        cuts = _least_moved(frame, layouts, factor, places, order, length, cuts)
    if factor in frame.rule.nonempty:
        full = cuts or default_cuts(length, sizes)
        if _leaves_empty(full):
            cuts = filled_cuts(full)
    return order, cuts


def _leaves_empty(cuts: tuple[int, ...]) -> bool:
    return any(start == stop for start, stop in pairwise(cuts))


def spread_sole_shard(
    frame: Frame, layouts: Sequence[Layout], factor: str, order: tuple[int, ...],
    cuts: tuple[int, ...],
) -> Cuts:
    """The cuts; the default where one shard of the first axis has all, and the op would do more on
    its ranks than they have: a sum of products, or a result that is larger than what they have."""
    rule, sizes = frame.rule, frame.sizes
    outer = cuts[:: math.prod([sizes[axis] for axis in order[1:]])]
    if factor in rule.offsets or sole_shard(outer) is None:
        return cuts
    places = frame.leads[factor]
    if factor in rule.reduce and len(places) > 1:
        return None
    most = max([math.prod(layouts[operand].shape) for operand, dim, _ in places
                if layouts[operand].dims[dim]], default=0)
    return None if any(math.prod([rule.sizes[name] for factors in dims for name in factors]) > most
                       for dims in rule.results) else cuts


def _units(
    layout: Layout, dim: int, inner: int, order: tuple[int, ...], length: int,
    sizes: Sequence[int], window: AnyWindow | None,
) -> Cuts:
    """The cuts of a dim in units of its leading factor, for axes that may differ from its own."""
    have = layout.dims[dim]
    if window is not None:
        return _under_window(window, layout, dim, length) if have == order else None
    if have == order:
        if inner == 1:
            return layout.cuts[dim]
        full = layout.cuts_of(dim)
    else:
        # Axes that both begin with keep their cuts; later ones chunk each piece.
        same = 0
        while same < min(len(have), len(order)) and have[same] == order[same]:
            same += 1
        if same == 0:
            return None
        step = math.prod(layout.mesh.axis_sizes[axis] for axis in have[same:])
        full = layout.cuts_of(dim)[::step]
        return finer_cuts([nearest(cut, inner) for cut in full], sizes[same:])
    return tuple([nearest(cut, inner) for cut in full])


def _under_window(
    window: AnyWindow, layout: Layout, dim: int, length: int
) -> tuple[int, ...]:
    """The cuts of the places of a windowed dim: a place is on the rank of its window's centre. A
    window with stride 1 that is not centred reads no more elsewhere. Its places keep the dim's
    cuts, as the tokens of a causal convolution with its own padding do; of a dim padded before,
    they are even."""
    cuts = layout.cuts_of(dim)
    due = window.units(cuts, length)
    if not isinstance(window, Window) or window.stride > 1 or due == cuts:
        return due
    if window.pad > 0:
        wanted = (*cuts[:-1], length)
    elif cuts != default_of(layout, dim):
        sizes = [layout.mesh.axis_sizes[axis] for axis in layout.dims[dim]]
        wanted = default_cuts(length, sizes)
    else:
        return due
    largest = max([stop - start for start, stop in pairwise(cuts)])
    fits = window.extent - 1 <= largest and all(
        0 <= cut + window.pad - one < window.extent and one <= length
        for one, cut in zip(wanted[1:-1], cuts[1:-1]))
    return wanted if fits else due


def _home(
    frame: Frame, layouts: Sequence[Layout], places: Sequence[tuple[int, int, int]],
    order: tuple[int, ...], length: int,
) -> tuple[int, ...] | None:
    """Where slices meet: at the cuts of an operand that is none, else in the middle of what they
    are slices of. They read there what they lack; operands that are no slices would have to move.
    None where operands of both sorts have cuts of their own."""
    fixed: set[tuple[int, ...]] = set()
    middles: dict[tuple[int, ...], list[int]] = {}
    for operand, dim, inner in places:
        layout, of = layouts[operand], frame.slices[operand]
        if layout.dims[dim] != order:
            continue
        if of is None or of[0].dims[dim] != order:
            fixed.add(tuple([nearest(cut, inner) for cut in layout.cuts_of(dim)]))
        elif inner == 1:
            middles.setdefault(of[0].cuts_of(dim), []).append(of[1][dim])
    if len(fixed) == 1 and middles:
        return fixed.pop()
    if fixed or len(middles) != 1 or frame.rule.windows:
        return None
    ((cuts, starts),) = middles.items()
    middle = (min(starts) + max(starts)) // 2
    return (0, *[min(max(cut - middle, 0), length) for cut in cuts[1:-1]], length)


def _least_moved(
    frame: Frame, layouts: Sequence[Layout], factor: str,
    places: Sequence[tuple[int, int, int]], order: tuple[int, ...], length: int, cuts: Cuts,
) -> Cuts:
    """The given cuts of a factor, or other cuts that operands have, or the default, if these
    require less of the busiest rank; or the same, and leave it with less."""
    sizes = [frame.sizes[axis] for axis in order]
    default = default_cuts(length, sizes)
    held: list[tuple[tuple[int, ...], float]] = []
    for operand, dim, inner in places:
        layout = layouts[operand]
        if layout.dims[dim] == order:
            window = window_of(frame.rule, operand, factor)
            own = _units(layout, dim, inner, order, length, sizes, window) or default
            row = frame.nbytes[operand] * (len(own) - 1) / max(length, 1)
            held.append((own, row * (2 if frame.grads[operand] else 1)))
    options = list(dict.fromkeys([cuts or default, *[own for own, _ in held], default]))
    if len(options) == 1 or len(held) < 2:
        return cuts
    best = min(options, key=lambda option: (
        busiest(option, held), max([stop - start for start, stop in pairwise(option)])
    ))
    return None if best == default else best


def _joined_cuts(
    frame: Frame, layouts: Sequence[Layout], factor: str, offsets: Sequence[int],
    order: tuple[int, ...],
) -> tuple[int, ...]:
    """Cuts of a concatenation: the default, or those of one operand with the first and the last
    shard taking what lies before and after it."""
    length = frame.rule.sizes[factor]
    held: list[tuple[tuple[int, ...], float]] = []
    options = [default_cuts(length, [frame.sizes[axis] for axis in order])]
    for operand, dim, _ in frame.leads[factor]:
        layout, offset = layouts[operand], offsets[operand]
        own = tuple([offset + cut for cut in layout.cuts_of(dim)])
        if layout.dims[dim] == order:
            options.append((0, *own[1:-1], length))
            row = frame.nbytes[operand] * (len(own) - 1) / max(layout.shape[dim], 1)
            held.append((own, row))
    return fairest(options, held)


def default_of(layout: Layout, dim: int) -> tuple[int, ...]:
    return default_cuts(
        layout.shape[dim], [layout.mesh.axis_sizes[axis] for axis in layout.dims[dim]]
    )


def scaled(rule: Rule, layout: Layout, factors: Sequence[str], cut: Cut) -> Cuts:
    """A dim's cuts, from those of its leading factor."""
    if len(factors) == 1:
        return cut[1]
    inner = math.prod([rule.sizes[name] for name in factors[1:]])
    return tuple([unit * inner for unit in in_full(rule, layout, factors[0], cut)])


# What cuts cost: elements that ranks lack, and shards that are larger than others.


def busiest(cuts: tuple[int, ...], held: Held) -> float:
    """What the busiest rank lacks of operands held by these cuts."""
    loads = [0.0] * (len(cuts) - 1)
    for own, row in held:
        for shard, (start, stop) in enumerate(pairwise(cuts)):
            inside = max(0, min(stop, own[-1]) - max(start, own[0]))
            kept = max(0, min(stop, own[shard + 1]) - max(start, own[shard]))
            loads[shard] += (inside - kept) * row
    return max(loads)


def fairest(options: Sequence[tuple[int, ...]], held: Held) -> tuple[int, ...]:
    """The cuts of a result that cost least: what the busiest rank lacks, and what the largest shard
    has above an equal share. A result of which one rank has nearly all is as good as whole."""
    largest = max([row for _, row in held], default=0.0)

    def cost(cuts: tuple[int, ...]) -> tuple[float, float]:
        most = max([stop - start for start, stop in pairwise(cuts)])
        equal = -(-(cuts[-1] - cuts[0]) // (len(cuts) - 1))
        lacks = busiest(cuts, held)
        return lacks + (most - equal) * largest, lacks

    return min(options, key=cost)


def sole_shard(cuts: tuple[int, ...]) -> int | None:
    """The shard, of several, that alone has something to share: two places or more."""
    holder = cuts.index(cuts[-1]) - 1
    return holder if len(cuts) > 2 and cuts[-1] > 1 and cuts[holder] == 0 else None


def nearest(cut: int, inner: int) -> int:
    """A cut in units of a factor, rounded half up (default cuts give the first shard more)."""
    return cut if inner == 1 else (2 * cut + inner) // (2 * inner) if inner else 0
