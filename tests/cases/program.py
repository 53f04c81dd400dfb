"""Random programs: chains of calls whose later steps read earlier results, drawn by seed.

A single call is right or wrong alone; a program also finds what calls do to each other: shared
views, memory written through, layouts that only come out of other calls. The steps are drawn
from shapes and a seed alone, so the dense run takes the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import Case, case, reals
from tests.cases.layouts import layouts_of
from tests.effort import EFFORT
from weft import ShardTensor

NUM_PROGRAMS, NUM_STEPS = 60 if EFFORT >= 1 else 30, 8

Step = Callable[[random.Random, list[Tensor]], Tensor]

_UNARY = (torch.tanh, torch.sigmoid, torch.square, torch.neg, F.gelu, lambda x: x * 0.5 + 1)
_BINARY = (torch.add, torch.mul, torch.sub, torch.maximum, lambda x, y: torch.where(x > 0, x, y))


def _unary(draw: random.Random, pool: list[Tensor]) -> Tensor:
    return draw.choice(_UNARY)(draw.choice(pool))


def _binary(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    return draw.choice(_BINARY)(x, draw.choice([y for y in pool if _broadcasts(x, y)]))


def _reduce(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    fn, keep = draw.choice((torch.sum, torch.mean)), draw.random() < 0.7
    return fn(x, dim=draw.randrange(x.dim()), keepdim=keep) if x.dim() else fn(x)


def _normalise(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x, dim = draw.choice(pool), draw.random()
    if not x.dim():
        return torch.tanh(x)
    if dim < 0.3 and x.shape[-1] > 1:
        return F.layer_norm(x, x.shape[-1:])
    return F.softmax(x, int(dim * x.dim()))


def _permute(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    return x.permute(draw.sample(range(x.dim()), x.dim()))


def _reshape(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x, merge = draw.choice(pool), draw.random() < 0.5
    if merge and x.dim() > 1:
        first = draw.randrange(x.dim() - 1)
        return x.flatten(first, first + 1)
    splits = [(dim, n) for dim, n in enumerate(x.shape) if n in (4, 6, 8, 12)]
    if not splits or x.dim() > 3:
        return x.unsqueeze(0).squeeze(0)
    dim, length = draw.choice(splits)
    return x.unflatten(dim, (draw.choice((2, length // 2)), -1))


def _slice(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    if not x.dim():
        return x * 1
    dim = draw.randrange(x.dim())
    start = draw.randrange(x.shape[dim])
    return x.narrow(dim, start, draw.randint(1, x.shape[dim] - start))


def _join(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    y = draw.choice([y for y in pool if y.shape == x.shape])
    return torch.cat([x, y], draw.randrange(x.dim())) if x.dim() else torch.stack([x, y])


def _product(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    others = [y for y in pool if x.dim() and y.dim() == 2 and y.shape[-1] == x.shape[-1]]
    return torch.tanh(F.linear(x, draw.choice(others))) if others else torch.tanh(x)


def _write(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    y, how = x.clone(), draw.randrange(4)
    if how == 0 and y.dim():
        y[: draw.randint(1, y.shape[0])].mul_(2)
    elif how == 1:
        y.add_(x, alpha=0.5)
    elif how == 2:
        y.mul_(draw.choice([one for one in pool if one.shape == x.shape]))
    else:
        y.copy_(x * 3)
    return y


def _write_view(draw: random.Random, pool: list[Tensor]) -> Tensor:
    """What views of views are written with is there in their base."""
    y = draw.choice(pool).clone()
    view = y
    for _ in range(draw.randint(1, 2)):
        if not view.dim():
            break
        dim, how = draw.randrange(view.dim()), draw.randrange(4)
        if how == 0:
            view = view.transpose(0, dim)
        elif how == 1:
            view = view.select(dim, draw.randrange(view.shape[dim]))
        elif how == 2:
            view = view.movedim(dim, 0)[:: draw.randint(1, 2)]
        else:
            view = view.unsqueeze(dim)
    if draw.random() < 0.5:
        view.tanh_()
    else:
        view.copy_(view * draw.choice((2, 0.5)) + 1)
    return y


def _out(draw: random.Random, pool: list[Tensor]) -> Tensor:
    """Written to a tensor that is there, without a gradient."""
    x = draw.choice(pool)
    with torch.no_grad():
        out = torch.empty_like(draw.choice([one for one in pool if one.shape == x.shape]))
        torch.mul(x, 2, out=out)
        out = torch.sub(out, x, out=out)
    return x * out


def _without_gradient(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x = draw.choice(pool)
    if draw.random() < 0.5:
        return x * x.detach()
    with torch.no_grad():
        weight = torch.sigmoid(x)
    return x * weight


def _pick(draw: random.Random, pool: list[Tensor]) -> Tensor:
    """By values, which all layouts have alike, or by steps."""
    x = draw.choice(pool)
    if not x.dim():
        return x.expand(2)
    if draw.random() < 0.5:
        y = x.clone()
        y[..., :: 2] = x[..., :1] * 3
        return y
    return x.masked_fill(x > x.mean(), 0.5)


def _move(draw: random.Random, pool: list[Tensor]) -> Tensor:
    x, which = draw.choice(pool), draw.random()
    if not isinstance(x, ShardTensor):
        return x * 1
    have = list(layouts_of(x.device_mesh.abstract, tuple(x.shape)).values())
    return x.redistribute(placements=have[int(which * len(have))]) * 1


STEPS: tuple[Step, ...] = (
    _unary, _binary, _binary, _reduce, _normalise, _permute, _reshape, _slice, _join, _product,
    _write, _write, _write_view, _out, _without_gradient, _pick, _move,
)


def _broadcasts(x: Tensor, y: Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape))
    return all(a == b or 1 in (a, b) for a, b in pairs)


def program(seed: int) -> Callable[..., list[Tensor]]:
    """The program of a seed: its last three results and the sum of the whole."""

    def run(*operands: Tensor) -> list[Tensor]:
        draw = random.Random(seed)
        pool = list(operands)
        for _ in range(NUM_STEPS):
            pool.append(draw.choice(STEPS)(draw, pool))
        return [*pool[-3:], sum(one.mean() for one in pool)]  # type: ignore[list-item]

    return run


CASES: list[Case] = [
    case(f"program{seed}", program(seed), reals(6, 4), reals(4), reals(6, 1), reals(5, 4))
    for seed in range(NUM_PROGRAMS)
]
