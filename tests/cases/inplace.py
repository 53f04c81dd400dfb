"""In-place calls, writes through slices, foreach calls, and copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.cases import Case, bools, case, integers, reals


def _written(write: Callable[..., object]) -> Callable[..., Tensor]:
    """The call on a clone of the first operand, which it returns after the write."""

    def fn(a: Tensor, *others: Tensor) -> Tensor:
        target = a.clone()
        write(target, *others)
        return target

    return fn


def _set(key: object, value: object = None) -> Callable[..., None]:
    def write(target: Tensor, *others: Tensor) -> None:
        target[key] = others[0] if others else value  # type: ignore[index]

    return write


def _iadd(a: Tensor, b: Tensor) -> None:
    a += b


def _views(write: Callable[[Tensor], object]) -> Callable[..., list[Tensor]]:
    """A write through a view: both the view's base and the view are returned."""

    def fn(a: Tensor) -> list[Tensor]:
        base = a.clone()
        view = base[1:3]
        write(view)
        return [base, view]

    return fn


def _foreach_add(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    targets = [a.clone(), b.clone()]
    torch._foreach_add_(targets, [c, c], alpha=0.5)
    return targets


def _adam(p: Tensor, g: Tensor) -> list[Tensor]:
    mean, square, moved = [torch.zeros_like(p)], [torch.zeros_like(p)], [p.clone()]
    torch._foreach_lerp_(mean, [g], 0.1)
    torch._foreach_mul_(square, 0.99)
    torch._foreach_addcmul_(square, [g], [g], 0.01)
    root = torch._foreach_sqrt(square)
    torch._foreach_add_(root, 1e-8)
    torch._foreach_addcdiv_(moved, mean, root, -0.1)
    return moved + mean + square


_TARGET = reals(7, 3, laid=True)

_WRITES: dict[str, tuple[Callable[..., object], tuple]] = {
    "add_": (lambda a, b: a.add_(b), (reals(6, 5), reals(6, 5))),
    "add_row_": (lambda a, b: a.add_(b, alpha=2), (reals(6, 5), reals(5))),
    "iadd": (_iadd, (reals(6, 5), reals(6, 5))),
    "add_scalar_": (lambda a: a.add_(1.5), (reals(7, 3),)),
    "sub_": (lambda a, b: a.sub_(b), (reals(6, 5), reals(5))),
    "mul_": (lambda a, b: a.mul_(b), (reals(6, 5), reals(6, 5))),
    "mul_scalar_": (lambda a: a.mul_(-2), (reals(7, 3),)),
    "div_": (lambda a: a.div_(4), (reals(7, 3),)),
    "copy_": (lambda a, b: a.copy_(b), (reals(6, 5), reals(6, 5))),
    "copy_row_": (lambda a, b: a.copy_(b), (reals(6, 5), reals(5))),
    "copy_int_": (lambda a, b: a.copy_(b), (reals(6, 5), integers(6, 5))),
    "zero_": (lambda a: a.zero_(), (reals(7, 3),)),
    "fill_": (lambda a: a.fill_(2.5), (reals(7, 3),)),
    "relu_": (lambda a: a.relu_(), (reals(7, 3),)),
    "exp_": (lambda a: a.exp_(), (reals(7, 3),)),
    "clamp_": (lambda a: a.clamp_(min=0), (reals(7, 3),)),
    "lerp_": (lambda a, b: a.lerp_(b, 0.25), (reals(6, 5), reals(6, 5))),
    "addcmul_": (lambda a, b, c: a.addcmul_(b, c, value=-0.5),
                 (reals(6, 5), reals(6, 5), reals(6, 5))),
    "masked_fill_": (lambda a, m: a.masked_fill_(m, 0.0), (reals(6, 5), bools(6, 5))),
    "set_slice": (_set(slice(1, 3), 0.0), (_TARGET,)),
    "set_row": (_set(0, 2.0), (_TARGET,)),
    "set_column": (_set((slice(None), 1)), (_TARGET, reals(7))),
    "set_slice_tensor": (_set(slice(2, 6)), (_TARGET, reals(4, 3))),
    "set_slice_row": (_set(slice(2, 6)), (_TARGET, reals(3))),
    "set_all": (_set(slice(None)), (_TARGET, reals(7, 3))),
    "set_item": (_set((3, 1), 9.0), (_TARGET,)),
    "zero_a_slice": (lambda a: a[:2].zero_(), (reals(7, 3),)),
    "add_to_a_slice": (lambda a, b: a[1:4].add_(b), (reals(7, 3), reals(3, 3))),
    "write_through_transpose": (lambda a: a.t().mul_(2), (reals(6, 5),)),
    "write_through_view": (lambda a: a.view(-1)[:4].zero_(), (reals(6, 2),)),
    "write_to_columns": (lambda a: a[:, 2:].mul_(3), (reals(5, 4),)),
}

_MAY_REFUSE = ("write_through_view",)  # a view that had to communicate shares no memory

CASES: list[Case] = [
    case(
        name if grad else f"{name}_no_grad", _written(write), *operands, grad=grad,
        may_refuse=name in _MAY_REFUSE,
    )
    for grad in (True, False)
    for name, (write, operands) in _WRITES.items()
] + [
    case("add_int_", _written(lambda a, b: a.add_(b)), integers(6, 5), integers(6, 5), grad=False),
    case("view_sees_write", _views(lambda view: view.mul_(3)), reals(7, 3), grad=False),
    case("base_and_view", _views(lambda view: view.add_(1)), reals(7, 3)),
    case("mul_into_replicated", _written(lambda a, b: a.mul_(b)), reals(6, 5), reals(6, 5),
         layouts=(("r",), ("s0", "s1!", "p", "s0.d", "s1.t?", "s0.d+p.t"))),
    case("set_in_a_plain_tensor", _written(_set(slice(2, 6))), reals(7, 3, dense=True),
         reals(4, 3, laid=True), falls_back=True),
    case("out_argument", lambda a, b: torch.add(a, b, out=torch.empty_like(a)), reals(6, 5),
         reals(6, 5), grad=False),
    case("foreach_add_", _foreach_add, reals(6, 5), reals(6, 5), reals(6, 5), grad=False),
    case("foreach_mul", lambda a, b: torch._foreach_mul([a, b], 0.5), reals(6, 5), reals(4),
         grad=False),
    case("foreach_norm", lambda a, b: torch._foreach_norm([a, b]), reals(6, 5), reals(4),
         grad=False),
    case("foreach_adam", _adam, reals(6, 5), reals(6, 5), grad=False),
    case("clip_grad_like", lambda a, b: torch.nn.utils.get_total_norm([a, b]), reals(6, 5),
         reals(4), grad=False),
    case("clone_is_a_copy", lambda a: [a.clone().zero_(), a * 1], reals(6, 5)),
    case("detach_shares", lambda a: [a, a.detach().mul_(2)], reals(6, 5), grad=False),
    case("data_write", lambda a: [a.data.mul_(2), a + 0], reals(6, 5), grad=False),
    case("empty_like", lambda a: torch.empty_like(a).fill_(1), reals(6, 5), grad=False),
]
