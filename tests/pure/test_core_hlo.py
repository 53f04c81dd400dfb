"""Op-sharding strings there and back, and at any number of devices."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core import Layout, Mesh, P
from weft.core.hlo import read_sizes, read_tiles
from weft.errors import PlacementError, ShardTypeError


@st.composite
def flat_layouts(draw: st.DrawFn, own_devices: bool = False) -> Layout:
    """A layout with flat cuts of a small tensor, in any order of axes, those of size 1 included."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = [(f"a{axis}", size) for axis, size in enumerate(sizes)]
    ranks = draw(st.permutations(range(math.prod(sizes)))) if own_devices else None
    shape = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    dims: list[list[str]] = [[] for _ in shape]
    for name, _ in draw(st.permutations(axes)):
        use = draw(st.integers(-1, len(shape) - 1))
        if use >= 0:
            dims[use].append(name)
    flat = dict.fromkeys(range(len(shape)), "flat")
    return Layout(Mesh(axes, ranks), shape, P(*map(tuple, dims)), sizes=flat)


def without_single(layout: Layout) -> Any:
    """What of a layout a string can say: axes of size 1 vanish."""
    sizes = layout.mesh.axis_sizes
    dims = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dims]
    return layout.mesh, layout.shape, dims, [layout.cuts_of(dim) for dim in range(layout.ndim)]


@settings(max_examples=200, deadline=None)
@given(flat_layouts())
def test_a_layout_comes_back_from_both_versions(layout: Layout) -> None:
    texts = [layout.hlo_sharding(version) for version in (1, 2)]
    for text in texts:
        again = Layout.from_hlo(text, layout.mesh, layout.shape)
        assert without_single(again) == without_single(layout)
        assert [again.hlo_sharding(version) for version in (1, 2)] == texts


@settings(max_examples=100, deadline=None)
@given(flat_layouts(own_devices=True))
def test_devices_in_any_order_come_back(layout: Layout) -> None:
    mesh, shape, said = layout.mesh, layout.shape, without_single(layout)
    text = layout.hlo_sharding(1)
    assert without_single(Layout.from_hlo(text, mesh, shape)) == said
    try:
        short = layout.hlo_sharding(2)
    except PlacementError as error:
        assert "no transposed iota" in str(error)
        return
    assert without_single(Layout.from_hlo(short, mesh, shape)) == said
    assert (short == text == "{replicated}") or "<=" in short


def listed(reshape: list[int], order: list[int]) -> list[int]:
    """A transposed iota, element by element."""
    strides = [math.prod(reshape[at + 1 :]) for at in range(len(reshape))]
    return [
        sum(digit * strides[axis] for digit, axis in zip(place, order))
        for place in product(*(range(reshape[axis]) for axis in order))
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_both_versions_of_any_string_list_the_same_devices(data: st.DataObject) -> None:
    """XLA may merge dims or not, and transpose what a mesh never would."""
    reshape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = list(data.draw(st.permutations(range(len(reshape)))))
    count = math.prod(reshape)
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    last = data.draw(st.booleans())
    tiles, end = f"{first},{count // first}", " last_tile_dim_replicate" if last else ""
    places = ",".join(map(str, order))
    iota = f"{{devices=[{tiles}]<=[{','.join(map(str, reshape))}]T({places}){end}}}"
    devices = listed(reshape, order)
    explicit = f"{{devices=[{tiles}]{','.join(map(str, devices))}{end}}}"
    expected = ([first] if last else [first, count // first], [first, count // first], devices)
    assert read_tiles(iota, "") == read_tiles(explicit, "") == expected
    mesh, shape = Mesh(reshape), (count,) if last else (count, count)
    assert _outcome(lambda: Layout.from_hlo(iota, mesh, shape)) == _outcome(
        lambda: Layout.from_hlo(explicit, mesh, shape))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_axes_of_any_iota_make_up_its_tiles(data: st.DataObject) -> None:
    """Every device's box over the axes that are found, against its place in the list."""
    reshape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    order = list(data.draw(st.permutations(range(len(reshape)))))
    count = math.prod(reshape)
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    iota = (f"{{devices=[{first},{count // first}]<=[{','.join(map(str, reshape))}]"
            f"T({','.join(map(str, order))})}}")
    found = read_sizes(iota, "")
    if found is None:  # a tile ends within a factor that no axis can be split at
        assert len({*reshape, first, count // first} - {1}) > 1
        return
    tiles, sizes = found
    assert tiles == [first, count // first] and math.prod(sizes) == count
    layout = Layout.from_hlo(iota, Mesh(sizes), tiles)
    for place, device in enumerate(listed(reshape, order)):
        row, column = divmod(place, count // first)
        assert layout.box(device) == ((row, row + 1), (column, column + 1))


BAD = [
    ("{devices=[2,4]0,1,2,3,4,5,6,6}", "device 6, 2 times"),
    ("{devices=[2,4]0,1,2,3,4,5,8,9}", "device 8, not in the mesh, device 9, not in the mesh"),
    ("{devices=[2,4]<=[2,4]T(1,1)}", "T(1,1)"), ("{devices=[2,4]<=[8]T(0,1)}", "T(0,1)"),
    ("{devices=[8,1]0,1,2,3,4,5,7,6}", "{devices=[8,1]0,1,2,3,4,5,7,6}"),
]


@pytest.mark.parametrize(("text", "offenders"), BAD)
def test_the_devices_that_do_not_fit_are_named(text: str, offenders: str) -> None:
    with pytest.raises(PlacementError) as told:
        Layout.from_hlo(text, Mesh({"a": 2, "b": 4}), (16, 16))
    assert f"Offenders: {offenders}\n" in str(told.value)


def test_what_is_no_string_is_refused() -> None:
    for wrong in (None, 3, b"{replicated}"):
        with pytest.raises(ShardTypeError, match="an op-sharding is given by its string"):
            Layout.from_hlo(wrong, Mesh((2,)), (4,))  # type: ignore[arg-type]


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return without_single(act())
    except PlacementError:
        return "refused"


@pytest.mark.parametrize("bits", [4, 20, 60])
def test_version_2_costs_the_same_at_any_number_of_devices(bits: int) -> None:
    """No device is listed: 2**20 of them would take 8 MB, 2**60 would never end."""
    third = 2 ** (bits // 4)
    mesh = Mesh({"a": third, "b": third, "c": third, "d": third})
    spec, shape = P(("c", "a"), "d"), (2**bits, 2**bits)
    texts = [Layout(mesh, shape, spec).hlo_sharding()]  # what is imported and cached, first
    tracemalloc.start()
    layout = Layout(mesh, shape, spec)
    texts.append(layout.hlo_sharding())
    again = Layout.from_hlo(texts[-1], mesh, shape)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again == layout and len(set(texts)) == 1
    assert texts[0] == (
        f"{{devices=[{third**2},{third},{third}]<=[{third},{third},{third},{third}]T(2,0,3,1) "
        "last_tile_dim_replicate}"
    )
    assert peak < 2**16
