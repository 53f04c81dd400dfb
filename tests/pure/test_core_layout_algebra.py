"""Layouts made of layouts, against the boxes of the one that they are made of."""

from __future__ import annotations

from itertools import permutations, product

from hypothesis import given
from hypothesis import strategies as st

from weft.core import Layout, Mesh, P

MESH = Mesh({"a": 2, "b": 3, "c": 2})
COORDINATES = tuple(product(range(2), range(3), range(2)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to three dims, cut by some axes anywhere; some of the others partial."""
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 5, 7)), max_size=3)))
    on = [draw(st.sampled_from(["", "sum", *range(len(shape))])) for _ in range(MESH.ndim)]
    dims = [
        tuple(draw(st.permutations([axis for axis, where in enumerate(on) if where == dim])))
        for dim in range(len(shape))
    ]
    layout = Layout.make(MESH, shape, dims, partial=[
        "sum" if where == "sum" else None for where in on
    ])
    for dim in range(len(shape)):
        if dims[dim] and draw(st.booleans()):
            inner = st.lists(
                st.integers(0, shape[dim]), min_size=layout.num_shards(dim) - 1,
                max_size=layout.num_shards(dim) - 1,
            )
            layout = layout.recut(dim, shape[dim], (0, *sorted(draw(inner)), shape[dim]))
    return layout


def boxes(layout: Layout) -> list[tuple[tuple[int, int], ...]]:
    return [layout.box_at(coordinate) for coordinate in COORDINATES]


@given(layouts())
def test_partial_values_are_reduced_or_made_over_some_axes(layout: Layout):
    value = layout.without_partial()
    assert not value.is_partial and boxes(value) == boxes(layout)
    assert value.without_partial() is value
    waiting = [axis for axis, kind in enumerate(layout.partial) if kind]
    assert value.with_partial(waiting) == layout
    for axis in waiting:
        reduced = layout.without_partial([axis])
        assert reduced.on(axis) is None and boxes(reduced) == boxes(layout)
        assert reduced.with_partial([axis]) == layout


@given(layouts())
def test_gathered_dims_are_whole_and_the_others_stay(layout: Layout):
    for chosen in product((False, True), repeat=layout.ndim):
        made = layout.gathered(dim for dim, whole in enumerate(chosen) if whole)
        assert made.shape == layout.shape and made.partial == layout.partial
        for box, old in zip(boxes(made), boxes(layout)):
            assert box == tuple(
                (0, length) if whole else mine
                for whole, length, mine in zip(chosen, layout.shape, old)
            )


@given(layouts())
def test_taken_dims_lie_as_they_did(layout: Layout):
    for count in range(layout.ndim + 1):
        for dims in permutations(range(layout.ndim), count):
            made = layout.take(dims)
            assert made.partial == layout.partial
            assert boxes(made) == [tuple(box[dim] for dim in dims) for box in boxes(layout)]


@given(layouts(), st.data())
def test_what_is_taken_out_can_be_put_in_again(layout: Layout, data: st.DataObject):
    start = data.draw(st.integers(0, layout.ndim))
    stop = data.draw(st.integers(start, layout.ndim))
    rest = layout.take([*range(start), *range(stop, layout.ndim)])
    assert rest.insert(start, layout.take(range(start, stop))) == layout


@given(layouts())
def test_an_operand_that_broadcasts_holds_what_its_place_in_the_result_needs(layout: Layout):
    whole = layout.without_partial()
    for count in range(layout.ndim + 1):
        tail = layout.shape[layout.ndim - count :]
        for ones in product((False, True), repeat=count):
            shape = tuple(1 if one else length for one, length in zip(ones, tail))
            made = layout.fitted(shape)
            assert made.shape == shape and not made.is_partial
            for box, due in zip(boxes(made), boxes(whole)):
                assert box == tuple(
                    mine if length == full else (0, length)
                    for length, full, mine in zip(shape, tail, due[layout.ndim - count :])
                )


def test_another_length_keeps_the_axes_and_takes_its_cuts():
    layout = Layout(MESH, (6, 4), P("b", "a"), sizes={0: (1, 2, 3)})
    assert layout.recut(0, 9).sizes_of(0) == (3, 3, 3)
    assert layout.recut(0, 9, (0, 0, 4, 9)).sizes_of(0) == (0, 4, 5)
    assert layout.recut(1, 5).cuts == (layout.cuts[0], None)
