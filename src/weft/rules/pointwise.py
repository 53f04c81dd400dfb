"""Ops that act element by element, with broadcasting, and ops that only read a tensor's shape.

Every operand shares the result's dims; what differs is in which operands the op is linear.
Random ops are not here: their values depend on the global index (`weft.rng`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from weft.core import Layout
from weft.rules.factors import IDENTITY, broadcast, dims, linear_sets, names, narrows
from weft.rules.notation import Call, Decision, Rule, TensorArg

__all__ = ["DECISIONS", "RULES", "VALUES_MATTER", "elementwise"]

# Per op: the sets of operands in which it is jointly linear. A number in the place of a set's
# member drops the set: x + 1 would count the 1 once per rank.
_FIRST = IDENTITY
_BILINEAR = ((0,), (1,))
_JOINT = ((0, 1),)
_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "neg": _FIRST, "negative": _FIRST, "positive": _FIRST, "_neg_view": _FIRST,
    "conj": _FIRST, "_conj": _FIRST, "conj_physical": _FIRST, "resolve_conj": _FIRST,
    "_conj_physical": _FIRST,
    "resolve_neg": _FIRST, "real": _FIRST, "imag": _FIRST, "deg2rad": _FIRST, "rad2deg": _FIRST,
    "ldexp": _FIRST, "add": _JOINT, "sub": _JOINT, "subtract": _JOINT, "rsub": _JOINT,
    "lerp": _JOINT, "complex": _JOINT, "mul": _BILINEAR, "multiply": _BILINEAR,
    "addcmul": ((0, 1), (0, 2)), "addcdiv": _JOINT,
    "gelu_backward": _FIRST, "silu_backward": _FIRST, "sigmoid_backward": _FIRST,
    "tanh_backward": _FIRST, "threshold_backward": _FIRST, "logit_backward": _FIRST,
    "native_dropout_backward": _FIRST,
}

_NONLINEAR = """
    _standard_gamma_grad
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh
    asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh
    digamma elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin
    fmod frac frexp gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish
    hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf
    isreal lcm le leaky_relu less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish
    mvlgamma nan_to_num ne nextafter not_equal polygamma polar pow reciprocal relu relu6
    remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
    sqrt square tan tanh threshold trunc xlogy special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
    special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1
    special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p
    special_log_ndtr special_logit special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr
    special_ndtri special_polygamma special_psi special_round special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_sinc special_spherical_bessel_j0
    special_xlog1py special_xlogy special_zeta
""".split()  # noqa: SIM905 (a page of names reads better than a page of quotes)

_MOVES = ("alias", "clone", "contiguous", "detach", "lift", "lift_fresh", "lift_fresh_copy")


def elementwise(
    call: Call, linear: tuple[tuple[int, ...], ...] = (), moves: bool = False
) -> Rule:
    """The rule in which every operand broadcasts to the results."""
    result = call.results[0]
    shape = result.shape
    kinds = dims(len(shape))
    tensors = call.tensors
    operands = tuple([broadcast(tensor.shape, shape, kinds) for tensor in tensors])
    if linear and not moves:
        linear = linear_sets(linear, tensors, result)
    return Rule(
        operands, (kinds,) * len(call.results), dict(zip(names(len(shape)), shape)),
        linear=linear, moves=moves,
    )


def _linear(sets: tuple[tuple[int, ...], ...]) -> Callable[[Call], Rule]:
    return lambda call: elementwise(call, sets if _numbers_are_finite(call) else ())


def _numbers_are_finite(call: Call) -> bool:
    """Terms times inf may add up to nan where their sum times inf is inf."""
    numbers = [arg for arg in (*call.args, *call.kwargs.values()) if type(arg) in (int, float)]
    return all(map(math.isfinite, numbers))


def _rounded(call: Call) -> Rule:
    """Division: linear in the dividend where the divisor is a number, finite and not zero.

    Terms divided by zero add up to nan, and a divisor that is a tensor may hold zeros.
    """
    divisor = call.args[1]
    tame = type(divisor) in (int, float) and divisor != 0 and _numbers_are_finite(call)
    return elementwise(call, _FIRST if tame and not call.kwargs.get("rounding_mode") else ())


def _move(call: Call) -> Rule:
    return elementwise(call, IDENTITY, moves=True)


def _convert(call: Call) -> Rule:
    """A change of dtype or device; further tensors (`type_as`) only lend their dtype.

    Terms pass where they grow no wider. Wider ones would ask for more bytes when they are reduced,
    and for the sum before it is rounded, which is not what the operand's value is made of.
    """
    source, result = call.tensors[0], call.results[0]
    shape = result.shape
    kinds = dims(len(shape))
    same = source.dtype == result.dtype
    passes = same or narrows(source.dtype, result.dtype)
    return Rule(
        (kinds,) + (None,) * (len(call.tensors) - 1), (kinds,), dict(zip(names(len(shape)), shape)),
        linear=IDENTITY if passes else (), moves=same,
    )


def _where(call: Call) -> Rule | None:
    """Jointly linear in the two choices; a choice that is the number 0 is linear as well."""
    if len(call.results) != 1 or len(call.args) + len(call.kwargs) < 3:
        return None  # where(condition) is nonzero: its size depends on the data
    choices = [call.arg(1, "self"), call.arg(2, "other")]
    members = tuple(range(1, len(call.tensors)))
    tensors = [choice for choice in choices if isinstance(choice, TensorArg)]
    zeros = all(isinstance(choice, TensorArg) or choice == 0 for choice in choices)
    same = all(tensor.dtype == call.results[0].dtype for tensor in tensors)
    linear = (members,) if zeros and members else ()
    return elementwise(call, linear, moves=len(tensors) == 2 and same)


def _masked_fill(call: Call) -> Rule:
    value = call.arg(2, "value")
    if isinstance(value, TensorArg):
        return elementwise(call, ((0, 2),))
    return elementwise(call, IDENTITY if value == 0 else ())


def _copy(call: Call) -> Rule:
    """`copy(self, src)`: the target's elements count for nothing, so it is linear in both."""
    same = call.tensors[1].dtype == call.results[0].dtype
    return elementwise(call, _JOINT, moves=same)


