"""Pointwise calls: broadcasting, promotion, comparisons, activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases import Case, bools, case, given, integers, positives, reals

F32, F16, BF16, I32 = torch.float32, torch.float16, torch.bfloat16, torch.int32

BROADCAST: list[Case] = [
    case("add", lambda a, b: a + b, reals(6, 5), reals(6, 5)),
    case("add_row", lambda a, b: a + b, reals(6, 5), reals(5)),
    case("add_column", lambda a, b: a + b, reals(6, 5), reals(6, 1)),
    case("add_outer", lambda a, b: a + b, reals(6, 1), reals(1, 5)),
    case("add_new_dim", lambda a, b: a + b, reals(5), reals(3, 6, 5)),
    case("add_zero_dim", lambda a, b: a + b, reals(6, 5), reals()),
    case("add_both_zero_dim", lambda a, b: a + b, reals(), reals()),
    case("add_empty", lambda a, b: a + b, reals(0, 5), reals(5)),
    case("add_one_row", lambda a, b: a + b, reals(1, 5), reals(6, 5)),
    case("add_alpha", lambda a, b: torch.add(a, b, alpha=-3), reals(6, 5), reals(6, 5)),
    case("sub", lambda a, b: a - b, reals(6, 5), reals(5)),
    case("mul", lambda a, b: a * b, reals(6, 5), reals(6, 5)),
    case("mul_self", lambda a: a * a, reals(7, 3)),
    case("div", lambda a, b: a / b, reals(6, 5), positives(5)),
    case("pow", lambda a, b: a**b, positives(6, 5), reals(5)),
    case("maximum", torch.maximum, reals(6, 5), reals(6, 5)),
    case("atan2", torch.atan2, reals(6, 5), positives(6, 1)),
    case("where", torch.where, bools(6, 1), reals(6, 5), reals(5)),
    case("masked_fill", lambda a, m: a.masked_fill(m, 2.5), reals(6, 5), bools(6, 5)),
    case("masked_fill_tensor", lambda a, m, v: a.masked_fill(m, v), reals(6, 5), bools(5), reals()),
    case("lerp", torch.lerp, reals(6, 5), reals(6, 5), positives(5)),
    case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), reals(6, 5), reals(6, 5),
         reals(5)),
    case("two_uses", lambda a, b: a * b + a, reals(6, 5), reals(5)),
    case("chain", lambda a, b: ((a + b).relu() * b - a).tanh(), reals(6, 5), reals(5)),
    case("add_list_sum", lambda a, b: sum([a, b, a]), reals(6, 5), reals(6, 5)),
]

SCALARS: list[Case] = [
    case("add_scalar", lambda a: a + 2, reals(7, 3)),
    case("add_float", lambda a: 1.5 + a, reals(7, 3)),
    case("rsub", lambda a: 1 - a, reals(7, 3)),
    case("mul_scalar", lambda a: a * -2.5, reals(7, 3)),
    case("div_scalar", lambda a: a / 4, reals(7, 3)),
    case("rdiv", lambda a: 2 / a, positives(7, 3)),
    case("pow_scalar", lambda a: a**2, reals(7, 3)),
    case("rpow", lambda a: 2**a, reals(7, 3)),
    case("neg", lambda a: -a, reals(7, 3)),
    case("floor_div", lambda a: a // 3, integers(7, 3, low=-9), grad=False),
    case("mod", lambda a: a % 3, integers(7, 3, low=-9), grad=False),
    case("clamp", lambda a: a.clamp(-0.5, 0.5), reals(7, 3)),
    case("clamp_min", lambda a: torch.clamp(a, min=0.1), reals(7, 3)),
]

PROMOTION: list[Case] = [
    case("int_plus_float_scalar", lambda a: a + 1.5, integers(6, 5), grad=False),
    case("int_plus_bool", lambda a, b: a + b, integers(6, 5), bools(5), grad=False),
    case("bool_plus_bool", lambda a, b: a + b, bools(6, 5), bools(6, 5), grad=False),
    case("bool_plus_int_scalar", lambda a: a + 1, bools(6, 5), grad=False),
    case("bool_times_float", lambda a, b: a * b, bools(6, 5), reals(6, 5)),
    case("int_over_int", lambda a, b: a / b, integers(6, 5), integers(5, low=1), grad=False),
    case("int32_plus_int64", lambda a, b: a + b, integers(6, 5, dtype=I32), integers(5),
         grad=False),
    case("int64_times_float32", lambda a, b: a * b, integers(6, 5), reals(5, dtype=F32)),
    case("float32_plus_float64", lambda a, b: a + b, reals(6, 5, dtype=F32), reals(6, 5)),
    case("float32_plus_zero_dim_float64", lambda a, b: a + b, reals(6, 5, dtype=F32), reals()),
    case("float32_plus_scalar", lambda a: a + 1e-3, reals(6, 5, dtype=F32)),
    case("half_plus_bfloat16", lambda a, b: a + b, integers(6, 5, dtype=F16),
         integers(6, 5, dtype=BF16), grad=False),
    case("int_zero_dim_plus_int32", lambda a, b: a + b, integers(), integers(6, dtype=I32),
         grad=False),
    case("partial_int_plus_int", lambda a, b: a + b, integers(6, 5), integers(6, 5), grad=False),
    case("to_float32", lambda a: a.to(torch.float32), reals(6, 5)),
    case("to_int", lambda a: (a * 10).to(torch.int32), reals(6, 5), grad=False),
    case("to_other", lambda a, b: a.to(b), reals(6, 5, dtype=F32), reals(2)),
    case("double", lambda a: a.double(), reals(6, 5, dtype=F32)),
    case("type_as", lambda a, b: a.type_as(b), reals(6, 5, dtype=F32), reals(2)),
    case("clone", lambda a: a.clone(), reals(6, 5)),
    case("detach", lambda a: a.detach() + 0, reals(6, 5), grad=False),
    case("contiguous", lambda a: a.t().contiguous(), reals(6, 5)),
]

COMPARE: list[Case] = [
    case("lt", lambda a, b: a < b, reals(6, 5), reals(5), grad=False),
    case("eq_scalar", lambda a: a == 3, integers(6, 5), grad=False),
    case("ge_int_float", lambda a, b: a >= b, integers(6, 5), reals(6, 5), grad=False),
    case("logical_and", lambda a, b: (a > 0) & (b > 0), reals(6, 5), reals(5), grad=False),
    case("logical_not", lambda a: ~(a > 0), reals(6, 5), grad=False),
    case("isnan", lambda a: torch.isnan(a / 0), integers(6, 5, low=-1, high=2), grad=False),
    case("compare_self", lambda a: (a > 0) * a, reals(6, 5)),
]

UNARY: list[Case] = [
    case(name, fn, reals(7, 3))
    for name, fn in {
        "relu": torch.relu, "relu6": F.relu6, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh,
        "sigmoid": torch.sigmoid, "exp": torch.exp, "sin": torch.sin, "abs": torch.abs,
        "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"), "softplus": F.softplus,
        "leaky_relu": lambda a: F.leaky_relu(a, 0.1), "elu": F.elu, "hardtanh": F.hardtanh,
        "logsigmoid": F.logsigmoid, "erf": torch.erf, "expm1": torch.expm1,
        "square": torch.square, "sign": torch.sign, "nan_to_num": torch.nan_to_num,
    }.items()
] + [
    case(name, fn, positives(7, 3))
    for name, fn in {
        "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
        "log1p": torch.log1p,
    }.items()
] + [
    case("dropout_off", lambda a: F.dropout(a, 0.5, training=False), reals(7, 3)),
    case("zeros_like", lambda a: torch.zeros_like(a), reals(7, 3), grad=False),
    case("ones_like", lambda a: a * torch.ones_like(a), reals(7, 3)),
    case("full_like", lambda a: torch.full_like(a, 3), reals(7, 3), grad=False),
    case("new_zeros", lambda a: a.new_zeros(4, 2), reals(7, 3), grad=False),
    case("ones_like_dtype", lambda a: torch.ones_like(a, dtype=torch.int32), reals(7, 3),
         grad=False),
    case("sgn_int", torch.sign, integers(7, 3, low=-3), grad=False),
    case("transposed_input", lambda a: torch.exp(a.t()), reals(7, 3)),
    case("given_values", lambda a: a * 2, given([[1, 2, 3]]), grad=False),
]

CASES = BROADCAST + SCALARS + PROMOTION + COMPARE + UNARY
