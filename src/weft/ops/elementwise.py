"""Ops that act element by element, with broadcasting; conversions and copies.

Every operand shares the dims of the results. Ops differ in the operands in which they are linear,
so that partial sums pass. A number in place of such an operand drops the linearity: x + 1 would
count the 1 once per rank. Random ops are not here: their values depend on the global index
(`weft.rng`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.dtypes import itemsize
from weft.rules import Call, op, page, rule

__all__ = ["PAGE", "broadcast_result"]

_PLAIN = rule("{...} -> {...}")
_LINEAR = rule("..., [...] -> ...", linear=[0])
_JOINT = rule("..., [...], [...] -> ...", linear=[(0, 1)])
_MOVES = rule("... -> ...", linear=[0], moves=True)


def _is_tame(call: Call) -> bool:
    """Whether partial sums may be divided one by one: after division by zero they add up to nan."""
    return call.get("other") != 0 and not call.kwargs.get("rounding_mode")


def _grows_wider(call: Call) -> bool:
    """Whether the result has a wider dtype. Wider partial values would need more bytes to reduce,
    and would be summed without the rounding that the operand's own sum has."""
    return itemsize(call.results[0].dtype) > itemsize(call.tensors[0].dtype)


def _zero_choice(call: Call) -> bool:
    return 0 in (call.get("self"), call.get("other"))


def _shift(x: Tensor, by: Any) -> Tensor | None:
    """Of bools and integers as sums are: torch's meta kernels refuse bools."""
    dtypes = [one.dtype for one in (x, by) if isinstance(one, Tensor)]
    if torch.bool not in dtypes or any(dtype.is_floating_point for dtype in dtypes):
        return None
    return None if isinstance(by, (float, complex)) else torch.add(x, by)


def _of_floats(x: Any, *others: Any, **named: Any) -> Tensor | None:
    """Like the first operand, if it is a dense float tensor beside numbers and tensors of its dtype
    that broadcast to it: torch's meta kernels are references in Python. A kernel gives its result
    the memory order of the first operand, if no dim of that has length 1."""
    if not isinstance(x, Tensor) or named or not (x.is_floating_point() and x.numel()):
        return None
    out = torch.empty_like(x)
    by_first = out.stride() == x.stride() and (x.is_contiguous() or 1 not in x.shape)
    for one in others:
        if isinstance(one, Tensor):
            lengths = zip(reversed(one.shape), reversed(x.shape))
            if one.dtype is not x.dtype or one.ndim > x.ndim or any(
                length not in (1, room) for length, room in lengths
            ) or (1 in x.shape and not one.is_contiguous()):
                return None
        elif not isinstance(one, (int, float)):
            return None
    return out if by_first else None


def broadcast_result(*operands: Any) -> Tensor:
    """Like the first operand, in the shape of all: for ops without a meta kernel."""
    shapes = [one.shape for one in operands if isinstance(one, Tensor)]
    return operands[0].new_empty(torch.broadcast_shapes(*shapes))


PAGE = page(
    op(
        """
        abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin
        asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cosh
        digamma elu eq erf erfc erfinv exp2 expm1 fix float_power floor floor_divide fmax fmin
        fmod frac frexp gcd ge greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
        heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal
        lcm le leaky_relu less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
        logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish
        mvlgamma nan_to_num ne nextafter not_equal polygamma polar pow reciprocal relu6 remainder
        round selu sgn sign signbit sinc sinh softplus softshrink tan threshold trunc xlogy
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma special_entr
        special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
        special_expm1 special_gammainc special_gammaincc special_gammaln
        special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e
        special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
        special_log1p special_log_ndtr special_logit special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
        special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
        special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta
        """, _PLAIN),
    op("cos exp gelu relu rsqrt sigmoid silu sin sqrt square tanh", _PLAIN, result=_of_floats),
    op("neg", _LINEAR, result=_of_floats),
    op("negative positive _neg_view conj _conj conj_physical _conj_physical resolve_conj "
       "resolve_neg real imag deg2rad rad2deg ldexp", _LINEAR),
    op("gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward "
       "logit_backward native_dropout_backward softshrink_backward hardshrink_backward", _LINEAR),
    op("add sub", _JOINT, result=_of_floats),
    op("subtract rsub lerp complex addcdiv", _JOINT),
    op("mul multiply", rule("..., [...] -> ...", linear=[0, 1]), result=_of_floats),
    op("addcmul", rule("..., ..., ... -> ...", linear=[(0, 1), (0, 2)])),
    op("div divide true_divide", rule("... -> ...", linear=[0], serves=_is_tame), _PLAIN,
       floats_flow=True, result=_of_floats),
    op("alias alias_copy clone contiguous detach detach_copy lift lift_fresh lift_fresh_copy",
       _MOVES),
    op("to _to_copy type_as", rule("..., [*] -> ...", serves=_grows_wider),
       rule("..., [*] -> ...", linear=[0], moves=True), floats_flow=True),
    op("copy", rule("..., ... -> ...", linear=[(0, 1)], moves=True)),
    op("where", rule("..., ..., ... -> ...", linear=[(1, 2)], moves=True),
       rule("..., ... -> ...", linear=[1], serves=_zero_choice),
       rule("{...} -> ...", serves=lambda call: len(call.args) == 3)),
    op("masked_fill", rule("..., ..., ... -> ...", linear=[(0, 2)]),
       rule("..., ... -> ...", linear=[0], serves=lambda call: call.get("value") == 0), _PLAIN),
    op("_prelu_kernel", rule("..., ... -> ...")),
    op("prelu", rule("b c ..., c -> b c ...", "..., ... -> ...")),
    op("__lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor", _PLAIN,
       result=_shift),
    op("_standard_gamma_grad", _PLAIN, result=broadcast_result),
)
