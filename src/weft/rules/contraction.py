"""Matrix products and what is built on them: sums over a factor that two operands share.

A contracted factor that is cut leaves P(sum). Operands that are added rather than multiplied
(a bias) then enter as a single term; the rule says which they are (`added`). The linear sets do
not say it: under autocast the product has another dtype than its operands, and no terms pass.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

from weft.rules.factors import broadcast, dims, linear_sets, names
from weft.rules.notation import Call, FactorDims, Rule

__all__ = ["RULES"]

_M, _N, _K = ("m",), ("n",), ("k",)
_SUM_K = {"k": "sum"}


def _product(
    operands: tuple[FactorDims, ...], result: FactorDims, sizes: dict[str, int], call: Call,
    linear: tuple[tuple[int, ...], ...] = ((0,), (1,)), added: tuple[int, ...] = (),
) -> Rule:
    return Rule(operands, (result,), sizes, _SUM_K, added=added,
                linear=linear_sets(linear, call.tensors, call.results[0]))


def _linear(call: Call) -> Rule:
    """`... k, n k, n -> ... n`; the weight may also be a vector."""
    x, weight, *bias = call.tensors
    lead = dims(len(x.shape) - 1)
    sizes = dict(zip(names(len(lead)), x.shape))
    sizes["k"] = x.shape[-1]
    row: FactorDims = ()
    if len(weight.shape) == 2:
        row = (_N,)
        sizes["n"] = weight.shape[0]
    operands = ((*lead, _K), (*row, _K))
    result = lead + row
    if not bias:
        return _product(operands, result, sizes, call)
    added = broadcast(bias[0].shape, call.results[0].shape, result)
    return _product((*operands, added), result, sizes, call, ((0, 2), (1, 2)), (2,))


def _matmul(call: Call) -> Rule:
    """Every rank of either side, batch dims broadcasting from the right."""
    left, right = call.tensors
    return _matrix_product(call, left.shape, right.shape)


def _matrix_product(call: Call, left: Sequence[int], right: Sequence[int]) -> Rule:
    shape = call.results[0].shape
    rows: FactorDims = (_M,) if len(left) > 1 else ()
    columns: FactorDims = (_N,) if len(right) > 1 else ()
    num_batch = len(shape) - len(rows) - len(columns)
    batch, batch_shape = dims(num_batch), shape[:num_batch]
    sizes = dict(zip(names(num_batch), shape))
    sizes["k"] = left[-1]
    if rows:
        sizes["m"] = left[-2]
    if columns:
        sizes["n"] = right[-1]
    first = (*broadcast(left[:-2], batch_shape, batch), *rows, _K)
    second = (*broadcast(right[:-2], batch_shape, batch), _K, *columns)
    return _product((first, second), (*batch, *rows, *columns), sizes, call)


def _outer(call: Call) -> Rule:
    left, right = call.tensors
    return Rule(((_M,), (_N,)), ((_M, _N),), {"m": left.shape[0], "n": right.shape[0]},
                linear=linear_sets(((0,), (1,)), call.tensors, call.results[0]))


def _added(call: Call) -> Rule:
    """`addmm(bias, a, b)`, `addmv`, `baddbmm`: a product with a term that broadcasts to it."""
    bias, left, right = call.tensors
    product = _matrix_product(call, left.shape, right.shape)
    result = call.results[0].shape
    added = broadcast(bias.shape, result, product.results[0])
    # torch's addmv of an empty matrix gives a bias of length 1 back as it is.
    spread = {"m", "k"} if call.op.startswith("aten.addmv") and bias.shape != result else set()
    if call.results[0].dtype.startswith(("int", "uint")) and any(
        type(call.kwargs.get(name)) is float for name in ("beta", "alpha")
    ):
        spread = spread | {"k"}  # torch cuts such factors to integers, and raises over nothing
    return Rule((added, *product.operands), product.results, product.sizes, _SUM_K,
                added=(0,), nonempty=frozenset(spread),
                linear=linear_sets(((0, 1), (0, 2)), call.tensors, call.results[0]))


def _addr(call: Call) -> Rule:
    bias, left, right = call.tensors
    result = (_M, _N)
    return Rule((broadcast(bias.shape, call.results[0].shape, result), (_M,), (_N,)), (result,),
                {"m": left.shape[0], "n": right.shape[0]},
                linear=linear_sets(((0, 1), (0, 2)), call.tensors, call.results[0]))


def _einsum(call: Call) -> Rule | None:
    """Letters are factors; an ellipsis is leading dims that broadcast."""
    equation = call.arg(0, "equation")
    if not isinstance(equation, str):
        return None
    given, arrow, kept = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow:
        kept = "..." * ("..." in given) + "".join(
            letter for letter in sorted(set(given)) if letter in string.ascii_letters
            and given.count(letter) == 1
        )
    tensors = call.tensors
    if len(terms) != len(tensors):
        return None
    spread = [_letters(term, len(tensor.shape)) for term, tensor in zip(terms, tensors)]
    num_dots = max((sum(name[0] == "." for name in letters) for letters in spread), default=0)
    result = _letters(kept, len(kept.replace("...", "")) + num_dots * ("..." in kept))
    sizes: dict[str, int] = {}
    for letters, tensor in zip(spread, tensors):
        for name, length in zip(letters, tensor.shape):
            sizes[name] = length if sizes.get(name, 1) == 1 else sizes[name]
    operands = tuple(
        tuple(
            (name,) if sizes[name] == length else ()
            for name, length in zip(letters, tensor.shape)
        )
        for letters, tensor in zip(spread, tensors)
    )
    repeated = {name for letters in spread for name in letters if letters.count(name) > 1}
    reduced = dict.fromkeys((name for name in sizes if name not in result), "sum")
    return Rule(
        operands, (tuple((name,) for name in result),), sizes, reduced, frozenset(repeated),
        linear_sets(tuple((index,) for index in range(len(tensors))), tensors, call.results[0]),
    )


def _letters(term: str, ndim: int) -> list[str]:
    """One factor per dim; those of the ellipsis count from the right."""
    before, dots, after = term.partition("...")
    num_dots = ndim - len(before) - len(after) if dots else 0
    return [*before, *(f"...{num_dots - index}" for index in range(num_dots)), *after]


def _tensordot(call: Call) -> Rule:
    left, right = call.tensors
    left_dims = [dim % len(left.shape) for dim in call.arg(2, "dims_self")]
    right_dims = [dim % len(right.shape) for dim in call.arg(3, "dims_other")]
    first = [(f"l{dim}",) for dim in range(len(left.shape))]
    second = [(f"r{dim}",) for dim in range(len(right.shape))]
    result = tuple(
        name for dims, given in ((left_dims, first), (right_dims, second))
        for dim, name in enumerate(given) if dim not in dims
    )
    kinds = {}
    for index, (one, other) in enumerate(zip(left_dims, right_dims)):
        first[one] = second[other] = (f"k{index}",)
        kinds[f"k{index}"] = "sum"
        if left.shape[one] != right.shape[other]:  # 1 meets any other, which is summed
            short, dim = (first, one) if left.shape[one] == 1 else (second, other)
            short[dim] = ()
    sizes = {
        name: length for dims, shape in ((first, left.shape), (second, right.shape))
        for names, length in zip(dims, shape) for name in names
    }
    return Rule(
        (tuple(first), tuple(second)), (result,), sizes, kinds,
        linear=linear_sets(((0,), (1,)), call.tensors, call.results[0]),
    )


def _embedding(call: Call) -> Rule | None:
    """`v! d, ... -> ... d`; a sharded vocabulary is an algorithm of `weft.ops`."""
    weight, indices = call.tensors
    if call.arg(4, "sparse", False):
        return None
    lead = dims(len(indices.shape))
    # Frequencies count over all indices, so these stay whole where they scale the gradient.
    counted = names(len(lead)) if call.arg(3, "scale_grad_by_freq", False) else ()
    sizes = dict(zip(names(len(lead)), indices.shape))
    sizes.update(v=weight.shape[0], e=weight.shape[1])
    return Rule(
        ((("v",), ("e",)), lead), ((*lead, ("e",)),), sizes, whole=frozenset(("v", *counted)),
        linear=((0,),), moves=True,
    )


def _attention(call: Call) -> Rule | None:
    """`scaled_dot_product_attention`: batch and heads pass, and the values' features.

    Queries pass as well where no causal mask ties them to their position. Grouped-query heads
    are cut at borders of key heads. With dropout the values depend on the global index.
    """
    query, key, value, *mask = call.tensors
    dropout = call.arg(4, "dropout_p", 0.0)
    causal = call.arg(5, "is_causal", False)
    if dropout or len(query.shape) < 3:
        return None
    shape = call.results[0].shape
    num_lead = len(shape) - 2
    lead, sizes = dims(num_lead), dict(zip(names(num_lead), shape))
    sizes.update(s=shape[-2], t=key.shape[-2], q=query.shape[-1], e=shape[-1])
    query_lead = key_lead = value_lead = lead
    if call.kwargs.get("enable_gqa", False) and key.shape[-3] not in (0, 1, shape[-3]):
        sizes.update(g=key.shape[-3], r=shape[-3] // key.shape[-3])
        query_lead = (*lead[:-1], ("g", "r"))
        key_lead = value_lead = (*lead[:-1], ("g",))
    lead = query_lead
    operands: list[FactorDims] = [
        (*_lead(query.shape, shape, query_lead), ("s",), ("q",)),
        (*_lead(key.shape, shape, key_lead), ("t",), ("q",)),
        (*_lead(value.shape, shape, value_lead), ("t",), ("e",)),
    ]
    for tensor in mask:
        full = (*shape[:-1], key.shape[-2])
        operands.append(broadcast(tensor.shape, full, (*lead, ("s",), ("t",))))
    whole = {"t", "q"} | ({"s"} if causal else set())
    # torch gives the query's own shape back where there is nothing to attend from or to.
    spreads = {len(query.shape), len(key.shape), len(value.shape)} != {len(shape)} or any(
        not factors for operand in operands[:3] for factors in operand[:-2]
    )
    return Rule(
        tuple(operands), ((*lead, ("s",), ("e",)),), sizes, whole=frozenset(whole),
        nonempty=frozenset(name for (name, *_) in lead) if spreads else frozenset(),
        linear=linear_sets(((2,),), call.tensors, call.results[0]),
    )


def _lead(shape: Sequence[int], result: Sequence[int], lead: FactorDims) -> FactorDims:
    """The dims before the last two: a size of 1 broadcasts, key heads have a size of their own."""
    skip = len(result) - len(shape)
    return tuple(
        () if shape[dim] == 1 and result[skip + dim] != 1 else lead[skip + dim]
        for dim in range(len(shape) - 2)
    )


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "aten.linear": _linear,
    **{f"aten.{name}": _matmul for name in ("bmm", "dot", "matmul", "mm", "mv")},
    **{f"aten.{name}": _added for name in ("addmm", "addmv", "baddbmm")},
    "aten.outer": _outer, "aten.ger": _outer, "aten.addr": _addr,
    "aten.einsum": _einsum, "aten.tensordot": _tensordot,
    "aten.embedding": _embedding,
    "aten.scaled_dot_product_attention": _attention,
}
