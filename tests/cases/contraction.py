"""Matrix products in every combination of ranks, linear layers, einsum."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases import Case, case, given, integers, reals

_F32 = torch.float32
_ENDS = given([2, 2, 7, 9, 12], torch.int32)
"""Where stretches of rows end, one of them empty."""

CASES: list[Case] = [
    case("mm", torch.mm, reals(6, 5), reals(5, 4), per_mesh=16),
    case("matmul_22", lambda a, b: a @ b, reals(7, 3), reals(3, 6)),
    case("matmul_11", torch.matmul, reals(7), reals(7)),
    case("matmul_12", torch.matmul, reals(5), reals(5, 4)),
    case("matmul_21", torch.matmul, reals(6, 5), reals(5)),
    case("matmul_13", torch.matmul, reals(5), reals(3, 5, 4)),
    case("matmul_31", torch.matmul, reals(3, 4, 5), reals(5)),
    case("matmul_32", torch.matmul, reals(3, 4, 5), reals(5, 6), per_mesh=10),
    case("matmul_23", torch.matmul, reals(4, 5), reals(3, 5, 6)),
    case("matmul_33", torch.matmul, reals(3, 4, 5), reals(3, 5, 2), per_mesh=10),
    case("matmul_33_broadcast", torch.matmul, reals(1, 4, 5), reals(3, 5, 2)),
    case("matmul_43", torch.matmul, reals(2, 3, 4, 5), reals(3, 5, 2)),
    case("matmul_44", torch.matmul, reals(2, 3, 4, 5), reals(2, 3, 5, 4)),
    case("matmul_empty_inner", torch.matmul, reals(4, 0), reals(0, 3)),
    case("matmul_int", torch.matmul, integers(4, 5), integers(5, 3), grad=False),
    case("matmul_transposed", lambda a, b: a @ b.t(), reals(6, 5), reals(4, 5)),
    case("matmul_float32", torch.matmul, reals(6, 5, dtype=torch.float32),
         reals(5, 4, dtype=torch.float32)),
    case("gram", lambda a: a @ a.t(), reals(6, 5)),
    case("bmm", torch.bmm, reals(3, 4, 5), reals(3, 5, 2)),
    case("mv", torch.mv, reals(6, 5), reals(5)),
    case("dot", torch.dot, reals(7), reals(7)),
    case("outer", torch.outer, reals(5), reals(4)),
    case("addmm", torch.addmm, reals(4), reals(6, 5), reals(5, 4), per_mesh=10),
    case("addmv_of_a_spread_bias", torch.addmv, reals(1), reals(5, 4), reals(4), per_mesh=10),
    case("tensordot_of_length_1",
         lambda a, b: torch.tensordot(a, b, ([0, 1], [2, 0])),  # type: ignore
         reals(1, 3, 2), reals(3, 2, 4), per_mesh=6),
    case("addmm_scaled", lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=0.5), reals(6, 4),
         reals(6, 5), reals(5, 4)),
    case("addmm_integers", lambda a, b, c: torch.addmm(a, b, c, beta=1.6, alpha=2.7),
         integers(6, 4, high=9), integers(6, 1, high=9), integers(1, 4, high=9), grad=False),
    case("baddbmm", torch.baddbmm, reals(3, 4, 2), reals(3, 4, 5), reals(3, 5, 2)),
    case("linear", F.linear, reals(6, 5), reals(4, 5), per_mesh=16),
    case("linear_bias", F.linear, reals(6, 5), reals(4, 5), reals(4), per_mesh=16),
    case("linear_1d", F.linear, reals(5), reals(4, 5), reals(4)),
    case("linear_3d", F.linear, reals(3, 2, 5), reals(4, 5), reals(4), per_mesh=16),
    case("linear_4d", F.linear, reals(3, 2, 2, 5), reals(4, 5)),
    case("linear_int_like", F.linear, integers(6, 5), integers(4, 5), grad=False),
    case("mlp", lambda x, a, b: F.linear(F.relu(F.linear(x, a)), b).mean(), reals(7, 5),
         reals(6, 5), reals(3, 6), per_mesh=12),
    case("einsum_mm", lambda a, b: torch.einsum("ij,jk->ik", a, b), reals(6, 5), reals(5, 4)),
    case("einsum_heads", lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), reals(2, 3, 5, 4),
         reals(2, 3, 5, 4)),
    case("einsum_trace", lambda a: torch.einsum("ii->", a), reals(5, 5)),
] + [
    case(f"einsum_of_{dtype}_{tag}", lambda a, b, text=text: torch.einsum(text, a, b),
         integers(2, 3, high=high, dtype=getattr(torch, dtype)),
         integers(*shape, high=high, dtype=getattr(torch, dtype)), grad=False, per_mesh=8)
    # What one operand alone has is summed as int64, but for length 1.
    for dtype, high in (("int32", 9), ("uint8", 200), ("bool", 2))
    for tag, text, shape in (("alone", "ai,b->ab", (4,)), ("spread", "ai,bi->ab", (4, 1)))
]

CASES += [
    case("grouped_mm", lambda a, b, ends: F.grouped_mm(a, b, offs=ends), reals(12, 8, dtype=_F32),
         reals(5, 8, 20, dtype=_F32), _ENDS, per_mesh=16),
    case("grouped_mm_turned", lambda a, b, ends: F.grouped_mm(a, b.mT, offs=ends),
         reals(12, 8, dtype=_F32), reals(5, 20, 8, dtype=_F32), _ENDS, per_mesh=10),
    case("grouped_mm_batch", lambda a, b: F.grouped_mm(a, b), reals(5, 3, 8, dtype=_F32),
         reals(5, 8, 12, dtype=_F32), per_mesh=8),
    case("grouped_mm_of_columns", lambda a, b, ends: F.grouped_mm(a, b.mT, offs=ends),
         reals(5, 4, 8, dtype=_F32), reals(12, 8, dtype=_F32), _ENDS, per_mesh=8),
    case("grouped_mm_of_sums", lambda a, b, ends: F.grouped_mm(a.mT, b, offs=ends),
         reals(12, 8, dtype=_F32), reals(12, 4, dtype=_F32), _ENDS, per_mesh=8),
]
