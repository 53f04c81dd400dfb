"""`x[index] = value` in all forms, writes to sums that are not reduced, `out=`, plain targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cases import Case, case, reals

_ROWS = torch.tensor([4, 0, 2])
_PAIRS = torch.tensor([[0, 5], [3, -1]])
_COLUMNS = torch.tensor([1, 3, 0])
_MASK = torch.arange(24).view(6, 4) % 3 == 0
_SOME = torch.tensor([True, False, True, True, False, False])

INDEX: dict[str, Any] = {
    "row": -1, "steps": slice(1, 5, 2), "column": (..., 1), "new_dim": (None, 2),
    "element": (3, -2), "list": [0, 3], "rows": _ROWS, "pairs": _PAIRS,
    "columns": (slice(None), _COLUMNS), "elements": (_ROWS, _COLUMNS), "mask": _MASK,
    "some_rows": _SOME, "some_of_a_column": (_SOME, 1), "mixed": (slice(1, 4), _COLUMNS),
    "new_dim_rows": (None, _ROWS), "number": torch.tensor(4), "true": True,
    "nothing": torch.tensor([], dtype=torch.long), "lists": ([0, 5], [1, 2]),
}


def _set(key: Any) -> Callable[..., list[Tensor]]:
    """A tensor and a number written to copies of the base: recorded, where gradients are."""

    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        full, row, number = a.clone(), a.clone(), a.clone()
        shape = torch.empty(6, 4)[key].shape
        full[key] = b.reshape(-1)[: shape.numel()].view(shape)
        if shape:
            row[key] = b.reshape(-1)[: shape[-1]]
        number[key] = 2.5
        return [full, row, number]

    return fn


_ON_SUMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_number": lambda a, b: a.add_(1.5), "neg": lambda a, b: a.neg_(),
    "fill": lambda a, b: a.fill_(2), "abs": lambda a, b: a.abs_(), "pow": lambda a, b: a.pow_(2),
    "sub": lambda a, b: a.sub_(b, alpha=-2), "mul": lambda a, b: a.mul_(b),
    "copy_row": lambda a, b: a.copy_(b[0]), "add_itself": lambda a, b: a.add_(a),
    "lerp": lambda a, b: a.lerp_(b, 0.25),
    "index_add": lambda a, b: a.index_add_(0, torch.tensor([1, 1, 4]), b[:3]),
    "scatter": lambda a, b: a.scatter_(0, torch.tensor([[1, 2, 3, 0]]), b[:1]),
    "tril": lambda a, b: a.tril_(), "addmm": lambda a, b: a[:4].addmm_(b[:4], b[2:], beta=0.5),
}


def _on_sum(write: Callable[[Tensor, Tensor], object]) -> Callable[..., Tensor]:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        target = a * 1
        write(target, b)
        return target

    return fn


_SUMS = ("p", "p.dt", "p.t", "s0.d+p.t", "s1.d+p.t", "s0.d+p.t!")


def _out(a: Tensor, b: Tensor) -> list[Tensor]:
    target, base = torch.zeros_like(b), b.clone()
    values, places = a.new_zeros(4), torch.zeros(4, dtype=torch.long)
    torch.add(a, b, out=target)
    torch.add(target, a, out=target)  # it stands among the operands
    torch.max(a, 0, out=(values, places))
    torch.mul(a[1], 2, out=base[3])  # a row of a base
    torch.neg(b[:, 0], out=base[:, 2])
    return [target, values, places, base]


_PLAIN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda t, s: t.add_(s), "copy": lambda t, s: t.copy_(s),
    "all": lambda t, s: t.__setitem__(..., s), "slice": lambda t, s: t[1:3].mul_(s[1:3]),
    "row": lambda t, s: t.__setitem__(2, s[0]), "rows": lambda t, s: t.__setitem__(_ROWS, s[:3]),
    "mask": lambda t, s: t.__setitem__(s > 0, 1.0), "sum": lambda t, s: t.fill_(s.sum()),
    "index_add": lambda t, s: t.index_add_(0, _ROWS, s[:3]),
}


def _to_plain(write: Callable[[Tensor, Tensor], object]) -> Callable[..., Tensor]:
    def fn(t: Tensor, s: Tensor) -> Tensor:
        target = t.clone()
        write(target, s)
        assert type(target) is Tensor
        return target

    return fn


CASES: list[Case] = [
    case(f"set_at_{name}{'' if grad else '_no_grad'}", _set(key), reals(6, 4, laid=True),
         reals(6, 4), grad=grad, falls_back=True, per_mesh=2)
    for name, key in INDEX.items() for grad in (True, False)
] + [
    case(f"{name}_in_a_sum{'' if grad else '_no_grad'}", _on_sum(write), reals(6, 4, laid=True),
         reals(6, 4), grad=grad, layouts=(_SUMS,), falls_back=True, per_mesh=2)
    for name, write in _ON_SUMS.items() for grad in (True, False)
    if grad is False or name not in ("fill",)
] + [
    case("out_of_all_kinds", _out, reals(6, 4), reals(6, 4, laid=True), grad=False),
] + [
    case(f"{name}_to_plain{'' if grad else '_no_grad'}", _to_plain(write), reals(6, 4, dense=True),
         reals(6, 4, laid=True), grad=grad, falls_back=True, per_mesh=2)
    for name, write in _PLAIN.items() for grad in (True, False)
]
