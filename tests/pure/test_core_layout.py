"""What a layout denotes: the boxes that ranks hold, the cuts, the canonical form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core import (
    KINDS,
    Layout,
    Mesh,
    P,
    Partial,
    Shard,
    balanced_cuts,
    default_cuts,
    filled_cuts,
    flat_cuts,
)
from weft.core import layout as layout_module
from weft.core.cuts import default_is_flat
from weft.errors import LayoutError

SMALL_MESHES = [(1,), (3,), (2, 2), (1, 2), (2, 1, 2), (2, 3)]
LENGTHS = (0, 1, 2, 3, 5, 7, 12)


def orders(num_axes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way in which some axes cut dim 0 and some others dim 1, in every order."""
    for count in range(num_axes + 1):
        for used in combinations(range(num_axes), count):
            for order in permutations(used):
                for split in range(count + 1):
                    yield order[:split], order[split:]


def chunks(items: list[int], count: int) -> list[list[int]]:
    """torch.chunk of a list, with the empty chunks that it leaves out."""
    width = -(-len(items) // count)
    return [items[i * width : (i + 1) * width] for i in range(count)]


def held(length: int, mesh: Mesh, axes: Sequence[int], coordinate: Sequence[int]) -> list[int]:
    """The indices that a rank holds of a dim: chunked axis by axis, by lists."""
    items = list(range(length))
    for axis in axes:
        items = chunks(items, mesh.axis_sizes[axis])[coordinate[axis]]
    return items


def indices(interval: tuple[int, int]) -> list[int]:
    return list(range(*interval))


@pytest.mark.parametrize("sizes", SMALL_MESHES)
def test_default_boxes_are_recursive_chunks(sizes: tuple[int, ...]):
    mesh = Mesh(sizes)
    for dims in orders(len(sizes)):
        for shape in product(LENGTHS, (3, 4)):
            layout = Layout.make(mesh, shape, dims)
            for rank in range(mesh.size()):
                coordinate = mesh.coordinate(rank)
                box = layout.box(rank)
                assert layout.box_at(coordinate) == box
                for dim in range(2):
                    want = held(shape[dim], mesh, dims[dim], coordinate)
                    assert indices(box[dim]) == want
                    index = layout.shard_index(dim, coordinate)
                    assert layout.interval(dim, index) == box[dim]
                    assert layout.cuts_of(dim)[index : index + 2] == box[dim]
                    assert layout.sizes_of(dim)[index] == layout.local_shape(rank)[dim]
                assert layout.local_shape_at(coordinate) == layout.local_shape(rank)


def check_tiling(layout: Layout) -> None:
    """Each element lies in the boxes of as many ranks as replicate it, with equal boxes."""
    boxes = Counter(layout.box(layout.mesh.rank_at(at)) for at in range(layout.mesh.size()))
    shards = math.prod(layout.num_shards(dim) for dim in range(layout.ndim))
    replicas = layout.mesh.size() // shards
    elements = Counter(
        element
        for box, count in boxes.items()
        for element in product(*map(indices, box))
        for _ in range(count)
    )
    assert elements == dict.fromkeys(product(*map(range, layout.shape)), replicas)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of a small tensor: any mesh, order, cuts and partial axes."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=0, max_size=4))
    ranks = draw(st.permutations(range(math.prod(sizes)))) if draw(st.booleans()) else None
    mesh = Mesh({f"a{axis}": size for axis, size in enumerate(sizes)}, ranks=ranks)
    shape = draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    dims: list[list[int]] = [[] for _ in shape]
    partial: list[str | None] = [None] * mesh.ndim
    kinds = draw(st.sampled_from([*([kind] for kind in KINDS), ["sum", "avg"]]))
    for axis in draw(st.permutations(range(mesh.ndim))):
        use = draw(st.sampled_from(["replicate", "partial", *range(len(shape))]))
        if use == "partial":
            partial[axis] = draw(st.sampled_from(kinds))
        elif isinstance(use, int):
            dims[use].append(axis)
    cuts: list[tuple[int, ...] | None] = []
    for length, axes in zip(shape, dims):
        inner = math.prod(mesh.axis_sizes[axis] for axis in axes) - 1
        points = st.lists(st.integers(0, length), min_size=inner, max_size=inner).map(sorted)
        cuts.append((0, *draw(points), length) if draw(st.booleans()) else None)
    return Layout.make(mesh, shape, dims, cuts, partial)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_boxes_tile_the_tensor(layout: Layout):
    check_tiling(layout)


def test_a_wrong_tiling_is_noticed():
    layout = Layout(Mesh((2,)), (4,), P(0))
    layout.cuts = ((0, 3, 3),)  # the last element is nobody's
    with pytest.raises(AssertionError):
        check_tiling(layout)


def test_boxes_by_device_id():
    mesh = Mesh({"dp": 2, "tp": 2}, ranks=(7, 3, 9, 0))
    layout = Layout(mesh, (5, 4), P("dp", "tp"))
    assert layout.box(7) == ((0, 3), (0, 2))
    assert layout.box(9) == ((3, 5), (0, 2))
    assert layout.local_shape(0) == (2, 2)
    with pytest.raises(LayoutError, match="rank 1 is not among"):
        layout.box(1)


def test_the_three_ways_to_cut_five_over_two_by_two():
    mesh = Mesh({"dp": 2, "tp": 2})
    spec = P(("dp", "tp"))
    assert Layout(mesh, (5,), spec).sizes_of(0) == (2, 1, 1, 1)
    assert Layout(mesh, (5,), spec, sizes={0: "flat"}).sizes_of(0) == (2, 2, 1, 0)
    assert Layout(mesh, (6,), spec, sizes={0: "balanced"}).sizes_of(0) == (2, 2, 1, 1)
    assert Layout(mesh, (6,), spec).sizes_of(0) == (2, 1, 2, 1)
    assert Layout(mesh, (5,), spec, sizes={-1: (0, 5, 0, 0)}).sizes_of(0) == (0, 5, 0, 0)
    assert Layout(mesh, (5,), P()).cuts_of(0) == (0, 5)


@settings(deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(1, 5), max_size=4))
def test_cuts_by_their_definitions(length: int, sizes: list[int]):
    count = math.prod(sizes)
    flat, balanced = flat_cuts(length, sizes), balanced_cuts(length, sizes)
    width = math.ceil(length / count)
    assert flat == tuple(min(width * i, length) for i in range(count + 1))
    even = [stop - start for start, stop in pairwise(balanced)]
    assert sum(even) == length
    assert max(even) - min(even) <= 1
    assert sorted(even, reverse=True) == even
    assert default_is_flat(length, sizes) == (default_cuts(length, sizes) == flat)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_filled_cuts_leave_no_shard_empty_and_full_ones_alone(sizes: list[int]):
    length = sum(sizes)
    if length < len(sizes):
        return
    cuts = (0, *accumulate(sizes))
    filled = filled_cuts(cuts)
    assert (filled[0], filled[-1]) == (0, length)
    assert all(start < stop for start, stop in pairwise(filled))
    if all(sizes):
        assert filled == cuts
    missing = sum(size == 0 for size in sizes)
    assert all(abs(new - old) <= missing for new, old in zip(filled, cuts))


