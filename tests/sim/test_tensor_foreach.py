"""Every `torch._foreach_*` does on ShardTensors, and among plain tensors, what it does on plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.effort import EFFORT
from tests.sharded import Make, agree
from weft import P, ShardTensor

FUNCTIONS = sorted(name for name in dir(torch) if name.startswith("_foreach_"))
X = torch.arange(1.0, 26.0, dtype=torch.float64).view(5, 5) / 32
LISTS_OR_NUMBERS = ("add", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "pow",
                    "sub")


def arguments(name: str, a: Tensor, b: Tensor, c: Tensor) -> Iterator[tuple[Any, ...]]:
    """What follows the list [a, b], in every form that the function takes."""
    base = name.removeprefix("_foreach_").removesuffix("_")
    if base in LISTS_OR_NUMBERS:
        yield from (([b, c],), (0.5,), ([0.5, 2.0],))
    if base in ("mul", "div"):
        yield (torch.tensor(0.25, dtype=torch.float64),)
    if base in ("addcdiv", "addcmul"):
        yield from (([b, c], [c, a]), ([b, c], [c, a], 0.3), ([b, c], [c, a], [0.3, 0.4]))
    if base == "lerp":
        yield from (([b, c], 0.3), ([b, c], [c, a]), ([b, c], [0.3, 0.6]))
    if base in ("copy", "mm"):
        yield ([b, c],)
    if base in ("norm", "powsum"):
        yield from ((), (1,), (3, torch.float64))
    if not base.startswith((*LISTS_OR_NUMBERS, "addc", "lerp", "copy", "mm", "norm", "powsum")):
        yield ()


def every_form(name: str, mixed: bool) -> Callable[[Make], Any]:
    func = getattr(torch, name)

    def program(make: Make) -> Any:
        def operands() -> tuple[Any, Any, Any]:
            second = X.flip(1) * 0.7 + 0.01
            b = second if mixed else make(second, False)
            return make(X, False), b, make(X.flip(0) * 0.3, False)

        seen: list[Any] = []
        for form in range(len(list(arguments(name, *operands())))):
            for _ in range(2):  # built, then from the cache
                a, b, c = operands()
                more = list(arguments(name, a, b, c))[form]
                out = func([a, b], *more)
                seen += [type(out).__name__, out, a, b, c]
        return seen

    return program


HARDEST = "half partial"
EASIER = ("partial", "empty", "both")


@pytest.mark.parametrize("name, way", [
    (name, way) for at, name in enumerate(FUNCTIONS)
    for way in (HARDEST, *(EASIER if EFFORT >= 1 else EASIER[at % 3 :][:1]))
])
def test_foreach(name: str, way: str) -> None:
    """In the hardest way, with elements of several kinds, and in another in turn."""
    agree(every_form(name, mixed=way == HARDEST), way)


def layouts_differ(make: Make) -> Any:
    """Within an element; and the elements are of several shapes and dtypes."""
    x, row = make(X, False), make(X[0].float(), False)
    other = x.redistribute(placements=P()) if isinstance(x, ShardTensor) else x
    out = torch._foreach_mul([x, row, x], [other, row, x])
    torch._foreach_add_([x, row], [other * 2, row], alpha=3)
    return [out, x, row, torch._foreach_pow(2.0, [x, row])]


def tuples_and_keywords(make: Make) -> Any:
    x, y = make(X, False), make(X * 2, False)
    roots = torch._foreach_sqrt((x, y))
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcmul_(self=[x], value=0.5, tensor1=[y], tensor2=[y])
    return [roots, x, torch._foreach_add((x, y), other=[y, y], alpha=2)]


def numbers_that_change(make: Make) -> Any:
    x, y = make(X, False), make(X * 2, False)
    seen: list[Any] = []
    for step in (0.5, 0.25, 0.0, float("inf"), 0.25):
        torch._foreach_addcdiv_([x], [y], [y + 1], [step])
        seen += [torch._foreach_mul([x, X], [step, 2 * step]), torch._foreach_pow([x], step)]
    return seen


def gradients(make: Make) -> Any:
    x, y = make(X), make(X * 2)
    torch.stack([one.sum() for one in torch._foreach_mul([x, y], [y, x])]).sum().backward()
    return [x.grad, y.grad]


@pytest.mark.parametrize("way", ["uneven", "replicated", "partial", "empty", "both"])
@pytest.mark.parametrize(
    "program", [layouts_differ, tuples_and_keywords, numbers_that_change, gradients],
    ids=lambda program: program.__name__,
)
def test_programs(program: Callable[[Make], Any], way: str) -> None:
    agree(program, way)


def moved_views(make: Make) -> Any:
    base = make(X[:4], False)
    view = base.view(-1)  # of columns, gathered
    torch._foreach_mul_([view], 2)
    torch._foreach_copy_([view], [view * 2])
    seen = [base * 1, view * 1]
    torch._foreach_add_([base, base], 1)
    torch._foreach_zero_([view[:3], base[2]])
    return [seen, base, view, torch._foreach_mul([view], 2)]


@pytest.mark.parametrize("way", ["even", "uneven", "partial", "both"])
def test_writes_to_views_that_had_to_move_reach_their_base(way: str) -> None:
    agree(moved_views, way)
