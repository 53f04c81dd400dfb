"""Losses: of elements, of rows and of classes.

A mean is a sum that stays partial, divided by the global count: of elements, or of targets that are
not ignored, by their weights. Ranks with uneven batches, or with different numbers of ignored
targets, therefore get the right loss and the right gradient. With sharded classes each rank
contributes the part of its own classes; logits are not gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.elementwise import result_like
from weft.ops.indexing.row_exchange import first_told
from weft.ops.precision import HALF, wide, widened
from weft.ops.reductions import in_half
from weft.ops.softmax import log_softmax
from weft.rules import Call, Entry, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE"]

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers for reduction=


# Losses of elements and of rows.


def _of_elements(call: Call, wants_grad: Any) -> str | None:
    """Each element by itself; a mean where the first operand determines the number of elements.
    A mean in half precision is rounded once, at the end."""
    reduction = call.get("reduction")
    first, *others = [tensor.shape for tensor in call.tensors]
    if reduction == _MEAN:
        if first not in others:
            return None
        return "{...~} -> " if in_half(call) else "{...~:sum} -> "
    return "{...:sum} -> " if reduction == _SUM else "{...} -> ..."


def _of_rows(call: Call, wants_grad: Any) -> str:
    """Each row by itself, with all of its classes. Kernels refuse an empty batch."""
    if not all(len(tensor.shape) == 2 for tensor in call.tensors):
        return "{...!} -> "
    match call.get("reduction"):
        case 0:
            return "b>0 c!, b c -> b"
        case 1:
            mark = "~" if in_half(call) else "~:sum"
            return f"b>0{mark} c!, b{mark} c -> "
    return "b>0:sum c!, b c -> "


def _reduced(name: str, text: Any, **more: Any) -> Entry:
    """The entry of a loss with `reduction=`."""
    loss = getattr(torch.ops.aten, name).default
    place = [argument.name for argument in loss._schema.arguments].index("reduction")

    def each(args: Sequence[Any], kwargs: Any) -> Tensor:
        return loss(*args[:place], _NONE, *args[place + 1 :], **kwargs)

    def mean(shards: Shards, *args: Any, **kwargs: Any) -> Tensor:
        """The sum of the shard's losses, divided by the global count."""
        found = each(args, kwargs)
        dtype, count = found.dtype, math.prod(shards.layout.shape[: found.dim()])
        total = found.sum(dtype=wide(dtype)) / count
        return shards.psum(total).to(dtype) if dtype in HALF else total

    def composed(*args: Any, **kwargs: Any) -> Tensor:
        """The mean of the losses of elements."""
        return each(args, kwargs).mean()

    return op(name, rule(text), kernel=mean, adds_up=True, compose=composed, floats_flow=True,
              **more)


# Losses of classes.


def _of_classes(call: Call, wants_grad: Sequence[bool]) -> str:
    """Each sample by itself; its target is a class, or the probabilities of all classes."""
    x, target, *_ = call.tensors
    has_all = target.dtype.startswith(("float", "bfloat"))
    if any(wants_grad[2:]) and not has_all:
        raise RuntimeError(
            "The function 'nll_loss_forward' is not differentiable with respect to argument "
            "'weight'. This input cannot have requires_grad True.")
    if len(x.shape) < 2:
        return "c~:sum, c~:sum, [c] -> " if has_all else "c~:sum, , [c] -> "
    reduction = call.get("reduction")
    mark = {_NONE: "", _MEAN: "~:sum", _SUM: ":sum"}[reduction]
    samples = "b ..." if reduction == _NONE else ""
    classes = "c~:sum " if has_all else ""
    return f"b{mark} c~:sum ...{mark}, b{mark} {classes}...{mark}, [c] -> {samples}"


