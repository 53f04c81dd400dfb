"""Windows: each place of one dim reads a few neighbouring places of another.

Place `o` of the factor reads the places `stride*o + dilation*t - pad` of the windowed dim, for each
tap `t`; or an interval that a table gives. The dim belongs to the factor: an axis that shards the
dim holds the factor. Or place `o` reads one place, at a fixed distance, and what it reads beyond
an end stands inside of the dim (`Shift`): of a ring at the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from weft.core import Interval
from weft.rules.call import Call

__all__ = [
    "AnyWindow", "Boxed", "BoxedDim", "Idle", "OnBox", "OnRank", "Shift", "Table", "Tables",
    "Window", "WindowText", "is_ring",
]


@dataclass(frozen=True, slots=True)
class WindowText:
    """A window as it is written: `2*y+v-1`, or `2*y+v<3-1`.

    Args:
        tap: the factor whose length is the number of taps; `count` is that number where it stands
            in the string.
    """

    stride: int
    dilation: int
    tap: str
    count: int | None
    pad: int


class _Reading:
    """What places read, shard by shard."""

    __slots__ = ()

    def read(self, start: int, stop: int) -> Interval:
        """What the places start..stop of the factor, at least one, read."""
        raise NotImplementedError

    def reads(self, units: Sequence[int], owned: Sequence[int]) -> tuple[Interval, ...]:
        """What each shard of the factor reads of the dim, whose cuts are `owned`; a shard of
        nothing reads nothing."""
        return tuple([
            self.read(start, stop) if start < stop else (place, place)
            for (start, stop), place in zip(pairwise(units), owned)
        ])


@dataclass(frozen=True, slots=True)
class Window(_Reading):
    """The window of one dim of a call."""

    stride: int
    dilation: int
    taps: int
    pad: int

    @property
    def extent(self) -> int:
        """How many places lie between the first and the last that one place reads, both counted."""
        return self.dilation * (self.taps - 1) + 1

    def overlap(self, length: int) -> float:
        """What neighbouring places of the factor, of this length, both read, as a part of the
        dim."""
        return min(max(self.extent - self.stride, 0) / (self.stride * max(length, 1)), 1.0)

    def read(self, start: int, stop: int) -> Interval:
        return self.stride * start - self.pad, self.stride * (stop - 1) - self.pad + self.extent

    def needs(self, start: int, stop: int, length: int) -> Interval:
        """Of which places of the factor, of this length, the places start..stop of the dim are
        made, read backwards: one at least."""
        first = -(-(start + self.pad - self.extent + 1) // self.stride)
        last = (stop - 1 + self.pad) // self.stride
        first = min(max(first, 0), length - 1)
        return first, max(min(last + 1, length), first + 1)

    def units(self, cuts: Sequence[int], length: int) -> tuple[int, ...]:
        """The cuts of the factor, of this length, that belong to cuts of the dim: a place lies
        where the centre of its window does."""
        shift = 2 * self.pad - self.extent
        inner = [-(-(2 * cut + shift) // (2 * self.stride)) for cut in cuts[1:-1]]
        return (0, *[min(max(unit, 0), length) for unit in inner], length)

    def cuts(self, units: Sequence[int], length: int) -> tuple[int, ...]:
        """Cuts of the dim, of this length, to which these cuts of the factor belong."""
        shift = self.extent - 2 * self.pad - self.stride
        inner = [-(-(2 * self.stride * unit + shift) // 2) for unit in units[1:-1]]
        return (0, *[min(max(cut, 0), length) for cut in inner], length)


_LOOKED_AT = 1 << 14


@dataclass(frozen=True, slots=True)
class Table(_Reading):
    """A window without a fixed stride: place `o` reads `starts[o]..stops[o]`.

    Args:
        starts, stops: neither falls from one place to the next; all intervals are inside the dim.
        length: of the dim.
    """

    starts: Sequence[int]
    stops: Sequence[int]
    length: int

    def overlap(self, length: int) -> float:
        """What neighbouring places of the factor both read at most, as a part of the dim; of many
        places, a few are looked at."""
        step = max(len(self.starts) // _LOOKED_AT, 1)
        both = [stop - start for stop, start in zip(self.stops[:-1:step], self.starts[1::step])]
        return max(0, *both, 0) / max(self.length, 1)

    def read(self, start: int, stop: int) -> Interval:
        return self.starts[start], self.stops[stop - 1]

    def units(self, cuts: Sequence[int], length: int) -> tuple[int, ...]:
        """The cuts of the factor, of this length, that belong to cuts of the dim: in proportion."""
        return _in_proportion(cuts, self.length, length)

    def cuts(self, units: Sequence[int], length: int) -> tuple[int, ...]:
        """Cuts of the dim, of this length, to which these cuts of the factor belong."""
        return _in_proportion(units, len(self.starts), length)


@dataclass(frozen=True, slots=True)
class Shift(_Reading):
    """Place `o` reads the place `o - by`.

    Args:
        by: the distance. length: of the dim.
        mode: what stands beyond an end: "circular" (the dim is a ring), "reflect" (the places in
            front of it, without the end itself), "replicate" (the end). Or "mirror": place `o`
            reads the place that is as far from the other end.
        home: place `o` lies where the place `o - home` does.
    """

    by: int
    length: int
    mode: str
    home: int = 0

    def overlap(self, length: int) -> float:
        """What a shard reads of others, as a part of the dim."""
        away = self.length if self.mode == "mirror" else abs(self.by - self.home)
        return min(away / max(self.length, 1), 1.0)

    def place(self, output: int) -> int:
        """The place that a place of the factor reads, or a tensor of them; on a ring, it may lie
        outside of the dim."""
        place, last = output - self.by, self.length - 1
        match self.mode:
            case "reflect":
                return last - abs(last - abs(place))
            case "replicate":  # the middle one of 0, place and last
                return (abs(place) - abs(place - last) + last) // 2
            case "mirror":
                return last - place
            case _:
                return place

    def read(self, start: int, stop: int) -> Interval:
        turns = [turn + self.by for turn in (0, self.length - 1) if self.mode == "reflect"]
        ends = [start, stop - 1, *[turn for turn in turns if start <= turn < stop]]
        places = [self.place(end) for end in ends]
        return min(places), max(places) + 1

    def units(self, cuts: Sequence[int], length: int) -> tuple[int, ...]:
        """The cuts of the factor, of this length, that belong to cuts of the dim: all that is
        beyond an end lies with the shard at that end."""
        return (0, *[min(max(cut + self.home, 0), length) for cut in cuts[1:-1]], length)

    def cuts(self, units: Sequence[int], length: int) -> tuple[int, ...]:
        """Cuts of the dim, of this length, to which these cuts of the factor belong."""
        return (0, *[min(max(unit - self.home, 0), length) for unit in units[1:-1]], length)


AnyWindow = Window | Table | Shift


def is_ring(window: AnyWindow | None) -> bool:
    """Whether what it reads beyond an end stands at the other end."""
    return isinstance(window, Shift) and window.mode == "circular"


def _in_proportion(cuts: Sequence[int], before: int, after: int) -> tuple[int, ...]:
    """The cuts of a length for another length, rounded half up."""
    inner = [(2 * cut * after + before) // (2 * before) if before else 0 for cut in cuts[1:-1]]
    return (0, *inner, after)


@dataclass(frozen=True, slots=True)
class BoxedDim:
    """One windowed dim on one rank.

    Args:
        dim: of the operand. length: its global length. window: of it.
        box: the interval that was read, filled where it sticks out of the dim; None where the dim
            is whole, and as the call has it.
        outputs: the places of the result that the rank computes.

    Where the window is read backwards, `box` are the places of the factor that the outputs are made
    of, none of them outside.
    """

    dim: int
    length: int
    window: AnyWindow
    box: Interval | None
    outputs: Interval


@dataclass(frozen=True, slots=True)
class Boxed:
    """One rank's part of a call with windows.

    Args:
        args, kwargs: of the op; TensorArgs stand for tensors.
        dims: the dims of the first operand that has windows, or is read by windows of results, in
            order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: tuple[BoxedDim, ...]

    def arg(self, call: Call, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        at = call.names.index(name)
        return self.args[at] if at < len(self.args) else self.kwargs.get(name, default)


@dataclass(frozen=True, slots=True)
class Idle:
    """A rank that has nothing of one of the results runs nothing; these are their shapes."""

    shapes: tuple[tuple[int, ...], ...]


OnRank = tuple[Callable[..., Any] | Idle | None, tuple[Any, ...], dict[str, Any]]
"""What runs on the local tensors of one rank (None: the op), and its arguments."""


OnBox = Callable[[Call, Boxed], OnRank]
"""(call, boxed) -> what runs there.

Windowed dims that are sharded come as the boxes that the rank reads, padding included, so that the
op runs without padding along them. A rank with an empty result is not asked (`Idle`).
"""

Tables = Callable[[Call], Mapping[str, Table | Shift]]
"""(call) -> the tables or shifts of the factors whose windows the string leaves to them."""
