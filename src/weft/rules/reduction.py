"""Ops that reduce dims, and ops that need some dims whole because they mix all of their elements.

A reduction over a sharded dim leaves terms of a known kind. Where no kind says it (a mean weighs
by counts, a softmax normalises, an argmax tells places) the rule keeps the reduced dims whole and
`weft.ops` has the algorithm for sharded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from weft.rules.factors import IDENTITY, dim_list, dims, linear_sets, names
from weft.rules.notation import Call, FactorDims, Rule
from weft.rules.pointwise import elementwise

__all__ = ["RULES"]


def _reduced(kinds: FactorDims, gone: Iterable[int], shape: tuple[int, ...]) -> FactorDims:
    """The dims of a result that lacks, or keeps with size 1, the dims `gone`."""
    if len(shape) == len(kinds):
        return tuple(() if dim in gone else factor for dim, factor in enumerate(kinds))
    return tuple(factor for dim, factor in enumerate(kinds) if dim not in gone)


def _reduce(
    kind: str, linear: bool = False, nonempty: bool = False, dim_index: int | None = 1
) -> Callable[[Call], Rule]:
    """A reduction of a kind over the dims named at `dim_index` (None: over all)."""

    def rule(call: Call) -> Rule:
        source, result = call.tensors[0], call.results[0]
        shape = source.shape
        ndim = len(shape)
        gone = _gone(call, dim_index, ndim)
        kinds = dims(ndim)
        factors = names(ndim)
        reduced = {factors[dim]: kind for dim in gone}
        return Rule(
            (kinds,), (_reduced(kinds, gone, result.shape),), dict(zip(factors, shape)), reduced,
            linear=linear_sets(IDENTITY, call.tensors, result) if linear else (),
            nonempty=frozenset(reduced) if nonempty else frozenset(),
        )

    return rule


def _truth(kind: str, of_bytes: str) -> Callable[[Call], Rule | None]:
    """`all` and `any`, which tell of bytes in bytes, 0 or 1; over no dims, of each element."""
    of_bools, otherwise = _reduce(kind), _reduce(of_bytes)

    def rule(call: Call) -> Rule | None:
        if call.arg(1, "dim") in ((), []):
            return elementwise(call)
        return (of_bools if call.results[0].dtype == "bool" else otherwise)(call)

    return rule


def _gone(call: Call, dim_index: int | None, ndim: int) -> tuple[int, ...]:
    """The dims a call reduces; `sum(x, dtype=)` and `std(x, unbiased)` name none."""
    if dim_index is None:
        return tuple(range(ndim))
    value = call.arg(dim_index, "dim")
    return dim_list(None if isinstance(value, bool) else value, ndim)


def _whole(
    dim_index: int | None = 1, linear: bool = False, nonempty: bool = False
) -> Callable[[Call], Rule]:
    """Reduced dims whole, one result shape for all results."""

    def rule(call: Call) -> Rule:
        source = call.tensors[0]
        ndim = len(source.shape)
        gone = _gone(call, dim_index, ndim)
        kinds = dims(ndim)
        factors = names(ndim)
        return Rule(
            (kinds,),
            tuple(_reduced(kinds, gone, result.shape) for result in call.results),
            dict(zip(factors, source.shape)), whole=frozenset(factors[dim] for dim in gone),
            linear=linear_sets(IDENTITY, call.tensors, call.results[0]) if linear else (),
            nonempty=frozenset(factors) if nonempty else frozenset(),
        )

    return rule


def _quantile(call: Call) -> Rule:
    """`quantile(x, q, dim)`: the reduced dim whole; a `q` of one dim stands in front."""
    source, *levels = call.tensors
    ndim, shape = len(source.shape), call.results[0].shape
    gone = _gone(call, 2, ndim)
    kinds, factors = dims(ndim), names(ndim)
    given = tuple([(("q",),) if level.shape else () for level in levels])
    front = given[0] if given else ()
    return Rule(
        (kinds, *given), ((*front, *_reduced(kinds, gone, shape[len(front) :])),),
        {**dict(zip(factors, source.shape)), **({"q": shape[0]} if front else {})},
        whole=frozenset(factors[dim] for dim in gone), nonempty=frozenset(factors),
    )


def _along(
    dim_index: int, default: int = -1, linear: bool = False, moves: bool = False,
    nonempty: bool = False,
) -> Callable[[Call], Rule]:
    """Ops that work along dims and keep them, possibly with another length (softmax, sort)."""

    def rule(call: Call) -> Rule:
        source, result = call.tensors[0], call.results[0]
        shape = source.shape
        ndim = len(shape)
        value = call.arg(dim_index, "dim", default)
        gone = dim_list(value, ndim)
        kinds = dims(ndim)
        factors = names(ndim)
        sizes = dict(zip(factors, shape))
        out = kinds
        if result.shape != shape:
            out = tuple(
                (f"new{dim}",) if dim in gone else factor for dim, factor in enumerate(kinds)
            )
            sizes.update({f"new{dim}": result.shape[dim] for dim in gone})
        sets = IDENTITY if moves else ()
        if linear and not moves:
            sets = linear_sets(IDENTITY, call.tensors, result)
        return Rule(
            (kinds,), (out,) * len(call.results), sizes,
            whole=frozenset(name for name in sizes if name[:1] == "n" or int(name[1:]) in gone),
            linear=sets, moves=moves, nonempty=frozenset(factors) if nonempty else frozenset(),
        )

    return rule


def _extreme(kind: str) -> Callable[[Call], Rule | None]:
    """`max(x)` reduces all, `max(x, dim)` tells places as well, `max(x, y)` is elementwise."""
    everything = _reduce(kind, nonempty=True, dim_index=None)
    places = _whole(1)

    def rule(call: Call) -> Rule | None:
        if len(call.tensors) != 1:
            return elementwise(call)
        return everything(call) if len(call.results) == 1 else places(call)

    return rule


def _roll(call: Call) -> Rule:
    """Without dims, roll works on the flattened tensor."""
    source = call.tensors[0]
    value = call.arg(2, "dims")
    gone = dim_list(value, len(source.shape))
    kinds, factors = dims(len(source.shape)), names(len(source.shape))
    return Rule(
        (kinds,), (kinds,), dict(zip(factors, source.shape)),
        whole=frozenset(factors[dim] for dim in gone), linear=IDENTITY, moves=True,
    )


def _normalized(num_results: int) -> Callable[[Call], Rule]:
    """`layer_norm(x, shape, weight, bias)`: the last dims whole, weight and bias with them."""

    def rule(call: Call) -> Rule:
        source = call.tensors[0]
        ndim = len(source.shape)
        last = len(call.arg(1, "normalized_shape"))
        kinds, factors = dims(ndim), names(ndim)
        statistics = kinds[: ndim - last] + ((),) * last
        return Rule(
            (kinds,) + (kinds[ndim - last :],) * (len(call.tensors) - 1),
            (kinds,) + (statistics,) * (num_results - 1),
            dict(zip(factors, source.shape)), whole=frozenset(factors[ndim - last :]),
        )

    return rule


def _group_norm(call: Call) -> Rule:
    """`group_norm(x, groups, weight, bias)`: each sample by itself, channels and space whole."""
    source = call.tensors[0]
    kinds, factors = dims(len(source.shape)), names(len(source.shape))
    return Rule(
        (kinds,) + ((kinds[1],),) * (len(call.tensors) - 1), (kinds,),
        dict(zip(factors, source.shape)), whole=frozenset(factors[1:]),
    )


def _batch_norm(call: Call) -> Rule | None:
    """`batch_norm(x, ...)` in evaluation: element by element, with numbers per channel."""
    if call.args[5]:
        return None
    shape = call.tensors[0].shape
    kinds = dims(len(shape))
    return Rule(
        (kinds,) + ((kinds[1],),) * (len(call.tensors) - 1), (kinds,),
        dict(zip(names(len(shape)), shape)), nonempty=frozenset(kinds[1]),
    )


def _instance_norm(call: Call) -> Rule | None:
    """`instance_norm(x, ...)`: each channel of each sample by itself, positions whole."""
    shape = call.tensors[0].shape
    if call.args[3] is not None or call.args[4] is not None:
        return None  # running statistics are of all samples
    kinds, factors = dims(len(shape)), names(len(shape))
    return Rule(
        (kinds,) + ((kinds[1],),) * (len(call.tensors) - 1), (kinds,),
        dict(zip(factors, shape)), whole=frozenset(factors[2:]), nonempty=frozenset(factors),
    )


def _cross_entropy(call: Call) -> Rule | None:
    """`cross_entropy_loss` without reduction: classes whole, samples and positions pass."""
    source, target, *weight = call.tensors
    if call.arg(3, "reduction", 1) != 0:
        return None
    ndim = len(source.shape)
    kinds, factors = dims(ndim), names(ndim)
    class_dim = 0 if ndim == 1 else 1
    without = kinds[:class_dim] + kinds[class_dim + 1 :]
    return Rule(
        (kinds, kinds if target.shape == source.shape and "int" not in target.dtype else without,
         *((kinds[class_dim],) for _ in weight)),
        (without,), dict(zip(factors, source.shape)), whole=frozenset({factors[class_dim]}),
    )


def _vector_norm(call: Call) -> Rule:
    """`linalg_vector_norm(x, ord, dim, keepdim)`; the infinity norms are maxima of magnitudes."""
    order = call.arg(1, "ord", 2)
    if order in (math.inf, -math.inf):
        return _reduce("max" if order > 0 else "min", nonempty=True, dim_index=2)(call)
    return _whole(2)(call)


_NO_ARGUMENT = 99

NORMS = {
    "aten.layer_norm": _normalized(1),
    "aten.native_layer_norm": _normalized(3),
    "aten.rms_norm": _normalized(1),
    "aten.batch_norm": _batch_norm,
    "aten.instance_norm": _instance_norm,
    "aten.group_norm": _group_norm,
}
"""Their one float, eps, matters to no rule; nor does batch_norm's momentum."""

