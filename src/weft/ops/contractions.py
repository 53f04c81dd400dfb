"""Matrix products and what is built on them: sums over a factor that two operands share.

A sharded contracted factor leaves partial sums. A bias is added rather than multiplied, so then one
rank alone adds it; `bias=` names it. It is in no linear set: under autocast the product has another
dtype than its operands, and no partial values pass.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.sole_holder import LINEAR, MATMUL, at_the_matrix
from weft.rules import Call, op, page, rule

__all__ = ["PAGE"]


def _added(result: str, product: str) -> list[str]:
    """The strings of a product plus an operand that broadcasts from the right."""
    dims = result.split()
    return [f"{' '.join(dims[at:])}, {product} -> {result}" for at in range(len(dims) + 1)]


def _with_bias(result: str, product: str) -> Callable[[Call, Any], str]:
    """The string of `addmm(bias, a, b)`, for a bias of any number of dims."""
    texts = _added(result, product)

    def text(call: Call, wants_grad: Any) -> str:
        bias, made = call.tensors[0], call.results[0]
        if len(bias.shape) >= len(texts):  # its meta kernel takes it
            raise RuntimeError(
                f"expand: the number of sizes provided ({len(texts) - 1}) must be greater or "
                f"equal to the number of dimensions in the tensor ({len(bias.shape)})")
        found = texts[len(made.shape) - len(bias.shape)]
        if made.dtype.startswith(("int", "uint")) and any(
            type(call.get(name)) is float for name in ("beta", "alpha")
        ):
            # torch truncates such factors to integers, and raises for an empty sum.
            return found.replace("k", "k>0")
        return found

    return text


def _addmv(call: Call, wants_grad: Any) -> str:
    """torch's addmv of an empty matrix returns a bias of length 1 as it is."""
    if call.tensors[0].shape == call.results[0].shape:
        return _ADDMV(call, wants_grad)
    return f"{'m' * len(call.tensors[0].shape)}, m>0 k>0, k -> m"


_ADDMV = _with_bias("m", "m k, k")


def _einsum(call: Call, wants_grad: Any) -> str | None:
    """Letters are factors; dims of an ellipsis count from the right.

    A factor of one operand alone is summed by torch in int64, unless it has length 1. A shard of
    one element would then have another dtype than the other shards.
    """
    equation: Any = call.get("equation")
    dtype = call.results[0].dtype
    if not isinstance(equation, str) or (
        dtype == "int64" and any(tensor.dtype != dtype for tensor in call.tensors)
    ):
        return None
    given, arrow, kept = equation.replace(" ", "").partition("->")
    if not arrow:
        kept = "..." * ("..." in given) + "".join(
            letter for letter in sorted(set(given)) if letter in string.ascii_letters
            and given.count(letter) == 1
        )
    terms = given.split(",")
    if len(terms) != len(call.tensors):
        return None
    dots = [len(tensor.shape) - len(term.replace("...", "")) if "..." in term else 0
            for term, tensor in zip(terms, call.tensors)]
    operands = ", ".join(map(_dims, terms, dots))
    return f"{operands} -> {_dims(kept, max(dots, default=0))}"


def _dims(term: str, num_dots: int) -> str:
    """A dim per letter, and `num_dots` dims for the ellipsis."""
    before, dots, after = term.partition("...")
    between = [f"dot{at}" for at in range(num_dots, 0, -1)] if dots else []
    return " ".join([*before, *between, *after])


def _einsum_of_integers(
    equation: str, tensors: Sequence[Tensor], *, path: Sequence[int] | None = None
) -> Tensor:
    """All operands converted to the dtype of the result."""
    return torch.einsum(equation, *[tensor.to(torch.int64) for tensor in tensors])


def _tensordot(call: Call, wants_grad: Any) -> str:
    """Paired dims are summed over; a dim of length 1 pairs with any other."""
    operands = []
    for side, tensor, name in zip("lr", call.tensors, ("dims_self", "dims_other")):
        dims = [f"{side}{dim}" for dim in range(len(tensor.shape))]
        for at, dim in enumerate(call.get(name)):
            dims[dim] = f"k{at}"
        operands.append(dims)
    kept = [dim for dims in operands for dim in dims if dim[0] != "k"]
    return f"{', '.join(map(' '.join, operands))} -> {' '.join(kept)}"


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """The number of classes follows from the largest one, which is read."""
    if num_classes != -1:
        return NotImplemented
    if x.numel() == 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    return torch.nn.functional.one_hot(x, int(x.max()) + 1)


def _one_hot_result(x: Tensor, num_classes: int = -1) -> Tensor | None:
    """Contiguous; torch's meta kernel compares, and keeps any strides."""
    if x.is_contiguous() or x.dtype is not torch.int64 or num_classes < 1:
        return None
    return x.new_empty((*x.shape, num_classes))


PAGE = page(
    op("linear", LINEAR, layouts=at_the_matrix, floats_flow=True),
    op("matmul mm", MATMUL, layouts=at_the_matrix, floats_flow=True),
    op("bmm", rule("b m k, b k n -> b m n", linear=[0, 1])),
    op("mv", rule("m k, k -> m", linear=[0, 1])),
    op("dot", rule("k, k ->", linear=[0, 1])),
    op("addmm", rule(_with_bias("m n", "m k, k n"), linear=[1, 2], bias=[0]), floats_flow=True),
    op("baddbmm", rule(_with_bias("b m n", "b m k, b k n"), linear=[1, 2], bias=[0]),
       floats_flow=True),
    op("addmv", rule(_addmv, linear=[1, 2], bias=[0]), floats_flow=True),
    op("addr", rule(*_added("m n", "m, n"), linear=[(0, 1), (0, 2)])),
    op("outer ger", rule("m, n -> m n", linear=[0, 1])),
    op("bilinear", rule("... i>0, ... j>0, o i j, [o] -> ... o", linear=[0, 1, 2], bias=[3])),
    op("einsum", rule(_einsum, linear=range(8)), compose=_einsum_of_integers),
    op("tensordot", rule(_tensordot, linear=[0, 1])),
    op("one_hot", rule("... -> ... classes!"), compose=_one_hot,
       result=_one_hot_result),
)