def _cross_entropy(
    shards: Shards, x: Tensor, target: Tensor, weight: Tensor | None = None,
    reduction: int = _MEAN, ignore_index: int = -100, smoothing: float = 0.0,
) -> Tensor:
    """The log-softmax over all shards' classes, then the loss of each shard's classes."""
    dim = _class_dim(x)
    _refuse_outside(shards, target, weight, reduction, ignore_index, dim, x)
    if dim not in shards.dims:
        each = torch.ops.aten.cross_entropy_loss(
            x, target, weight, _NONE, ignore_index, smoothing)
        return _total(shards, each, target, weight, reduction, ignore_index, dim)
    logp = log_softmax(shards.along(dim), widened(x), dim)
    if target.is_floating_point():
        count = shards.layout.shape[dim]
        spread = target * (1 - smoothing) + smoothing / count if smoothing else target
        each = -(_weighted(logp, weight, dim) * spread).sum(dim)
    else:
        each = _picked(shards, logp, target, weight, ignore_index, dim)
        if smoothing:
            spread = -_weighted(logp, weight, dim).sum(dim) / shards.layout.shape[dim]
            spread = torch.where(target != ignore_index, spread, 0.0)
            each = (1 - smoothing) * each + smoothing * spread
    return _total(shards, each, target, weight, reduction, ignore_index, dim).to(x.dtype)


def _nll(
    shards: Shards, logp: Tensor, target: Tensor, weight: Tensor | None = None,
    reduction: int = _MEAN, ignore_index: int = -100,
) -> Tensor:
    """The loss of each shard's classes."""
    dim = _class_dim(logp)
    _refuse_outside(shards, target, weight, reduction, ignore_index, dim, logp)
    if dim in shards.dims:
        each = _picked(shards, logp, target, weight, ignore_index, dim)
    else:
        each = torch.ops.aten.nll_loss_nd(logp, target, weight, _NONE, ignore_index)
    return _total(shards, each, target, weight, reduction, ignore_index, dim)


def _class_dim(x: Tensor) -> int:
    return 1 if x.dim() > 1 else 0


