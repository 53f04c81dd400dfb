"""Grouped matrix products where the groups are sharded: rows go to the rank of their matrix.

In a layer of experts the rows are sorted by expert, and `offs` says where each expert's rows end.
If the matrices are sharded over some axes, the rows are cut where the owners of the matrices
change. Ends depend on the data, so the cuts are read at each call, and one exchange moves the rows
that ranks lack. The next ops by rows (activations, the next product) run where the rows are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout, finer_cuts
from weft.ops import Composite
from weft.ops.algorithm import Local
from weft.ops.grouped_mm import RULE, by_rows, matrices_as_they_are, product, result
from weft.rules import Call, Decision, TensorArg, op, page, rule
from weft.tensor.call import outside
from weft.tensor.call.dispatch import mesh_of
from weft.tensor.placing.layouts import layout_of, local_to_sharded
from weft.tensor.placing.operands import entered
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["PAGE", "cuts_at_owners"]

_ENDS = "its ends are read"
_OWNERS = "rows go to the rank of their matrix"

_OF_GROUPS = rule("e c k, e k n -> e c n", linear=[0, 1])


def _layouts(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | Composite | None:
    """Rows go to the owner of their matrix, if that sends less than to gather the matrices."""
    if by_rows(call) and layouts[1].dims[0] and _rows_are_less(call, layouts, wants_grad):
        return Composite(_at_owners, each_call=True)
    return matrices_as_they_are(call, layouts, wants_grad)


def _rows_are_less(call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]) -> bool:
    """Whether the rows of operand and result take fewer bytes than the matrices. Rows that are not
    sharded over the same axes are on all owners already."""
    (rows, k), (groups, _, n) = call.tensors[0].shape, call.tensors[1].shape
    if not rows or not groups:
        return False
    owners = layouts[1].dims[0]
    if not set(owners) & set(layouts[0].dims[0]):
        return True
    share = math.prod(layouts[1].mesh.axis_sizes[axis] for axis in owners)
    return rows * (k + n) <= groups * k * n * share


def _at_owners(
    a: Tensor, b: Tensor, offs: Tensor, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """Each rank multiplies the rows of the groups that it holds."""
    if bias is not None:
        return NotImplemented  # torch refuses it
    mesh = mesh_of("grouped_mm", [x._meta for x in (a, b, offs) if type(x) is ShardTensor])
    if mesh.here is None:
        outside.unknown(mesh, "the layout of its result depends on the data")("grouped_mm", (), {})
    name, whole = "grouped_mm", Layout.replicated(mesh.abstract, offs.shape)
    (ends,) = entered(name, mesh, (offs,), (whole,), _ENDS)
    wants = [torch.is_grad_enabled() and x.requires_grad for x in (a, b)]
    decision = _decided(mesh, a, b, wants)
    of_a, of_b = decision.operands
    (of_out,) = decision.results
    found = ends.tolist()
    rows, to_out = (_of_rows(lies, of_b, found, len(a)) for lies in (of_a, of_out))
    mine, matrices = entered(name, mesh, (a, b), (rows, of_b), _OWNERS)
    assert mesh.here is not None
    (start, stop), (first, last) = rows.box_at(mesh.here)[0], of_b.box_at(mesh.here)[0]
    made = product(mine, matrices, (ends[first:last] - start).clamp(0, stop - start), out_dtype)
    return local_to_sharded(made, mesh, to_out)


def _decided(mesh: BoundMesh, a: Tensor, b: Tensor, wants: Sequence[bool]) -> Decision:
    """The layouts of a product whose rows are those of each group, of shape (groups, rows, k)."""
    of_a, of_b = layout_of(a, mesh), layout_of(b, mesh)
    owners = of_b.dims[0]
    shapes = (len(b), *a.shape), tuple(b.shape), (len(b), len(a), b.shape[-1])
    x, y, out = (TensorArg(shape, "float32") for shape in shapes)
    call = Call("grouped_mm", (x, y), {}, (out,))
    rest = tuple(axis for axis in of_a.dims[0] if axis not in owners)
    lies = Layout.make(
        of_a.mesh, x.shape, (owners, rest, tuple(set(of_a.dims[1]) - set(owners))),
        (of_b.cuts[0], None, None), [None if axis in owners else kind for axis, kind in
                                    enumerate(of_a.partial)])
    bound = _OF_GROUPS.bind(call, wants)
    assert bound is not None
    return propagate.decide(bound, call, (lies, of_b), wants)


def _of_rows(lies: Layout, of_b: Layout, ends: Sequence[int], num_rows: int) -> Layout:
    """The layout of all rows, from that of (groups, rows of a group, columns)."""
    owners, within, columns = lies.dims
    assert owners == of_b.dims[0]
    cuts = cuts_at_owners(of_b, within, ends, num_rows)
    return Layout.make(
        lies.mesh, (num_rows, lies.shape[2]), ((*owners, *within), columns), (cuts, lies.cuts[2]),
        lies.partial)


def cuts_at_owners(
    of_groups: Layout, within: Sequence[int], ends: Sequence[int], num_rows: int
) -> tuple[int, ...]:
    """Where rows that are sorted by group are cut, so that each is where its group is (dim 0 of
    `of_groups`); those of each owner are chunked over the axes `within`."""
    last = [0]
    for end in ends:
        last.append(min(max(end, last[-1]), num_rows))
    bounds = [last[cut] for cut in of_groups.cuts_of(0)]
    bounds[0], bounds[-1] = 0, num_rows  # rows behind the last group have to be somewhere
    return finer_cuts(bounds, [of_groups.mesh.axis_sizes[axis] for axis in within])


PAGE = page(
    op("_grouped_mm", RULE, layouts=_layouts, result=result, has_meta_gradient=False),
)
