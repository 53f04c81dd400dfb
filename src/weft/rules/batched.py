"""Ops on the last dims of each element of a batch: linear algebra, and what runs along one dim.

What they run on is whole; batch dims broadcast from the right and pass. Kernels and derivatives
of factorizations may refuse a batch of nothing, so no shard may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.rules.factors import broadcast, dim_list, dims, linear_sets, names, one_dim
from weft.rules.notation import Call, FactorDims, Rule

__all__ = ["RULES"]

Rules = Callable[[Call], Rule | None]


def _batched(
    inner: tuple[int, ...], results: tuple[int, ...], linear: tuple[tuple[int, ...], ...] = ()
) -> Rules:
    """A rule for operands and results of which so many last dims are no batch dims."""

    def rule(call: Call) -> Rule | None:
        if len(call.tensors) != len(inner) or len(call.results) != len(results):
            return None
        return _of_batch(call, inner, results, linear)

    return rule


def _of_batch(
    call: Call, inner: tuple[int, ...], results: tuple[int, ...],
    linear: tuple[tuple[int, ...], ...] = (),
) -> Rule | None:
    shapes = [tensor.shape for tensor in call.tensors]
    leads = [shape[: len(shape) - num] for shape, num in zip(shapes, inner)]
    if any(0 in lead for lead in leads) or all(0 in shape for shape in shapes):
        return None  # nothing to gather, and kernels that may refuse a batch of nothing
    longest = max(len(lead) for lead in leads)
    batch = tuple(
        max((lead[at - longest + len(lead)] for lead in leads if at - longest + len(lead) >= 0),
            key=lambda length: (length != 1, length))
        for at in range(longest)
    )
    kinds = dims(longest)
    sizes = dict(zip(names(longest), batch))
    whole: set[str] = set()

    def own(what: str, lengths: tuple[int, ...]) -> FactorDims:
        found = [f"{what}.{at}" for at in range(len(lengths))]
        sizes.update(zip(found, lengths))
        whole.update(found)
        return tuple((name,) for name in found)

    operands = tuple(
        broadcast(lead, batch, kinds) + own(f"in{place}", shape[len(lead) :])
        for place, (lead, shape) in enumerate(zip(leads, shapes))
    )
    made: list[FactorDims] = []
    for place, (result, num) in enumerate(zip(call.results, results)):
        if result.shape[: len(result.shape) - num] != batch:
            if result.shape != (0,):
                return None
            made.append(own(f"none{place}", (0,)))  # what was not asked for, of a decomposition
        else:
            made.append(kinds + own(f"out{place}", result.shape[longest:]))
    return Rule(
        operands, tuple(made), sizes, whole=frozenset(whole), nonempty=frozenset(names(longest)),
        linear=linear_sets(linear, call.tensors, call.results[0]),
    )


_B_LINEAR = ((1,),)


def _solving(
    inner: tuple[int, ...], place: int, linear: tuple[tuple[int, ...], ...] = (), left: int = 99
) -> Rules:
    """A rule for systems of equations: each column of the right-hand sides, which stand at
    `place`, by itself; each row, where these are multiplied from the right. `left` is where the
    argument that says so stands, if it is not given by name alone."""
    def rule(call: Call) -> Rule | None:
        if len(call.tensors) != len(inner) or len(call.results) != 1:
            return None
        found = _of_batch(call, inner, (2,), linear)
        return found and _free(found, place, 1 if call.arg(left, "left", True) else 0)

    return rule


def _free(rule: Rule, place: int, dim: int) -> Rule:
    """The rule with one of the last two dims of an operand free, which the result shares."""
    name, result = f"in{place}.{dim}", list(rule.results[0])
    gone, result[dim - 2] = result[dim - 2], (name,)
    return replace(
        rule, results=(tuple(result),), whole=rule.whole - {name, *gone},
        nonempty=rule.nonempty | {name},
    )


def _rank(call: Call) -> Rule | None:
    """`linalg.matrix_rank`; tolerances may be tensors, one for each matrix."""
    return _of_batch(call, (2, *(0 for _ in call.tensors[1:])), (0,))


_LAST_DIMS: dict[str, Rules] = {
    **dict.fromkeys(("det", "linalg_det", "logdet", "linalg_cond"), _batched((2,), (0,))),
    **dict.fromkeys(("slogdet", "linalg_slogdet"), _batched((2,), (0, 0))),
    **dict.fromkeys((
        "inverse", "linalg_inv", "pinverse", "linalg_pinv", "cholesky", "linalg_cholesky",
        "cholesky_inverse", "matrix_exp", "linalg_matrix_exp", "matrix_power",
        "linalg_matrix_power",
    ), _batched((2,), (2,))),
    **dict.fromkeys(("linalg_inv_ex", "linalg_cholesky_ex"), _batched((2,), (2, 0))),
    "linalg_matrix_rank": _rank,
    **dict.fromkeys(("qr", "linalg_qr"), _batched((2,), (2, 2))),
    **dict.fromkeys(("linalg_eigh", "linalg_eig"), _batched((2,), (1, 2))),
    **dict.fromkeys(("linalg_eigvalsh", "linalg_eigvals", "linalg_svdvals"), _batched((2,), (1,))),
    **dict.fromkeys(("svd", "linalg_svd"), _batched((2,), (2, 1, 2))),
    "linalg_lu": _batched((2,), (2, 2, 2)),
    "linalg_lu_factor": _batched((2,), (2, 1)),
    **dict.fromkeys(("linalg_lu_factor_ex", "linalg_ldl_factor_ex"), _batched((2,), (2, 1, 0))),
    "linalg_ldl_factor": _batched((2,), (2, 1)),
    "linalg_lu_solve": _solving((2, 1, 2), 2, ((2,),)),
    "linalg_ldl_solve": _solving((2, 1, 2), 2, ((2,),)),
    "lu_solve": _solving((2, 2, 1), 0, ((0,),)),
    "lu_unpack": _batched((2, 1), (2, 2, 2)),
    "cholesky_solve": _solving((2, 2), 0, ((0,),)),
    "linalg_solve_triangular": _solving((2, 2), 1, _B_LINEAR),
    "ormqr": _solving((2, 1, 2), 2, ((2,),), 3),
    "triangular_solve": _batched((2, 2), (2, 2)),
    "linalg_householder_product": _batched((2, 1), (2,)),
    "linalg_vander": _batched((1,), (2,)),
}


def _solve(call: Call) -> Rule | None:
    """`linalg_solve(A, B)`; B may be a batch of vectors."""
    if len(call.tensors) != 2 or len(call.results) not in (1, 2):
        return None
    left, right = call.tensors
    vector = len(right.shape) == 1 or right.shape == left.shape[:-1]
    if not vector and len(right.shape) == len(left.shape) - 1:
        return None  # one matrix for all: a block of the batch may look like vectors for each
    num = 1 if vector else 2
    linear = _B_LINEAR if len(call.results) == 1 else ()  # what torch says of A is the same for all
    rule = _of_batch(call, (2, num), (num, 0)[: len(call.results)], linear)
    if rule is None or vector or len(call.results) > 1:
        return rule
    return _free(rule, 1, 1 if call.kwargs.get("left", True) else 0)


def _matrix_norm(call: Call) -> Rule | None:
    """A norm of matrices in any two dims, which are whole."""
    shape = call.tensors[0].shape
    ndim = len(shape)
    inner = {dim % ndim for dim in call.arg(2, "dim", (-2, -1))}
    kinds, factors = dims(ndim), names(ndim)
    keep = len(call.results[0].shape) == ndim
    result = tuple(
        () if dim in inner else kinds[dim] for dim in range(ndim) if keep or dim not in inner
    )
    return Rule(
        (kinds,), (result,), dict(zip(factors, shape)),
        whole=frozenset(factors[dim] for dim in inner),
        nonempty=frozenset(factors[dim] for dim in range(ndim) if dim not in inner),
    )


# Ops on corresponding elements that run along one dim.


def _along(default: int, place: int | None = None) -> Rules:
    """A rule for operands that broadcast, one dim of which is whole: results have it with another
    length, or not at all. `place` is that of the argument `dim`, if it is not given by name alone.
    """

    def rule(call: Call) -> Rule | None:
        dim = call.kwargs.get("dim", default) if place is None else call.arg(place, "dim", default)
        shapes = [tensor.shape for tensor in call.tensors]
        ndim = max(map(len, shapes))
        if not ndim:
            return Rule(((),) * len(shapes), ((),) * len(call.results), {})
        dim = one_dim(dim, ndim)
        if dim != ndim - 1 and any(len(shape) != ndim for shape in shapes):
            return None  # a line may stand for that dim
        return _over(call, shapes, dim)

    return rule


def _cross(call: Call) -> Rule | None:
    """`cross(x, y, dim)`; without a dim it is the first of length 3, which blocks cannot tell."""
    shapes = [tensor.shape for tensor in call.tensors]
    dim = call.args[2]
    if dim is None:
        dim = next((at for at, length in enumerate(shapes[0]) if length == 3), None)
    if dim is None or len({len(shape) for shape in shapes}) > 1:
        return None
    dim = one_dim(dim, len(shapes[0]))
    return replace(_over(call, shapes, dim), args=(*call.tensors, dim))


def _over(call: Call, shapes: Sequence[Sequence[int]], dim: int) -> Rule:
    ndim = max(map(len, shapes))
    full = [1] * ndim
    for shape in shapes:
        for at, length in enumerate(shape, start=ndim - len(shape)):
            full[at] = length if length != 1 else full[at]
    kinds, factors = dims(ndim), names(ndim)
    sizes = dict(zip(factors, full))
    made: list[FactorDims] = []
    whole = {factors[dim]}
    for index, result in enumerate(call.results):
        along: FactorDims = ()
        if len(result.shape) == ndim:
            along = (kinds[dim],)
            if result.shape[dim] != full[dim]:
                along = ((f"out{index}",),)
                sizes[f"out{index}"] = result.shape[dim]
                whole.add(f"out{index}")
        made.append((*kinds[:dim], *along, *kinds[dim + 1 :]))
    return Rule(
        tuple(broadcast(shape, full, kinds) for shape in shapes), tuple(made), sizes,
        whole=frozenset(whole),
    )


def _gradient(call: Call) -> Rule:
    """`gradient(x, spacing, dim)`: differences along dims that are whole."""
    shape = call.tensors[0].shape
    kinds, factors = dims(len(shape)), names(len(shape))
    dim = call.kwargs.get("dim")
    along = dim_list(dim, len(shape))
    sizes = dict(zip(factors, shape))
    spacing: list[FactorDims] = []
    for at, line in enumerate(call.tensors[1:]):
        spacing.append(((f"s{at}",),) * len(line.shape))
        sizes.update({f"s{at}": length for length in line.shape})
    return Rule(
        (kinds, *spacing), (kinds,) * len(call.results), sizes,
        whole=frozenset((*(factors[at] for at in along), *sizes.keys() - set(factors))),
        linear=() if spacing else linear_sets(((0,),), call.tensors, call.results[0]),
    )


def _cdist(call: Call) -> Rule | None:
    """`cdist(x, y)`: distances of all pairs of rows."""
    rule = _of_batch(call, (2, 2), (2,))
    if rule is None:
        return None
    rows, columns, width = "in0.0", "in1.0", ("in0.1", "in1.1")
    lead = rule.results[0][:-2]
    free = rule.whole - {rows, columns, "out0.0", "out0.1"} | frozenset(width)
    return Rule(
        rule.operands, ((*lead, (rows,), (columns,)),), rule.sizes, whole=free,
        nonempty=rule.nonempty | {rows, columns},
    )


def _bilinear(call: Call) -> Rule:
    """`bilinear(x, y, weight, bias)`: rows pass, and the outputs; what is summed over leaves terms,
    of which one has the bias."""
    x, _, weight, *bias = call.tensors
    lead = dims(len(x.shape) - 1)
    sizes = dict(zip(names(len(lead)), x.shape), o=weight.shape[0], i=weight.shape[1],
                 j=weight.shape[2])
    operands = [(*lead, ("i",)), (*lead, ("j",)), (("o",), ("i",), ("j",))]
    operands += [(("o",),)] * len(bias)
    return Rule(
        tuple(operands), ((*lead, ("o",)),), sizes, {"i": "sum", "j": "sum"},
        added=(3,) if bias else (), nonempty=frozenset(("i", "j")),
        linear=() if bias else linear_sets(((0,), (1,), (2,)), call.tensors, call.results[0]),
    )


def _multilabel(call: Call) -> Rule | None:
    """`multilabel_margin_loss` of rows, kept per row, or of a single one, which is whole."""
    x = call.tensors[0]
    if len(x.shape) == 1 and not call.results[0].shape:
        classes: FactorDims = (("classes",),)
        return Rule((classes, classes), ((),), {"classes": x.shape[0]},
                    whole=frozenset(("classes",)))
    if len(x.shape) != 2 or len(call.results[0].shape) != 1:
        return None
    rows: FactorDims = (("b",), ("classes",))
    return Rule(
        (rows, rows), ((("b",),),), {"b": x.shape[0], "classes": x.shape[1]},
        whole=frozenset(("classes",)), nonempty=frozenset(("b",)),
    )


def _one_hot(call: Call) -> Rule:
    """`one_hot(x, num_classes)`: classes are a new dim."""
    shape = call.tensors[0].shape
    kinds = dims(len(shape))
    sizes = dict(zip(names(len(shape)), shape), classes=call.results[0].shape[-1])
    return Rule((kinds,), ((*kinds, ("classes",)),), sizes, whole=frozenset(("classes",)))


RULES: dict[str, Rules] = {
    **{f"aten.{name}": rule for name, rule in _LAST_DIMS.items()},
    **{f"aten.{name}": _solve for name in ("linalg_solve", "linalg_solve_ex")},
    "aten.linalg_matrix_norm": _matrix_norm,
    "aten.cosine_similarity": _along(1, 2),
    "aten.cross": _cross,
    **{f"aten.{name}": _along(-1) for name in ("linalg_cross", "linalg_vecdot")},
    "aten.gradient": _gradient,
    **{f"aten.{name}": _cdist for name in ("cdist", "_cdist_forward")},
    "aten.bilinear": _bilinear,
    "aten.one_hot": _one_hot,
    "aten.multilabel_margin_loss": _multilabel,
}
