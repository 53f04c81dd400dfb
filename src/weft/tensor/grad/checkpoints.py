"""Activation checkpoints without reentrance: `checkpoint(use_reentrant=False)` of torch.

torch recomputes when the first saved tensor is requested, and until the last one is there. If a
rank's shard is empty an op may save less than on other ranks: that must not decide which
collectives a rank issues, or when. So the results are the first to request, and the last to save
unless the end of the graph shows that ranks agree anyway:

- A product of matrices comes last, but for ops that save nothing (a residual is added). As with
  torch the recomputation ends when the product has saved its operands, and does not compute it.
- A reduction comes last, of such a product or of anything else: no rank repeats its collective.
- Running statistics come last: torch, too, counts a batch again only if more is saved after it.

If some rank's result is empty, the end of its graph may differ: all ranks recompute to the results.

The results are no part of a second backward, through gradients that keep a graph. So what the
first has recomputed stays with it, and the second recomputes nothing.

Recomputations find where to end by a number among the reductions and counted batches. They make
the same ones as the forward: they may find weights that have been gathered, but no value that has
been reduced (`reduce_once.scope`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from weft.core.scopes import setting
from weft.tensor.call import reduce_once
from weft.tensor.call.own.functions import is_sharded
from weft.tensor.grad.autograd import metas_of
from weft.tensor.placing.factories import carried
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.trees import flatten, local_of, map_tensors
from weft.transport.nodes import REDUCTIONS, transforms, with_gradient

__all__ = ["checkpoint"]

_SAVE_NOTHING = frozenset({
    "AddBackward0", "SubBackward0", "TBackward0", "ToCopyBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "ViewBackward0",
})
"""Nodes of ops that save no tensor. Where no rank's result is empty, all ranks have the same."""

_PRODUCTS = frozenset({
    "AddmmBackward0", "BmmBackward0", "ConvolutionBackward0", "LinearBackward0", "MmBackward0",
})
"""Nodes of ops without communication that save an operand on all ranks, also an empty one."""

_NOTHING = torch.empty(0)

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_engine: Any = torch._C  # type: ignore[attr-defined]


def _tie(x: torch.Tensor) -> torch.Tensor:
    """The identity, which saves a tensor."""
    return with_gradient(x, lambda x, _: x.detach(), lambda grad, _: grad, x.new_empty(0))


class _Anchor:
    """What was saved first, for the results of one checkpoint to request it once in a backward."""

    def __init__(self, first: Any) -> None:
        self.first, self.task = first, -1

    def request(self) -> None:
        task = _engine._current_graph_task_id()
        if task != self.task:
            self.task = task
            _ = self.first.grad_fn.saved_tensors


def _request(x: torch.Tensor, anchor: _Anchor) -> torch.Tensor:
    """The identity, whose gradient requests the anchor."""
    held = [anchor]

    def back(grad: torch.Tensor) -> torch.Tensor:
        held[0].request()
        if not _engine._autograd._get_current_graph_task_keep_graph():
            held.clear()  # the last result that lets go of it frees the inputs
        return grad

    return with_gradient(x, torch.Tensor.detach, back)


def _saved(like: torch.Tensor) -> Any:
    """A tensor whose node saves one here, also where the function is without gradients. Before
    torch 2.13 a node lets go of what it saved when its tensor is gone."""
    with torch.enable_grad():
        return _tie(like.detach().requires_grad_())


class _Kept:
    """What the forward saved, and its value since a backward that keeps a graph."""

    __slots__ = ("saved", "value")

    def __init__(self, saved: Any) -> None:
        self.saved, self.value = saved, None


