"""torch's `associative_scan` along a sharded dim.

Each rank scans its shard with torch's own algorithm. The totals of all shards are gathered, each
rank combines those before its own, and the result with its scan (Blelloch, Prefix Sums and Their
Applications, 1990). So ranks receive one slice per shard, whatever the length.

The axes that do not shard the scanned dim stay a mesh: there the slices are ShardTensors, and the
user's function may be any function of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.tensor import ShardTensor, modes
from weft.tensor.placing.layouts import as_sharded, local_to_sharded
from weft.transport import Shards, traffic

__all__ = ["associative_scan"]

_CALL = "associative_scan(combine_fn, xs, dim)"
_REASON = "the totals of all shards"
_ON_CPU = torch.__version__ >= "2.14"
"""Whether the mode "pointwise" takes tensors of CPUs."""


class _Checked(Exception):
    """Raised when torch has checked the arguments, and calls the function."""


def associative_scan(
    original: Any, combine_fn: Any, xs: Any, dim: int, reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """`torch._higher_order_ops.associative_scan`: with ShardTensors each rank scans its shard."""
    leaves, spec = tree_flatten(xs)
    sharded = [one for one in leaves if type(one) is ShardTensor]
    if not sharded:
        return original(combine_fn, xs, dim, reverse, combine_mode)
    _check(original, spec, leaves, dim, reverse, combine_mode)
    dim %= leaves[0].ndim
    over = next((one.sharding for one in sharded if one.sharding.dims[dim]), None)
    if over is None:  # slices of whole lines: calls like others
        return original(combine_fn, xs, dim, reverse, "generic")
    mesh = sharded[0]._meta.mesh
    first: list[Any] = [torch.movedim(as_sharded(one, mesh), dim, 0) for one in leaves]
    laid = [one.redistribute(placements=_beside(one.sharding, over, dim)) for one in first]
    if mesh.here is None:
        out: Sequence[Tensor] = [one.clone() for one in laid]
    else:
        with traffic.label("associative_scan", _REASON):
            out = _Scan(combine_fn, spec, laid, reverse).run()
    return tree_unflatten([torch.movedim(one, 0, dim) for one in out], spec)


def _check(
    original: Any, spec: TreeSpec, leaves: Sequence[Any], dim: Any, reverse: Any, mode: str
) -> None:
    """Raise torch's own errors: it checks what it is given before it calls the function."""
    def stop(*_: Any) -> None:
        raise _Checked

    on_gpu = all(getattr(one, "device", torch.device("cpu")).type == "cuda" for one in leaves)
    empty = [torch.empty_like(one, device="meta") if type(one) is not ShardTensor
             else torch.empty(one.shape, dtype=one.dtype, device="meta") for one in leaves]
    with suppress(_Checked):
        original(stop, tree_unflatten(empty, spec), dim, reverse,
                 "generic" if mode == "pointwise" and (on_gpu or _ON_CPU) else mode)


def _beside(layout: Layout, over: Layout, dim: int) -> Layout:
    """The layout of a tensor whose first dim is scanned: that dim sharded as in `over`, the others
    as other axes shard them."""
    axes, cuts = over.dims[dim], over.cuts[dim]
    kept = [not set(axes) & set(each) for each in layout.dims[1:]]
    return Layout.make(
        layout.mesh, layout.shape,
        [axes, *[each if keeps else () for each, keeps in zip(layout.dims[1:], kept)]],
        [cuts, *[each if keeps else None for each, keeps in zip(layout.cuts[1:], kept)]],
        [None] * layout.mesh.ndim)


