"""Exchanges in which ranks compare what they have: local tensors of one tensor, full tensors that
they distribute together, or anything else.

Every rank of the mesh takes part, even if its own tensor cannot be used. So all ranks find the
fault, and all raise it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.comm.communicator import as_bytes
from weft.core import Layout
from weft.errors import LayoutError, WeftError
from weft.tensor.meta import contiguous_strides
from weft.transport.order import memory_order, order_of, strides_like

__all__ = [
    "Strides", "agreed_layout", "check_over_ranks", "check_same", "compared", "digest_of",
    "exchanged", "facts_of", "strides_of",
]

Strides = tuple[int, ...] | None
"""Of a tensor without gaps; None is row-major."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about one rank's local tensor; `said` are the caller's statements about all of them."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool
    said: Any
    digest: str = ""


def agreed_layout(
    call: str, mesh: BoundMesh, local: Any, form: Layout | None, word: str, fault: WeftError | None
) -> tuple[Layout, Strides]:
    """The layout that the ranks' blocks make up, and its strides; None if none follow.

    Args:
        form: which axes shard which dim, where there is no fault.
        word: "infer" takes the blocks as they are, "chunk" as the default cuts.
        fault: why this rank's local tensor cannot be used.

    Raises:
        LayoutError: on all ranks, if the blocks do not make up one tensor; `fault` if there is one.
    """
    facts = None if form is None else _facts(local, (form.dims, form.partial))
    told = exchanged(call, mesh, facts, fault)
    assert form is not None
    sizes, wrong = _sizes(told, mesh, form)
    kinds = _other_kinds(told, mesh)
    if wrong or any(one.said != told[0].said for one in told):
        shapes = [one.shape for one in told]
        raise LayoutError(
            call, f"the local shapes {shapes} do not make one tensor on {form.mesh} with "
            f"{form.spec!r}",
            "local shapes differ only in the dims that mesh axes shard, and ranks with the "
            "same shard agree", wrong + kinds or [
                f"rank {mesh.rank_at(at)}: other placements than rank {mesh.rank_at(0)}"
                for at, one in enumerate(told) if one.said != told[0].said
            ], "check each rank's local tensor")
    if kinds:
        raise LayoutError(
            call, f"{len(kinds)} facts of the local tensors differ between {len(told)} "
            "ranks", "the blocks of one tensor have one dtype and one order in memory, and "
            "all of them or none require a gradient", kinds,
            "local.to(dtype), local.contiguous() or local.requires_grad_() on these ranks")
    lengths = [sum(sizes[d]) if d in sizes else n for d, n in enumerate(told[0].shape)]
    layout = Layout(mesh, lengths, form.spec, sizes=sizes)
    if word == "chunk" and any(layout.cuts):
        default = Layout(mesh, lengths, form.spec)
        wrong = [f"dim {dim}: {layout.sizes_of(dim)}, not {default.sizes_of(dim)}"
                 for dim, cut in enumerate(layout.cuts) if cut is not None]
        raise LayoutError(
            call, f"{len(wrong)} dims of shape {layout.shape} are sharded in another way",
            "blocks are those of torch.chunk, axis by axis", wrong,
            'sizes="infer", which takes them as they are')
    return layout, _strides(told, layout)


def _facts(local: torch.Tensor, said: Any, digest: str = "") -> _Facts:
    return _Facts(tuple(local.shape), local.stride(), str(local.dtype), local.requires_grad, said,
                  digest)


def exchanged(call: str, mesh: BoundMesh, facts: Any, fault: WeftError | None) -> list[Any]:
    """The facts of all ranks, in mesh order; facts must not be tuples.

    Raises:
        WeftError: on all of them, if one rank has a fault; its own fault on that rank.
    """
    mine = facts if fault is None else (type(fault), str(fault).split(".\n")[0])
    told: list[Any] = mesh.everyone().exchange(mine)
    wrong = [(at, one) for at, one in enumerate(told) if type(one) is tuple]
    if fault is not None:
        raise fault
    if wrong:
        kind = wrong[0][1][0]
        raise kind(
            call, f"{len(wrong)} of {len(told)} ranks pass an invalid argument",
            "all ranks make one call together", [
                f"rank {mesh.rank_at(at)}: {text}" for at, (_, text) in wrong
            ], "check what these ranks pass")
    return told