class _End:
    """Where the recomputations of one checkpoint end."""

    def __init__(self, stops_early: bool) -> None:
        self.stops_early = stops_early
        self.is_recomputed = False
        self.is_sharded = False  # whether a result is
        self.at_product = False
        self.num_passed = 0  # reductions and counted batches of this run, so far
        self.reduced = -1, 0  # number of the node of the last reduction, and its own
        self.counted = -1, 0  # number of the node after the last counted batch, and its own
        self.before: int | None = None  # what a recomputation ends before
        self.tied: list[torch.Tensor] = []  # an empty tensor like each result

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward, or a recomputation. Of nested checkpoints each counts what is its own."""
        self.num_passed = 0
        told = setting(REDUCTIONS.thread, passing=self._passing, counting=self._counting)
        with REDUCTIONS.counted(), told:
            yield

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """The forward: what is saved here is recomputed once for derivatives of any order."""
        hooks = None if self.is_recomputed else _autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            yield
            return
        pack, unpack = hooks

        def value_of(kept: _Kept) -> Any:
            if kept.value is not None:
                return kept.value
            value = unpack(kept.saved)
            if self.is_sharded and torch.is_grad_enabled():
                kept.value = value
            return value

        @wraps(pack, assigned=())  # torch 2.14 marks its own hooks, with the user's beneath
        def kept_of(x: torch.Tensor) -> _Kept:
            return _Kept(pack(x))

        try:
            with saved_tensors_hooks(kept_of, value_of):
                yield
        finally:
            vars(kept_of).clear()  # the graph refers to it, and would keep the user's hooks

    def _passing(self) -> None:
        if not self._ends():
            self.reduced = _autograd._get_sequence_nr(), self.num_passed

    def _counting(self) -> None:
        if not self._ends():
            self.counted = _autograd._get_sequence_nr(), self.num_passed

    def _ends(self) -> bool:
        """Whether this is a recomputation, which ends here if it is where it ends."""
        self.num_passed += 1
        if self.num_passed == self.before:
            for like in self.tied:  # the last one ends the run
                _saved(like)
            raise torch_checkpoint._StopRecomputationError  # pyright: ignore[reportPrivateUsage]
        return self.is_recomputed

    def results(self, out: Any, first: Any | None) -> Any:
        """The results as the checkpoint returns them; what `first` is from saved first."""
        tensors = [
            one for one in flatten(out)
            if type(one) is ShardTensor and one.requires_grad and not one.is_leaf
        ]
        locals_ = [one._local for one in tensors]
        if not self.is_recomputed:
            self.is_recomputed = True
            self.is_sharded = bool(tensors)
            can_be_empty = any(one._meta.layout.has_empty_shards for one in tensors)
            if self.stops_early and tensors:
                self._decide(locals_, can_be_empty)
        made = {id(one): one for one in locals_}
        anchor = _Anchor(first)

        def returned(one: torch.Tensor) -> torch.Tensor:
            if type(one) is not ShardTensor or id(one._local) not in made:
                return one
            mine = _request(one._local, anchor) if self.at_product else _tie(one._local)
            return wrap(mine, one._meta)

        return map_tensors(returned, out)

    def _decide(self, locals_: Sequence[torch.Tensor], can_be_empty: bool) -> None:
        """From the nodes that were made last: all save nothing, and lead to the results. If some
        rank's can be empty, there are none at all, after a batch has been counted."""
        due = _autograd._get_sequence_nr()
        ahead = [one.grad_fn for one in locals_]
        while True:
            # Once a value was reduced, shards may have been empty before.
            if due == self.counted[0] and self.before is None:
                self._end_before(self.counted[1], locals_)
                return
            if can_be_empty:
                return
            due -= 1
            node = next((one for one in ahead if one and one._sequence_nr() == due), None)
            if node is None:
                return
            if node.name() in _PRODUCTS:
                self.at_product, self.before = True, None
                return
            if due == self.reduced[0] and self.before is None:
                self._end_before(self.reduced[1], locals_)
            elif node.name() not in _SAVE_NOTHING:
                return
            ahead = [one for one in ahead if one is not node]
            ahead += [one for one, _ in node.next_functions]

    def _end_before(self, number: int, locals_: Sequence[torch.Tensor]) -> None:
        self.before = number
        self.tied = [one.detach().new_empty(0) for one in locals_]


def checkpoint(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`: torch saves the local tensors, with their graph."""
    function = carried(function)
    if kwargs.get("use_reentrant") is not False:
        return original(function, *args, **kwargs)
    metas = metas_of(args)
    saved = [_Kept(arg) if is_sharded(arg) and meta is None else local_of(arg)
             for arg, meta in zip(args, metas)]
    named = {key: kwargs.pop(key) for key in tuple(kwargs) if is_sharded(kwargs[key])}
    of_forward = [args]

    def given(*saved: Any, **more: Any) -> Any:
        again = of_forward.pop() if of_forward else map(_as_given, saved, metas)
        return function(*again, **more, **named)

    if transforms() is not None:
        return original(given, *saved, **kwargs)
    asked = torch_checkpoint._enable_checkpoint_early_stop
    stops_early = kwargs.get("early_stop", True) if asked is None else asked
    end = _End(is_sharded(args, named) and stops_early)

    def run(*saved: Any, **more: Any) -> Any:
        if not torch.is_grad_enabled():
            return given(*saved, **more)
        first = _saved(_NOTHING) if end.stops_early else None
        with reduce_once.scope(), end.running(), end.keeping():
            out = given(*saved, **more)
        return end.results(out, first)

    return original(run, *saved, **kwargs)


def _as_given(saved: Any, meta: Any) -> Any:
    """An argument, from what torch has saved: the local tensor, or nested arguments as they are."""
    if meta is None:
        return saved.saved if type(saved) is _Kept else saved
    return wrap(saved, meta.replace(requires_grad=saved.requires_grad))
