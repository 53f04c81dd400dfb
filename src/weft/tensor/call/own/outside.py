"""Users' functions on a rank outside the mesh: results have layouts as inside, and no data.

The function runs on meta tensors of the global shape, as torch's ops do there (`outside`), so that
the graph depends on the same tensors as the graphs inside. One that needs data (numpy, a kernel
of its own) runs once on ones: this shows dtypes, strides, and which operands get a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.call import outside
from weft.tensor.call.anchor import tie
from weft.tensor.placing.layouts import common_strides, local_to_sharded
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace import derivatives
from weft.tensor.trace.capture import meta_like
from weft.tensor.trace.trees import flatten, map_tensors, substitute

__all__ = ["OutsideMesh", "edges"]


class OutsideMesh:
    """A user's function on a rank outside the mesh.

    Args:
        function: on plain tensors.
        mesh: that of the operands.
        layouts: of the results inside; None where all are replicated.
        moved: the operands that come to the function as other tensors.
    """

    __slots__ = ("function", "layouts", "mesh", "moved", "needs_data", "seen")

    def __init__(
        self, function: Callable[..., Any], mesh: BoundMesh, layouts: Sequence[Layout] | None,
        moved: frozenset[int] = frozenset(),
    ) -> None:
        self.function, self.mesh, self.layouts, self.moved = function, mesh, layouts, moved
        self.needs_data = False
        self.seen: Any = None  # ones, what came of them, edges, and what was written to

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = flatten((args, kwargs))
        if not self.needs_data:
            twins = [outside.twin(tensor).clone() for tensor in given]
            before = [twin._version for twin in twins]
            try:
                out = self._call(args, kwargs, twins)
            except Exception:  # if not because there are no data, ones will raise it too
                self.needs_data = True
            else:
                for tensor, twin, version in zip(given, twins, before):
                    if twin._version != version:
                        outside.write(tensor, outside.leave(twin, tensor.device))
                return self._wrapped(out, twins, given, outside.leave)
        if self.seen is None:
            self.seen = self._on_ones(args, kwargs, given)
        ones, out, behind, written = self.seen
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)

        def made(one: torch.Tensor, device: torch.device) -> torch.Tensor:
            local = torch.empty(0, dtype=one.dtype, device=device)
            if grad and one.requires_grad:
                ends = [given[at]._local for at in behind[id(one)]
                        if type(given[at]) is ShardTensor]
                local = tie(local, ends) if ends else local.requires_grad_()
            return local

        for at in written:
            outside.write(given[at], made(ones[at], given[at].device))
        return self._wrapped(out, ones, given, made)

    def _call(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        feed = iter(tensors)
        return self.function(*substitute(args, feed), **substitute(kwargs, feed))

    def _on_ones(self, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        wants = tuple([at for at, one in enumerate(given)
                       if torch.is_grad_enabled() and one.requires_grad])
        found = edges(self.function, args, kwargs, given, wants)
        wanted = set(wants if found is None else itertools.chain(*found))
        ones = [_ones(tensor).requires_grad_(at in wanted) for at, tensor in enumerate(given)]
        ones = [one * 1 if one.requires_grad else one for one in ones]  # no leaf: it may be written
        before = [one._version for one in ones]
        out = self._call(args, kwargs, ones)
        written = [at for at, one in enumerate(ones) if one._version != before[at]]
        kept: dict[int, torch.Tensor] = {}

        def keep(one: torch.Tensor) -> torch.Tensor:
            return kept.setdefault(id(one), meta_like(one).requires_grad_(one.requires_grad))

        ones, out = list(map(keep, ones)), map_tensors(keep, out)
        results = flatten(out)
        behind = {id(one): wants for one in (*ones, *results)}
        behind.update(zip(map(id, results), found or ()))
        return ones, out, behind, written

    def _wrapped(
        self, out: Any, opened: Sequence[torch.Tensor], given: Sequence[torch.Tensor],
        made: Callable[[torch.Tensor, torch.device], torch.Tensor],
    ) -> Any:
        same = {id(one): tensor for at, (one, tensor) in enumerate(zip(opened, given))
                if at not in self.moved}
        feed = iter(self.layouts or ())

        def wrapped(one: torch.Tensor) -> torch.Tensor:
            layout = next(feed, None) or Layout.replicated(self.mesh.abstract, tuple(one.shape))
            if id(one) in same:
                return same[id(one)]
            local = made(one, given[0].device)
            strides = None if one.is_contiguous() else common_strides(layout, one)
            return local_to_sharded(local, self.mesh, layout, strides)

        return map_tensors(wrapped, out)


def edges(
    function: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    wanted: Sequence[int],
) -> tuple[tuple[int, ...], ...] | None:
    """Per result of a function, the operands that get a gradient from it; None: not known.

    They are found by running it on ones. torch's kernels, and the function itself, may drop edges
    of empty tensors; a transition behind a dropped edge would leave other ranks waiting. All ranks
    of the call look, and find the same.
    """
    def call(given: Callable[[int], torch.Tensor]) -> Any:
        feed = map(given, range(len(tensors)))
        return function(*substitute(args, feed), **substitute(kwargs, feed))

    try:
        return derivatives.edges(call, lambda index: _ones(tensors[index]), wanted)
    except Exception:  # it does not like ones
        return None


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