def test_default_and_flat_cuts_are_told_apart_exhaustively():
    for sizes in [(2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 3, 2), (4, 1, 3), (3, 3, 2)]:
        for length in range(60):
            same = default_cuts(length, sizes) == flat_cuts(length, sizes)
            assert default_is_flat(length, sizes) == same, (length, sizes)


def test_explicit_cuts_that_equal_the_default_are_the_default():
    mesh = Mesh({"dp": 2, "tp": 2})
    plain = Layout(mesh, (5, 8), P(("dp", "tp")))
    same = [
        Layout(mesh, (5, 8), P(("dp", "tp")), sizes={0: (2, 1, 1, 1), 1: (8,)}),
        Layout(mesh, (5, 8), [Shard(0, sizes=(2, 1, 1, 1)), Shard(0)]),
        Layout(mesh, (5, 8), [Shard(-2), Shard(-2)], sizes={0: "default"}),
        Layout.make(mesh, (5, 8), ((0, 1), ()), cuts=((0, 2, 3, 4, 5), (0, 8))),
        Layout(mesh, [5, 8], P((0, 1), None)),
    ]
    for layout in same:
        assert layout.cuts == (None, None)
        assert layout == plain
        assert hash(layout) == hash(plain)
    different = {
        plain, Layout(mesh, (5, 8), P(("tp", "dp"))), Layout(mesh, (5, 8), P(None, ("dp", "tp"))),
        Layout(mesh, (5, 8), P(("dp", "tp")), sizes={0: "flat"}), Layout(mesh, (5, 8)),
        Layout(mesh, (6, 8), P(("dp", "tp"))), Layout(Mesh((2, 2)), (5, 8), P((0, 1))),
        Layout(mesh, (5, 8), P("dp", partial={"tp": "sum"})),
        Layout(mesh, (5, 8), P("dp", partial={"tp": "avg"})), Layout(mesh, (5, 8), P("dp")),
    }
    assert len(different) == 10
    assert plain != "layout"


