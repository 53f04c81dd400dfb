"""The text of the errors that a user of core can cause, word for word."""
# ruff: noqa: E501

from __future__ import annotations

import pytest

from weft import core
from weft.errors import (
    LayoutError,
    MeshError,
    PlacementError,
    ShardTypeError,
    WeftError,
    message,
)

NAMES = {**vars(core), "MESH": core.Mesh({"dp": 2, "tp": 4})}

CASES: dict[str, tuple[type[WeftError], str]] = {
    'Mesh({"dp": 0, "tp": -1, "cp": 2})': (MeshError, """
Mesh(axes): 2 of 3 axes have a size below 1.
  Rule: every mesh axis has at least one device.
  Offenders: dp=0, tp=-1
  Fix: Mesh({"dp": 1})"""),
    'Mesh([("dp", 2), ("a b", 2), ("dp", 3)])': (MeshError, """
Mesh(axes): 2 of 3 axis names will not do.
  Rule: axis names are different, start with a letter, and go on with letters, digits and _ . : / -.
  Offenders: 'a b', 'dp' 2 times
  Fix: Mesh({"dp": 2, "tp": 4}); sizes alone number the axes"""),
    'Mesh((2, 4), ("dp", "tp"))': (ShardTypeError, """
Mesh(axes): 2 names of axes stand apart from their sizes.
  Rule: a mesh is a map axis name -> size; device ids in row-major order are ranks=.
  Offenders: 'dp', 'tp'
  Fix: Mesh({'dp': 2, 'tp': 4}), or Mesh({'dp': 2, 'tp': 4}, ranks=...)"""),
    'Mesh([[0, 1, 2], [3, 4, 5]], ("dp", "tp"))': (ShardTypeError, """
Mesh(axes): 2 names of axes stand apart from their sizes.
  Rule: a mesh is a map axis name -> size; device ids in row-major order are ranks=.
  Offenders: 'dp', 'tp'
  Fix: Mesh({'dp': 2, 'tp': 3}), or Mesh({'dp': 2, 'tp': 3}, ranks=...)"""),
    'Mesh([0, 1, 2], (3,), ("dp",))': (ShardTypeError, """
Mesh(axes): 1 names of axes stand apart from their sizes.
  Rule: a mesh is a map axis name -> size; device ids in row-major order are ranks=.
  Offenders: 'dp'
  Fix: Mesh({'dp': 3}), or Mesh({'dp': 3}, ranks=...)"""),
    'Mesh({"dp": 2.5})': (ShardTypeError, """
Mesh(axes): 1 of 1 entries are no whole numbers.
  Rule: axis sizes are whole numbers.
  Offenders: 2.5 (float)
  Fix: Mesh({"dp": 2, "tp": 4})"""),
    'Mesh({"dp": 2, "tp": 2}, ranks=(0, 1, 1, -3))': (MeshError, """
Mesh(ranks=): 4 device ids, 3 of them different, for a mesh of 4.
  Rule: a mesh holds each device once, has as many as the product of its axes, and ids are at least 0.
  Offenders: 1 2 times, -3 is negative
  Fix: Mesh({'dp': 2, 'tp': 2}, ranks=range(4))"""),
    'MESH["tp", "x"]': (MeshError, """
Mesh(dp=2, tp=4)[...]: 1 of 2 names fit none of the 2 axes of Mesh(dp=2, tp=4).
  Rule: an axis is named as the mesh names it, or by its number.
  Offenders: 'x'
  Fix: one of 'dp', 'tp'"""),
    'Layout(Mesh((2, 4)), (8,), P("dp"))': (MeshError, """
Layout(placements=P('dp')): 'dp' is no axis of Mesh(0=2, 1=4).
  Rule: an axis is named as the mesh names it, or by its number.
  Offenders: 'dp'
  Fix: one of 0, 1; or a mesh whose axes have names: {'dp': 2, 'tp': 4}"""),
    'MESH["tp", "tp"]': (MeshError, """
Mesh(dp=2, tp=4)[...]: 2 names for 1 axes.
  Rule: a slice names each axis once.
  Offenders: 'tp'
  Fix: mesh['tp']"""),
    'Layout("mesh", (4,))': (ShardTypeError, """
Layout(mesh): 'mesh', of type str, is no mesh.
  Rule: a mesh is a weft.Mesh or a torch DeviceMesh.
  Offenders: 'mesh'
  Fix: Mesh({"dp": 2, "tp": 4})"""),
    'Layout(MESH, 8)': (ShardTypeError, """
Layout(shape): 8, of type int, is no sequence.
  Rule: lengths are given as a sequence of whole numbers.
  Offenders: 8
  Fix: Layout(mesh, (8, 16), P('dp'))"""),
    'Layout(MESH, (8, -1, -2))': (LayoutError, """
Layout(shape): 2 of 3 lengths of (8, -1, -2) are negative.
  Rule: a length is at least 0.
  Offenders: dim 1: -1, dim 2: -2
  Fix: Layout(mesh, (8, 16), P('dp'))"""),
    'Layout(MESH, (8, 8), P("dp", "up", partial={"cp": "sum"}))': (MeshError, """
Layout(placements=P('dp', 'up', partial={'cp': 'sum'})): 2 of 3 names fit none of the 2 axes of Mesh(dp=2, tp=4).
  Rule: an axis is named as the mesh names it, or by its number.
  Offenders: 'up', 'cp'
  Fix: one of 'dp', 'tp'"""),
    'Layout(MESH, (8, 8), P("dp", ("tp", 0), partial={"tp": "sum"}))': (PlacementError, """
Layout(placements=P('dp', ('tp', 0), partial={'tp': 'sum'})): 4 entries name 2 axes.
  Rule: a mesh axis shards one tensor dim or is partial, once.
  Offenders: 'dp', 'tp'
  Fix: name each axis in one entry"""),
    'Layout(MESH, (8,), P("dp", "tp"))': (PlacementError, """
Layout(placements=P('dp', 'tp')): 2 entries for a tensor of 1 dims.
  Rule: a spec has at most one entry per tensor dim.
  Offenders: ('tp',)
  Fix: P('dp'); a spec that is for tensors of several sorts names each sort by a pattern of its own"""),
    'Layout(MESH, (8, 8), [Shard(0)])': (PlacementError, """
Layout(placements): 1 placements for the 2 axes of Mesh(dp=2, tp=4).
  Rule: there is one placement per mesh axis.
  Offenders: S(0)
  Fix: [Shard(dim=0), Replicate()]"""),
    'Layout(MESH, (8, 8), [Shard(2), Shard(-3)])': (PlacementError, """
Layout(placements): 2 of 2 placements name a dim that a tensor of 2 dims lacks.
  Rule: a dim lies in [-2, 2).
  Offenders: S(2) on axis 'dp', S(-3) on axis 'tp'
  Fix: Shard(0)"""),
    'Layout(MESH, (8, 8), "dp")': (ShardTypeError, """
Layout(placements): 'dp', of type str, is no placement.
  Rule: a placement is Shard(dim), Replicate() or Partial(kind), one per mesh axis.
  Offenders: 'dp'
  Fix: P('dp')"""),
    'Layout(MESH, (8, 8), "P(dp)")': (ShardTypeError, """
Layout(placements): 'P(dp)', of type str, is no placement.
  Rule: a placement is Shard(dim), Replicate() or Partial(kind), one per mesh axis.
  Offenders: 'P(dp)'
  Fix: P('dp', None), or [Shard(0), Replicate()]"""),
    'Layout(MESH, (8, 8), ["shard(0)", "replicate"])': (ShardTypeError, """
Layout(placements): ['shard(0)', 'replicate'] has 2 names among 2 entries.
  Rule: a spec of names is a P, with one entry per tensor dim; a list has placements, one per mesh axis.
  Offenders: 'shard(0)', 'replicate'
  Fix: P('dp', None), or [Shard(0), Replicate()]"""),
    'Layout(MESH, (8, 8), [Partial("max"), Partial("sum")])': (PlacementError, """
Layout(placements): 2 kinds of reduction on one tensor of Mesh(dp=2, tp=4).
  Rule: all partial axes have one kind; only sum and avg may stand together.
  Offenders: max@dp, sum@tp
  Fix: reduce the axes of one kind first: x.redistribute(...)"""),
    'Layout(MESH, (8, 8), [StridedShard(0, 3), Shard(0)])': (PlacementError, """
StridedShard(dim, split_factor): _S(0, 3) on axis 'dp' fits no place among the axes to its right that shard the dim, {'tp': 4}.
  Rule: split_factor is the product of the sizes of the axes that shard the dim before; a flattened dim has no such axes and cannot be said by an order of axes.
  Offenders: StridedShard(dim=0, split_factor=3)
  Fix: give the order of axes by a partition spec, P(('tp', 'dp')), or cut the dim before it is flattened"""),
    'Layout(MESH, (8, 8), [Shard(0), Shard(0, sizes=(2, 2, 2, 2))])': (PlacementError, """
Layout(placements): 1 placements carry sizes on a minor axis.
  Rule: where several axes shard one dim, the sizes of all its shards stand on the major axis.
  Offenders: S(0, sizes=(2, 2, 2, 2)) on axis 'tp', below axis 'dp'
  Fix: Layout(mesh, shape, placements, sizes={0: (...)})"""),
    'Layout(MESH, (8, 8), P("dp", "tp"), sizes={0: (3, 4), 1: (9, -1, 0, 0), 2: (8,)})': (LayoutError, """
Layout(sizes=): 3 entries do not fit shape (8, 8) on Mesh(dp=2, tp=4).
  Rule: sizes are at least 0, one per shard, and sum to the global size; or one of 'default', 'flat', 'balanced'.
  Offenders: dim 0: (3, 4) are 2 sizes with sum 7 for 2 shards of 8, dim 1: (9, -1, 0, 0) are 4 sizes with sum 8 for 4 shards of 8, dim 2 of a tensor of 2 dims
  Fix: leave sizes out for default cuts"""),
    'Layout(MESH, (8, 8), P("dp"), sizes={0: "even"})': (LayoutError, """
Layout(sizes=): 1 entries do not fit shape (8, 8) on Mesh(dp=2, tp=4).
  Rule: sizes are at least 0, one per shard, and sum to the global size; or one of 'default', 'flat', 'balanced'.
  Offenders: dim 0: no cuts are called 'even'
  Fix: leave sizes out for default cuts"""),
    'Layout(MESH, (8, 8), P("dp"), sizes=(3, 5))': (ShardTypeError, """
Layout(sizes=): (3, 5) is of type tuple.
  Rule: sizes is a map tensor dim -> shard sizes, or one of 'default', 'flat', 'balanced'.
  Offenders: (3, 5)
  Fix: Layout(mesh, shape, spec, sizes={0: (3, 5)})"""),
    'Layout(MESH, (8, 8), P("dp"), sizes="balanced")': (ShardTypeError, """
Layout(sizes=): 'balanced' is of type str.
  Rule: sizes is a map tensor dim -> shard sizes, or one of 'default', 'flat', 'balanced'.
  Offenders: 'balanced'
  Fix: Layout(mesh, shape, spec, sizes={0: 'balanced'})"""),
    'Layout(MESH, (8, 8), ("dp", None, ("tp",)))': (ShardTypeError, """
Layout(placements): ('dp', None, ('tp',)) has 1 names among 3 entries.
  Rule: a spec of names is a P, with one entry per tensor dim; a list has placements, one per mesh axis.
  Offenders: 'dp'
  Fix: P('dp', None, ('tp',))"""),
    'Layout(MESH, (8,), P("dp")).local_shape(-1)': (LayoutError, """
Layout.local_shape(rank): rank -1 is not among the 8 devices of Mesh(dp=2, tp=4).
  Rule: only a rank of the mesh holds a box.
  Offenders: -1
  Fix: layout.local_shape(0)"""),
    'Layout(MESH, (8,), P("dp")).box(8)': (LayoutError, """
Layout.box(rank): rank 8 is not among the 8 devices of Mesh(dp=2, tp=4).
  Rule: only a rank of the mesh holds a box.
  Offenders: 8
  Fix: layout.box(0)"""),
    'Layout(MESH, (8,), [Partial("avg"), Replicate()]).check_dtype("int64")': (LayoutError, """
[8] partial(avg@dp): 1 partial axes cannot carry int64.
  Rule: avg is for floats and complex, max and min for all but complex, band, bor and bxor for integers and bools, and and or for bools.
  Offenders: avg@dp
  Fix: Partial("sum") carries every dtype; or convert the tensor first"""),
    'Layout(MESH, (8,), [Partial("sum"), Replicate()]).check_dtype("float8_e8m0fnu")': (
        LayoutError, """
[8] partial(sum@dp): 1 partial axes cannot carry float8_e8m0fnu.
  Rule: a partial value of a sum may be zero, which this dtype lacks.
  Offenders: sum@dp
  Fix: x.float() first"""),
    'Layout(MESH, (9, 5), P(("dp", "tp"), partial={})).hlo_sharding()': (PlacementError, """
Layout.hlo_sharding(): [9@(dp,tp), 5] has 0 partial axes and 1 dims whose cuts are not flat.
  Rule: XLA's op-sharding has no partial values, and cuts each dim by one ceiling over all its axes.
  Offenders: dim 0
  Fix: use layout.placements, which says everything, or layout.spec with sizes; or cut flat, Layout(mesh, shape, spec, sizes={0: "flat"})"""),
    'Layout(MESH, (5,), P("dp", partial={"tp": "sum"}), sizes={0: (1, 4)}).hlo_sharding()': (PlacementError, """
Layout.hlo_sharding(): [5@dp{1,4}] partial(sum@tp) has 1 partial axes and 1 dims whose cuts are not flat.
  Rule: XLA's op-sharding has no partial values, and cuts each dim by one ceiling over all its axes.
  Offenders: sum@tp, dim 0 with sizes (1, 4)
  Fix: use layout.placements, which says everything, or layout.spec with sizes; or cut flat, Layout(mesh, shape, spec, sizes={0: "flat"})"""),
    'Layout(Mesh((4,), ranks=(0, 1, 3, 2)), (8,), P(0)).hlo_sharding(version=2)': (PlacementError, """
hlo_sharding(version=2): the 4 device ids of Mesh(0=4) are no transposed iota.
  Rule: version 2 describes devices 0..n-1 in the order of permuted axes.
  Offenders: devices 0,1,3,2, ...
  Fix: layout.hlo_sharding(version=1)"""),
    'Layout(MESH, (8,)).hlo_sharding(version=3)': (PlacementError, """
hlo_sharding(version): there is no version 3.
  Rule: version 1 lists the devices, version 2 is the iota form.
  Offenders: 3
  Fix: layout.hlo_sharding(version=2)"""),
    'Layout.from_hlo("{maximal device=0}", MESH, (8,))': (PlacementError, """
Layout.from_hlo(text): '{maximal device=0}' is neither {replicated} nor {devices=[tiles]...}.
  Rule: only tiled and replicated shardings of one tensor are layouts; maximal (one owner), manual, unknown, subgroup types and tuples are not.
  Offenders: {maximal device=0}
  Fix: for one owner give explicit sizes, P('x') with sizes={0: (n, 0, ...)}; for a manual region use weft.local_map; else write a partition spec"""),
    'Layout.from_hlo("{devices=[4,2]<=[8]}", MESH, (8, 8))': (PlacementError, """
Layout.from_hlo(text): '{devices=[4,2]<=[8]}' cuts within an axis of Mesh(dp=2, tp=4).
  Rule: every tile is made of whole mesh axes.
  Offenders: dim 0: tile 4
  Fix: name the axes by a mesh of smaller axes, Mesh({'a': 2, 'b': 4}) for [2,4]; or write a partition spec, P(...), over this mesh"""),
    'Layout.from_hlo("{devices=[8,2]<=[16]}", MESH, (8,))': (PlacementError, """
Layout.from_hlo(text): '{devices=[8,2]<=[16]}' has 2 tile dims for 16 devices and lists 16, the tensor has 1 dims and Mesh(dp=2, tp=4) 8 devices.
  Rule: there is one tile dim per tensor dim (and one for replicas), and the devices are those of the mesh.
  Offenders: {devices=[8,2]<=[16]}
  Fix: a shape of 2 dims, and a mesh of these devices"""),
    'Layout.from_hlo("{devices=[8]0,1,2,3,4,5,7,6}", MESH, (8,))': (PlacementError, """
Layout.from_hlo(text): '{devices=[8]0,1,2,3,4,5,7,6}' lists the devices of Mesh(dp=2, tp=4) in an order of their own.
  Rule: the devices are those of the mesh, each once, in the order of whole axes.
  Offenders: {devices=[8]0,1,2,3,4,5,7,6}
  Fix: the devices in that order, Mesh((8,), ranks=(...))"""),
    'Shard(1.5)': (ShardTypeError, """
Shard(dim): dim is 1.5, of type float.
  Rule: a tensor dim is a whole number.
  Offenders: 1.5
  Fix: Shard(0)"""),
    'Shard(0, sizes=(1, 2.5))': (ShardTypeError, """
Shard(sizes=): 1 of 2 entries are no whole numbers.
  Rule: shard sizes are whole numbers.
  Offenders: 2.5 (float)
  Fix: Shard(0, sizes=(6, 14))"""),
    'StridedShard(0, 0)': (PlacementError, """
StridedShard(dim, split_factor): split_factor is 0, skip is 0.
  Rule: split_factor is a product of axis sizes, at least 1; skip at least 0.
  Offenders: StridedShard(dim=0, split_factor=0)
  Fix: StridedShard(0, split_factor=2)"""),
    'Partial("mean")': (PlacementError, """
Partial(reduce_op): 'mean' is none of 10 kinds.
  Rule: the kinds of reduction are sum, avg, max, min, product, and, or, band, bor, bxor.
  Offenders: 'mean'
  Fix: Partial("avg")"""),
    'P(0.5)': (ShardTypeError, """
P(*entries): entry 0.5 is of type float.
  Rule: an entry is an axis name or number, a tuple of them, or None.
  Offenders: 0.5
  Fix: P(("dp", "tp"), None)"""),
    'P("dp", partial="cp")': (ShardTypeError, """
P(partial=): 'cp' is of type str.
  Rule: partial is a map axis -> kind of reduction.
  Offenders: 'cp'
  Fix: P("dp", partial={"cp": "sum"})"""),
}


@pytest.mark.parametrize("code", CASES)
def test_errors_say_it_in_five_parts(code: str):
    kind, text = CASES[code]
    with pytest.raises(kind) as raised:
        eval(code, dict(NAMES))
    assert str(raised.value) == text.lstrip("\n")
    assert isinstance(raised.value, TypeError if kind is ShardTypeError else ValueError)
    for part in ("Rule: ", "Offenders: ", "Fix: "):
        assert part in text


def test_message_leaves_out_what_is_empty():
    assert message("f(x)", "x is 1", "x is at least 2") == "f(x): x is 1.\n  Rule: x is at least 2."
