"""Windows: dims of which each place of another dim reads a few neighbouring ones.

Place `o` of the factor reads the places `stride*o + dilation*t - pad` of the windowed dim, for each
tap `t`. The dim belongs to the factor: an axis that shards the dim holds the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from weft.core import Interval
from weft.rules.call import Call

__all__ = ["Boxed", "BoxedDim", "OnBox", "Window", "WindowText"]


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


@dataclass(frozen=True, slots=True)
class Window:
    """The window of one dim of a call."""

    stride: int
    dilation: int
    taps: int
    pad: int

    @property
    def extent(self) -> int:
        """How many places lie between the first and the last that one place reads, both counted."""
        return self.dilation * (self.taps - 1) + 1

    def read(self, start: int, stop: int) -> Interval:
        """What the places start..stop of the factor, at least one, read."""
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

    def reads(
        self, units: Sequence[int], owned: Sequence[int]
    ) -> tuple[Interval, ...]:
        """What each shard of the factor reads of the dim, whose cuts are `owned`; a shard of
        nothing reads nothing."""
        return tuple([
            self.read(start, stop) if start < stop else (place, place)
            for (start, stop), place in zip(pairwise(units), owned)
        ])


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
    window: Window
    box: Interval | None
    outputs: Interval


@dataclass(frozen=True, slots=True)
class Boxed:
    """One rank's part of a call with windows.

    Args:
        args, kwargs: of the op; TensorArgs stand for tensors.
        dims: the dims of the first operand that has windows, or is read by windows of results, in
            order.
        shapes: of the results on this rank.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: tuple[BoxedDim, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def is_idle(self) -> bool:
        """Whether the rank has nothing of the results."""
        return any(0 in shape for shape in self.shapes)

    def arg(self, call: Call, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        at = call.names.index(name)
        return self.args[at] if at < len(self.args) else self.kwargs.get(name, default)


OnBox = Callable[[Call, Boxed], tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]]]
"""(call, boxed) -> what runs on the local tensors (None: the op), and its arguments.

Windowed dims that are sharded come as the boxes that the rank reads, padding included, so that the
op runs without padding along them.
"""
