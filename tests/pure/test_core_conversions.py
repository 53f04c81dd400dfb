"""The three spellings of a layout: placements, partition specs, XLA op-shardings."""

from __future__ import annotations

import math
import pickle
import re
from itertools import product

import pytest
from hypothesis import given, settings

from tests.pure.test_core_layout import layouts, orders
from weft.core import (
    KINDS,
    Layout,
    Mesh,
    P,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    as_placement,
)
from weft.core import encoding as encoding_module
from weft.errors import PlacementError, ShardTypeError

MESHES = [(2,), (2, 3), (2, 2, 2), (1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 1, 1, 3)]

# Placements.


def test_placements_ask_and_print_as_torchs():
    shown = {
        Shard(0): ("Shard(dim=0)", "S(0)"), Shard(-1): ("Shard(dim=-1)", "S(-1)"),
        Shard(1, sizes=(6, 3)): ("Shard(dim=1, sizes=(6, 3))", "S(1, sizes=(6, 3))"),
        StridedShard(0, 2): ("StridedShard(dim=0, split_factor=2)", "_S(0, 2)"),
        StridedShard(0, 2, skip=1): (
            "StridedShard(dim=0, split_factor=2, skip=1)", "_S(0, 2, skip=1)"),
        Replicate(): ("Replicate()", "R"),
        Partial(): ("Partial(sum)", "P(sum)"), Partial("max"): ("Partial(max)", "P(max)"),
    }
    assert {placement: (repr(placement), str(placement)) for placement in shown} == shown
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Shard(-1).is_shard(-1)
    assert StridedShard(1, 2).is_shard(1)
    assert not StridedShard(1, 2).is_shard(0)
    assert not Shard(0).is_partial()
    assert not Shard(0).is_replicate()
    assert Replicate().is_replicate()
    assert not Replicate().is_shard()
    assert Partial().is_partial("sum")
    assert not Partial().is_partial("avg")
    assert Partial("avg").is_partial()
    assert not Partial().is_shard()
    assert Partial().reduce_op == "sum"


def test_placements_are_values():
    values = [Shard(0), Shard(1), Shard(0, sizes=(1, 2)), StridedShard(0, 1), StridedShard(0, 2),
              Replicate(), *map(Partial, KINDS)]
    assert len(set(values)) == len(values)
    assert Shard(0, sizes=[1, 2]) == Shard(0, (1, 2))  # type: ignore[arg-type]
    assert hash(StridedShard(0, split_factor=2)) == hash(StridedShard(0, 2))
    assert as_placement(Shard(0)) == Shard(0)


@pytest.mark.parametrize("sizes", MESHES)
def test_every_order_of_axes_has_one_encoding(sizes: tuple[int, ...]):
    mesh = Mesh(sizes)
    seen: dict[tuple[object, ...], Layout] = {}
    for dims in orders(len(sizes)):
        layout = Layout.make(mesh, (24, 36), dims)
        decoded = encoding_module.decode(mesh, 2, layout.placements)
        assert decoded.dims == dims
        assert Layout(mesh, (24, 36), layout.placements) == layout
        assert layout.placements not in seen
        seen[layout.placements] = layout


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_placements_say_every_layout(layout: Layout):
    assert Layout(layout.mesh, layout.shape, layout.placements) == layout


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_a_spec_with_sizes_says_every_layout(layout: Layout):
    sizes = {dim: layout.sizes_of(dim) for dim in range(layout.ndim)}
    assert Layout(layout.mesh, layout.shape, layout.spec, sizes=sizes) == layout


def test_what_strided_placements_denote():
    mesh = Mesh({"dp": 2, "tp": 2})
    fsdp = Layout(mesh, (8,), [StridedShard(0, split_factor=2), Shard(0)])
    assert fsdp.spec == P(("tp", "dp"))
    assert [fsdp.box(rank) for rank in range(4)] == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]
    cube = Mesh({"a": 2, "b": 3, "c": 5})
    named = {
        ("a", "b", "c"): [Shard(0), Shard(0), Shard(0)],
        ("a", "c", "b"): [Shard(0), StridedShard(0, 5), Shard(0)],
        ("b", "a", "c"): [StridedShard(0, 3), Shard(0), Shard(0)],
        ("b", "c", "a"): [StridedShard(0, 15), Shard(0), Shard(0)],
        ("c", "a", "b"): [StridedShard(0, 5), StridedShard(0, 5), Shard(0)],
        ("c", "b", "a"): [StridedShard(0, 15), StridedShard(0, 5), Shard(0)],
    }
    for order, placements in named.items():
        layout = Layout(cube, (30,), placements)
        assert layout.spec == P(order)
        assert list(layout.placements) == placements