RULES: dict[str, Callable[[Call], Rule | None]] = {
    "aten.sum": _reduce("sum", linear=True),
    "aten.nansum": _reduce("sum"),
    "aten.count_nonzero": _reduce("sum"),
    "aten.amax": _reduce("max", nonempty=True),
    "aten.amin": _reduce("min", nonempty=True),
    "aten.max": _extreme("max"),
    "aten.min": _extreme("min"),
    "aten.prod": _reduce("product"),
    "aten.all": _truth("and", "min"),
    "aten.any": _truth("or", "max"),
    "aten._is_all_true": _reduce("and"),  # as torch.distributions asks of its arguments
    "aten._is_any_true": _reduce("or"),
    "aten.mean": _whole(1, linear=True),
    "aten.linalg_vector_norm": _vector_norm,
    "aten.logsumexp": _whole(1),
    "aten.special_logsumexp": _whole(1),
    **{f"aten.{name}": _whole(1) for name in (
        "argmax", "argmin", "aminmax", "median", "mode", "nanmean", "nanmedian",
    )},
    # These warn of too few degrees of freedom where a shard has no elements.
    **{f"aten.{name}": _whole(1, nonempty=True) for name in (
        "std", "std_mean", "var", "var_mean",
    )},
    **{f"aten.{name}": _whole(2) for name in ("kthvalue", "norm")},
    "aten.quantile": _quantile, "aten.nanquantile": _quantile,
    **{f"aten.{name}": _along(1) for name in (
        "_log_softmax", "_safe_softmax", "_softmax", "argsort", "cummax", "cummin", "cumprod",
        "glu", "log_softmax", "logcumsumexp", "softmax", "sort",
    )},
    **{f"aten.{name}": _along(1, linear=True) for name in ("cumsum",)},
    **{f"aten.{name}": _along(1, linear=True, nonempty=True)
       for name in ("_fft_c2c", "_fft_r2c", "_fft_c2r")},
    "aten.topk": _along(2),
    "aten.msort": _along(_NO_ARGUMENT, default=0),
    "aten.flip": _along(1, moves=True),
    "aten.fliplr": _along(_NO_ARGUMENT, default=1, moves=True),
    "aten.flipud": _along(_NO_ARGUMENT, default=0, moves=True),
    "aten.roll": _roll,
    **NORMS,
    "aten.cross_entropy_loss": _cross_entropy,
}
