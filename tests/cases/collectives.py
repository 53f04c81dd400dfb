"""Collectives on every kind of group, dtype and split, with a model of what each must give.

`on_rank` runs them all on one rank of a mesh; `expected` says, from the ranks' inputs and plain
torch arithmetic over stacked terms, what that rank must have got. Inputs are small multiples of
one half, so that every sum is exact in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Mesh

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)

MESHES = (
    Mesh({"dp": 2, "tp": 2}),
    Mesh({"dp": 2, "tp": 2}, ranks=(2, 0, 3, 1)),
    Mesh({"x": 4}),
    Mesh({"x": 3}, ranks=(3, 0, 2)),
    Mesh({"x": 2, "one": 1}, ranks=(1, 3)),
)

_REAL = ("sum", "avg", "max", "min", "product", "and", "or")
_COMPLEX = ("sum", "avg", "product", "and", "or")
_WHOLE = ("sum", "max", "min", "product", "and", "or", "band", "bor", "bxor")

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
    "product": lambda terms: terms.prod(0),
    "and": lambda terms: (terms != 0).all(0),
    "or": lambda terms: (terms != 0).any(0),
    "band": lambda terms: _fold(terms, lambda a, b: a & b),
    "bor": lambda terms: _fold(terms, lambda a, b: a | b),
    "bxor": lambda terms: _fold(terms, lambda a, b: a ^ b),
}


def kinds_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that a dtype carries."""
    if dtype.is_complex:
        return _COMPLEX
    return _REAL if dtype.is_floating_point else _WHOLE


def groups_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Every set of axes of a mesh."""
    return [
        axes for count in range(1, mesh.ndim + 1)
        for axes in itertools.combinations(range(mesh.ndim), count)
    ]


def members_of(mesh: Mesh, axes: tuple[int, ...], position: int) -> list[int]:
    """The positions that agree with `position` on all axes but `axes`."""
    mine = mesh.coordinate(position)
    return [
        other for other in range(mesh.size())
        if all(
            axis in axes or mine[axis] == at for axis, at in enumerate(mesh.coordinate(other))
        )
    ]


def given(position: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What the rank at `position` brings; with NaN here and there where the dtype has it."""
    generator = torch.Generator().manual_seed(100 * position + numel)
    values = torch.randint(-3, 4, (numel,), generator=generator)
    if dtype.is_complex:
        return torch.complex(values / 2, values.flip(0) / 2).to(dtype)
    if not dtype.is_floating_point:
        return values.abs().to(dtype) if dtype in _UNSIGNED else values.to(dtype)
    values = values / 2
    if numel > 2:
        values[position % 3 :: 5] = float("nan")
    return values.to(dtype)


_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def splits_of(size: int) -> dict[str, tuple[int, ...]]:
    """Ways to share out a buffer."""
    return {
        "even": (3,) * size,
        "uneven": (2, 0, 5, 1)[:size],
        "last only": (0,) * (size - 1) + (4,),
        "nothing": (0,) * size,
    }


def sent(sender: int, receiver: int) -> int:
    """How many elements one place sends to another in the all-to-all."""
    return (sender * 3 + receiver * receiver + 1) % 4


def on_rank(mesh: BoundMesh, dtype: torch.dtype) -> dict[Any, Any] | None:
    """Everything on every group; results by group and name."""
    if mesh.here is None:
        return None
    position = mesh.position(mesh.here)
    return {
        (axes, name): value
        for axes in groups_of(mesh)
        for name, value in _collectives(mesh, axes, position, dtype).items()
    }


def faults_on_rank(mesh: BoundMesh, dtype: torch.dtype) -> list[str] | None:
    """Where a rank's results differ from the model; None on a rank outside the mesh."""
    got = on_rank(mesh, dtype)
    if got is None:
        return None
    assert mesh.here is not None
    return differences(got, expected(mesh.abstract, mesh.position(mesh.here), dtype))


