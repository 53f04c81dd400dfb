"""Every row of the table of transitions in every dtype, from memory that lies in every way.

Values are small whole numbers, so that each dtype carries them and their reductions exactly. What
is due is computed on int64 and compared as bytes, since torch itself can do little with some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.execute import execute
from tests.oracle import block, coordinates, reduce_partials
from weft.comm import BoundMesh
from weft.core import Layout, Mesh, P
from weft.planner import plan

MESH = Mesh({"a": 2, "b": 2})
_NAMES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bfloat16",
    "half", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz",
)
DTYPES = [getattr(torch, name) for name in _NAMES]
FEW = [getattr(torch, name) for name in ("bool", "int16", "complex64", "float8_e5m2")]
"""For memory of other forms: one of each way in which dtypes are treated."""
MEMORY = ("contiguous", "transposed", "stepped", "expanded", "conjugate")
SHAPES = ((5, 3), (4, 2), (), (0, 3), (1, 1))


def _sum(*entries: Any, kind: str = "sum", axis: str = "a") -> P:
    return P(*entries, partial={axis: kind})


_ROWS = [
    (P("a"), P()), (P(None, "b"), P()), (P(("a", "b")), P()), (P("a"), P("b")),
    (P("a", "b"), P("b", "a")), (P(("a", "b")), P(None, ("b", "a"))), (P("a"), P(None, "a")),
    (P(), P("a")), (P(), P(None, ("a", "b"))), (P("a"), P(("a", "b"))), (P("b"), P(("a", "b"))),
    (_sum(), P()), (_sum("b"), P()), (_sum(), P("a")), (_sum(), P(None, "a")),
    (_sum(), P("b", "a")), (_sum("b"), P(("b", "a"))), (P("a"), _sum()), (P(), _sum()),
    (_sum("b"), _sum(None, "b")), (P(partial={"a": "sum", "b": "sum"}), P("b")),
    (_sum(kind="avg"), P("a")), (_sum(kind="avg"), P()),
    *[(_sum(kind=kind), to) for kind in ("max", "min", "product", "bor", "or")
      for to in (P(), P("a"))],
    *[(P(), _sum(kind=kind)) for kind in ("max", "product")],
]


def rows(dtype: torch.dtype, shape: Sequence[int]) -> list[tuple[Layout, Layout]]:
    """The pairs of layouts whose kinds the dtype carries; once with ragged cuts."""
    out = []
    for specs in _ROWS:
        if max(len(spec.entries) for spec in specs) > len(shape):
            continue
        pair = [Layout(MESH, shape, spec) for spec in specs]
        try:
            for layout in pair:
                layout.check_dtype(str(dtype).removeprefix("torch."))
        except ValueError:
            continue
        out.append((pair[0], pair[1]))
        if shape == (5, 3):
            out.append((_ragged(pair[0]), pair[1]))
    return list(dict.fromkeys(out))


def _ragged(layout: Layout) -> Layout:
    cuts = [
        (*([0] * (layout.num_shards(dim) - 1)), 1, length) if axes else None
        for dim, (axes, length) in enumerate(zip(layout.dims, layout.shape))
    ]
    return layout.replace(cuts=cuts)


def dtypes_in(memory: str) -> list[torch.dtype]:
    """Those to be tried in memory of a form."""
    if memory == "contiguous":
        return DTYPES
    return [dtype for dtype in FEW if dtype.is_complex or memory != "conjugate"]


def terms_of(layout: Layout) -> Tensor:
    """Whole numbers, one term per coordinate of the partial axes in dim 0."""
    count = 1
    for size, kind in zip(layout.mesh.axis_sizes, layout.partial):
        count *= size if kind else 1
    numel = count * torch.Size(layout.shape).numel()
    values = torch.arange(numel).remainder(3)
    if "avg" in layout.partial:
        values = values * 2
    return values.view(count, *layout.shape)


def term_at(layout: Layout, terms: Tensor, at: Sequence[int]) -> Tensor:
    """This coordinate's block of its own term."""
    index = 0
    for digit, size, kind in zip(at, layout.mesh.axis_sizes, layout.partial):
        index = index * size + digit if kind else index
    return block(layout, terms[index], at)


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers in a dtype; complex ones are real, so that products stay exact."""
    return values.to(torch.float32).to(dtype) if dtype.itemsize == 1 else values.to(dtype)


def laid(values: Tensor, memory: str) -> Tensor:
    """The tensor in memory of another form; of equal rows, where they are expanded."""
    if not values.dim():
        return values
    match memory:
        case "contiguous":
            return values
        case "transposed":
            return values.t().contiguous().t()
        case "stepped":
            wide = values.new_zeros((*values.shape, 2))
            wide[..., 1] = values
            return wide[..., 1]
        case "expanded":
            return values[:1].expand(values.shape) if len(values) else values
        case _:
            return values.conj_physical().conj()


def run_rows(mesh: BoundMesh, dtype: torch.dtype, memory: str) -> list[tuple[bytes, bool]]:
    """On one rank: the bytes of every row's result, and whether it is as results are."""
    at, out = mesh.here, []
    assert at is not None
    for shape in SHAPES:
        for src, dst in rows(dtype, shape):
            mine = as_dtype(term_at(src, terms_of(src), at), dtype).contiguous()
            local = laid(mine, memory)
            got = execute(plan(src, dst, dtype.itemsize), local, mesh)
            if memory == "expanded":  # what is due is not the model's
                dense = execute(plan(src, dst, dtype.itemsize), local.contiguous(), mesh)
                assert as_bytes(got) == as_bytes(dense), f"{src} -> {dst}"
                got = execute(plan(src, dst, dtype.itemsize), mine, mesh)
            if got is local:  # nothing to do: the argument itself
                got = got.clone(memory_format=torch.contiguous_format)
            good = got.is_contiguous() and got.dtype == dtype and (
                tuple(got.shape) == dst.local_shape_at(at)
            )
            out.append((as_bytes(got), good))
    return out