class _Scan:
    """One scan along the first, sharded dim of some tensors.

    Args:
        function: what combines two slices.
        spec: of its arguments' structure.
        tensors: the leaves.
        reverse: whether the last slice comes first.
    """

    def __init__(
        self, function: Callable[..., Any], spec: TreeSpec, tensors: Sequence[ShardTensor],
        reverse: bool,
    ) -> None:
        self.function, self.spec, self.tensors, self.reverse = function, spec, tensors, reverse
        layout = tensors[0].sharding
        self.mesh: BoundMesh = tensors[0]._meta.mesh
        self.axes = layout.dims[0]
        self.rest = [axis for axis in range(self.mesh.ndim) if axis not in self.axes]
        self.layouts = [one.sharding for one in tensors]
        names = tuple([self.mesh.axis_names[axis] for axis in self.rest])
        is_cut = any(axes for one in self.layouts for axes in one.dims[1:])
        self.submesh = self.mesh[names] if is_cut else None
        self.shards = Shards(self.mesh, layout, (0,))

    def run(self) -> list[Tensor]:
        modes.check_summaries("associative_scan", self.layouts, self.axes)
        if self.submesh is None:
            with modes.inside_region("the function of associative_scan"):
                own, gathered, out = self._local()
        else:
            own, gathered, out = self._local()
        made = []
        for at, (one, layout) in enumerate(zip(out, self.layouts)):
            one = self._plain(one.flip(0) if self.reverse else one, at)
            for mine, all_of in zip(own, gathered):
                one = _tied(one, all_of, mine)
            made.append(local_to_sharded(one.contiguous(), self.mesh, layout))
        return made

    def _local(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Scan this rank's shard, exchange totals, and combine."""
        blocks = [self._global(one.to_local(), at) for at, one in enumerate(self.tensors)]
        if self.reverse:
            blocks = [one.flip(0) for one in blocks]
        length = len(blocks[0])
        scans = generic_associative_scan(self._mapped(0), blocks) if length else blocks
        totals = [one[-1] if length else one.sum(0).to(one.dtype) for one in scans]
        self._try(totals)
        own, gathered, every = self._gathered(totals)
        order = self.shards.filled[::-1] if self.reverse else self.shards.filled
        place = order.index(self.shards.index) if length else 0
        before = generic_associative_scan(self._mapped(0), [one[list(order)] for one in every])
        if place:
            scans = self._mapped(None)(*[one[place - 1] for one in before], *scans)
        return own, gathered, scans

    def _mapped(self, left: int | None) -> Callable[..., list[Tensor]]:
        """The function mapped over the first dim: of all right slices, with the left ones or a
        single one."""
        num = len(self.tensors)
        sides = [tree_unflatten([each] * num, self.spec) for each in (left, 0)]
        function = torch.vmap(self.function, in_dims=tuple(sides))

        def of_leaves(*given: Tensor) -> list[Tensor]:
            return tree_leaves(function(tree_unflatten(given[:num], self.spec),
                                        tree_unflatten(given[num:], self.spec)))

        return of_leaves

    def _try(self, totals: Sequence[Tensor]) -> None:
        """Raise for a function whose gradients would be lost, before anything is sent."""
        alone = tree_unflatten([one.detach() for one in totals], self.spec)
        made = tree_leaves(self.function(alone, alone))
        lost = [one for one in made if type(one) is not type(totals[0]) or one.requires_grad]
        if lost:
            raise UnsupportedOpError(
                _CALL, f"{len(lost)} of {len(made)} results of combine_fn depend on "
                "tensors that are not its arguments, and that require grad or are sharded",
                "a rank combines slices of its shard by itself",
                [f"shape {tuple(one.shape)}" for one in lost],
                "give such a tensor as a part of xs, expanded along the scanned dim")

    def _gathered(
        self, totals: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The totals of this rank, and of all, in a tensor per dtype; and of all, leaf by leaf."""
        mine = [self._plain(one, at) for at, one in enumerate(totals)]
        every: list[Any] = [None] * len(mine)
        own, gathered = [], []
        for dtype in dict.fromkeys([one.dtype for one in mine]):
            places = [at for at, one in enumerate(mine) if one.dtype is dtype]
            own.append(torch.cat([mine[at].reshape(-1) for at in places]))
            gathered.append(self.shards.gather(own[-1])[0])
            parts = gathered[-1].split([mine[at].numel() for at in places], 1)
            for at, part in zip(places, parts):
                part = part.reshape(self.shards.num, *mine[at].shape)
                every[at] = self._global(part, at)
        return own, gathered, every

    def _inner(self, at: int, lead: Sequence[int]) -> Layout:
        """The layout of slices of a leaf on the other axes, with whole dims before."""
        assert self.submesh is not None
        layout, number = self.layouts[at], {axis: to for to, axis in enumerate(self.rest)}
        dims = [tuple([number[axis] for axis in axes]) for axes in layout.dims[1:]]
        whole = [()] * len(lead)
        return Layout.make(
            self.submesh, (*lead, *layout.shape[1:]), [*whole, *dims],
            [*[None for _ in lead], *layout.cuts[1:]], [None] * self.submesh.ndim)

    def _global(self, block: Tensor, at: int) -> Tensor:
        """Slices of this rank, as those of all ranks of the other axes."""
        if self.submesh is None:
            return block
        layout = self._inner(at, block.shape[:1])
        return local_to_sharded(block.contiguous(), self.submesh, layout)

    def _plain(self, slices: Any, at: int) -> Tensor:
        """This rank's block of them."""
        if self.submesh is None:
            return slices
        lead = slices.shape[: slices.ndim - len(self.layouts[at].shape) + 1]
        return slices.redistribute(placements=self._inner(at, lead)).to_local()


def _tied(out: Tensor, gathered: Tensor, own: Tensor) -> Tensor:
    """`out`, whose gradient, and second derivative, pass through the gathered totals on every rank
    alike. So both factors require grad."""
    if not (own.requires_grad and torch.is_grad_enabled()):
        return out
    nothing = gathered.reshape(-1).narrow(0, 0, 0) * own.narrow(0, 0, 0)
    return out + nothing.sum().to(out.dtype) if out.requires_grad else out