def check_same(
    call: str, mesh: BoundMesh, mine: Any, fact: str, rule: str, fix: str,
    fault: WeftError | None = None, kind: type[WeftError] = LayoutError,
) -> None:
    """Raise an error on all ranks of the mesh if they say different things: `mine` is what this one
    says, `fact` may have a place for how many; `fault` as in `exchanged`."""
    if mesh.here is None:
        if fault is not None:
            raise fault
        return
    told = exchanged(call, mesh, mine, fault)
    num = len(set(told))
    if num > 1:
        wrong = [f"rank {mesh.rank_at(at)}: {one}" for at, one in enumerate(told)]
        raise kind(call, fact.replace("{}", str(num)), rule, wrong, fix)


def _sizes(
    told: Sequence[_Facts], mesh: BoundMesh, form: Layout
) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """Sizes of the sharded dims, and contradictions."""
    found: dict[int, dict[int, int]] = {dim: {} for dim, axes in enumerate(form.dims) if axes}
    first, wrong = told[0].shape, []
    for position, one in enumerate(told):
        rank = mesh.rank_at(position)
        if len(one.shape) != len(first):
            wrong.append(f"rank {rank}: {len(one.shape)} dims")
            continue
        if len(first) != form.ndim:  # this rank is among those that differ from the first
            continue
        coordinate = mesh.coordinate(position)
        for dim, length in enumerate(one.shape):
            if dim not in found:
                if length != first[dim]:
                    wrong.append(f"rank {rank}: {length} in dim {dim}, which no axis shards")
                continue
            known = found[dim].setdefault(form.shard_index(dim, coordinate), length)
            if known != length:
                wrong.append(f"rank {rank}: {length} in dim {dim}, another rank with the same "
                             f"shard has {known}")
    if wrong:
        return {}, wrong
    return {
        dim: tuple(lengths[index] for index in range(form.num_shards(dim)))
        for dim, lengths in found.items()
    }, []


def _other_kinds(told: Sequence[_Facts], mesh: BoundMesh) -> list[str]:
    """Which ranks differ from the first in dtype, gradient or memory order."""
    first, wrong = told[0], []
    start = mesh.rank_at(0)
    at = _widest(told)
    order = memory_order(told[at].shape, told[at].strides)
    for position, one in enumerate(told):
        rank = mesh.rank_at(position)
        if one.dtype != first.dtype:
            wrong.append(f"rank {rank}: {one.dtype}, rank {start}: {first.dtype}")
        if one.requires_grad != first.requires_grad:
            wrong.append(f"rank {rank}: requires_grad={one.requires_grad}, rank {start}: "
                         f"{first.requires_grad}")
        if len(one.shape) == len(order) and not _lies_in(one, order):
            wrong.append(f"rank {rank}: strides {one.strides} of shape {one.shape}, rank "
                         f"{mesh.rank_at(at)}: {told[at].strides} of {told[at].shape}")
    return wrong


def _widest(told: Sequence[_Facts]) -> int:
    """The first index of a block with the most dims of several elements: it shows an order."""
    counts = [0 if 0 in one.shape else 1 + sum(length > 1 for length in one.shape) for one in told]
    return counts.index(max(counts))


def _lies_in(one: _Facts, order: Sequence[int]) -> bool:
    steps = [one.strides[dim] for dim in order if one.shape[dim] > 1 and one.strides[dim]]
    return 0 in one.shape or steps == sorted(steps, reverse=True)


def _strides(told: Sequence[_Facts], layout: Layout) -> Strides:
    """The global strides: in the order of the blocks, if these have no gaps."""
    one = told[_widest(told)]
    if 0 in one.shape or order_of(one.shape, one.strides) is None:
        return None
    return strides_like(layout.shape, one.shape, one.strides)


