"""How the kernel of an op communicates: with the ranks that hold the shards of some dims.

A kernel runs on local tensors, like code under `local_map`. Every rank reduces its shard to a few
numbers, the *summary*. `psum`, `pmax` and `gather` bring the summaries of all shards to all ranks,
and each rank computes its result from them. What ranks compute from a common value varies, so the
gradient of that value is the sum over the ranks: the gradient of `psum` is a `psum`, that of
`gather` is reduced and scattered. All of them are differentiable to any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm import BoundMesh, Communicator
from weft.core import Layout
from weft.transport.nodes import (
    check_maps,
    outside_maps,
    refuse_transforms,
    transforms,
    with_gradient,
)
from weft.transport.traffic import sending
from weft.transport.transition import Transition

__all__ = ["Shards", "collective"]

_CALL = "an op along a sharded dim"


class Shards:
    """The shards of some dims of one tensor, seen from one rank.

    They are in the order of the dims, and along one dim in the order of its elements.

    Attributes:
        num: the number of shards.
        index: the number of this rank's shard.
        dims: the sharded dims.
        sizes: per shard, how many elements of these dims it has (the product of its lengths).
        filled: the shards that have any.
        layout: that of the tensor. mesh: its mesh, bound to this rank.
        operands: the layouts of all tensors that the op is given.
        check: called before a collective, with the mesh axes that it runs over.
        next_key: gives the key of a random call, which is counted then; all ranks call it alike.
        version_of: counts the writes to a tensor's memory.
    """

    def __init__(
        self, mesh: BoundMesh, layout: Layout, dims: Sequence[int],
        check: Callable[[tuple[int, ...]], None] | None = None, operands: Sequence[Layout] = (),
        next_key: Callable[[], Any] | None = None,
        version_of: Callable[[Tensor], int] | None = None,
    ) -> None:
        assert mesh.here is not None
        self.operands, self.next_key, self.version_of = tuple(operands), next_key, version_of
        self.mesh, self.layout, self.dims, self.check = mesh, layout, tuple(dims), check
        self.parts: dict[tuple[int, ...], Shards] = {}
        self.made: Any = None
        self._moved = WeakTensorKeyDictionary()
        axes = tuple([axis for dim in self.dims for axis in layout.dims[dim]])
        self.axes = tuple(sorted(axes))
        self._group: Communicator = mesh.line(axes)
        self.sizes = tuple([
            math.prod(each) for each in product(*[layout.sizes_of(dim) for dim in self.dims])
        ])
        self.num = len(self.sizes)
        self.filled = tuple([at for at, size in enumerate(self.sizes) if size])
        self.index = 0
        for dim in self.dims:
            mine = layout.shard_index(dim, mesh.here)
            self.index = self.index * layout.num_shards(dim) + mine
        self.starts = tuple([start for start, _ in layout.box_at(mesh.here)])
        """Per dim of the tensor, the global index of this rank's first element."""

    def along(self, *dims: int) -> Shards:
        """The shards of some of the dims, among ranks that agree in the others."""
        if dims == self.dims:
            return self
        found = self.parts.get(dims)
        if found is None:
            found = self.parts[dims] = Shards(
                self.mesh, self.layout, dims, self.check, self.operands, self.next_key,
                self.version_of)
        return found

    def group(self) -> Communicator:
        """The ranks of the shards, in their order. Raises in strict mode, because the caller is
        about to send."""
        if self.check is not None:
            self.check(self.axes)
        return self._group

    def psum(self, x: Tensor) -> Tensor:
        """The sum of every shard's `x`, of one shape everywhere."""
        return _run(x, self.group(), "sum")

    def pmax(self, x: Tensor) -> Tensor:
        """The maximum of every shard's `x`, elementwise. It has no gradient."""
        return _run(x.detach(), self.group(), "max")

    def pmin(self, x: Tensor) -> Tensor:
        """The minimum of every shard's `x`, elementwise. It has no gradient."""
        return _run(x.detach(), self.group(), "min")

    def gather(self, *own: Tensor) -> list[Tensor]:
        """The summaries of all shards, each with a leading dim of `num`.

        A summary has one shape on all ranks. Summaries of one dtype are sent together.
        """
        if len(own) > 1 and len({(one.dtype, one.shape) for one in own}) == 1:
            return list(_run(torch.stack(own, -1), self.group(), "gather").unbind(-1))
        return [_run(one, self.group(), "gather") for one in own]

    def exchange(
        self, x: Tensor, make: Callable[[BoundMesh, Layout], Callable[[Tensor], Tensor]]
    ) -> Tensor:
        """The result of `make(mesh, layout)` on `x`: an exchange whose routes are found once."""
        self.group()
        return self.once(lambda: make(self.mesh, self.layout))(x)

    def once(self, make: Callable[[], Any]) -> Any:
        """The result of `make`, which runs at the first call of the op with these layouts."""
        if self.made is None:
            self.made = make()
        return self.made

    def moved(self, x: Tensor, move: Transition) -> Tensor:
        """`move(x)`. What has no gradient moves once, until it is written to: the layers of a
        model have one mask."""
        if (x.requires_grad or x.is_inference() or self.version_of is None
                or not move.communicates):
            return move(x)
        version = self.version_of(x)
        known, out = self._moved.get(x) or (None, x)
        if known != version:
            out = move(x)
            self._moved[x] = version, out
        return out

    def of_filled(self, gathered: Tensor) -> Tensor:
        """Of gathered summaries, those of the shards that have elements."""
        return gathered if len(self.filled) == self.num else gathered[list(self.filled)]

    def counts(self, x: Tensor, dims: Sequence[int]) -> list[int]:
        """The number of elements of `dims`, sharded or not, in each shard of `x`."""
        others = math.prod([x.shape[dim] for dim in dims if dim not in self.dims])
        return [size * others for size in self.sizes]

    def tie(self, out: Tensor, *others: Tensor) -> Tensor:
        """`out` with a graph edge to tensors that this rank, unlike others, did not use: all ranks
        then issue the same collectives in backward."""
        for other in others:
            if other.requires_grad and torch.is_grad_enabled():
                out = out + other.reshape(-1).narrow(0, 0, 0).sum().to(out.dtype)
        return out


