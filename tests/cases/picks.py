"""Reads and writes by index and by mask along cut dims: nothing may fall back to a gather."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cases import Case, Operand, bools, case, given, integers, reals
from tests.cases.transforms import complexes

_ROWS = torch.tensor([4, 0, 4, 6, -1, 2, 3])
_SET = torch.tensor([4, 0, 6, -5])
_PAIRS = torch.tensor([[1, 2, 0], [0, -1, 2]])
_PUT: Any = torch.ops.aten.index_put


def _target(*shape: int) -> Operand:
    """What is written to: a plain tensor would receive the full value."""
    return reals(*shape, laid=True)


def _written(write: Callable[..., object]) -> Callable[..., Tensor]:
    """The write on a copy of the first operand, in place."""
    def fn(a: Tensor, *others: Tensor) -> Tensor:
        target = a.clone()
        write(target, *others)
        return target

    return fn


def _set(key: Any) -> Callable[..., Tensor]:
    return _written(lambda a, v: a.__setitem__(key, v))


def _add_at(a: Tensor, v: Tensor) -> None:
    a[_SET] += v


def _index_reduced(kind: str) -> Callable[..., Tensor]:
    def run(a: Tensor, index: Tensor, values: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "index_reduce.. is in beta")
            return a.index_reduce(0, index, values, kind)

    return run


def _change_some(a: Tensor, mask: Tensor) -> None:
    a[mask] += 1
    a[mask] *= 2


_READS: list[Case] = [
    case("read_rows", lambda a: a[_ROWS], reals(7, 3), per_mesh=4),
    case("read_rows_named", lambda a, i: a[i], reals(7, 3), integers(5, low=-7, high=7),
         per_mesh=4),
    case("read_columns", lambda a: a[:, _PAIRS], reals(7, 3)),
    case("read_elements", lambda a, i, j: a[i, j], reals(7, 5), integers(6, high=7),
         integers(6, high=5), per_mesh=4),
    case("read_grid", lambda a, i, j: a[i[:, None], j], reals(7, 5), integers(4, high=7),
         integers(3, high=5)),
    case("read_apart", lambda a, i: a[i, :, i], reals(5, 3, 5), integers(4, high=5)),
    case("read_between", lambda a, i: a[:, i], reals(3, 7, 2), integers(5, high=7)),
    case("read_one", lambda a, i: a[i], reals(7, 3), given(3)),
    case("read_ints", lambda a, i: a[i], integers(7, 3), integers(4, high=7), grad=False),
    case("read_bools", lambda a, i: a[i], bools(7, 3), integers(4, high=7), grad=False),
    case("read_many", lambda a, i: a[i], reals(2, 3), integers(20, high=2)),
    case("read_nothing", lambda a: a[torch.tensor([], dtype=torch.long)], reals(7, 3)),
    case("read_by_list", lambda a: a[[0, 2, 5]], reals(7, 3)),
    case("read_by_lists", lambda a: a[[0, 2, 5], [1, 1, 0]], reals(7, 3)),
    case("read_index_select", lambda a, i: a.index_select(0, i), reals(7, 3), integers(5, high=7),
         per_mesh=4),
    case("read_shuffled", lambda a: a[torch.tensor([3, 6, 0, 2, 5, 1, 4])].cos(), reals(7, 3)),
    case("take", lambda a, i: a.take(i), reals(7, 3), integers(2, 4, low=-21, high=21)),
    case("gather_along", lambda a, i: a.gather(0, i), reals(7, 3), integers(7, 3, high=7),
         per_mesh=4),
    case("gather_few_bools", lambda a, i: a.gather(0, i), bools(7, 3), integers(1, 3, high=7),
         grad=False),
    case("gather_shorter", lambda a, i: a.gather(0, i), reals(7, 3), integers(5, 2, high=7)),
    case("repeat_each", lambda a, n: a.repeat_interleave(n, 0), reals(7, 3),
         integers(7, high=3)),
    case("repeat_alike", lambda a: a.repeat_interleave(2, 1, output_size=6), reals(7, 3)),
    case("repeat_each_flat", lambda a, n: torch.repeat_interleave(a, n), reals(4, 3),
         integers(12, high=3)),
    case("repeat_places", lambda n: torch.repeat_interleave(n), integers(7, high=3), grad=False),
    case("one_hot_untold", lambda a: torch.nn.functional.one_hot(a), integers(7, 3, high=5),
         grad=False),
    case("take_along_dim", lambda a, i: torch.take_along_dim(a, i, 1), reals(4, 6),
         integers(1, 5, high=6)),
    # Places go round.
    case("take_along_dim_round", lambda a, i: torch.take_along_dim(a, i, 1), reals(4, 6),
         integers(1, 5, low=-13, high=13), per_mesh=6),
    case("take_along_rows_round", lambda a, i: torch.take_along_dim(a, i, 0), reals(4, 6),
         integers(3, 6, low=-9, high=9), per_mesh=6),
    # Fewer places than ranks hold.
    case("few_of_rows", lambda a, i: a[i], reals(7, 5, 2), integers(2, low=-7, high=7)),
    case("few_of_columns", lambda a, i: a[:, i], reals(3, 6, 5), integers(2, high=6)),
    case("few_selected", lambda a, i: a.index_select(0, i), reals(7, 5), integers(2, high=7)),
    # One line for all rows of the index.
    case("take_along_line", lambda a, i: torch.take_along_dim(a, i, 1), reals(1, 6),
         integers(5, 3, high=6)),
    case("take_along_number", lambda a, i: torch.take_along_dim(a.sum(), i), reals(4),
         given([0, 0]), per_mesh=6),
    case("take_along_all", lambda a, i: torch.take_along_dim(a, i), reals(4, 6),
         integers(5, high=24)),
]

_WRITES: list[Case] = [
    case("put_rows", lambda a, i, v: a.index_put((i,), v), reals(7, 3), given([4, 0, 6, 2]),
         reals(4, 3), per_mesh=4),
    case("put_added", lambda a, i, v: a.index_put((i,), v, accumulate=True), reals(7, 3),
         integers(5, high=7), reals(5, 3), per_mesh=4),
    case("put_added_to_few", lambda a, i, v: a.index_put((i,), v, accumulate=True), reals(3, 2),
         integers(9, high=3), reals(9, 2)),
    case("segment_sum", lambda v, i: v.new_zeros(3, 2).index_add(0, i, v), reals(9, 2),
         integers(9, high=3), per_mesh=4),
    case("segment_sum_here", _written(lambda a, i, v: a.index_add_(0, i, v)), _target(3, 2),
         integers(9, high=3), reals(9, 2)),
    case("scatter_add_to_few", lambda a, i, v: a.scatter_add(0, i, v), reals(3, 2),
         integers(9, 2, high=3), reals(9, 2), per_mesh=4),
    *[case(f"{name}_to_a_sum", call, reals(3, 2), integers(9, high=3), reals(9, 2),
           layouts=(("p", "p.dt", "p.t", "p.d"), None, ("s0", "s0.d", "s0.t", "s0.dt", "s0!")),
           per_mesh=3)
      for name, call in {
          "segment_sum": lambda a, i, v: a.index_add(0, i, v),
          "put_added": lambda a, i, v: a.index_put((i,), v, accumulate=True),
          "scatter_add": lambda a, i, v: a.scatter_add(0, i[:, None].expand(-1, 2), v)}.items()],
    case("scatter_add_of_rows", lambda a, i, v: [
        a.scatter_add(0, i[:, None].expand(-1, 2), v),
        (a * 1).scatter_add_(0, i[:, None].expand(-1, 2), v),
        a.mT.scatter_add(-1, i.expand(2, -1), v.mT)],
         reals(7, 2), integers(5, high=7), reals(5, 2), per_mesh=4),
    case("index_amax_to_few", _index_reduced("amax"), reals(3, 2),
         integers(9, high=3), reals(9, 2), per_mesh=2),
    case("scatter_mean_of_ints", lambda a, i, v: a.scatter_reduce(0, i, v, "mean"),
         integers(3, 2), integers(9, 2, high=3), integers(9, 2), grad=False),
    case("put_elements", lambda a, v: a.index_put((_SET, _SET % 3), v), reals(7, 3), reals(4)),
    case("put_columns", lambda a, v: _PUT(a, [None, torch.tensor([2, 0])], v), reals(7, 3),
         reals(7, 2)),
    case("put_one_row", lambda a, v: a.index_put((_SET,), v), reals(7, 3), reals(3)),
    case("put_here", _written(lambda a, v: a.index_put_((_SET,), v)), _target(7, 3), reals(4, 3)),
    case("put_by_mask", lambda a, m, v: a.index_put((m,), v), reals(7, 3),
         given([1, 0, 1, 1, 0, 0, 1], torch.bool), reals(4, 3)),
    case("put_flat", lambda a, v: a.put(torch.tensor([[3, -2], [20, 0]]), v), reals(7, 3),
         reals(2, 2)),
    case("index_add_cut", lambda a, i, v: a.index_add(0, i, v, alpha=2), reals(7, 3),
         integers(5, high=7), reals(5, 3), per_mesh=4),
    case("index_copy_cut", lambda a, v: a.index_copy(0, _SET % 7, v), reals(7, 3), reals(4, 3)),
    case("index_fill_cut", lambda a: a.index_fill(0, _SET % 7, 2.5), reals(7, 3)),
    case("index_fill_back", lambda a: a.index_fill(0, torch.tensor([-1, 0, -4]), 2.5), reals(7, 3)),
    case("index_fill_one", lambda a: a.index_fill(0, torch.tensor(-1), 2.5), reals(7, 3)),
    case("index_fill_by", lambda a, v: a.index_fill(0, _SET % 7, v), reals(7, 3), reals()),
    case("index_reduce_halves", _index_reduced("prod"),
         integers(7, 3, low=1, high=3, dtype=torch.bfloat16), integers(4, high=7),
         integers(4, 3, low=1, high=3, dtype=torch.bfloat16),
         grad=False, per_mesh=4),
    case("scatter_cut", lambda a, i, v: a.scatter(0, i, v), reals(7, 3),
         given([[4, 1, 0], [0, 2, 5], [3, 3, 6]]), reals(3, 3), per_mesh=4),
    case("scatter_into_a_corner", lambda a, i, v: a.scatter(1, i, v), reals(7, 4, 3),
         given([[[2], [3]], [[0], [1]], [[1], [0]]]), reals(3, 2, 1), per_mesh=6),
    case("scatter_add_into_a_corner", lambda a, i, v: a.scatter_add(0, i, v), complexes(5, 7),
         integers(3, 4, high=5), complexes(3, 4), per_mesh=6),
    case("scatter_number", lambda a, i: a.scatter(0, i, 2.0), reals(7, 3),
         integers(5, 2, high=7)),
    case("scatter_longer", lambda a, i, v: a.scatter(0, i, v), reals(7, 3),
         given([[4, 1], [0, 2], [3, 3]]), reals(5, 3), grad=False),
    case("scatter_add_cut", lambda a, i, v: a.scatter_add(0, i, v), reals(7, 3),
         integers(7, 3, high=7), reals(7, 3), per_mesh=4),
    case("scatter_add_ints", lambda a, i, v: a.scatter_add(0, i, v), integers(7, 3),
         integers(7, 3, high=7), integers(7, 3), grad=False),
    case("scatter_add_here", _written(lambda a, i, v: a.scatter_add_(0, i, v)), _target(7, 3),
         integers(7, 3, high=7), reals(7, 3)),
] + [
    case(f"scatter_{kind}{'' if include else '_alone'}",
         lambda a, i, v, kind=kind, include=include: a.scatter_reduce(
             0, i, v, kind, include_self=include),
         reals(7, 3), integers(7, 3, high=7), reals(7, 3), per_mesh=2)
    for kind in ("sum", "mean", "amax", "prod") for include in (True, False)
] + [
    case(f"scatter_{kind}_to_few{'' if include else '_alone'}",
         lambda a, i, v, kind=kind, include=include: a.scatter_reduce(
             0, i, v, kind, include_self=include),
         integers(3, 2, dtype=torch.float64), integers(9, 2, high=3),
         integers(9, 2, dtype=torch.float64), per_mesh=2)
    for kind in ("sum", "mean", "amax", "amin") for include in (True, False)
] + [
    case(f"set_{name}", _set(key), _target(7, 3), reals(*shape), per_mesh=2)
    for name, key, shape in (
        ("rows", _SET, (4, 3)), ("each_row", _SET, (3,)), ("listed", [0, 2], (2, 3)),
        ("columns", (slice(None), torch.tensor([2, 0])), (7, 2)), ("at_one", (_SET, 1), (4,)),
        ("steps", (slice(1, 6, 2), torch.tensor([2, 0])), (3, 2)),
        ("new_dim", (_SET, None, ...), (4, 1, 3)), ("number", _SET, ()),
    )
] + [
    case("set_behind_one", _set((0, slice(None), torch.tensor([2, 0, 1]))), _target(4, 5, 3),
         reals(5, 3)),
    case("add_to_rows", _written(_add_at), _target(7, 3), reals(4, 3), per_mesh=4),
]

_NUMBERS: list[Case] = [  # torch takes a number for a line of one element
    case("gather_from_number", lambda a, i: a.gather(0, i), reals(), given([0, 0, 0])),
    case("gather_one", lambda a, i: a.gather(0, i), reals(7), given(3)),
    case("take_from_number", lambda a, i: a.take(i), reals(), given([0, -1])),
    case("put_into_number", lambda a, i, v: a.put(i, v), reals(), given(0), reals()),
    case("put_into_number_here", _written(lambda a, i, v: a.put_(i, v)), _target(), given([0]),
         reals(1)),
    case("gather_no_places", lambda a, i: a.gather(0, i), reals(7), integers(2, 0)),
    case("take_nothing", lambda a, i: a.take(i), reals(0), integers(0)),
    case("put_nothing", lambda a, i, v: a.put(i, v), reals(0), integers(0), reals(0)),
    case("narrow_by_tensor", lambda a, i: a.narrow(0, i, 2), reals(7, 3), given(3)),
    case("repeats_in_all", lambda r: torch.repeat_interleave(r, output_size=9),
         given([2, 0, 3, 1, 3]), grad=False, per_mesh=5),
]

_MASKS: list[Case] = [
    case("masked_rows", lambda a, m: a[m], reals(7, 3), bools(7), per_mesh=4),
    case("masked_elements", lambda a, m: a[m], reals(7, 3), bools(7, 3), per_mesh=4),
    case("masked_positive", lambda a: a[a > 0], reals(7, 3), per_mesh=4),
    case("masked_columns", lambda a, m: a[:, m], reals(7, 3), bools(3)),
    case("masked_inside", lambda a, m: a[:, m], reals(3, 5, 3), bools(5, 3)),
    case("masked_last", lambda a, m: a[..., m], reals(3, 5, 3), bools(3)),
    case("masked_and_named", lambda a, m: a[m, 1], reals(7, 3), bools(7)),
    case("masked_by_list", lambda a: a[[True, False] * 3 + [True]], reals(7, 3)),
    case("masked_ints", lambda a, m: a[m], integers(7, 3), bools(7), grad=False),
    case("masked_none", lambda a: a[a > 99], reals(7, 3)),
    case("masked_select", lambda a, m: a.masked_select(m), reals(7, 3), bools(7, 3)),
    case("masked_select_row", lambda a, m: torch.masked_select(a, m), reals(7, 3), bools(3)),
    case("nonzero", lambda a: a.nonzero(), integers(7, 3, high=2), grad=False, per_mesh=4),
    case("nonzero_tuple", lambda a: torch.nonzero(a, as_tuple=True), bools(7, 3), grad=False),
    case("nonzero_line", lambda a: (a > 0).nonzero().squeeze(1), reals(7), grad=False),
    case("nonzero_first", lambda a: torch.nonzero_static(a, size=4), integers(7, 3, high=2),
         grad=False, per_mesh=4),
    case("nonzero_filled", lambda a: a.nonzero_static(size=20, fill_value=7), bools(7, 3),
         grad=False, per_mesh=4),
    case("nonzero_first_number", lambda a: torch.nonzero_static(a, size=2), reals(), grad=False),
    case("argwhere", lambda a: torch.argwhere(a), integers(7, 3, high=2), grad=False),
    case("where_alone", lambda a: torch.where(a), bools(7, 3), grad=False),
    case("masked_scatter", lambda a, m, s: a.masked_scatter(m, s), reals(7, 3), bools(7, 3),
         reals(4, 6), per_mesh=4),
    case("masked_scatter_here", _written(lambda a, m, s: a.masked_scatter_(m, s)), _target(7, 3),
         bools(7, 3), reals(4, 6)),
    case("set_masked_rows", _written(lambda a, m, v: a.__setitem__(m, v)), _target(7, 3),
         given([1, 0, 1, 1, 0, 0, 1], torch.bool), reals(4, 3), per_mesh=4),
    case("set_masked_row", _written(lambda a, m, v: a.__setitem__(m, v)), _target(7, 3), bools(7),
         reals(3)),
    case("set_masked_column", _written(lambda a, m, v: a.__setitem__(m, v)), _target(7, 3),
         given([1, 0, 1, 1, 0, 0, 1], torch.bool), reals(4, 1)),
    case("set_masked_number", _written(lambda a: a.__setitem__(a > 0, 1.5)), _target(7, 3)),
    case("set_masked_columns", _written(lambda a, m, v: a.__setitem__((slice(None), m), v)),
         _target(7, 3), given([1, 0, 1], torch.bool), reals(7, 2)),
    case("change_masked", _written(_change_some), _target(7, 3), bools(7), per_mesh=4),
]

CASES: list[Case] = [
    replace(one, per_mesh=2) if one.per_mesh == 3 else one
    for one in _READS + _WRITES + _NUMBERS + _MASKS
]