def test_axes_of_size_one_keep_their_place():
    mesh = Mesh({"dp": 2, "cp": 1, "tp": 1})
    for order, dp in {
        ("dp", "cp", "tp"): Shard(0),
        ("cp", "dp", "tp"): StridedShard(0, 1),
        ("cp", "tp", "dp"): StridedShard(0, 1, skip=1),
    }.items():
        layout = Layout(mesh, (4,), P(order))
        assert layout.placements == (dp, Shard(0), Shard(0))
        assert Layout(mesh, (4,), layout.placements).spec == P(order)
    # Written for any size of tp: below tp, be it 1 or 8.
    for size in (1, 8):
        small = Mesh({"dp": 2, "tp": size})
        layout = Layout(small, (16,), [StridedShard(0, split_factor=size), Shard(0)])
        assert layout.spec == P(("tp", "dp"))
    # Nothing to stand below: the same as Shard.
    assert Layout(Mesh((2,)), (4,), [StridedShard(0, 1)]) == Layout(Mesh((2,)), (4,), [Shard(0)])


def test_sizes_stand_on_the_major_axis():
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Layout(mesh, (20,), P(("tp", "dp")), sizes={0: (6, 3, 4, 7)})
    assert layout.placements == (StridedShard(0, 2), Shard(0, sizes=(6, 3, 4, 7)))
    assert [layout.box(rank)[0] for rank in range(4)] == [(0, 6), (9, 13), (6, 9), (13, 20)]


def test_a_single_placement_or_none_will_do():
    mesh = Mesh((4,))
    assert Layout(mesh, (8,), Shard(0)) == Layout(mesh, (8,), [Shard(-1)])  # type: ignore[arg-type]
    assert Layout(mesh, (8,)) == Layout(mesh, (8,), [Replicate()])


# Partition specs.


def test_specs_are_values():
    assert P("dp", None, None) == P("dp")
    assert P(["dp", "tp"]) == P(("dp", "tp"))  # type: ignore[arg-type]
    assert P(("dp",)) == P("dp")
    assert P(()) == P(None) == P()
    assert len({P(("dp", "tp")), P(("tp", "dp")), P("dp", "tp"), P(None, "dp"),
                P("dp", partial={"tp": "sum"}), P("dp", partial={"tp": "max"})}) == 6
    for spec in [P(), P("dp"), P(None, ("a", "b"), 3), P("dp", partial={"cp": "sum", "tp": "avg"})]:
        assert eval(repr(spec)) == spec
        assert hash(eval(repr(spec))) == hash(spec)
    assert P(partial={"a": "sum", "b": "avg"}) == P(partial={"b": "avg", "a": "sum"})


def test_specs_are_sequences():
    spec = P(("dp", "tp"), None, ("cp",), None, partial={"ep": "sum"})
    assert len(spec) == 4
    assert list(spec) == [("dp", "tp"), None, "cp", None]
    assert (spec[0], spec[1], spec[-2], spec[1:3]) == (("dp", "tp"), None, "cp", (None, "cp"))
    rows, *others = spec
    assert (rows, others) == (("dp", "tp"), [None, "cp", None])
    assert P(*spec, partial=dict(spec.partial)) == spec
    assert P("layers", *spec) == P("layers", ("dp", "tp"), None, "cp")
    assert "cp" in spec
    assert "dp" not in spec
    assert (spec.index("cp"), [*reversed(P("a", "b"))]) == (2, ["b", "a"])
    with pytest.raises(IndexError):
        P("dp")[1]
    assert not P()
    assert len(Layout(Mesh({"dp": 2}), (4, 5, 6), P(None, "dp")).spec) == 3
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len(pickle.loads(pickle.dumps(spec))) == 4


def test_axes_by_name_and_by_number():
    mesh = Mesh({"dp": 2, "tp": 2, "cp": 2})
    named = Layout(mesh, (8, 8), P(("tp", "dp"), None, partial={"cp": "max"}))
    assert Layout(mesh, (8, 8), P((1, 0), partial={2: "max"})) == named
    assert Layout(mesh, (8, 8), P((-2, 0), partial={-1: "max"})) == named
    assert named.spec == P(("tp", "dp"), partial={"cp": "max"})
    assert Layout(Mesh((2, 2)), (8,), P(1)).spec == P(1)