def _run(x: Tensor, comm: Communicator, kind: str) -> Tensor:
    """A collective: a reduction of this kind, or one of `_BACK`."""
    refuse_transforms(x, lambda: _CALL)
    if transforms() is not None and x.requires_grad:
        check_maps(x, lambda: _CALL)
        with outside_maps():
            return _run(x, comm, kind)
    with _DisableAutocast():
        if kind not in _BACK or not (x.requires_grad and torch.is_grad_enabled()):
            return collective(x.detach(), comm, kind)
        return with_gradient(
            x, lambda x: collective(x, comm, kind), lambda grad: _run(grad, comm, _BACK[kind]),
            why="gradient of what all shards know", always=False)


def collective(x: Tensor, comm: Communicator, kind: str) -> Tensor:
    """A reduction of this kind over a group; or "gather" or "scatter", see there."""
    others = comm.size - 1
    match kind:
        case "gather":  # all ranks' tensors, stacked
            with sending(comm, "S->R", "AllGather", x.nbytes * others):
                flat = comm.all_gather(x.contiguous().view(-1), (x.numel(),) * comm.size)
            return flat.view(comm.size, *x.shape)
        case "scatter":  # of stacked tensors, the sum over the ranks of this rank's own
            one, flat = x[0], x.contiguous().view(-1)
            with sending(comm, "P(sum)->S", "ReduceScatter", one.nbytes * others):
                flat = comm.reduce_scatter(flat, (one.numel(),) * comm.size, "sum")
            return flat.view(one.shape)
    with sending(comm, f"P({kind})->R", "AllReduce", -(-2 * x.nbytes * others // comm.size)):
        return comm.all_reduce(x, kind)


_BACK = {"sum": "sum", "gather": "scatter", "scatter": "gather"}
"""The collectives with a gradient, and the collective of the gradient."""
