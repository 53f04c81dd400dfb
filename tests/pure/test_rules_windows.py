"""Windows: the notation, what places read, and which cuts belong to which."""

from __future__ import annotations

import itertools

import pytest

from weft.core import default_cuts
from weft.errors import LayoutError, PlacementError
from weft.rules import Window, bind, parse

SHAPES = [
    Window(stride, dilation, taps, pad)
    for stride, dilation, taps, pad in itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 5), (0, 1, 3))
]


def outputs(window: Window, length: int) -> int:
    """How many places a dim of this length, padded on both sides, has windows for."""
    return (length + 2 * window.pad - window.extent) // window.stride + 1


def places(window: Window, one: int) -> list[int]:
    """What one place reads, by the definition."""
    return [window.stride * one + window.dilation * tap - window.pad for tap in range(window.taps)]


def test_notation() -> None:
    rule = bind(parse("b k>0 2*y+v-1 x+3*u, n k v! u!, [n] -> b n y x"),
                [(2, 3, 16, 16), (5, 3, 3, 2)], [(2, 5, 8, 13)])
    assert rule.operands[0] == (("b",), ("k",), ("y",), ("x",))
    assert rule.windows == {(0, "y"): Window(2, 1, 3, 1), (0, "x"): Window(1, 3, 2, 0)}
    assert rule.sizes["y"] == 8 and rule.whole == {"v", "u"}
    rule = bind(parse("b y+v<3+2 -> b y"), [(2, 9)], [(2, 5)])
    assert rule.windows == {(0, "y"): Window(1, 1, 3, -2)}
    rule = bind(parse("b k y, k n v! -> b n 2*y+v-1"), [(2, 3, 8), (3, 4, 4)], [(2, 4, 16)])
    assert not rule.windows and rule.spreads == {(0, "y"): Window(2, 1, 4, 1)}


@pytest.mark.parametrize(
    "text", ["2*y+ -> y", "y+v-1 -> y", "y+2 -> y", "2*y*v+1 -> y", "y+v! -> y"])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(PlacementError):
        parse(text)


def test_the_other_dims_have_to_fit() -> None:
    with pytest.raises(LayoutError, match="k: 3 and 4"):
        bind(parse("b k y+v-1, n k v! -> b n y"), [(2, 3, 8), (5, 4, 3)], [(2, 5, 8)])


@pytest.mark.parametrize("window", SHAPES, ids=str)
def test_what_places_read(window: Window) -> None:
    for start in range(3):
        read = [place for one in range(start, start + 3) for place in places(window, one)]
        assert window.read(start, start + 3) == (min(read), max(read) + 1)


@pytest.mark.parametrize("window", SHAPES, ids=str)
def test_what_places_are_made_of(window: Window) -> None:
    """Read backwards: of all places of the factor, none that matters is left out."""
    length = 6
    for start, stop in itertools.combinations(range(-2, 20), 2):
        due = [one for one in range(length)
               if any(start <= place < stop for place in places(window, one))]
        first, last = window.needs(start, stop, length)
        assert 0 <= first < last <= length
        if due:
            assert first <= due[0] and due[-1] < last
            if window.dilation == 1:
                assert (first, last) == (due[0], due[-1] + 1)


@pytest.mark.parametrize("window", [
    Window(1, 1, 3, 1), Window(2, 1, 3, 1), Window(2, 1, 7, 3), Window(1, 2, 5, 4),
    Window(2, 1, 2, 0), Window(4, 1, 4, 0), Window(2, 1, 4, 1), Window(1, 1, 1, 0),
], ids=str)
def test_even_layouts_come_out_even(window: Window) -> None:
    """Windows that keep the length, or divide it by their stride; there and back."""
    for shards in (2, 3, 4):
        length = 4 * shards * window.stride
        cuts = default_cuts(length, [shards])
        units = window.units(cuts, outputs(window, length))
        assert units == default_cuts(length // window.stride, [shards])
        assert window.cuts(units, length) == cuts


@pytest.mark.parametrize("window", SHAPES, ids=str)
def test_cuts_stay_in_order(window: Window) -> None:
    for length, cuts in ((9, (0, 0, 2, 9, 9)), (12, (0, 1, 2, 11, 12)), (7, (0, 7, 7, 7, 7))):
        count = outputs(window, length)
        if count < 1:
            continue
        units = window.units(cuts, count)
        assert (units[0], units[-1], len(units)) == (0, count, 5) and units == tuple(sorted(units))
        back = window.cuts(units, length)
        assert (back[0], back[-1]) == (0, length) and back == tuple(sorted(back))