def _weighted(logp: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    if weight is None:
        return logp
    return logp * weight.reshape([-1] + [1] * (logp.dim() - 1 - dim))


def _inside(
    shards: Shards, target: Tensor, length: int, ignore_index: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Which targets are classes of this shard, and their positions in it (0 for the others)."""
    start = shards.starts[dim]
    inside = (target != ignore_index) & (target >= start) & (target < start + length)
    return inside, torch.where(inside, target - start, 0)


def _picked(
    shards: Shards, logp: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int,
    dim: int,
) -> Tensor:
    """Per sample -logp of its target; zero where the target is not a class of this shard. torch's
    own op: ranks would not agree on what requires a gradient."""
    length = logp.shape[dim]
    if not length:
        return logp.sum(dim)
    inside, places = _inside(shards, target, length, ignore_index, dim)
    mine = torch.where(inside, places, -1)
    if weight is not None:
        weight = weight.to(logp.dtype)  # logarithms of narrow floats are wide
    return torch.ops.aten.nll_loss_nd(logp, mine, weight, _NONE, -1)


def _total(
    shards: Shards, each: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    ignore_index: int, dim: int,
) -> Tensor:
    """The reduced loss of the samples, from this shard's classes."""
    if reduction == _NONE:
        return each
    dtype, total = each.dtype, each.sum(dtype=wide(each.dtype))
    if reduction == _MEAN:
        total = total / _count(shards, target, weight, ignore_index, dim, total.dtype)
    return total.to(dtype)


def _count(
    shards: Shards, target: Tensor, weight: Tensor | None, ignore_index: int, dim: int,
    dtype: torch.dtype,
) -> Any:
    """The divisor of a mean: the number of all samples, or the sum of the weights of all targets
    that are not ignored."""
    shape = shards.layout.shape
    if target.is_floating_point():
        return max(math.prod([*shape[:dim], *shape[dim + 1 :]]), 1)
    if weight is not None and dim in shards.dims:
        inside, places = _inside(shards, target, weight.shape[0], ignore_index, dim)
        weights = weight[places] if weight.shape[0] else 0.0
        return _agreed(shards, torch.where(inside, weights, 0.0).sum(dtype=dtype))
    count = target != ignore_index
    if weight is not None:
        count = torch.where(count, weight[torch.where(count, target, 0)], 0.0)
    count = count.sum(dtype=dtype)
    others = [one for one in shards.dims if one != dim]
    return _agreed(shards.along(*others), count) if others else count


def _refuse_outside(
    shards: Shards, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    dim: int, x: Tensor,
) -> None:
    """Raise torch's error of a target that is no class. Where the ranks add up their counts, this
    one takes part, so that all of them raise. Targets on an accelerator are not read."""
    if target.is_floating_point() or target.device.type != "cpu":
        return
    classes = shards.layout.shape[dim]
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    if not wrong.numel():
        return
    told = f"Target {int(wrong.reshape(-1)[0])} is out of bounds."
    others = [one for one in shards.dims if one != dim]
    if reduction == _MEAN and (others or (weight is not None and dim in shards.dims)):
        of_all = shards if weight is not None and dim in shards.dims else shards.along(*others)
        _agreed(of_all, torch.tensor(-math.inf, dtype=wide(x.dtype)), told)
    raise IndexError(told)


def _agreed(shards: Shards, count: Tensor, wrong: str = "") -> Tensor:
    """The sum of the counts of all shards. All ranks raise IndexError if one of them has a `wrong`
    target: its count is -inf."""
    total = shards.psum(count)
    if total.device.type == "cpu" and not torch.isfinite(total):  # weights may be infinite, too
        told = first_told(shards.group(), wrong)
        if told:
            raise IndexError(told)
    return total


def _multi_margin(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """How far each class except the target comes within the margin; a mean over classes."""
    if target.dtype is not torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {target.dtype}")
    rows = x if x.dim() > 1 else x.reshape(1, -1)
    target = target.reshape(-1, 1)
    within = (margin - rows.gather(1, target) + rows).relu()
    within = (within if p == 1 else within * within).scatter(1, target, 0)
    if weight is not None:
        within = within * weight[target]
    each = within.sum(1) / rows.shape[1]
    if reduction == _NONE:
        return each if x.dim() > 1 else each.squeeze(0)
    return each.mean() if reduction == _MEAN else each.sum()


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Elementwise, and reduced; whether a variance is negative is read."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if bool((var.detach() < 0).any()):
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or sum(
            mine for due, mine in zip(input.shape, var.shape) if mine != due
        ) != 1:  # as torch has it: one dim differs, and is 1
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = torch.where(var < eps, var - var.detach() + eps, var)  # clamped, but for the gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _cross_entropy_result(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor | None:
    """Of the plain cases: torch's meta kernel is a composition in Python."""
    if (
        target.dtype is not torch.int64 or not x.is_floating_point() or x.ndim < 2
        or target.shape != (x.shape[0], *x.shape[2:])
        or (weight is not None and (weight.dtype, weight.shape) != (x.dtype, x.shape[1:2]))
        or reduction not in (0, 1, 2) or not 0.0 <= label_smoothing <= 1.0
    ):
        return None
    return x.new_empty(() if reduction else target.shape)


def _multilabel_margin_result(
    x: Tensor, target: Tensor, reduction: int = 1
) -> Tensor | None:
    """For a single row the result is a number, also without reduction; torch's meta kernel gives a
    row."""
    return x.new_empty(()) if x.ndim == 1 and target.shape == x.shape and x.numel() else None


def _distance_result(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor | None:
    if x.shape != target.shape or x.dtype is not target.dtype or not x.is_floating_point():
        return None
    return x.new_empty(()) if reduction != _NONE else result_like(x, x.dtype, [target])


_ELEMENTS = """
    smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss
    binary_cross_entropy binary_cross_entropy_with_logits
"""


def _nll_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """nll_loss, and the sum of the weights, which its gradient asks for."""
    out = torch.ops.aten.nll_loss_nd.default(x, target, weight, reduction, ignore_index)
    if reduction == 0:
        return out, x.new_zeros(())
    kept = target != ignore_index
    if weight is None:
        return out, kept.sum().to(x.dtype)
    return out, weight[torch.where(kept, target, 0)].where(kept, 0).sum()


PAGE = page(
    _reduced("mse_loss", _of_elements, result=_distance_result),
    _reduced("l1_loss", _of_elements, result=_distance_result),
    *[_reduced(name, _of_elements) for name in _ELEMENTS.split()],
    _reduced("multilabel_margin_loss", _of_rows, result=_multilabel_margin_result,
             has_meta_gradient=False),
    op("cross_entropy_loss", rule(_of_classes), kernel=_cross_entropy, adds_up=True,
       floats_flow=True, result=_cross_entropy_result),
    op("nll_loss nll_loss_nd nll_loss2d", rule(_of_classes, linear=[0]), kernel=_nll,
       adds_up=True, floats_flow=True),
    op("nll_loss_forward nll_loss2d_forward", compose=_nll_forward),
    op("multi_margin_loss", compose=_multi_margin, floats_flow=False, has_meta_gradient=False),
    op("torch.nn.functional.gaussian_nll_loss", compose=_gaussian_nll, each_call=True),
)