def _collectives(
    mesh: BoundMesh, axes: tuple[int, ...], position: int, dtype: torch.dtype
) -> dict[str, Any]:
    comm = mesh.comm(axes)
    places, me, got = range(comm.size), comm.index, {}
    for kind in kinds_of(dtype):
        got[f"all_reduce {kind}"] = comm.all_reduce(given(position, 12, dtype).view(3, 4), kind)
    for name, sizes in splits_of(comm.size).items():
        got[f"all_gather {name}"] = comm.all_gather(given(position, sizes[me], dtype), sizes)
        for kind in kinds_of(dtype):
            x = given(position, sum(sizes), dtype)
            got[f"reduce_scatter {name} {kind}"] = comm.reduce_scatter(x, sizes, kind)
        for source in places:
            x = given(position, sum(sizes), dtype) if source == me else None
            got[f"scatter {name} {source}"] = comm.scatter(x, sizes, source, dtype)
    send, recv = [sent(me, at) for at in places], [sent(at, me) for at in places]
    got["all_to_all"] = comm.all_to_all(given(position, sum(send), dtype), send, recv)
    got["swap"] = _swapped(comm, send, recv, given(position, sum(send), dtype))
    limit, comm.swaps_from_nbytes = comm.swaps_from_nbytes, 0
    for name, sizes in splits_of(comm.size).items():  # as though it were much data
        x = given(position, sizes[me], dtype)
        got[f"all_gather {name}, swapped"] = comm.all_gather(x, sizes)
    comm.swaps_from_nbytes = limit
    for source in places:
        x = given(position, 6, dtype).view(2, 3)
        got[f"broadcast {source}"] = comm.broadcast(x, source)
    got["exchange small"] = comm.exchange((position, str(dtype)))
    got["exchange large"] = comm.exchange("x" * (1000 * position + 1))
    return got


def _swapped(comm: Any, send: list[int], recv: list[int], x: Tensor) -> Tensor:
    """The all-to-all by pieces, some of which lie in matrices; what stays is copied here."""
    out = torch.empty(sum(recv), dtype=x.dtype)
    given, taken = list(enumerate(x.split(send))), list(enumerate(out.split(recv)))
    taken[comm.index][1].copy_(given[comm.index][1])
    pieces = [
        [(place, part.view(1, -1)) for place, part in side if place != comm.index and len(part)]
        for side in (given, taken)
    ]
    wait = comm.swap(*pieces, x.dtype)
    wait()
    wait()
    return out


def expected(mesh: Mesh, position: int, dtype: torch.dtype) -> dict[Any, Any]:
    """What `on_rank` must give at a position of a mesh."""
    return {
        (axes, name): value
        for axes in groups_of(mesh)
        for name, value in _model(members_of(mesh, axes, position), position, dtype).items()
    }


def _model(members: list[int], position: int, dtype: torch.dtype) -> dict[str, Any]:
    me, size, want = members.index(position), len(members), {}
    for kind in kinds_of(dtype):
        terms = [given(member, 12, dtype).view(3, 4) for member in members]
        want[f"all_reduce {kind}"] = reduced(terms, kind)
    for name, sizes in splits_of(size).items():
        parts = [given(member, sizes[place], dtype) for place, member in enumerate(members)]
        want[f"all_gather {name}"] = torch.cat(parts)
        want[f"all_gather {name}, swapped"] = torch.cat(parts)
        mine = slice(sum(sizes[:me]), sum(sizes[: me + 1]))
        whole = [given(member, sum(sizes), dtype) for member in members]
        for kind in kinds_of(dtype):
            want[f"reduce_scatter {name} {kind}"] = reduced([x[mine] for x in whole], kind)
        for source in range(size):
            want[f"scatter {name} {source}"] = whole[source][mine]
    pieces = []
    for place, member in enumerate(members):
        counts = [sent(place, at) for at in range(size)]
        start = sum(counts[:me])
        pieces.append(given(member, sum(counts), dtype)[start : start + counts[me]])
    want["all_to_all"] = want["swap"] = torch.cat(pieces)
    for source, member in enumerate(members):
        want[f"broadcast {source}"] = given(member, 6, dtype).view(2, 3)
    want["exchange small"] = [(member, str(dtype)) for member in members]
    want["exchange large"] = ["x" * (1000 * member + 1) for member in members]
    return want


def reduced(terms: list[Tensor], kind: str) -> Tensor:
    """The reduction, by torch over stacked terms in a wide dtype (of one term, the term)."""
    dtype = terms[0].dtype
    if len(terms) == 1:
        return terms[0]
    wide = torch.float64 if dtype.is_floating_point else dtype
    wide = torch.int64 if dtype in _UNSIGNED else wide
    return _REDUCE[kind](torch.stack([term.to(wide) for term in terms])).to(dtype)


def same(got: Any, want: Any) -> bool:
    """Equal to the last bit; NaN equals NaN."""
    if not isinstance(want, Tensor):
        return got == want
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if got.dtype.is_floating_point:
        got, want = got.double(), want.double()
        return bool(((got == want) | (got.isnan() & want.isnan())).all())
    return torch.equal(got, want)


def differences(got: dict[Any, Any], want: dict[Any, Any]) -> list[str]:
    """The names whose results differ, with both; a name that is missing differs."""
    return [
        f"{name}: got {got.get(name)!r}, want {want.get(name)!r}"
        for name in want.keys() | got.keys()
        if name not in got or name not in want or not same(got[name], want[name])
    ]


def _fold(terms: Tensor, step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = step(total, term)
    return total
