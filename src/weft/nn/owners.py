"""Functions of whole matrices, each computed at one rank: `at_owners`, `Owners`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import CommunicationError, LayoutError, ShardTypeError
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.placing.owners import buckets, owners_of, way_to_owners
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.views.moved import unwrap_view
from weft.transport import balanced, traffic

__all__ = ["Owners", "at_owners"]


def at_owners(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[fn(x) for x in tensors]`, where each is computed whole at one rank, its owner.

    The blocks of all tensors go to their owners in one all-to-all, and the blocks of the results
    come back in another; the work is balanced between owners. See `Owners`.

    Args:
        fn: a function of a plain tensor, which it may write to; returns one of its shape and dtype.
        tensors: ShardTensors on one mesh, in any layouts. For plain tensors the result is the list
            above.

    Returns:
        Tensors in the layouts of those given, without history.
    """
    (out,) = Owners(tensors).map(fn, tensors)
    return out


class Owners:
    """An owner for each matrix: the rank that computes with it. All ranks choose the same owners.

    Args:
        tensors: ShardTensors on one mesh.
        cost: the work for a matrix of a shape; None: that of its product with itself. The most
            expensive matrices are assigned first, each to the rank with the least work so far.

    Attributes:
        ranks: the owner of each, as a position in the mesh (its last axis counts first).

    Raises:
        ShardTypeError: plain tensors among ShardTensors, or tensors on several meshes.
    """

    def __init__(
        self, tensors: Sequence[Tensor], cost: Callable[[torch.Size], float] | None = None
    ) -> None:
        self.mesh = _mesh_of(tensors, "Owners(tensors)")
        shapes = [one.shape for one in tensors]
        num = 1 if self.mesh is None else self.mesh.size()
        self.ranks = tuple(
            owners_of(shapes, num) if cost is None else balanced([*map(cost, shapes)], num))

    def zeros(self, at: int, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Zeros on the owner of tensor number `at`: state that does not move.

        Args:
            shape: of at least one dim.
        """
        if self.mesh is None:
            return torch.zeros(*shape, dtype=dtype)
        layout = _lying_at(self.mesh, self.ranks[at], shape)
        here = self.mesh.here
        local = torch.zeros(
            (0,) if here is None else layout.local_shape_at(here), dtype=dtype,
            device=self.mesh.device)
        return local_to_sharded(local, self.mesh, layout)

    def map(
        self, fn: Callable[..., Any], *lists: Sequence[Tensor], num_results: int = 1
    ) -> tuple[list[Tensor], ...]:
        """`fn(first[at], second[at], ...)` for each tensor, at its owner, on whole plain tensors.

        Args:
            fn: returns a tensor, or a tuple of `num_results`; the first has the shape and dtype of
                `first[at]`, and so on. It may write to its arguments. It does not communicate.
            lists: as long as the tensors that have owners; in any layouts.
            num_results: how many of the lists get results.

        Returns:
            `num_results` lists of results, in the layouts of the first lists, without history.

        Raises:
            LayoutError: lists of another length.
            ShardTypeError: plain tensors, another mesh, or a gradient is wanted of what has none.
            CommunicationError: `fn` has raised at another rank. That rank raises what `fn` did.
        """
        call = "Owners.map(fn, ...)"
        if any(len(one) != len(self.ranks) for one in lists) or not lists:
            raise LayoutError(
                call, f"there are {len(self.ranks)} owners, and lists of "
                f"{[len(one) for one in lists]}", "each list has a tensor for each owner",
                [len(one) for one in lists], "Owners(tensors).map(fn, tensors)")
        every = [one for some in lists for one in some]
        if _mesh_of(every, call) is not self.mesh:
            raise _apart(call)
        if torch.is_grad_enabled() and any(one.requires_grad for one in every):
            raise ShardTypeError(
                call, "autograd records, and a tensor requires grad",
                "what owners compute has no gradient",
                [at for at, one in enumerate(every) if one.requires_grad],
                "with torch.no_grad(): ...")
        out: tuple[list[Any], ...] = tuple([[] for _ in range(num_results)])
        with torch.no_grad():
            sizes = [sum(one.nbytes for one in some) for some in zip(*lists)]
            for some in buckets(sizes):
                found = self._map(fn, some, [[one[at] for at in some] for one in lists],
                                  num_results)
                for results, more in zip(out, found):
                    results.extend(more)
        return out

    def _map(
        self, fn: Callable[..., Any], places: Sequence[int], lists: Sequence[list[Any]], num: int
    ) -> list[list[Tensor]]:
        mesh = self.mesh
        if mesh is None:
            made = [_as_tuple(fn(*some)) for some in zip(*lists)]
            return [[one[at] for one in made] for at in range(num)]
        if mesh.here is None:
            return [[wrap(one._local.clone(), _meta(one)) for one in some] for some in lists[:num]]
        owners = [self.ranks[at] for at in places]
        me = mesh.everyone().index
        with traffic.label("at_owners", "whole at their owners"):
            given = [[one.redistribute(one.sharding.without_partial()) for one in some]
                     for some in lists]
            whole = _gathered(mesh, given, owners)
            results, error = [], None
            try:
                for at in range(len(whole[0])):
                    one = _as_tuple(fn(*[some[at] for some in whole]))
                    results.append(_checked(one, [some[at] for some in whole[:num]]))
            except Exception as raised:
                error = raised
            _agree(mesh, me, error)
            return _spread(mesh, given[:num], owners, results)


def _gathered(
    mesh: BoundMesh, lists: Sequence[list[Any]], owners: Sequence[int]
) -> list[list[Tensor]]:
    """For each list, the whole tensors that this rank owns; those of one dtype travel together."""
    out: list[list[Tensor]] = [[] for _ in lists]
    for ats in _by_dtype(lists):
        every = [one for at in ats for one in lists[at]]
        way = way_to_owners(mesh, every, [*owners] * len(ats))
        found = way.gather(
            [unwrap_view(one._local) for one in every], [one.stride() for one in every])
        share = len(found) // len(ats)
        for place, at in enumerate(ats):
            out[at] = found[place * share : (place + 1) * share]
    return out


def _spread(
    mesh: BoundMesh, lists: Sequence[list[Any]], owners: Sequence[int],
    results: Sequence[tuple[Tensor, ...]],
) -> list[list[Tensor]]:
    """The results, each in the layout of the tensor that it replaces."""
    out: list[list[Tensor]] = [[] for _ in lists]
    for ats in _by_dtype(lists):
        every = [one for at in ats for one in lists[at]]
        way = way_to_owners(mesh, every, [*owners] * len(ats))
        found = way.spread([one[at] for at in ats for one in results], every[0]._local)
        made: list[Tensor] = [
            wrap(torch.empty_like(one._local).copy_(local), _meta(one))
            for one, local in zip(every, found)
        ]
        for place, at in enumerate(ats):
            out[at] = made[place * len(owners) : (place + 1) * len(owners)]
    return out


def _by_dtype(lists: Sequence[list[Any]]) -> list[list[int]]:
    """The lists of one dtype together. All tensors of a list have the same."""
    kinds: dict[Any, list[int]] = {}
    for at, some in enumerate(lists):
        kinds.setdefault(some[0].dtype, []).append(at)
        if any(one.dtype is not some[0].dtype for one in some):
            raise ShardTypeError(
                "Owners.map(fn, ...)", f"list {at} has {some[0].dtype} and others",
                "the tensors of one list have one dtype, to travel together",
                sorted({str(one.dtype) for one in some}), "one call for each dtype")
    return list(kinds.values())


def _checked(made: tuple[Any, ...], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    got = [(tuple(one.shape), one.dtype) for one in made]
    due = [(tuple(one.shape), one.dtype) for one in like]
    if got != due:
        raise LayoutError(
            "Owners.map(fn, ...)", f"fn has returned {got} in the places of {due}",
            "each result has the shape and dtype of the argument in its place", got,
            "num_results= says how many arguments get one")
    return made


def _agree(mesh: BoundMesh, me: int, error: Exception | None) -> None:
    """Raise on all ranks if `fn` has raised on one."""
    comm = mesh.everyone()
    mine = torch.tensor([error is not None], dtype=torch.int64, device=mesh.device)
    failed = comm.all_gather(mine, [1] * comm.size).tolist()
    if error is not None:
        raise error
    if any(failed):
        ranks = [rank for rank, has_failed in enumerate(failed) if has_failed]
        raise CommunicationError(
            "Owners.map(fn, ...)", f"fn has raised at position {ranks[0]} of the mesh, not "
            f"at position {me}", "all ranks stop where one does", ranks,
            "the error of that rank")


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _meta(tensor: Any) -> Any:
    return tensor._meta.replace(requires_grad=False)


def _lying_at(mesh: BoundMesh, owner: int, shape: Sequence[int]) -> Layout:
    """The layout in which one rank has everything."""
    cuts = (0,) * (owner + 1) + (shape[0],) * (mesh.size() - owner)
    rest = [()] * (len(shape) - 1)
    return Layout.make(mesh, shape, (tuple(range(mesh.ndim)), *rest), (cuts, *[None] * len(rest)))


def _mesh_of(tensors: Sequence[Any], call: str) -> BoundMesh | None:
    """The one mesh of the tensors; None if all are plain."""
    meshes = {id(one._meta.mesh): one._meta.mesh for one in tensors if type(one) is ShardTensor}
    if not meshes:
        return None
    if len(meshes) > 1 or any(type(one) is not ShardTensor for one in tensors):
        raise _apart(call)
    return next(iter(meshes.values()))


def _apart(call: str) -> ShardTypeError:
    return ShardTypeError(
        call, "tensors are on several meshes, or some are plain and others ShardTensors",
        "owners are ranks of one mesh, and all tensors are on it", [],
        "one call for each mesh")
