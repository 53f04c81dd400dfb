"""Parts and wholes: split, chunk, cat, stack, slicing, select, narrow, unbind, embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases import Case, case, integers, reals

_ONE = (
    ("split", (7, 3), lambda a: a.split(2)),
    ("split_sizes", (7, 3), lambda a: a.split([1, 4, 2])),
    ("split_last", (3, 7), lambda a: torch.split(a, 3, dim=-1)),
    ("split_use", (3, 6), lambda a: [part * (k + 1) for k, part in enumerate(a.split(2, 1))]),
    ("split_with_empty", (5, 3), lambda a: a.split([0, 5])),
    ("chunk", (7, 3), lambda a: a.chunk(3)),
    ("chunk_last", (4, 6), lambda a: a.chunk(3, dim=-1)),
    ("tensor_split", (7, 3), lambda a: a.tensor_split(3)),
    ("tensor_split_back", (7, 3), lambda a: [
        part * (k + 1) for k, part in enumerate(a.tensor_split([5, 2, -3, -9]))
    ]),
    ("qkv", (4, 2, 12), lambda a: [part.reshape(4, 2, 2, 2) for part in a.chunk(3, -1)]),
    ("slice", (7, 3), lambda a: a[2:5]),
    ("slice_head", (7, 3), lambda a: a[:3]),
    ("slice_tail", (7, 3), lambda a: a[-2:]),
    ("slice_step", (7, 3), lambda a: a[1::2]),
    ("slice_two", (7, 6), lambda a: a[1:6, 2:4]),
    ("slice_other_dim", (7, 6), lambda a: a[:, 1:3]),
    ("slice_nothing", (7, 3), lambda a: a[:]),
    ("slice_empty", (7, 3), lambda a: a[3:3]),
    ("slice_past_the_end", (5, 3), lambda a: a[3:99]),
    ("slice_work", (7, 3), lambda a: a[1:] - a[:-1]),
    ("shift_labels", (4, 6), lambda a: (a[:, :-1] * a[:, 1:]).sum()),
    ("ellipsis", (3, 4, 5), lambda a: a[..., 1]),
    ("none_index", (4, 3), lambda a: a[:, None]),
    ("mixed_index", (5, 4, 3), lambda a: a[1:4, 2, None]),
    ("select_first", (7, 3), lambda a: a[0]),
    ("select_last", (7, 3), lambda a: a[-1]),
    ("select_dim", (5, 4, 3), lambda a: a.select(1, 2)),
    ("select_item", (5, 4), lambda a: a[3, 1]),
    ("narrow", (7, 3), lambda a: a.narrow(0, 2, 4)),
    ("narrow_last", (3, 7), lambda a: torch.narrow(a, 1, 1, 5)),
    ("unbind", (5, 3), lambda a: a.unbind()),
    ("unbind_last", (3, 4), lambda a: torch.unbind(a, -1)),
    ("iterate", (3, 4), lambda a: [row * 2 for row in a]),
    ("cat_self", (5, 3), lambda a: torch.cat([a, a])),
    ("pad", (5, 3), lambda a: F.pad(a, (1, 2))),
    ("pad_rows", (5, 3), lambda a: F.pad(a, (0, 0, 2, 1), value=3.0)),
    ("tril", (5, 5), lambda a: a.tril()),
    ("triu", (3, 5, 5), lambda a: torch.triu(a, 1)),
    ("rotate_half", (4, 6), lambda a: torch.cat([-a[..., 3:], a[..., :3]], -1)),
    ("index_plain", (7, 3), lambda a: a[torch.tensor([4, 0, 4])]),
    ("index_select", (7, 3), lambda a: a.index_select(0, torch.tensor([6, 1, 1]))),
    ("cumsum", (7, 3), lambda a: a.cumsum(0)),
    ("flip", (7, 3), lambda a: a.flip(0)),
    ("roll", (7, 3), lambda a: a.roll(2, 0)),
)

_MOVED = (
    ("flip_both", (7, 5), lambda a: a.flip(0, 1)),
    ("roll_twice", (7, 5), lambda a: a.roll((2, -1, 3), (0, 1, 0))),
    ("shift_all", (7, 2, 5), lambda a: torch.fft.ifftshift(a)),
    ("flip_line", (7,), lambda a: a.flip(0)),
    ("roll_back", (7, 5), lambda a: a.roll(-9, 1)),
    ("roll_both", (7, 5), lambda a: a.roll((1, 2), (0, 1))),
    ("roll_flat", (7, 5), lambda a: a.roll(3)),
    ("rot90", (7, 5), lambda a: a.rot90()),
    ("rot90_back", (7, 5), lambda a: a.rot90(-1, (1, 0))),
    ("diagonal_below", (7, 5), lambda a: a.diagonal(-3)),
    ("diagonal_of_some", (3, 6, 4), lambda a: a.diagonal(1, 0, 2)),
    ("diag", (7, 5), lambda a: a.diag()),
    ("diag_of_line", (6,), lambda a: torch.diag(a, -2)),
    ("diagflat", (2, 3), lambda a: a.diagflat(1)),
    ("diag_embed", (4, 5), lambda a: a.diag_embed(1, 0, 2)),
    ("diag_embed_below", (4, 5), lambda a: a.diag_embed(-2, -1, 0)),
    ("trace", (7, 5), lambda a: a.trace()),
    ("diff", (7, 5), lambda a: a.diff(n=2, dim=0)),
    ("powers", (7,), lambda a: torch.linalg.vander(a, N=4)),
    ("powers_of_one", (), lambda a: torch.linalg.vander(a, N=3)),
    ("atleast_2d_of_one", (1,), lambda a: torch.atleast_2d(a)),
    ("atleast_3d_of_one", (1,), lambda a: torch.atleast_3d(a)),
    ("repeat_flat", (5, 3), lambda a: a.repeat_interleave(2)),
)
def _changed_copy(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = a * b
    return whole, whole.diff(0).mul_(2)


_JOINED = (
    ("hstack", (5, 3), (5, 2), lambda a, b: torch.hstack([a, b])),
    ("vstack", (5, 3), (3,), lambda a, b: torch.vstack([a, b])),
    ("dstack", (5, 3), (5, 3), lambda a, b: torch.dstack([a, b])),
    ("column_stack", (5, 3), (5,), lambda a, b: torch.column_stack([a, b])),
    ("block_diag_of_lines", (1,), (5,), lambda a, b: torch.block_diag(a, b)),
    ("block_diag", (5, 3), (4,), lambda a, b: torch.block_diag(a, b)),
    ("diff_behind", (5, 3), (1, 3), lambda a, b: torch.diff(a, dim=0, prepend=b)),
    # Nothing is taken of what stands beside it.
    ("diff_of_none", (5, 3), (1, 3), lambda a, b: torch.diff(a, 0, 0, b, b)),
    ("diff_of_none_is_a_copy", (5, 3), (1, 3), _changed_copy),
    ("kron", (3, 4), (2, 3), lambda a, b: torch.kron(a, b)),
    ("cartesian_prod", (6,), (4,), lambda a, b: torch.cartesian_prod(a, b)),
    ("slice_scatter", (7, 5), (3, 5), lambda a, b: a.slice_scatter(b, 0, 1, 6, 2)),
    ("select_scatter", (7, 5), (5,), lambda a, b: a.select_scatter(b, 0, -2)),
    ("diagonal_scatter", (7, 7), (6,), lambda a, b: a.diagonal_scatter(b, 1)),
)

CASES: list[Case] = [case(name, fn, reals(*shape), per_mesh=2) for name, shape, fn in _MOVED] + [
    case(name, fn, reals(*one), reals(*other), per_mesh=2) for name, one, other, fn in _JOINED
] + [case(name, fn, reals(*shape)) for name, shape, fn in _ONE] + [
    case("cat", lambda a, b: torch.cat([a, b]), reals(4, 3), reals(3, 3)),
    case("cat_last", lambda a, b: torch.cat((a, b), dim=-1), reals(4, 3), reals(4, 2)),
    case("cat_three", lambda a, b, c: torch.cat([a, b, c], 1), reals(4, 1), reals(4, 3),
         reals(4, 2)),
    case("cat_empty", lambda a, b: torch.cat([a, b]), reals(0, 3), reals(4, 3)),
    case("cat_promote", lambda a, b: torch.cat([a, b]), integers(4, 3), reals(3, 3)),
    case("stack", lambda a, b: torch.stack([a, b]), reals(4, 3), reals(4, 3)),
    case("stack_last", lambda a, b: torch.stack([a, b], -1), reals(4, 3), reals(4, 3)),
    case("split_then_cat", lambda a: torch.cat(a.split([2, 3, 2]), 0), reals(7, 3)),
    case("gather", lambda a, i: torch.gather(a, 1, i), reals(5, 4), integers(5, 2, high=4)),
    case("gather_nothing", lambda a: a.gather(0, torch.empty(2, 0, dtype=torch.long)), reals(5),
         falls_back=True),
    case("take_along", lambda a, i: a.gather(-1, i[:, None])[:, 0], reals(5, 4),
         integers(5, high=4)),
    case("index_tensor", lambda a, i: a[i], reals(5, 3), integers(4, high=5)),
    case("index_list", lambda a: a[[0, 2, 5]], reals(7, 3)),
    case("one_hot", lambda i: F.one_hot(i, 5), integers(6, high=5), grad=False),
    case("diagonal", lambda a: a.diagonal(), reals(5, 5)),
    case("embedding", lambda i, w: F.embedding(i, w), integers(4, 3, high=7), reals(7, 5),
         per_mesh=16),
    case("embedding_flat", lambda i, w: F.embedding(i, w), integers(9, high=7), reals(7, 2)),
    case("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=2),
         integers(4, 3, high=7), reals(7, 5)),
    case("embedding_scaled", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
         integers(4, 3, high=4), reals(7, 5)),
    case("embedding_tied", lambda i, w: F.embedding(i, w) @ w.t(), integers(4, high=7),
         reals(7, 5)),
    case("embedding_int32", lambda i, w: F.embedding(i, w),
         integers(5, high=7, dtype=torch.int32), reals(7, 3)),
    case("embedding_sum", lambda i, j, w: F.embedding(i, w) + F.embedding(j, w),
         integers(4, high=7), integers(4, high=7), reals(7, 5)),
] + [
    case(f"bags_{mode}_{name}", lambda w, i, mode=mode, more=more: F.embedding_bag(
        i, w, *more[0], mode=mode, **more[1]),  # type: ignore[arg-type]
        reals(7, 4), integers(*shape, high=7), per_mesh=2)
    for mode in ("sum", "mean")
    for name, shape, more in (
        ("of_rows", (5, 3), ((), {})), ("padded", (5, 3), ((), {"padding_idx": 2})),
        ("at_offsets", (9,), ((torch.tensor([0, 2, 2, 6]),), {"padding_idx": -1})),
        ("to_last", (9,), ((torch.tensor([0, 2, 2, 6, 9]),), {"include_last_offset": True})),
    )
] + [
    case(f"bags_renormed_{mode}", lambda w, i, mode=mode: [F.embedding_bag(
        i, (table := w.detach().clone()), max_norm=1.0, norm_type=1.0, mode=mode), table],
        reals(7, 4), integers(5, 3, high=6), grad=False, per_mesh=4)
    for mode in ("mean", "max")
] + [
    case("bags_weighed", lambda w, i, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p),
         reals(7, 4), integers(5, 3, high=7), reals(5, 3), per_mesh=2),
]
