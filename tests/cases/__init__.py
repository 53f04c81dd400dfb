"""The shared cases: what is computed, on what operands, in which layouts.

One `Case` is a function on tensors with a builder for each operand. `trials(case)` lays its
operands out in every way that `tests.cases.layouts` knows, on every small mesh. The same trials
drive forward and backward, on simulated ranks and over gloo (`tests.harness`). Everything is
named and seeded: a trial is reproduced by its id.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.cases.layouts import layouts_of
from tests.effort import EFFORT
from weft.core import Layout, Mesh

MESHES: tuple[dict[str, int], ...] = ({"x": 2}, {"x": 3}, {"dp": 2, "tp": 2}, {"x": 1})

PLAIN = "plain"
"""The name of the layout of an operand that stays an ordinary tensor."""


@dataclass(frozen=True, slots=True)
class Operand:
    """How to make one operand.

    `fixed` ones get no gradient; `dense` ones are always plain tensors, `memory_format` ones never.
    """

    shape: tuple[int, ...]
    make: Callable[[torch.Generator], Tensor]
    fixed: bool = False
    dense: bool = False
    laid: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A named computation on tensors.

    `fn` gets the operands and returns a tensor, a number, or a tuple or list of them. A case
    with `grad` is also run backward. `layouts` limits the layouts of an operand by name, and
    `per_mesh` says how many combinations of layouts are tried on each mesh. A case that
    `falls_back` may gather its operands, with a warning, because no rule covers it; one that
    `may_refuse` may raise UnsupportedOpError instead, in the layouts that leave no other way.
    """

    name: str
    fn: Callable[..., Any]
    operands: tuple[Operand, ...]
    grad: bool = True
    layouts: tuple[tuple[str, ...] | None, ...] = ()
    per_mesh: int = 3
    falls_back: bool = False
    may_refuse: bool = False

    def tensors(self) -> list[Tensor]:
        """The dense operands, the same at every call."""
        generator = torch.Generator().manual_seed(seed_of(self.name))
        return [operand.make(generator) for operand in self.operands]


@dataclass(frozen=True, slots=True)
class Trial:
    """One case on one mesh in one combination of layouts (None: a plain operand)."""

    case: Case
    axes: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    layouts: tuple[Layout | None, ...]

    @property
    def id(self) -> str:
        mesh = "".join(f"{name}{size}" for name, size in self.axes)
        return f"{self.case.name}-{mesh}-{'-'.join(self.names)}"


def seed_of(*parts: object) -> int:
    """A seed that depends on the text of `parts` alone."""
    return zlib.crc32(repr(parts).encode())


def case(name: str, fn: Callable[..., Any], *operands: Operand, **options: Any) -> Case:
    """A case in one line."""
    return Case(name, fn, operands, **options)


def reals(*shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Operand:
    """Normal numbers, in steps of 1/256 so that the terms of a sum are exact in float32 too."""

    def make(generator: torch.Generator) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return ((values * 256).round() / 256).to(dtype)

    return Operand(shape, make, **options)


def positives(*shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Operand:
    """Numbers in (0.1, 1.1)."""
    return Operand(
        shape,
        lambda generator: (
            torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
        ).to(dtype),
        **options,
    )


def integers(*shape: int, low: int = 0, high: int = 10, dtype: torch.dtype = torch.int64,
             **options: Any) -> Operand:
    """Whole numbers in [low, high); few enough of them make ties."""
    return Operand(
        shape,
        lambda generator: torch.randint(low, high, shape, generator=generator).to(dtype),
        **options,
    )


def bools(*shape: int, **options: Any) -> Operand:
    """Coin flips."""
    return integers(*shape, high=2, dtype=torch.bool, **options)


def given(values: Any, dtype: torch.dtype = torch.int64, **options: Any) -> Operand:
    """The very values."""
    fixed = torch.tensor(values, dtype=dtype)
    return Operand(tuple(fixed.shape), lambda generator: fixed.clone(), **options)


def trials(case: Case, meshes: Sequence[Mapping[str, int]] | None = None) -> Iterator[Trial]:
    """Combinations of layouts, drawn at random without repeats, seeded by the case's name.

    On all meshes, or on these of them.
    """
    for axes in MESHES if meshes is None else meshes:
        mesh = Mesh(axes)
        if mesh.size() == 1 and EFFORT < 1 and seed_of(case.name) % 4:
            continue  # one rank is tried with a quarter of the cases
        options = [_options(case, place, mesh) for place in range(len(case.operands))]
        limit = max(1, round(EFFORT * case.per_mesh)) if mesh.size() > 1 else 1
        for names in _combinations(options, limit, seed_of(case.name, str(mesh))):
            layouts = tuple(have[name] for have, name in zip(options, names))
            yield Trial(case, tuple(axes.items()), names, layouts)


def trials_of(cases: list[Case]) -> list[Trial]:
    """Every trial of every case."""
    return [trial for case in cases for trial in trials(case)]


def _options(case: Case, place: int, mesh: Mesh) -> dict[str, Layout | None]:
    operand = case.operands[place]
    if operand.dense:
        return {PLAIN: None}
    wanted = case.layouts[place] if place < len(case.layouts) else None
    partial = operand.make(torch.Generator()).dtype is not torch.bool
    have: dict[str, Layout | None] = dict(layouts_of(mesh, operand.shape, partial))
    if len(case.operands) > 1 and not operand.laid:
        have[PLAIN] = None
    return have if wanted is None else {name: have[name] for name in wanted if name in have}


def _combinations(
    options: list[dict[str, Layout | None]], limit: int, seed: int
) -> list[tuple[str, ...]]:
    """Every other one gives all operands one layout where they have it, as users mostly do."""
    draw = random.Random(seed)
    chosen: dict[tuple[str, ...], None] = {}
    for turn in range(20 * limit):
        if len(chosen) == limit:
            break
        names = [draw.choice(list(have)) for have in options]
        if turn % 2 == 0:
            names = [names[0] if names[0] in have else name for have, name in zip(options, names)]
        if any(name != PLAIN for name in names):
            chosen[tuple(names)] = None
    return sorted(chosen)
