"""The layouts of operands that `check_rule` tries, and each rank's blocks and partial values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout, Mesh, P
from weft.rules import Rule

__all__ = ["Trial", "Trials", "part"]

_MANY = 150
"""If there are more ways than this on one mesh, every n-th is tried."""

Place = int | str | None
"""What an axis does with an operand: the dim that it shards, the kind of partial values, or
nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of layouts for the operands."""

    mesh: tuple[tuple[str, int], ...]
    layouts: tuple[Layout, ...]
    grad: bool


class Trials:
    """The ways for one call: its rule bound to the shapes of its operands; with gradients, if it
    has any, and without where the rule lets more pass then."""

    def __init__(self, rule: Rule, operands: Sequence[Tensor], has_gradient: bool) -> None:
        self.rule, self.operands, self.has_gradient = rule, operands, has_gradient

    def __iter__(self) -> Iterator[Trial]:
        """Every way that is tried, mesh after mesh."""
        forward_only = self.rule.moves or any(kind != "sum" for kind in self.rule.reduce.values())
        modes = [False] if forward_only or not self.has_gradient else []
        modes += [True] if self.has_gradient else []
        for size in (2, 3):
            mesh = Mesh({"x": size})
            for grad in modes:
                for layouts in (*self._asked_for(mesh), *self._any(mesh, not grad)):
                    yield Trial((("x", size),), layouts, grad)
        mesh = Mesh({"x": 2, "y": 2})
        pairs = list(itertools.product(list(self._candidates()), repeat=2))
        for grad, (one, other) in itertools.product(modes, pairs):
            if self._can_be(one, other):
                layouts = [
                    _layout(mesh, operand, places)
                    for operand, *places in zip(self.operands, one, other)
                ]
                yield Trial((("x", 2), ("y", 2)), tuple(layouts), grad)

    def _candidates(self) -> Iterator[list[Place]]:
        """What a mesh axis may do with each operand, by the rule."""
        count = len(self.operands)
        leads: dict[str, list[Place]] = {}
        for at, dims in enumerate(self.rule.operands):
            for dim, factors in enumerate(dims or ()):
                if factors and factors[0] not in self.rule.whole:
                    leads.setdefault(factors[0], [None] * count)[at] = dim
        yield from leads.values()
        for other in sorted({other for _, _, other in self.rule.beside} & leads.keys()):
            both = list(leads[other])
            for at, factor, leader in self.rule.beside:
                if leader == other and factor in leads:
                    both[at] = leads[factor][at]
            yield both
        for members in self.rule.linear:
            for kind in ("sum", "avg"):
                yield [kind if at in members else None for at in range(count)]
        yield [None] * count

    def _can_be(self, *choices: list[Place]) -> bool:
        """Whether the dtypes of the operands allow such partial values."""
        return all(
            not isinstance(place, str) or _has_terms(operand, place)
            for choice in choices for operand, place in zip(self.operands, choice)
        )

    def _asked_for(self, mesh: Mesh) -> Iterator[tuple[Layout, ...]]:
        """What the rule asks for over one axis, with shards of several lengths."""
        for choice in self._candidates():
            if not self._can_be(choice):
                continue
            yield tuple(_layout(mesh, one, [place]) for one, place in zip(self.operands, choice))
            units = [self._units(at, place) for at, place in enumerate(choice)]
            lengths = {length for length, _ in units} - {0}
            for cut in _ragged(max(lengths), mesh.size()) if len(lengths) == 1 else ():
                yield tuple(
                    _layout(mesh, one, [place], [size * inner for size in cut] if inner else ())
                    for one, place, (_, inner) in zip(self.operands, choice, units)
                )

    def _units(self, operand: int, place: Place) -> tuple[int, int]:
        """The length of the factor that leads this dim, and of the dim's others together."""
        dims = self.rule.operands[operand]
        if not isinstance(place, int) or dims is None:
            return 0, 0
        if (operand, dims[place][0]) in self.rule.windows:  # shards of any lengths can be read
            return self.operands[operand].shape[place], 1
        length = self.rule.sizes[dims[place][0]]
        return length, self.operands[operand].shape[place] // max(length, 1)

    def _any(self, mesh: Mesh, any_kind: bool) -> Iterator[tuple[Layout, ...]]:
        """All layouts of every operand, in all combinations."""
        ways = []
        for operand in self.operands:
            mine = [_layout(mesh, operand, [None])]
            for dim, length in enumerate(operand.shape):
                mine.append(_layout(mesh, operand, [dim]))
                mine += [_layout(mesh, operand, [dim], cut) for cut in _ragged(length, mesh.size())]
            kinds = ("sum", "max") if self.rule.moves and any_kind else ("sum",)
            mine += [_layout(mesh, operand, [kind]) for kind in kinds if _has_terms(operand, kind)]
            ways.append(mine)
        count = math.prod(map(len, ways))
        # An odd step omits none of the first operand's ways with some of the last one's.
        step = count // _MANY | 1 if count > _MANY else 1
        return itertools.islice(itertools.product(*ways), 0, None, step)


def _layout(
    mesh: Mesh, operand: Tensor, places: Sequence[Place], cut: Sequence[int] = ()
) -> Layout:
    """An operand's layout by what each axis does; `cut`: the lengths of shards, if not default."""
    entries: list[list[Any]] = [[] for _ in operand.shape]
    partial: dict[Any, str] = {}
    for axis, place in zip(mesh.axis_names, places):
        if isinstance(place, int):
            entries[place].append(axis)
        elif place is not None:
            partial[axis] = place
    spec = P(*[tuple(axes) or None for axes in entries], partial=partial or None)
    sizes = {place: tuple(cut) for place in places if isinstance(place, int)} if cut else None
    return Layout(mesh, tuple(operand.shape), spec, sizes=sizes)


def _ragged(length: int, num_shards: int) -> list[tuple[int, ...]]:
    """Lengths of shards: zero at one end, zero at the other, nearly zero."""
    zeros = [0] * (num_shards - 2)
    found = [(0, *zeros, length), (length, *zeros, 0)]
    return [*found, (1, *zeros, length - 1)] if length > 2 else found


def _has_terms(tensor: Tensor, kind: str) -> bool:
    if kind == "sum":
        return tensor.dtype is not torch.bool
    return tensor.is_floating_point() or (kind == "avg" and tensor.is_complex())


def part(layout: Layout, full: Tensor, here: Sequence[int], seed: int) -> Tensor:
    """A rank's block; over partial axes its partial value, unequal and of both signs."""
    axes = [axis for axis, kind in enumerate(layout.partial) if kind is not None]
    part = full
    if axes:
        sizes = [layout.mesh.axis_sizes[axis] for axis in axes]
        place = layout.mesh.place_along(axes, here)
        part = _terms(full, layout.partial[axes[0]] or "sum", math.prod(sizes), seed)[place]
        # Each avg axis takes the mean over its own coordinates.
        means = [layout.mesh.axis_sizes[axis] for axis in axes if layout.partial[axis] == "avg"]
        part = part * math.prod(means)
    box = layout.box_at(here)
    return part[tuple(slice(start, stop) for start, stop in box)].clone()


def _terms(full: Tensor, kind: str, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = [
        (torch.randint(-8, 9, full.shape, generator=generator) / 4).to(full.dtype)
        for _ in range(count - 1)
    ]
    if kind == "max":
        return [full, *(full - one.abs() for one in noise)]
    return [*noise, full - sum(noise)]