def _dropout(call: Call) -> Rule | None:
    """Without training or probability, dropout only hands its input on."""
    if call.arg(2, "train") and call.arg(1, "p"):
        return None
    return _move(call)


def _prelu(call: Call) -> Rule:
    """One weight for all, or one per channel (dim 1)."""
    source, weight = call.tensors
    kinds = dims(len(source.shape))
    channel = kinds[1] if len(kinds) > 1 and weight.shape == (source.shape[1],) else ()
    return Rule(
        (kinds, (channel,) * len(weight.shape)), (kinds,),
        dict(zip(names(len(kinds)), source.shape)),
    )


def _spaced(call: Call) -> Rule:
    """`linspace`, `logspace` between numbers that are tensors: each rank has all of them."""
    return Rule(((),) * len(call.tensors), ((("n",),),), {"n": call.results[0].shape[0]},
                whole=frozenset("n"))


_NONE, _SUM = 0, 2


def _loss(reduction_index: int) -> Callable[[Call], Rule | None]:
    """An elementwise loss: kept per element, or summed. A mean weighs by counts: not here."""

    def rule(call: Call) -> Rule | None:
        reduction = call.arg(reduction_index, "reduction", 1)
        tensors = call.tensors
        if reduction == _NONE:
            return elementwise(call)
        if reduction != _SUM or any(tensor.shape != tensors[0].shape for tensor in tensors):
            return None
        kinds = dims(len(tensors[0].shape))
        factors = names(len(kinds))
        return Rule(
            (kinds,) * len(tensors), ((),), dict(zip(factors, tensors[0].shape)),
            dict.fromkeys(factors, "sum"),
        )

    return rule


_LOSSES = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2,
    "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "kl_div": 2,
    "poisson_nll_loss": 5,
}

RULES: dict[str, Callable[[Call], Rule | None]] = {
    **{f"aten.{name}": _linear(sets) for name, sets in _LINEAR.items()},
    **{f"aten.{name}": elementwise for name in _NONLINEAR},
    **{f"aten.{name}": _move for name in _MOVES},
    **{f"aten.{name}": _rounded for name in ("div", "divide", "true_divide")},
    **{f"aten.{name}": _convert for name in ("to", "_to_copy", "type_as")},
    **{f"aten.{name}": _loss(index) for name, index in _LOSSES.items()},
    "aten.where": _where, "aten.masked_fill": _masked_fill, "aten.copy": _copy,
    "aten.dropout": _dropout, "aten.feature_dropout": _dropout, "aten.alpha_dropout": _dropout,
    "aten.prelu": _prelu, "aten.linspace": _spaced, "aten.logspace": _spaced,
}


VALUES_MATTER = frozenset({
    "aten.where", "aten.masked_fill", "aten.dropout", "aten.feature_dropout", "aten.alpha_dropout",
})
"""Ops whose rule reads the value of a number (is it 0?)."""


# Ops that read no element of their first operand: its layout stays, terms of a sum do not count.


def _finished(layout: Layout) -> Layout:
    return layout.replace(partial=(None,) * layout.mesh.ndim) if layout.is_partial else layout


def _like(call: Call, layouts: Any) -> Decision:
    first, *others = layouts
    shape = call.results[0].shape
    result = _finished(first) if shape == first.shape else Layout.replicated(first.mesh, shape)
    rest = tuple(Layout.replicated(first.mesh, layout.shape) for layout in others)
    return Decision((first, *rest), (result,), by_form=True)


def _zero(call: Call, layouts: Any) -> Decision:
    """`x.zero_()`: terms of zero, whatever the kind, are zero."""
    return Decision(tuple(layouts), tuple(layouts), by_form=True)


def _new(call: Call, layouts: Any) -> Decision:
    mesh = layouts[0].mesh
    return Decision(tuple(layouts), (Layout.replicated(mesh, call.results[0].shape),))


DECISIONS: dict[str, Callable[[Call, Any], Decision]] = {
    **{f"aten.{name}": _like for name in (
        "empty_like", "fill", "full_like", "ones_like", "zeros_like",
    )},
    "aten.zero": _zero,
    **{f"aten.{name}": _new for name in (
        "new_empty", "new_full", "new_ones", "new_zeros",
    )},
}