def as_bytes(x: Tensor) -> bytes:
    dense = torch.empty_like(x.resolve_conj(), memory_format=torch.contiguous_format).copy_(x)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def faults(ranks: Sequence[Sequence[tuple[bytes, bool]]], dtype: torch.dtype) -> list[str]:
    """Where the ranks' results differ from what is due."""
    wrong, number = [], 0
    for shape in SHAPES:
        for src, dst in rows(dtype, shape):
            for at, results in zip(coordinates(dst), ranks):
                got, good = results[number]
                if not good:
                    wrong.append(f"{src} -> {dst} at {at}: shape, dtype or strides")
                if got != as_bytes(due(src, dst, at, dtype)):
                    wrong.append(f"{src} -> {dst} at {at}: values")
            number += 1
    return wrong


def due(src: Layout, dst: Layout, at: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a coordinate holds afterwards."""
    terms = terms_of(src)
    kept = [axis for axis, kind in enumerate(src.partial) if kind and dst.partial[axis] == kind]
    if kept:
        return as_dtype(block(dst, term_at(src.replace(dims=((),) * src.ndim), terms, at), at),
                        dtype)
    value = _reduced(src, terms)
    made = [axis for axis, kind in enumerate(dst.partial) if kind]
    kinds = {dst.partial[axis] for axis in made}
    cut = {axis for axes in src.dims for axis in axes}
    if kinds == {"sum"}:  # an axis that cut leaves zeros around its block
        for axis in made:
            if axis in cut:
                own = block(src, torch.arange(value.numel()).view(value.shape), at).reshape(-1)
                masked = torch.zeros_like(value).view(-1)
                masked[own] = value.reshape(-1)[own]
                value = masked.view(value.shape)
            elif at[axis]:
                value = torch.zeros_like(value)
    elif kinds == {"product"} and any(at[axis] for axis in made):
        value = torch.ones_like(value)
    return as_dtype(block(dst, value, at), dtype)


def _reduced(src: Layout, terms: Tensor) -> Tensor:
    kinds = set(src.partial) - {None}
    if kinds == {"bor"}:
        return terms[0] | terms[1]
    if kinds == {"or"}:
        return ((terms[0] != 0) | (terms[1] != 0)).to(torch.int64)
    if not kinds:
        return terms[0]
    total = reduce_partials(src, terms.double() if "avg" in kinds else terms)
    return total.to(torch.int64)
