"""Functions of whole matrices, each computed at one rank: `at_owners`, `Owners`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.errors import CommunicationError, LayoutError, ShardTypeError
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.placing.states import (
    at_one_rank,
    balanced,
    buckets,
    from_owners,
    owners_of,
    to_owners,
)
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.transport import traffic

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
        layout = at_one_rank(self.mesh, self.ranks[at], shape)
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
        owners, me = [self.ranks[at] for at in places], None
        if mesh.here is not None:
            me = mesh.everyone().index
        with traffic.label("at_owners", "whole at their owners"):
            given = [one.redistribute(one.sharding.without_partial())
                     for some in lists for one in some]
            every, many = to_owners(mesh, given, owners * len(lists)), len(owners)
            error = None
            try:
                for at in [at for at, owner in enumerate(owners) if owner == me]:
                    whole = [one._local.view(like.shape)
                             for one, like in zip(every[at::many], given[at::many])]
                    made = _checked(_as_tuple(fn(*whole)), whole[:num])
                    every[at : num * many : many] = [
                        wrap(torch.empty_like(old._local).copy_(one), old._meta)
                        for one, old in zip(made, every[at::many])]
            except Exception as raised:
                error = raised
            if me is not None:
                _agree(mesh, me, error)
            found: list[Any] = from_owners(mesh, every[: num * many], given[: num * many])
            return [found[at * many : (at + 1) * many] for at in range(num)]


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
