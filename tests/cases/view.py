"""Views and shapes: reshape, transpose, permute, unflatten, flatten, expand, squeeze."""

from __future__ import annotations

import torch

from tests.cases import Case, case, integers, reals

CASES: list[Case] = [
    case(name, fn, reals(*shape))
    for name, shape, fn in (
        ("view_merge", (4, 3, 5), lambda a: a.view(12, 5)),
        ("view_merge_pairs", (2, 6, 5), lambda a: (a.view(12, 5) * 2).unflatten(0, (2, 6)).sin()),
        ("flatten_pairs", (3, 2, 6), lambda a: a.flatten(1) * 2),
        ("view_merge_tail", (4, 3, 5), lambda a: a.view(4, 15)),
        ("view_flat", (4, 3), lambda a: a.view(-1)),
        ("view_split", (6, 4), lambda a: a.view(2, 3, 4)),
        ("view_split_tail", (3, 10), lambda a: a.view(3, 5, 2)),
        ("view_infer", (6, 4), lambda a: a.view(-1, 8)),
        ("view_regroup", (6, 4), lambda a: a.view(4, 6)),
        ("view_ones", (6, 4), lambda a: a.view(1, 6, 1, 4)),
        ("view_same", (6, 4), lambda a: a.view(6, 4)),
        ("view_of_sum", (6, 4), lambda a: a.sum(0).view(2, 2)),
        ("view_scalar", (1, 1), lambda a: a.view(())),
        ("view_as", (6, 4), lambda a: a.view_as(a.new_zeros(3, 8))),
        ("reshape_copy", (5, 4), lambda a: a.t().reshape(10, 2)),
        ("reshape_merge", (3, 4, 5), lambda a: a.transpose(0, 1).reshape(4, 15)),
        ("reshape_heads", (3, 4, 10), lambda a: a.reshape(3, 4, 5, 2).transpose(1, 2)),
        ("reshape_heads_back", (3, 5, 4, 2), lambda a: a.transpose(1, 2).reshape(3, 4, 10)),
        ("reshape_empty", (0, 4), lambda a: a.reshape(2, 0, 2)),
        ("flatten", (3, 4, 5), lambda a: a.flatten()),
        ("flatten_head", (3, 4, 5), lambda a: torch.flatten(a, 0, 1)),
        ("flatten_tail", (3, 4, 5), lambda a: a.flatten(1)),
        ("unflatten", (3, 10), lambda a: a.unflatten(1, (5, 2))),
        ("unflatten_infer", (12, 3), lambda a: a.unflatten(0, (-1, 4))),
        ("transpose", (5, 4, 3), lambda a: a.transpose(0, 2)),
        ("transpose_negative", (5, 4, 3), lambda a: torch.transpose(a, -1, -2)),
        ("t", (5, 4), lambda a: a.t()),
        ("T", (5, 4), lambda a: a.T),
        ("mT", (5, 4, 3), lambda a: a.mT),
        ("permute", (5, 4, 3), lambda a: a.permute(2, 0, 1)),
        ("permute_work", (5, 4, 3), lambda a: a.permute(1, 2, 0) * 2 + 1),
        ("movedim", (5, 4, 3), lambda a: a.movedim(0, 2)),
        ("unsqueeze", (5, 4), lambda a: a.unsqueeze(1)),
        ("unsqueeze_last", (5, 4), lambda a: a.unsqueeze(-1)),
        ("squeeze", (5, 1, 3), lambda a: a.squeeze()),
        ("squeeze_no_dim", (5, 1, 3), lambda a: a.squeeze(())),
        ("squeeze_dim", (5, 1, 3), lambda a: a.squeeze(1)),
        ("squeeze_nothing", (5, 4), lambda a: a.squeeze(0)),
        ("expand", (5, 1), lambda a: a.expand(5, 4)),
        ("expand_new", (5,), lambda a: a.expand(3, -1)),
        ("expand_work", (5, 1), lambda a: a.expand(5, 4) * 2),
        ("expand_as", (5, 1), lambda a: a.expand_as(a.new_zeros(5, 3))),
        ("broadcast_to", (4,), lambda a: torch.broadcast_to(a, (3, 4))),
        ("repeat", (5, 2), lambda a: a.repeat(1, 3)),
        ("repeat_line", (7,), lambda a: a.repeat(2)),
        ("tile_rows", (5, 1), lambda a: a.tile(2, 1)),
        ("repeat_interleave", (5, 2), lambda a: a.repeat_interleave(2, dim=1)),
        ("tile", (5, 2), lambda a: a.tile(2, 1)),
        ("swap_and_sum", (5, 4, 3), lambda a: a.transpose(0, 1).sum(0)),
        ("movedim_of_a_number", (), lambda a: a.movedim(0, 0)),
        ("flatten_before_a_1", (3, 1, 1), lambda a: a.flatten(0, 1)),
        ("flatten_of_ones", (3, 1, 1), lambda a: a.flatten(1)),
        ("unflatten_before_a_1", (3, 1), lambda a: a.unflatten(0, (-1, 1))),
        ("unflatten_of_a_1", (3, 1), lambda a: a.unflatten(1, (1, 1))),
        ("unflatten_no_rows", (0, 1, 2), lambda a: a.unflatten(2, (1, -1))),
        ("view_chain", (4, 6), lambda a: a.view(4, 2, 3).transpose(1, 2).reshape(12, 2)),
    )
] + [
    case("view_int", lambda a: a.view(2, 10), integers(4, 5), grad=False),
    case("view_two", lambda a, b: a.view(2, 3, 4) + b.view(3, 4), reals(6, 4), reals(12)),
    case("shape_reads", lambda a: [a.size(0), a.shape[1], a.dim(), a.numel(), len(a)],
         reals(5, 4), grad=False),
]