# XLA.


def devices_of(text: str) -> tuple[list[int], list[int], bool]:
    """Tiles, devices in tile order and whether the last tile dim replicates, by plain counting."""
    match = re.fullmatch(
        r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))( last\w+)?\}", text)
    assert match
    tiles, shape, perm, listed = (
        [int(number) for number in group.split(",")] if group else None
        for group in match.groups()[:4]
    )
    assert tiles
    if listed:
        return tiles, listed, bool(match[5])
    assert shape
    perm = perm or list(range(len(shape)))
    devices = []
    for place in product(*(range(shape[axis]) for axis in perm)):
        index = [place[perm.index(axis)] for axis in range(len(shape))]
        devices.append(sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(index)))
    return tiles, devices, bool(match[5])


def check_hlo(layout: Layout, text: str) -> None:
    """The box of each device, read off the text with XLA's one ceiling per dim."""
    if text == "{replicated}":
        whole = tuple((0, length) for length in layout.shape)
        assert all(layout.box(layout.mesh.rank_at(p)) == whole for p in range(layout.mesh.size()))
        return
    tiles, devices, replicates = devices_of(text)
    assert sorted(devices) == sorted(map(layout.mesh.rank_at, range(layout.mesh.size())))
    for device, tile in zip(devices, product(*map(range, tiles)), strict=True):
        counts, places = (tiles[:-1], tile[:-1]) if replicates else (tiles, tile)
        box = []
        for length, count, place in zip(layout.shape, counts, places, strict=True):
            width = -(-length // count)
            box.append((min(place * width, length), min((place + 1) * width, length)))
        assert layout.box(device) == tuple(box)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("version", [1, 2])
def test_op_shardings_denote_the_same_boxes(sizes: tuple[int, ...], version: int):
    mesh = Mesh(sizes)
    for dims in orders(len(sizes)):
        for shape in [(24, 36), (7, 5)]:
            by_dim = dict.fromkeys(range(2), "flat")
            layout = Layout(mesh, shape, P(*dims), sizes=by_dim)
            text = layout.hlo_sharding(version)
            check_hlo(layout, text)
            again = Layout.from_hlo(text, mesh, shape)
            if 1 not in sizes:
                assert again == layout
            assert [again.box(r) for r in range(mesh.size())] == [
                layout.box(r) for r in range(mesh.size())]
            assert again.hlo_sharding(version) == text


def test_op_shardings_of_a_mesh_with_its_own_devices():
    mesh = Mesh({"a": 2, "b": 3})["b", "a"]
    layout = Layout(mesh, (6, 6), P("b"))
    assert layout.hlo_sharding() == "{devices=[3,1,2]<=[2,3]T(1,0) last_tile_dim_replicate}"
    assert layout.hlo_sharding(1) == "{devices=[3,1,2]0,3,1,4,2,5 last_tile_dim_replicate}"
    swapped = Mesh((4,), ranks=(0, 1, 3, 2))
    odd = Layout(swapped, (8,), P(0))
    assert odd.hlo_sharding(1) == "{devices=[4]0,1,3,2}"
    with pytest.raises(PlacementError, match="no transposed iota"):
        odd.hlo_sharding(2)
    every_other = Layout(Mesh((4,), ranks=(0, 2, 4, 6)), (8,), P(0))
    with pytest.raises(PlacementError, match="no transposed iota"):
        every_other.hlo_sharding(2)
    some = Layout(Mesh((2, 2), ranks=(9, 4, 7, 0)), (8,), P(1))
    assert some.hlo_sharding(1) == "{devices=[2,2]9,7,4,0 last_tile_dim_replicate}"
    for case in (layout, odd, every_other, some):
        check_hlo(case, case.hlo_sharding(1))
        assert Layout.from_hlo(case.hlo_sharding(1), case.mesh, case.shape) == case
    assert Layout.from_hlo(layout.hlo_sharding(2), mesh, (6, 6)) == layout


def test_op_shardings_of_reference():
    # From JAX and torch_xla.
    grid, cube = Mesh({"a": 2, "b": 4}), Mesh({"x": 4, "y": 4, "z": 4})
    assert [
        Layout(grid, (8, 8), P("b")).hlo_sharding(),
        Layout(grid, (8, 8), P("a")).hlo_sharding(),
        Layout(grid, (8, 8), P(None, "a")).hlo_sharding(1),
        Layout(cube, (16, 16), P("z", ("y", "x"))).hlo_sharding(),
        Layout(cube, (16, 16), P("z", ("x", "y"))).hlo_sharding(),
        Layout(Mesh({"a": 2, "one": 1, "b": 4}), (8, 8), P(("a", "one"), "b")).hlo_sharding(),
        Layout(grid, (8, 8), P()).hlo_sharding(),
        Layout(Mesh({"a": 1}), (8, 8), P("a")).hlo_sharding(),
    ] == [
        "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
        "{devices=[1,2,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
        "{devices=[4,16]<=[4,4,4]T(2,1,0)}",
        "{devices=[4,16]<=[16,4]T(1,0)}",
        "{devices=[2,4]<=[8]}",
        "{replicated}",
        "{replicated}",
    ]


def test_replicas_have_no_order():
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    text = "{devices=[2,4]3,1,2,0,7,5,4,6 last_tile_dim_replicate}"
    assert Layout.from_hlo(text, mesh, (8,)) == Layout(mesh, (8,), P("a"))


def test_flat_cuts_come_back_as_flat_cuts():
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Layout.from_hlo("{devices=[4]<=[4]}", mesh, (5,))
    assert layout.sizes_of(0) == (2, 2, 1, 0)
    assert layout == Layout(mesh, (5,), P(("dp", "tp")), sizes={0: "flat"})


def test_tile_and_group_assignment():
    layout = Layout(Mesh({"a": 2, "b": 2, "c": 2}), (8, 8), P("b", "c"))
    assignment = layout.tile_assignment
    assert (assignment.tiles, assignment.num_replicas) == ((2, 2), 2)
    assert assignment.devices == (0, 4, 1, 5, 2, 6, 3, 7)
    assert assignment.replication_groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("text", [
    "{maximal device=0}", "{manual}", "{unknown}", "{{replicated}, {replicated}}", "", "replicated",
    "{devices=[2,2]<=[4] last_tile_dims={manual}}", "{devices=[4,]<=[4]}", "{devices=[0,4]<=[4]}",
])
def test_op_shardings_that_are_no_layout(text: str):
    with pytest.raises(PlacementError, match="is neither"):
        Layout.from_hlo(text, Mesh((2, 2)), (4,))


@pytest.mark.parametrize(("text", "reason"), [
    ("{devices=[2,2]<=[4]}", "2 tile dims"), ("{devices=[8]<=[8]}", "8 devices"),
    ("{devices=[2]<=[4]}", "for 2 devices and lists 4"),
    ("{devices=[4]0,1,2,4}", "order of their own"), ("{devices=[4]0,1,3,2}", "order of their own"),
    ("{devices=[4]0,1,1,2}", "order of their own"),
    ("{devices=[4]<=[2,2]T(0,0)}", "order of their own"),
])
def test_op_shardings_that_do_not_fit(text: str, reason: str):
    with pytest.raises(PlacementError, match=reason):
        Layout.from_hlo(text, Mesh((2, 2)), (4,))


@pytest.mark.parametrize(("sizes", "text"), [
    ((4,), "{devices=[2,2]<=[4]}"), ((6, 2), "{devices=[4,3]<=[12]}"),
    ((2, 3, 2), "{devices=[6,2]<=[3,4]T(1,0)}"),
])
def test_tiles_that_split_an_axis(sizes: tuple[int, ...], text: str):
    with pytest.raises(PlacementError, match="cuts within an axis"):
        Layout.from_hlo(text, Mesh(sizes), (12, 12))


class _LooksLikeTorch:
    def __init__(self, **fields: object) -> None:
        self.__dict__ |= fields


def _torch(name: str, **fields: object) -> object:
    kind = type(name, (_LooksLikeTorch,), {"__module__": "torch.distributed.tensor.x"})
    return kind(**fields)


def test_torch_placements_are_known_by_type_and_fields():
    assert as_placement(_torch("Shard", dim=1)) == Shard(1)
    assert as_placement(_torch("Replicate")) == Replicate()
    assert as_placement(_torch("Partial", reduce_op="avg")) == Partial("avg")
    assert as_placement(_torch("_StridedShard", dim=0, split_factor=2)) == StridedShard(0, 2)
    others_shard = type("Shard", (_LooksLikeTorch,), {"__module__": "jax"})(dim=0)
    strangers = (_torch("_MaskPartial", reduce_op="sum"), others_shard, "dp", 0, None)
    for stranger in strangers:
        with pytest.raises(ShardTypeError):
            as_placement(stranger)
