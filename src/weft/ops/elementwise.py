"""Ops that act element by element, with broadcasting; conversions and copies.

Every operand shares the dims of the results. Ops differ in the operands in which they are linear,
so that partial sums pass. A number in place of such an operand drops the linearity: x + 1 would
count the 1 once per rank. Random ops are not here: their values depend on the global index
(`weft.rng`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.dtypes import itemsize
from weft.rules import Call, op, page, rule

__all__ = ["PAGE", "broadcast_result", "result_like"]

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


def result_like(x: Tensor, dtype: torch.dtype, others: Sequence[Any] = ()) -> Tensor | None:
    """Like the first operand, if it has elements and is dense, and others are numbers and tensors
    that broadcast to it: torch's meta kernels are references in Python. A kernel gives its result
    the memory order of the first operand, if no dim of that has length 1."""
    for one in others:
        if isinstance(one, Tensor):
            lengths = zip(reversed(one.shape), reversed(x.shape))
            if one.ndim > x.ndim or any(length not in (1, room) for length, room in lengths) or (
                1 in x.shape and not one.is_contiguous()
            ):
                return None
        elif type(one) not in (int, float):
            return None
    if x.is_contiguous() and x.numel():
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    elif 1 in x.shape or not x.numel():
        return None
    else:
        out = torch.empty_like(x, dtype=dtype)
    return out if out.stride() == x.stride() else None


def _of_floats(x: Any, *others: Any, **named: Any) -> Tensor | None:
    """Of floats beside numbers and tensors of the same dtype."""
    if not isinstance(x, Tensor) or named or not x.is_floating_point() or any(
        isinstance(one, Tensor) and one.dtype is not x.dtype for one in others
    ):
        return None
    return result_like(x, x.dtype, others)


def _promoted(x: Any, *others: Any, **named: Any) -> Tensor | None:
    """Of the dtype to which both operands promote, unless it is bool, which some ops refuse."""
    if not isinstance(x, Tensor) or named or len(others) != 1 or others[0] is None:
        return None
    dtype = torch.result_type(x, others[0])
    return None if dtype is torch.bool else result_like(x, dtype, others)


def _difference(x: Any, *others: Any, **named: Any) -> Tensor | None:
    """Of operands that are no bools, which are refused beside some."""
    every = [one.dtype for one in (x, *others) if isinstance(one, Tensor)]
    return None if torch.bool in every else _promoted(x, *others, **named)


def _true_or_false(x: Any, *others: Any, **named: Any) -> Tensor | None:
    """Bools, of operands that are not complex: some ops refuse these."""
    if not isinstance(x, Tensor) or named or any(
        isinstance(one, Tensor) and one.is_complex() for one in (x, *others)
    ):
        return None
    return result_like(x, torch.bool, others)


def _of_bits(x: Any, *others: Any, **named: Any) -> Tensor | None:
    """Of bools, or of integers of one dtype."""
    if not isinstance(x, Tensor) or named or x.is_floating_point() or x.is_complex() or any(
        not isinstance(one, Tensor) or one.dtype is not x.dtype for one in others
    ):
        return None
    return result_like(x, x.dtype, others)


def _chosen(condition: Any, x: Any = None, other: Any = None, **named: Any) -> Tensor | None:
    """Of tensors in rows of one dtype, of which one has the shape of the result."""
    every = [one for one in (condition, x, other) if isinstance(one, Tensor)]
    if named or len(every) < 3 or condition.dtype is not torch.bool or x.dtype is not other.dtype:
        return None
    whole = max(every, key=lambda one: (one.ndim, one.numel()))
    if not all(one.is_contiguous() for one in every):
        return None
    return result_like(whole, x.dtype, every)


def _filled(x: Tensor, mask: Tensor, value: Any, **named: Any) -> Tensor | None:
    """Of floats in rows where a number is put in."""
    if named or type(value) not in (int, float) or not (
        x.is_floating_point() and x.is_contiguous() and mask.dtype is torch.bool
    ):
        return None
    return result_like(x, x.dtype, [mask])


def broadcast_result(*operands: Any) -> Tensor:
    """Like the first operand, in the shape of all: for ops without a meta kernel."""
    shapes = [one.shape for one in operands if isinstance(one, Tensor)]
    return operands[0].new_empty(torch.broadcast_shapes(*shapes))


PAGE = page(
    op(
        """
        angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_left_shift
        bitwise_right_shift celu clip fix float_power floor_divide frexp gcd hardshrink
        hardtanh heaviside i0 igamma igammac isclose isneginf isposinf isreal lcm
        log_sigmoid logit mvlgamma nextafter polygamma polar relu6 signbit softshrink
        threshold special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
        special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma
        special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
        special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
        special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e
        special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
        special_log1p special_log_ndtr special_logit special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
        special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
        special_sinc special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta
        """, _PLAIN),
    op(
        """
        abs absolute acos acosh asin asinh atan atan2 atanh ceil clamp_max clamp_min
        copysign cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod
        frac gelu hardsigmoid hardswish hypot leaky_relu lgamma log log10 log1p log2
        logaddexp logaddexp2 maximum minimum mish nan_to_num pow reciprocal relu remainder
        round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus sqrt square tan tanh
        trunc xlogy
        """, _PLAIN, result=_of_floats),
    op(
        """
        eq ge greater greater_equal gt isfinite isinf isnan le less less_equal logical_and
        logical_not logical_or logical_xor lt ne not_equal
        """, _PLAIN, result=_true_or_false),
    op("bitwise_and bitwise_not bitwise_or bitwise_xor", _PLAIN, result=_of_bits),
    op("clamp", _PLAIN, result=lambda x, *bounds, **named: (
        _of_floats(x, *bounds, **named) if bounds else None)),
    op("neg", _LINEAR, result=_of_floats),
    op("negative positive _neg_view conj _conj conj_physical _conj_physical resolve_conj "
       "resolve_neg real imag deg2rad rad2deg ldexp", _LINEAR),
    op("gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward "
       "logit_backward native_dropout_backward softshrink_backward hardshrink_backward", _LINEAR),
    op("add", _JOINT, result=_promoted),
    op("sub", _JOINT, result=_difference),
    op("subtract rsub lerp complex addcdiv", _JOINT),
    op("mul multiply", rule("..., [...] -> ...", linear=[0, 1]), result=_promoted),
    op("addcmul", rule("..., ..., ... -> ...", linear=[(0, 1), (0, 2)])),
    op("div divide true_divide", rule("... -> ...", linear=[0], serves=_is_tame), _PLAIN,
       floats_flow=True, result=_of_floats),
    op("alias alias_copy clone contiguous detach_copy lift lift_fresh lift_fresh_copy", _MOVES),
    op("detach", _MOVES, detaches=True),
    op("to _to_copy type_as", rule("..., [*] -> ...", serves=_grows_wider),
       rule("..., [*] -> ...", linear=[0], moves=True), floats_flow=True),
    op("copy", rule("..., ... -> ...", linear=[(0, 1)], moves=True)),
    op("where", rule("..., ..., ... -> ...", linear=[(1, 2)], moves=True),
       rule("..., ... -> ...", linear=[1], serves=_zero_choice),
       rule("{...} -> ...", serves=lambda call: len(call.args) == 3), result=_chosen),
    op("masked_fill", rule("..., ..., ... -> ...", linear=[(0, 2)]),
       rule("..., ... -> ...", linear=[0], serves=lambda call: call.get("value") == 0), _PLAIN,
       result=_filled),
    op("_prelu_kernel", rule("..., ... -> ...")),
    op("prelu", rule("b c ..., c -> b c ...", "..., ... -> ...")),
    op("__lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor", _PLAIN,
       result=_shift),
    op("_standard_gamma_grad", _PLAIN, result=broadcast_result),
)
