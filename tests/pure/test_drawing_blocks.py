"""The blocks of a drawing and the ranks they name, against every rank's own box."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings

from tests.pure.test_core_layout import layouts
from weft.core import Layout, Mesh, P
from weft.core.hlo import merged
from weft.drawing.blocks import Band, Cell, Grid, Limits, bands, grid, shares
from weft.drawing.ranks import RankSet, rank_set, ranks_text

ALL = Limits(rows=999, columns=999, panels=999)


def members(ranks: RankSet) -> list[int]:
    assert ranks.run is not None
    runs = [ranks.run(number) for number in range(ranks.num_runs)]
    assert runs == sorted(runs)
    found = [rank for first, last in runs for rank in range(first, last + 1)]
    assert len(found) == ranks.num_ranks == len(set(found))
    return found


def drawn(picture: Grid) -> list[tuple[list[Band], Cell]]:
    """Every block that is drawn, with its band in each dim."""
    out = []
    shown = [panel for panel in picture.panels if panel is not None]
    for panel, rows in zip(shown, picture.cells):
        for row, of_row in zip(picture.rows, rows):
            for column, cell in zip(picture.columns, of_row):
                if cell is not None:
                    out.append((picture._chosen(panel, row, column), cell))
    return out


def coordinate(mesh: Mesh, rank: int) -> tuple[int, ...]:
    position = mesh.position_of_rank(rank)
    assert position is not None
    return mesh.coordinate(position)


def check(layout: Layout) -> None:
    """Every rank is in one block, its own, and with the term that it holds."""
    mesh = layout.mesh
    partial = [axis for axis, kind in enumerate(layout.partial) if kind]
    seen: list[int] = []
    for chosen, cell in drawn(grid(layout, ALL)):
        assert cell.num_partials >= len(cell.partials)
        terms = [members(term) for term in cell.partials]
        if cell.num_partials == len(terms):
            seen += [rank for term in terms for rank in term]
        for term in terms:
            assert len({tuple(coordinate(mesh, rank)[axis] for axis in partial)
                        for rank in term}) == 1
            for rank in term:
                for (start, stop), band in zip(layout.box(rank), chosen):
                    assert (start, stop) == (band.start, band.stop)
        assert cell.is_empty == any(band.start == band.stop for band in chosen)
        assert cell.rank in terms[0]
    if all(cell.num_partials <= 4 for _, cell in drawn(grid(layout, ALL))):
        assert sorted(seen) == sorted(map(mesh.rank_at, range(mesh.size())))


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_rank_stands_in_its_own_block(layout: Layout):
    check(layout)


@pytest.mark.parametrize("spec", [
    P("a", "b", "c"), P(("c", "a"), None, "b"), P(None, ("b", "a", "c")), P("b"), P(),
    P(None, ("c", "b"), partial={"a": "sum"}), P("c", partial={"a": "avg", "b": "sum"}),
])
@pytest.mark.parametrize("shape", [(5, 3, 4), (0, 2, 7), (1, 1, 1), (12, 8, 6)])
@pytest.mark.parametrize("ranks", [None, range(100, 112), (3, 1, 2, 0, 7, 11, 5, 4, 6, 10, 9, 8)])
def test_every_rank_stands_in_its_own_block_of_three_axes(spec: P, shape, ranks):
    check(Layout(Mesh({"a": 2, "b": 3, "c": 2}, ranks=ranks), shape, spec))


def test_ranks_of_large_meshes_are_not_listed():
    mesh = Mesh({"a": 10**6, "b": 10**6})
    held = rank_set(mesh, [3], [(10**6, 10**6)])
    assert held.texts() == ["3,1000003,…,999999000003", "3,…,999999000003"]
    assert rank_set(mesh, [0], [(10**6, 10**6), (10**6, 1)]).texts() == ["0-999999999999"]
    assert rank_set(mesh, range(5000), [(10**6, 10**6)]).texts() == ["5,000,000,000 ranks"]


@pytest.mark.parametrize(("ranks", "text"), [
    ([0], "0"), ([0, 1], "0,1"), ([0, 1, 2], "0-2"), ([4, 0, 1, 2, 9], "0-2,4,9"),
    (range(0, 12, 2), "0,2,4,6,8,10"), (range(0, 14, 2), "0,2,…,12"),
])
def test_ranks_are_named_by_ranges(ranks, text: str):
    assert ranks_text(ranks) == text


def test_digits_that_run_on_are_one():
    assert merged([(3, 16), (4, 2), (2, 1)]) == ((3, 16), (8, 1))
    assert merged([(1, 7)]) == ()
    sums = {sum(each) for each in product(range(0, 48, 16), range(0, 8, 2), range(2))}
    assert sums == {a + b for a in range(0, 48, 16) for b in range(8)}


def test_empty_shards_that_follow_one_another_are_one_band():
    layout = Layout(Mesh({"x": 8}), (10,), P("x"), sizes={0: (0, 0, 4, 0, 3, 3, 0, 0)})
    assert bands(layout, 0, 99, 7) == (
        Band(0, 0, 0, 2), Band(0, 4, 2, 3), Band(4, 4, 3, 4), Band(4, 7, 4, 5), Band(7, 10, 5, 6),
        Band(10, 10, 6, 8),
    )


@pytest.mark.parametrize("count", [1, 3, 7, 8, 127, 128, 129, 130, 257, 4096, 65536])
def test_bands_follow_one_another_and_the_middle_is_hidden(count: int):
    layout = Layout(Mesh((count,)), (3 * count,), P(0))
    found = bands(layout, 0, 7, 5)
    assert len(found) == (count if count <= 7 else 5)
    assert [band.hidden for band in found].count(True) == (count > 7)
    assert found[0].start == found[0].first == 0
    assert (found[-1].stop, found[-1].last) == (3 * count, count)
    for left, right in pairwise(found):
        assert (left.stop, left.last) == (right.start, right.first)


def test_a_tail_of_empty_shards_is_known_to_be_empty():
    found = bands(Layout(Mesh((65536,)), (4,), P(0)), 0, 7, 5)
    assert [(band.first, band.last, band.hidden) for band in found] == [
        (0, 1, False), (1, 2, False), (2, 3, False), (3, 4, False), (4, 65536, False)
    ]


def test_rows_and_columns_are_the_last_dims_that_are_cut():
    mesh = Mesh({"a": 2, "b": 2, "c": 2, "d": 2})
    cases = {
        P("a", "b", "c", "d"): ((2, 3), (0, 1)), P("a", "b"): ((0, 1), ()),
        P("a", None, "b"): ((0, 2), ()), P(None, "a"): ((1, 3), ()), P(): ((2, 3), ()),
        P("a", "b", None, "c"): ((1, 3), (0,)), P(None, None, None, "a"): ((2, 3), ()),
    }
    for spec, (dims, outer) in cases.items():
        picture = grid(Layout(mesh, (8, 8, 8, 8), spec), ALL)
        assert (picture.dims, picture.outer) == (dims, outer), spec


def test_shares_are_to_scale_but_for_what_would_be_too_small():
    assert shares([1, 1, 2], 8, [1, 1, 1]) == [2, 2, 4]
    assert shares([1, 99], 100, [10, 10]) == [10, 90]
    assert shares([0, 0], 6, [1, 1]) == [3, 3]
    assert shares([5, 5], 4, [3, 4]) == [3, 4]
    assert sum(shares([1, 5, 90, 2], 40, [4, 4, 4, 4])) == pytest.approx(40)