def check_over_ranks(
    mesh: BoundMesh, local: Any, layout: Layout | None, fault: WeftError | None,
    region: str | None,
) -> None:
    """Compare shapes, dtypes and replicas over the mesh; raise on all ranks alike.

    `region`: the call whose function has computed the blocks; None for `from_local`.
    """
    call = region or "from_local(run_check=True)"
    facts = None
    if fault is None:
        facts = _facts(local, str(layout), digest_of(local))
    told = exchanged(call, mesh, facts, fault)
    assert layout is not None
    wrong: list[str] = []
    replicas: dict[Any, tuple[int, str]] = {}
    first = told[0]
    for position, one in enumerate(told):
        rank, coordinate = mesh.rank_at(position), mesh.coordinate(position)
        if (one.dtype, one.said) != (first.dtype, first.said):
            wrong.append(f"rank {rank}: {one.dtype} {one.said}, rank {mesh.rank_at(0)}: "
                         f"{first.dtype} {first.said}")
        elif one.shape != layout.local_shape_at(coordinate):
            wrong.append(f"rank {rank}: shape {one.shape} for {layout.local_shape_at(coordinate)}")
        elif one.requires_grad != first.requires_grad:
            wrong.append(f"rank {rank}: requires_grad={one.requires_grad}, rank "
                         f"{mesh.rank_at(0)}: {first.requires_grad}")
        partial = tuple(coordinate[a] for a, kind in enumerate(layout.partial) if kind)
        before = replicas.setdefault((layout.box_at(coordinate), partial), (rank, one.digest))
        if before[1] != one.digest:
            wrong.append(f"rank {rank}: other values than its replica, rank {before[0]}")
    if wrong:
        fix = "from_local(..., sync=True) takes the first replica's values"
        axes = _varying(mesh, layout, told)
        if region is not None and axes:
            fix = (f"where ranks hold terms of a sum, collectives.psum(result, {axes!r}) inside, "
                   f"or a spec P(..., partial={dict.fromkeys(axes, 'sum')!r})")
        raise LayoutError(
            call, f"{len(wrong)} ranks contradict layout {layout}",
            "all ranks agree on layout and dtype, and replicas are equal", wrong,
            fix)


def _varying(mesh: BoundMesh, layout: Layout, told: Sequence[_Facts]) -> tuple[Any, ...]:
    """The axes along which replicas of a block have other values."""
    kept = layout.free_axes
    rows: dict[Any, set[str]] = {}
    for position, one in enumerate(told):
        at = mesh.coordinate(position)
        for axis in kept:
            rows.setdefault((axis, at[:axis], at[axis + 1:]), set()).add(one.digest)
    return tuple(mesh.axis_names[axis] for axis in kept
                 if any(row[0] == axis and len(seen) > 1 for row, seen in rows.items()))


def digest_of(local: torch.Tensor) -> str:
    """A short hash of the values."""
    data = as_bytes(local.detach().cpu()).numpy().data
    return hashlib.blake2b(data, digest_size=4).hexdigest()


# Full tensors.


@dataclass(frozen=True, slots=True)
class _FullFacts:
    """One rank's facts about a full tensor; `parts` are those of its layout. Of the memory order
    the source's counts, so ranks may differ in it."""

    name: str
    dtype: torch.dtype
    strides: Strides = field(compare=False)
    requires_grad: bool
    parts: tuple[Any, ...]

    def text(self, mesh: BoundMesh) -> str:
        """The layout, as it is printed."""
        layout = Layout.make(mesh.abstract, *self.parts)
        text = layout.text(str(self.dtype).removeprefix("torch."))
        return f"{self.name} {text}".strip() + (" that requires grad" if self.requires_grad else "")


def facts_of(name: str, tensor: torch.Tensor, layout: Layout) -> _FullFacts:
    parts = layout.shape, layout.dims, layout.cuts, layout.partial
    return _FullFacts(name, tensor.dtype, strides_of(tensor), tensor.requires_grad, parts)


def strides_of(tensor: torch.Tensor) -> Strides:
    """The strides of a copy."""
    if tensor.is_contiguous():
        return None
    strides = torch.empty_like(tensor, device="meta").stride()
    return None if strides == contiguous_strides(tensor.shape) else strides


def compared(
    call: str, mesh: BoundMesh, mine: list[_FullFacts], fault: WeftError | None, source: int
) -> list[_FullFacts]:
    """The facts of the source, if all ranks say the same, and there is no `fault`; else LayoutError
    on all ranks."""
    told: list[list[_FullFacts]] = exchanged(call, mesh, mine, fault)
    truth = told[source]
    wrong, first = [], None
    for at, theirs in enumerate(told):
        pair = next((pair for pair in zip_longest(theirs, truth) if pair[0] != pair[1]), None)
        if pair is not None:
            first = first or pair[1]
            wrong.append(f"rank {mesh.rank_at(at)}: " + (
                "no more" if pair[0] is None else pair[0].text(mesh)))
    if wrong:
        has = "no more" if first is None else first.text(mesh)
        raise LayoutError(
            call, f"rank {mesh.rank_at(source)} has {has}, and {len(wrong)} ranks another",
            "all ranks pass tensors of one shape and dtype, which all or none want a "
            "gradient of, and the same placements", wrong,
            "torch.empty_like(full) on ranks whose data do not count, or "
            "scatter_tensor(full_or_None, source, mesh, placements)")
    return truth