def test_the_same_sizes_may_be_said_twice_but_not_two_different_ones():
    mesh = Mesh({"dp": 2})
    placements = [Shard(0, sizes=(1, 4))]
    layout = Layout(mesh, (5,), placements, sizes={0: (1, 4)})
    assert layout.sizes_of(0) == (1, 4)
    with pytest.raises(LayoutError, match="given twice"):
        Layout(mesh, (5,), placements, sizes={0: (2, 3)})


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_repr_evaluates_back(layout: Layout):
    again = eval(repr(layout))
    assert again == layout
    assert hash(again) == hash(layout)


def test_canonical_text():
    mesh = Mesh({"dp": 2, "tp": 2, "sp": 2, "cp": 2})
    layout = Layout(mesh, (8, 16, 3), P("dp", ("tp", "sp"), partial={"cp": "sum"}))
    assert str(layout) == "[8@dp, 16@(tp,sp), 3] partial(sum@cp)"
    assert layout.text("float32") == "f32[8@dp, 16@(tp,sp), 3] partial(sum@cp)"
    ragged = Layout(mesh, (8,), P("tp", partial={"cp": "avg", "dp": "sum"}), sizes={0: (8, 0)})
    assert ragged.text("torch.bfloat16") == "bf16[8@tp{8,0}] partial(sum@dp, avg@cp)"
    assert Layout(mesh, ()).text("bool") == "bool[]"
    assert Layout(Mesh((2,)), (4,), P(0)).text("uint8") == "u8[4@0]"
    assert Layout(mesh, (1,)).text("quint4x2") == "quint4x2[1]"


def test_what_an_axis_does():
    layout = Layout(Mesh({"a": 2, "b": 2, "c": 2, "d": 2}), (4, 4),
                    P(None, ("c", "a"), partial={"d": "max"}))
    assert [layout.on(axis) for axis in range(4)] == [1, None, 1, "max"]
    assert layout.sharded_axes == (0, 2)
    assert (layout.is_partial, layout.is_replicated) == (True, False)
    assert Layout.replicated(layout.mesh, (4, 4)).is_replicated
    assert layout.num_shards(1) == 4


def test_replace_keeps_the_cuts_of_what_stays():
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Layout(mesh, (5, 6), P("dp", "tp"), sizes={0: (1, 4), 1: (5, 1)})
    other = layout.replace(shape=(5, 8))
    assert (other.sizes_of(0), other.sizes_of(1)) == ((1, 4), (4, 4))
    assert layout.replace(partial=(None, None)) == layout
    assert layout.replace(dims=((1,), ())).cuts == (None, None)
    assert layout.replace(cuts=(None, None)) == Layout(mesh, (5, 6), P("dp", "tp"))


BOOL, INTEGERS, COMPLEX = {"bool"}, {"int64", "uint8"}, {"complex64"}
FLOATS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn"}
EXACT = {
    "sum": BOOL | INTEGERS | FLOATS | COMPLEX, "product": BOOL | INTEGERS | FLOATS | COMPLEX,
    "avg": FLOATS | COMPLEX, "max": BOOL | INTEGERS | FLOATS, "min": BOOL | INTEGERS | FLOATS,
    "and": BOOL, "or": BOOL,
    "band": BOOL | INTEGERS, "bor": BOOL | INTEGERS, "bxor": BOOL | INTEGERS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_refuse_what_they_cannot_carry(kind: str):
    layout = Layout(Mesh((2, 2)), (4,), [Partial(kind), Shard(0)])
    for name in EXACT["sum"] | {"quint4x2"}:
        for dtype in (name, f"torch.{name}"):
            if name in EXACT[kind]:
                layout.check_dtype(dtype)
            else:
                with pytest.raises(LayoutError, match=f"{kind}@0"):
                    layout.check_dtype(dtype)


def test_a_layout_without_partial_axes_takes_every_dtype():
    Layout(Mesh((2,)), (4,), P(0)).check_dtype("anything")


def test_huge_meshes_are_never_listed(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("listed the cuts of a huge mesh")

    monkeypatch.setattr(layout_module, "known_default_cuts", refuse)
    monkeypatch.setattr(layout_module, "flat_cuts", refuse)
    mesh = Mesh({"dp": 10**5, "tp": 10**3, "cp": 7})
    layout = Layout(mesh, (10**9 + 7, 10**6), P(("cp", "dp"), "tp"))
    last = mesh.size() - 1
    assert layout.box(0) == ((0, 1429), (0, 1000))
    assert layout.box(last)[1] == (999_000, 10**6)
    assert layout.local_shape(last)[1] == 1000
    even = Layout(mesh, (7 * 10**6, 10**6), P(("cp", "dp"), "tp"))
    assert even.hlo_sharding() == "{devices=[700000,1000]<=[100000000,7]T(1,0)}"
    assert Layout.from_hlo(even.hlo_sharding(), mesh, even.shape) == even
