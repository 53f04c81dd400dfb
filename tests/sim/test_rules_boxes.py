"""Every rule against torch, box by box and without communication.

For an op on dense operands and random layouts of them: the decision's operand layouts say which
box (or which terms of a sum) each coordinate holds. The local op runs on each, and what comes out,
put together as the result layouts say, must be the dense result.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.effort import EFFORT
from tests.rule_of import rule_of
from weft.core import Cover, Layout, Mesh
from weft.ops import BOOK, FUNCTIONS, creation, elementwise, losses
from weft.ops.attending.fused import ATTENTION
from weft.propagate import decide
from weft.rules import Call, Decision, Idle, TensorArg
from weft.rules.factors import packet
from weft.tensor.trace.calls import call_of

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
MESHES = (Mesh({"x": 2, "y": 2}), Mesh({"x": 3}), Mesh({"x": 1, "y": 2}), Mesh({"x": 3, "y": 2}))
NUM_LAYOUTS = 60 if EFFORT >= 1 else 20
"""Of each sample; the elementwise ops, which share their rules, get one on each mesh and dtype."""


def f(*shape: int) -> Tensor:
    """Integers small enough that sums of products are exact."""
    return torch.randint(-4, 5, shape).to(torch.float64)


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add": lambda: (aten.add.Tensor, f(5, 4), f(5, 4)),
    "add broadcast": lambda: (aten.add.Tensor, f(5, 4, 3), f(4, 1)),
    "add number": lambda: (aten.add.Tensor, f(5, 4), 2),
    "add scalar tensor": lambda: (aten.add.Tensor, f(5, 4), f()),
    "add one": lambda: (aten.add.Tensor, f(1, 4), f(5, 1)),
    "sub": lambda: (aten.sub.Tensor, f(5, 4), f(1, 4)),
    "rsub": lambda: (aten.rsub.Scalar, f(5, 4), 1),
    "mul": lambda: (aten.mul.Tensor, f(5, 4), f(4)),
    "mul int": lambda: (aten.mul.Tensor, i(9, 5, 4), i(9, 5, 1)),
    "mul mixed": lambda: (aten.mul.Tensor, i(9, 5, 4), f(5, 4)),
    "div": lambda: (aten.div.Tensor, f(5, 4), f(5, 4).abs() + 1),
    "div floor": lambda: (
        aten.div.Tensor_mode, f(5, 4), f(5, 4).abs() + 1, {"rounding_mode": "floor"},
    ),
    "linspace": lambda: (aten.linspace.Tensor_Tensor, f(), f(), 5),
    "linspace to": lambda: (aten.linspace.Scalar_Tensor, 1, f(), 5),
    "logspace": lambda: (aten.logspace.Tensor_Tensor, f(), f(), 5),
    "logspace from": lambda: (aten.logspace.Tensor_Scalar, f(), 2, 5),
    "relu": lambda: (aten.relu.default, f(5, 4)),
    "gelu": lambda: (aten.gelu.default, f(5, 4)),
    "pow": lambda: (aten.pow.Tensor_Scalar, f(5, 4), 2),
    "where": lambda: (aten.where.self, flags(5, 4), f(5, 4), f(4)),
    "where zero": lambda: (aten.where.ScalarOther, flags(5, 4), f(5, 4), 0.0),
    "where one": lambda: (aten.where.ScalarOther, flags(5, 4), f(5, 4), 1.0),
    "masked_fill": lambda: (aten.masked_fill.Scalar, f(5, 4), flags(4), 7.0),
    "masked_fill zero": lambda: (aten.masked_fill.Scalar, f(5, 4), flags(4), 0.0),
    "masked_fill tensor": lambda: (aten.masked_fill.Tensor, f(5, 4), flags(4), f()),
    "addcmul": lambda: (aten.addcmul.default, f(5, 4), f(5, 1), f(4)),
    "addcdiv": lambda: (aten.addcdiv.default, f(5, 4), f(5, 1), f(4).abs() + 1),
    "lerp": lambda: (aten.lerp.Scalar, f(5, 4), f(5, 4), 0.25),
    "lerp tensor": lambda: (aten.lerp.Tensor, f(5, 4), f(5, 4), f(4)),
    "clamp": lambda: (aten.clamp.default, f(5, 4), -1.0, 1.0),
    "clamp tensor": lambda: (aten.clamp.Tensor, f(5, 4), f(4), None),
    "gt": lambda: (aten.gt.Tensor, f(5, 4), f(5, 4)),
    "logical_not": lambda: (aten.logical_not.default, f(5, 4)),
    "to half": lambda: (aten.to.dtype, f(5, 4), torch.float16),
    "to int": lambda: (aten.to.dtype, f(5, 4), torch.int64),
    "to double": lambda: (aten.to.dtype, f(5, 4).float(), torch.float64),
    "int narrows": lambda: (aten.to.dtype, i(300, 5, 4), torch.uint8),
    "type_as": lambda: (aten.type_as.default, f(5, 4), i(3, 7)),
    "clone": lambda: (aten.clone.default, f(5, 4)),
    "detach": lambda: (aten.detach.default, f(5, 4)),
    "copy": lambda: (aten.copy.default, f(5, 4), f(4)),
    "zeros_like": lambda: (aten.zeros_like.default, f(5, 4)),
    "ones_like": lambda: (aten.ones_like.default, f(5, 4)),
    "full_like": lambda: (aten.full_like.default, f(5, 4), 3.0),
    "fill": lambda: (aten.fill.Scalar, f(5, 4), 3.0),
    "fill tensor": lambda: (aten.fill.Tensor, f(5, 4), f()),
    "new_zeros": lambda: (aten.new_zeros.default, f(5, 4), [3, 2]),
    "prelu": lambda: (aten.prelu.default, f(5, 4, 3), f(4)),
    "mse none": lambda: (aten.mse_loss.default, f(5, 4), f(5, 4), 0),
    "mse sum": lambda: (aten.mse_loss.default, f(5, 4), f(5, 4), 2),
    "dropout off": lambda: (aten.dropout.default, f(5, 4), 0.5, False),
    "conj": lambda: (aten.conj_physical.default, torch.complex(f(5, 4), f(5, 4))),
    "sum": lambda: (aten.sum.dim_IntList, f(5, 4, 3), [1]),
    "sum keepdim": lambda: (aten.sum.dim_IntList, f(5, 4, 3), [0, -1], True),
    "sum all": lambda: (aten.sum.default, f(5, 4)),
    "sum bool": lambda: (aten.sum.default, flags(5, 4)),
    "sum int": lambda: (aten.sum.dim_IntList, i(9, 5, 4), [0]),
    "amax": lambda: (aten.amax.default, f(5, 4, 3), [1]),
    "amin all": lambda: (aten.amin.default, f(5, 4)),
    "max": lambda: (aten.max.default, f(5, 4)),
    "max dim": lambda: (aten.max.dim, f(5, 4), 1),
    "max other": lambda: (aten.max.other, f(5, 4), f(4)),
    "prod": lambda: (aten.prod.dim_int, f(5, 4), 0),
    "all": lambda: (aten.all.default, flags(5, 4)),
    "any dim": lambda: (aten.any.dim, flags(5, 4), 1),
    "mean": lambda: (aten.mean.dim, f(5, 4, 3), [1], True),
    "var": lambda: (aten.var.correction, f(5, 4), [1], {"correction": 1}),
    "std flag": lambda: (aten.std.default, f(5, 4), False),
    "argmax": lambda: (aten.argmax.default, f(5, 4), 1),
    "argmax all": lambda: (aten.argmax.default, f(5, 4)),
    "logsumexp": lambda: (aten.logsumexp.default, f(5, 4), [1]),
    "norm": lambda: (aten.linalg_vector_norm.default, f(5, 4), 2, [1]),
    "norm inf": lambda: (aten.linalg_vector_norm.default, f(5, 4), math.inf, [1]),
    "softmax": lambda: (aten.softmax.int, f(5, 4, 3), 1),
    "log_softmax": lambda: (aten._log_softmax.default, f(5, 4), -1, False),
    "cumsum": lambda: (aten.cumsum.default, f(5, 4), 0),
    "sort": lambda: (aten.sort.stable, f(5, 4), {"stable": True, "dim": 1}),
    "topk": lambda: (aten.topk.default, f(5, 4), 2),
    "glu": lambda: (aten.glu.default, f(5, 4), -1),
    "flip": lambda: (aten.flip.default, f(5, 4, 3), [1]),
    "roll": lambda: (aten.roll.default, f(5, 4), [2], [1]),
    "layer_norm": lambda: (aten.layer_norm.default, f(5, 4, 3), [3], f(3), f(3)),
    "layer_norm two": lambda: (aten.layer_norm.default, f(5, 4, 3), [4, 3], None, f(4, 3)),
    "native_layer_norm": lambda: (aten.native_layer_norm.default, f(5, 4), [4], f(4), f(4), 1e-5),
    "rms_norm": lambda: (aten.rms_norm.default, f(5, 4), [4], f(4)),
    "group_norm": lambda: (aten.group_norm.default, f(5, 4, 3), 2, f(4), f(4)),
    "cross_entropy": lambda: (aten.cross_entropy_loss.default, f(5, 4), i(4, 5), None, 0),
    "cross_entropy wide": lambda: (
        aten.cross_entropy_loss.default, f(5, 4, 3), i(4, 5, 3), f(4).abs(), 0,
    ),
    "cross_entropy soft": lambda: (
        aten.cross_entropy_loss.default, f(5, 4), f(5, 4).abs(), None, 0,
    ),
    "mm": lambda: (aten.mm.default, f(5, 4), f(4, 3)),
    "bmm": lambda: (aten.bmm.default, f(2, 5, 4), f(2, 4, 3)),
    "mv": lambda: (aten.mv.default, f(5, 4), f(4)),
    "dot": lambda: (aten.dot.default, f(5), f(5)),
    "outer": lambda: (aten.outer.default, f(5), f(4)),
    "matmul batch": lambda: (aten.matmul.default, f(3, 1, 5, 4), f(2, 4, 3)),
    "matmul vector": lambda: (aten.matmul.default, f(4), f(2, 4, 3)),
    "matmul row": lambda: (aten.matmul.default, f(2, 5, 4), f(4)),
    "matmul int": lambda: (aten.matmul.default, i(9, 5, 4), i(9, 4, 3)),
    "matmul nothing": lambda: (aten.matmul.default, f(4, 0), f(0, 3)),
    "addmm": lambda: (aten.addmm.default, f(3), f(5, 4), f(4, 3)),
    "addmm scaled": lambda: (
        aten.addmm.default, f(5, 1), f(5, 4), f(4, 3), {"beta": 2, "alpha": 3},
    ),
    "addmv": lambda: (aten.addmv.default, f(5), f(5, 4), f(4)),
    "baddbmm": lambda: (aten.baddbmm.default, f(1, 3), f(2, 5, 4), f(2, 4, 3)),
    "addr": lambda: (aten.addr.default, f(4), f(5), f(4)),
    "linear": lambda: (aten.linear.default, f(3, 5, 4), f(6, 4), f(6)),
    "linear plain": lambda: (aten.linear.default, f(5, 4), f(6, 4)),
    "linear vector": lambda: (aten.linear.default, f(4), f(6, 4), f(6)),
    "einsum": lambda: (aten.einsum.default, "bij,bkj->bik", [f(2, 5, 4), f(2, 3, 4)]),
    "einsum dots": lambda: (aten.einsum.default, "...ij,jk", [f(2, 3, 4), f(4, 5)]),
    "einsum three": lambda: (aten.einsum.default, "ij,jk,k->i", [f(5, 4), f(4, 3), f(3)]),
    "einsum diagonal": lambda: (aten.einsum.default, "ii->i", [f(4, 4)]),
    "tensordot": lambda: (aten.tensordot.default, f(2, 4, 3), f(3, 4, 5), [1, 2], [1, 0]),
    "embedding": lambda: (aten.embedding.default, f(7, 4), i(7, 5, 3)),
    "sdpa": lambda: (SDPA, f(2, 5, 4, 3), f(2, 5, 6, 3), f(2, 5, 6, 3)),
    "sdpa causal": lambda: (
        SDPA, f(2, 5, 4, 3), f(2, 5, 4, 3), f(2, 5, 4, 3), None, 0.0, True,
    ),
    "sdpa mask": lambda: (SDPA, f(2, 5, 4, 3), f(2, 5, 6, 3), f(2, 5, 6, 3), f(5, 4, 1)),
    "sdpa grouped": lambda: (
        SDPA, f(2, 6, 4, 3), f(2, 3, 4, 3), f(2, 3, 4, 3), None, 0.0, True, {"enable_gqa": True},
    ),
    "sdpa one key head": lambda: (
        SDPA, f(2, 6, 4, 3), f(2, 1, 4, 3), f(2, 1, 4, 3), None, 0.0, False, {"enable_gqa": True},
    ),
    "conv1d": lambda: (aten.conv1d.default, f(3, 4, 7), f(5, 4, 3), f(5)),
    "conv1d points": lambda: (aten.conv1d.default, f(3, 4, 7), f(5, 4, 1)),
    "conv1d groups": lambda: (
        aten.conv1d.default, f(3, 6, 7), f(9, 2, 3), f(9), [2], [1], [1], 3,
    ),
    "conv_transpose1d groups": lambda: (
        aten.conv_transpose1d.default, f(3, 6, 7), f(6, 2, 3), f(6), [2], [1], [0], 3,
    ),
    "avg_pool1d": lambda: (aten.avg_pool1d.default, f(3, 4, 7), [2], [2]),
    "max_pool2d points": lambda: (aten.max_pool2d.default, f(3, 4, 5, 6), [3, 1], [1, 1]),
    "im2col": lambda: (aten.im2col.default, f(3, 4, 5, 6), [2, 3], [1, 1], [0, 0], [1, 1]),
    "view split": lambda: (aten.view.default, f(3, 20), [3, 5, 4]),
    "view join": lambda: (aten.view.default, f(3, 5, 4), [3, 20]),
    "view batch": lambda: (aten.view.default, f(3, 5, 4), [15, 4]),
    "view regroup": lambda: (aten.view.default, f(6, 4, 2), [8, 6]),
    "view ones": lambda: (aten.view.default, f(1, 6, 1), [6, 1, 1]),
    "view negative": lambda: (aten.reshape.default, f(4, 6), [2, -1, 3]),
    "view empty": lambda: (aten.view.default, f(0, 6), [0, 2, 3]),
    "view scalar": lambda: (aten.view.default, f(1), []),
    "flatten": lambda: (aten.flatten.using_ints, f(3, 5, 4), 1),
    "unflatten": lambda: (aten.unflatten.int, f(3, 20), -1, [5, 4]),
    "transpose": lambda: (aten.transpose.int, f(5, 4, 3), 0, -1),
    "permute": lambda: (aten.permute.default, f(5, 4, 3), [2, 0, 1]),
    "t": lambda: (aten.t.default, f(5, 4)),
    "mT": lambda: (aten.mT.default, f(5, 4, 3)),
    "movedim": lambda: (aten.movedim.intlist, f(5, 4, 3), [0, 2], [1, 0]),
    "squeeze": lambda: (aten.squeeze.default, f(3, 1, 2)),
    "squeeze dim": lambda: (aten.squeeze.dim, f(3, 1, 2), 1),
    "squeeze nothing": lambda: (aten.squeeze.dim, f(3, 1, 2), 0),
    "unsqueeze": lambda: (aten.unsqueeze.default, f(5, 4), -2),
    "expand": lambda: (aten.expand.default, f(5, 1), [3, -1, 4]),
    "expand_as": lambda: (aten.expand_as.default, f(5, 1), f(3, 5, 4)),
    "repeat": lambda: (aten.repeat.default, f(5, 4), [2, 1, 3]),
    "repeat_interleave": lambda: (aten.repeat_interleave.self_int, f(5, 4), 3, 0),
    "repeat_interleave one": lambda: (aten.repeat_interleave.self_int, f(1, 4), 3, 0),
    "view_as_real": lambda: (aten.view_as_real.default, torch.complex(f(5, 4), f(5, 4))),
    "view_as_complex": lambda: (aten.view_as_complex.default, f(5, 4, 2)),
    "slice": lambda: (aten.slice.Tensor, f(7, 4), 0, 1, 6),
    "slice step": lambda: (aten.slice.Tensor, f(7, 4), 0, 1, 7, 3),
    "slice none": lambda: (aten.slice.Tensor, f(7, 4), 0, 5, 2),
    "slice tail": lambda: (aten.slice.Tensor, f(7, 4), 0, -3, 9223372036854775807),
    "narrow": lambda: (aten.narrow.default, f(7, 4), 0, -5, 3),
    "select": lambda: (aten.select.int, f(7, 4), 0, -2),
    "unbind": lambda: (aten.unbind.int, f(3, 4), 0),
    "split": lambda: (aten.split.Tensor, f(7, 4), 3),
    "split sizes": lambda: (aten.split_with_sizes.default, f(7, 4), [2, 0, 5], 0),
    "chunk": lambda: (aten.chunk.default, f(5, 7), 3, -1),
    "cat": lambda: (aten.cat.default, [f(3, 4), f(5, 4), f(2, 4)]),
    "cat other": lambda: (aten.cat.default, [f(3, 4), f(3, 1)], 1),
    "cat nothing": lambda: (aten.cat.default, [f(0), f(3, 4)]),
    "cat mixed": lambda: (aten.cat.default, [f(3, 4), i(4, 2, 4)]),
    "stack": lambda: (aten.stack.default, [f(3, 4), f(3, 4)], 1),
    "pad": lambda: (aten.constant_pad_nd.default, f(5, 4), [1, 2, 3, 1], 2.5),
    "pad zero": lambda: (aten.pad.default, f(5, 4), [0, 0, 2, 0]),
    "pad crop": lambda: (aten.constant_pad_nd.default, f(6, 4), [0, 0, -3, 2]),
    "tril": lambda: (aten.tril.default, f(5, 4), 1),
    "triu": lambda: (aten.triu.default, f(2, 5, 4), -1),
    "triu far": lambda: (aten.triu.default, f(5, 4), 2**63 - 1),
    "triu far below": lambda: (aten.triu.default, f(5, 4), -(2**63)),
    "tril far": lambda: (aten.tril.default, f(5, 4), 2**63 - 1),
    "tril far below": lambda: (aten.tril.default, f(5, 4), -(2**63)),
    "diagonal far": lambda: (aten.diagonal.default, f(5, 4), 2**63 - 1),
    "diagonal far below": lambda: (aten.diagonal.default, f(5, 4), -(2**63)),
    "index_select": lambda: (aten.index_select.default, f(5, 4), 1, i(4, 6)),
    "gather": lambda: (aten.gather.default, f(5, 4), 1, i(4, 5, 3)),
    "gather short": lambda: (aten.gather.default, f(5, 4), 1, i(4, 2, 3)),
    "scatter": lambda: (aten.scatter.value, f(5, 4), 1, i(4, 5, 1), 0),
    "scatter_add": lambda: (aten.scatter_add.default, f(5, 4), 1, i(4, 5, 3), f(5, 3)),
    "index": lambda: (aten.index.Tensor, f(5, 4, 3), [None, i(4, 2)]),
    "index two": lambda: (aten.index.Tensor, f(5, 4, 3), [i(5, 2, 1), i(4, 2)]),
    "index apart": lambda: (aten.index.Tensor, f(5, 4, 3), [i(5, 2), None, i(3, 2)]),
    "index_add": lambda: (aten.index_add.default, f(5, 4), 1, i(4, 3), f(5, 3)),
    "index_copy": lambda: (aten.index_copy.default, f(5, 4), 1, torch.tensor([2, 0]), f(5, 2)),
    "index_fill": lambda: (aten.index_fill.int_Scalar, f(5, 4), 1, torch.tensor([2, 0]), 3.0),
}


def random_layout(rng: random.Random, mesh: Mesh, tensor: Tensor) -> Layout:
    """Any axis on any dim in any order, default or ragged cuts, or partial."""
    dims: list[list[int]] = [[] for _ in tensor.shape]
    kinds = ["sum", "avg", "max"] if tensor.is_floating_point() else ["sum"]
    if tensor.dtype == torch.bool or tensor.is_complex():
        kinds = []
    kind = rng.choice(kinds) if kinds else None
    partial: list[str | None] = [None] * mesh.ndim
    for axis in rng.sample(range(mesh.ndim), mesh.ndim):
        place = rng.randrange(tensor.ndim + 2)
        if place < tensor.ndim:
            dims[place].append(axis)
        elif place == tensor.ndim and kind:
            partial[axis] = kind if kind == "max" else rng.choice(["sum", "avg"][: len(kinds)])
    cuts: list[tuple[int, ...] | None] = [None] * tensor.ndim
    for dim, axes in enumerate(dims):
        if axes and rng.random() < 0.6:
            count = math.prod(mesh.axis_sizes[axis] for axis in axes)
            inner = sorted(rng.randint(0, tensor.shape[dim]) for _ in range(count - 1))
            cuts[dim] = (0, *inner, tensor.shape[dim])
    return Layout.make(mesh, tensor.shape, dims, cuts, partial)


def coordinates(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, mesh.axis_sizes))


def locals_of(
    dense: Tensor, layout: Layout, rng: random.Random, cover: Cover | None = None
) -> dict[tuple[int, ...], Tensor]:
    """What every coordinate holds, or reads; terms are random and reduce to the dense value."""
    axes = [axis for axis, kind in enumerate(layout.partial) if kind]
    kinds = {layout.partial[axis] for axis in axes}
    keys = list(itertools.product(*(range(layout.mesh.axis_sizes[axis]) for axis in axes)))
    terms: dict[tuple[int, ...], Tensor] = {}
    if kinds <= {"sum", "avg"}:
        rest = dense * math.prod(
            layout.mesh.axis_sizes[axis] for axis in axes if layout.partial[axis] == "avg"
        )
        for key in keys[:-1]:
            low = 0 if dense.dtype == torch.uint8 else -5
            terms[key] = torch.randint(low, 6, dense.shape).to(dense.dtype)
            rest = rest - terms[key] if dense.dtype != torch.bool else rest
        terms[keys[-1]] = rest if axes else dense
    else:
        assert kinds == {"max"}
        winner = torch.randint(0, len(keys), dense.shape)
        for place, key in enumerate(keys):
            less = torch.randint(0, 6, dense.shape).to(dense.dtype)
            terms[key] = dense - torch.where(winner == place, torch.zeros_like(less), less)
    out = {}
    for coordinate in coordinates(layout.mesh):
        term = terms[tuple(coordinate[axis] for axis in axes)]
        box = layout.box_at(coordinate) if cover is None else cover.box_at(layout, coordinate)
        if cover is None:
            out[coordinate] = boxed(term, box, 0.0)
            continue
        whole = term
        for dim in cover.rings:  # places go round
            turn = torch.arange(*box[dim]) % max(term.shape[dim], 1)
            whole = whole.index_select(dim, turn)
            box = (*box[:dim], (0, len(turn)), *box[dim + 1 :])
        out[coordinate] = boxed(whole, box, cover.fill)
    return out


def boxed(term: Tensor, box: Sequence[tuple[int, int]], fill: float) -> Tensor:
    """A box of a tensor, filled where it sticks out."""
    out = torch.full([stop - start for start, stop in box], fill).to(term.dtype)
    inside = [(max(start, 0), min(stop, length)) for (start, stop), length in zip(box, term.shape)]
    if all(start < stop for start, stop in inside):
        place = tuple(slice(one[0] - mine[0], one[1] - mine[0]) for one, mine in zip(inside, box))
        out[place] = term[tuple(slice(*one) for one in inside)]
    return out


def folded(
    pieces: dict[tuple[int, ...], Tensor], layout: Layout, cover: Cover
) -> dict[tuple[int, ...], Tensor]:
    """Boxes of partial values, summed over the ranks of one replica."""
    sums: dict[Any, Tensor] = {}
    own = [axis for axes in layout.dims for axis in axes]

    def key(coordinate: tuple[int, ...]) -> Any:
        return tuple(None if axis in own else at for axis, at in enumerate(coordinate))

    for coordinate, piece in pieces.items():
        whole = sums.setdefault(key(coordinate), torch.zeros(layout.shape, dtype=piece.dtype))
        box = cover.box_at(layout, coordinate)
        inside = [(max(start, 0), min(stop, length))
                  for (start, stop), length in zip(box, layout.shape)]
        place = tuple(slice(one[0] - mine[0], max(one[1] - mine[0], 0))
                      for one, mine in zip(inside, box))
        if all(start < stop for start, stop in inside):
            whole[tuple(slice(*one) for one in inside)] += piece[place]
    return {
        coordinate: boxed(sums[key(coordinate)], layout.box_at(coordinate), 0.0)
        for coordinate in pieces
    }


def assemble(pieces: dict[tuple[int, ...], Tensor], layout: Layout, dense: Tensor) -> Tensor:
    """The dense value of local results; replicas must agree, terms are reduced."""
    axes = [axis for axis, kind in enumerate(layout.partial) if kind]
    seen: dict[tuple[int, ...], Tensor] = {}
    filled: dict[tuple[int, ...], Tensor] = {}
    for coordinate, piece in pieces.items():
        box = layout.box_at(coordinate)
        assert tuple(piece.shape) == layout.local_shape_at(coordinate), (layout, coordinate)
        assert piece.dtype == dense.dtype
        key = tuple(coordinate[axis] for axis in axes)
        whole = filled.setdefault(key, torch.zeros_like(dense))
        mask = seen.setdefault(key, torch.zeros(dense.shape, dtype=torch.bool))
        where = tuple(slice(start, stop) for start, stop in box)
        before, again = whole[where][mask[where]], piece[mask[where]]
        assert torch.all((before == again) | before.isnan() & again.isnan()), "replicas differ"
        whole[where], mask[where] = piece, True
    assert all(bool(mask.all()) for mask in seen.values()), "elements that no coordinate holds"
    value = filled
    for place in reversed(range(len(axes))):
        kind = layout.partial[axes[place]]
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for key, term in value.items():
            groups.setdefault(key[:place], []).append(term)
        value = {key: reduce_partials(kind, terms) for key, terms in groups.items()}
    return value[()]


def reduce_partials(kind: str | None, terms: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(terms))
    match kind:
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "avg":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0)
        case "and":
            return stacked.all(0)
        case "or":
            return stacked.any(0)
    raise AssertionError(kind)


def as_call(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> Call:
    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorArg(tuple(value.shape), str(value.dtype)[6:])
        return [swap(one) for one in value] if isinstance(value, list) else value

    return call_of(op, tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()},
                   tuple(map(swap, results)))


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def put(values: Any, locals_: Iterator[Tensor]) -> Any:
    if isinstance(values, (Tensor, TensorArg)):
        return next(locals_)
    if isinstance(values, (list, tuple)):
        return type(values)(put(value, locals_) for value in values)
    return values


def overload(name: str) -> Any:
    _, packet, which = name.split(".")
    return getattr(getattr(aten, packet), which)


def overloads_of(name: str) -> list[Any]:
    """The functional overloads of an op that takes tensors."""
    found = getattr(aten, name.split(".")[1])
    overloads = [getattr(found, which) for which in found.overloads()]
    return [
        one for one in overloads
        if not one._schema.is_mutable and "out" not in one._overloadname
        and any(str(argument.type) == "Tensor" for argument in one._schema.arguments)
    ]


def generic_arguments(
    op: Any, make: Callable[..., Tensor], shapes: Iterator[tuple[int, ...]]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments from the schema alone: small numbers, no options."""
    values = {"number": 2, "float": 0.5, "int": 1, "bool": False, "Optional[str]": None}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value: Any = make(*next(shapes))
        elif argument.name == "reduction":
            kwargs["reduction"] = 0
            continue
        elif argument.has_default_value():
            continue
        else:
            value = values.get(kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


MAKERS: dict[str, Callable[..., Tensor]] = {
    "float": lambda *shape: f(*shape) + 0.5,  # no zero: terms of a sum over 0 are infinities
    "unit": lambda *shape: torch.rand(shape, dtype=torch.float64),
    "int": lambda *shape: i(5, *shape), "bool": flags,
    "complex": lambda *shape: torch.complex(f(*shape), f(*shape)),
}

SHAPES = (((5, 4), (4,), (5, 1)), ((5, 4),))
"""Operands that broadcast, and operands of one shape."""

OWN_SAMPLES = (
    "aten.fill.Tensor", "aten.masked_fill.Tensor", "aten.to.device", "aten.where.default",
    "aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default", "aten.clip.Tensor",
    "aten._neg_view.default",
)
"""Ops that want arguments which their schema does not tell."""

ELEMENTWISE = {*creation.PAGE, *elementwise.PAGE, *losses.PAGE}

GENERIC = [
    str(op) for name in sorted(ELEMENTWISE)
    if not name.startswith((
        "aten.new_", "aten.empty", "aten.prelu", "aten.linspace", "aten.logspace",
        "aten.cross_entropy", "aten.nll_", "aten.multi_", "aten.multilabel",
        "torch.",
    ))
    for op in overloads_of(name) if str(op) not in OWN_SAMPLES
]


@pytest.fixture
def of_doubles() -> Iterator[None]:
    """What integers give: in float32, kernels compute the rest of a row to another last bit."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", GENERIC)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("of_doubles")
def test_every_elementwise_op(name: str) -> None:
    op, seed = overload(name), zlib.crc32(name.encode())
    rng, ran = random.Random(seed), 0
    for make in MAKERS.values():
        for shapes in SHAPES:
            torch.manual_seed(seed)
            args, kwargs = generic_arguments(op, make, itertools.cycle(shapes))
            try:
                results = tensors_in(op(*args, **kwargs))
            except (RuntimeError, TypeError, NotImplementedError):
                continue  # not with this dtype, or not with these shapes
            check_layouts(
                op, args, kwargs, results, rng, False, len(MESHES) * (2 if EFFORT >= 1 else 1))
            ran += 1
            break
    assert ran, "no arguments were found for this op"


def test_the_table_names_ops_that_exist() -> None:
    of_aten = [name.split(".")[1] for name in BOOK if name.startswith("aten.")]
    gone = {"cholesky"}  # torch 2.14 has that of torch.linalg alone
    gone |= {"_foreach_clone", "_foreach_mm", "_upsample_lanczos2d_aa"}  # torch 2.11 has none
    assert {name for name in of_aten if not hasattr(aten, name)} <= gone
    lacks = not hasattr(torch.nn.functional, "linear_cross_entropy")  # torch 2.11
    assert len(FUNCTIONS) == len(BOOK) - len(of_aten) - lacks


def test_every_op_that_torch_calls_pointwise_has_a_rule() -> None:
    every = torch._C._dispatch_get_all_op_names()  # `dir(aten)` has what was asked for before
    of_aten = {op.removeprefix("aten::").split(".")[0] for op in every if op.startswith("aten::")}
    packets = [getattr(aten, name) for name in sorted(of_aten) if hasattr(aten, name)]
    tagged = {
        packet(str(getattr(one, which)))
        for one in packets if hasattr(one, "overloads") for which in one.overloads()
        if torch.Tag.pointwise in (tags := getattr(one, which).tags)
        and torch.Tag.nondeterministic_seeded not in tags  # those are drawn
    }
    assert len(tagged) > 100
    assert tagged <= set(map(packet, BOOK))


@pytest.mark.parametrize("grad", [False, True], ids=["value", "grad"])
@pytest.mark.parametrize("name", SAMPLES)
def test_boxes_make_the_dense_result(name: str, grad: bool) -> None:
    seed = zlib.crc32(f"{name} {grad}".encode())
    torch.manual_seed(seed)
    op, *args = SAMPLES[name]()
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    results = tensors_in(op(*args, **kwargs))
    check_layouts(op, args, kwargs, results, random.Random(seed), grad, NUM_LAYOUTS)


def check_layouts(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor],
    rng: random.Random, grad: bool, num_layouts: int,
) -> None:
    dense = tensors_in(args)
    call = as_call(op, args, kwargs, results)
    for trial in range(num_layouts):
        mesh = MESHES[trial % len(MESHES)]
        layouts = [random_layout(rng, mesh, tensor) for tensor in dense]
        found = rule_of(call, layouts)
        assert found is not None
        wants = [grad and tensor.is_floating_point() for tensor in dense]
        decision = found if isinstance(found, Decision) else decide(found, call, layouts, wants)
        check(call, op, args, kwargs, dense, results, decision, rng)


def check(
    call: Call, op: Any, args: Sequence[Any], kwargs: dict[str, Any], dense: Sequence[Tensor],
    results: Sequence[Tensor], decision: Decision, rng: random.Random,
) -> None:
    covers = decision.reads or [None] * len(dense)
    held = [locals_of(tensor, layout, rng, cover)
            for tensor, layout, cover in zip(dense, decision.operands, covers)]
    assert [layout.shape for layout in decision.operands] == [tuple(t.shape) for t in dense]
    run = overload(decision.op) if decision.op else ATTENTION if op is SDPA else op
    pieces: list[dict[tuple[int, ...], Tensor]] = [{} for _ in results]
    for coordinate in coordinates(decision.operands[0].mesh):
        given, named = (args, kwargs) if decision.args is None else decision.args(coordinate)
        locals_ = iter([one[coordinate] for one in held])
        function = decision.runs(coordinate) if decision.runs is not None else None
        if isinstance(function, Idle):
            out = [torch.zeros(shape, dtype=whole.dtype)
                   for shape, whole in zip(function.shapes, results)]
        else:
            out = tensors_in((function or run)(*put(list(given), locals_), **named))
        for place, piece in enumerate(out):
            pieces[place][coordinate] = piece
    for place, cover in enumerate(decision.folds):
        if cover is not None:
            pieces[place] = folded(pieces[place], decision.results[place], cover)
    for piece, layout, expected in zip(pieces, decision.results, results, strict=True):
        found = assemble(piece, layout, expected)
        same = torch.allclose(found, expected, atol=1e-9, rtol=1e-9, equal_nan=True)
        assert same, (decision, found, expected)
