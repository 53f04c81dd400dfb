"""Random indices: numbers, slices, new dims, `...`, lists, tensors and masks, read and written at.

Drawn by seed from what torch takes; tensors among them are operands, in layouts of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cases import Case, Operand, bools, case, integers, reals

NUM_CASES = 50


class Place(int):
    """Stands in a drawn index for the operand of this number."""


def _slice(draw: random.Random, length: int) -> slice:
    start, stop = (draw.choice([None, draw.randint(-length - 1, length + 1)]) for _ in range(2))
    return slice(start, stop, draw.choice([None, None, 2, 3]))


def _index(draw: random.Random, shape: tuple[int, ...]) -> tuple[list[Any], list[Operand]]:
    """An index of parts, and the operands that `Place`s in it name."""
    parts: list[Any] = []
    operands: list[Operand] = []
    spread = tuple(draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 1, 2])))
    dim, stop = 0, draw.randint(1, len(shape))
    while dim < stop:
        length, kind, count = shape[dim], draw.random(), 1
        if kind < 0.1:
            parts.append(None)
            continue
        if kind < 0.28:
            parts.append(draw.randrange(-length, length))
        elif kind < 0.45:
            parts.append(_slice(draw, length))
        elif kind < 0.6:
            parts.append([draw.randrange(-length, length) for _ in range((*spread, 1)[-1])])
        elif kind < 0.85:
            parts.append(Place(len(operands)))
            of = tuple(draw.choice([1, each]) for each in spread)
            operands.append(integers(*of, low=-length, high=length))
        else:
            count = draw.randint(1, min(2, len(shape) - dim))
            parts.append(Place(len(operands)))
            operands.append(bools(*shape[dim : dim + count]))
        dim += count
    if draw.random() < 0.3:
        parts.insert(draw.choice([0, len(parts)]), Ellipsis)
    return parts, operands


def _at(parts: list[Any], given: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tuple([given[part] if type(part) is Place else part for part in parts])


def _case(seed: int) -> Case | None:
    """None where torch refuses the index that comes out."""
    draw = random.Random(seed)
    shape = tuple(draw.choice([1, 2, 3, 4, 5]) for _ in range(draw.choice([1, 2, 3, 3, 4])))
    parts, operands = _index(draw, shape)
    generator = torch.Generator().manual_seed(seed)
    made = [(operand, operand.make(generator)) for operand in operands]
    try:
        found = torch.zeros(shape)[_at(parts, tuple(tensor for _, tensor in made))]
    except IndexError:
        return None
    fixed = [Operand(one.shape, lambda _, tensor=tensor: tensor.clone()) for one, tensor in made]
    lead = draw.choice([0, 0, draw.randint(0, found.dim())])
    of_value = tuple(draw.choice([each, each, 1]) for each in found.shape[lead:])
    return case(f"index{seed}", _use(parts, draw.choice(_WRITES)),
                reals(*shape, laid=True), reals(*of_value), *fixed, per_mesh=1, falls_back=True)


def _set(y: Tensor, key: Any, value: Tensor) -> None:
    y[key] = value


def _add(y: Tensor, key: Any, value: Tensor) -> None:
    y[key] += value


_WRITES = (_set, _set, _add)


def _use(parts: list[Any], write: Callable[..., None]) -> Callable[..., list[Tensor]]:
    def fn(x: Tensor, value: Tensor, *given: Tensor) -> list[Tensor]:
        key, y, shown = _at(parts, given), x * 1, x * 2
        write(y, key, value)
        with torch.no_grad():
            other = x.detach().clone()
            row = other[:1]
            other[key] = 3
        return [x[key], y, shown[key], other, row]

    return fn


_DRAWN = (_case(seed) for seed in range(10 * NUM_CASES))
CASES: list[Case] = [one for one, _ in zip(filter(None, _DRAWN), range(NUM_CASES))]
