"""Activation checkpoints without reentrance: `checkpoint(use_reentrant=False)` of torch.

torch recomputes when the first saved tensor is requested, and until the last one is there. If a
rank's shard is empty an op may save less than on other ranks: that must not decide which
collectives a rank issues, or when. So the results are the last to save and the first to request.

Often the last collective of the forward is only added to something: a block's result is reduced and
joins the residual stream. Nothing saves what comes of it, so the recomputation ends in front of
that collective, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.utils import checkpoint as torch_checkpoint

from weft.core.scopes import setting
from weft.errors import UnsupportedOpError, message
from weft.tensor.call import reduce_once
from weft.tensor.call.own.functions import is_sharded
from weft.tensor.grad.torch_patches import plain_apply
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.trace.trees import flatten, local_of, map_tensors
from weft.transport.nodes import COLLECTIVES

__all__ = ["checkpoint", "get_inputs", "save_inputs"]

_SAVES_NOTHING = frozenset({
    "AddBackward0", "SubBackward0", "TBackward0", "ToCopyBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "ViewBackward0",
})
"""Nodes of ops that save no tensor, whatever their shards."""


class _Tie(Function):
    """The identity, which saves a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.new_empty(0))
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _ = ctx.saved_tensors
        return grad


_tie = plain_apply(_Tie)


class _End:
    """Where the recomputations of one checkpoint end: at the results, or before a collective."""

    def __init__(self, stops_early: bool) -> None:
        self.stops_early = stops_early
        self.is_recomputed = False
        self.num_collectives = 0  # of this run, so far
        self.last_node = 0  # number of the node that autograd makes for the last of them
        self.before: int | None = None  # the collective before which a recomputation ends
        self.tied: list[torch.Tensor] = []  # an empty tensor like each result

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward, or a recomputation. Of nested checkpoints each counts what is its own."""
        self.num_collectives = 0
        with COLLECTIVES.counted(), setting(COLLECTIVES.thread, passing=self._passing):
            yield

    def _passing(self) -> None:
        self.num_collectives += 1
        if not self.is_recomputed:
            self.last_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        elif self.num_collectives == self.before:
            for like in self.tied:  # the last one ends the run
                _tie(like.detach().requires_grad_())
            raise torch_checkpoint._StopRecomputationError  # pyright: ignore[reportPrivateUsage]

    def tie(self, out: Any) -> Any:
        """The results, which are the last to save."""
        locals_ = [
            one._local for one in flatten(out)
            if type(one) is ShardTensor and one.requires_grad and not one.is_leaf
        ]
        if not self.is_recomputed:
            self.is_recomputed = True
            if self.stops_early and self.num_collectives and locals_ and self._is_last(locals_):
                self.before = self.num_collectives
                self.tied = [one.detach().new_empty(0) for one in locals_]
        made = {id(one): one for one in locals_}

        def tied(one: torch.Tensor) -> torch.Tensor:
            if type(one) is not ShardTensor or id(one._local) not in made:
                return one
            return wrap(_tie(one._local), one._meta)

        return map_tensors(tied, out)

    def _is_last(self, locals_: Sequence[torch.Tensor]) -> bool:
        """Whether the nodes since the last collective save nothing, and all lead to the results."""
        num_nodes = torch.autograd._get_sequence_nr() - self.last_node  # type: ignore[attr-defined]
        seen = set[Any]()
        ahead = [one.grad_fn for one in locals_]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen or node._sequence_nr() < self.last_node:
                continue
            if node.name() == "torch::autograd::AccumulateGrad":  # its number is the largest
                continue
            seen.add(node)
            if node._sequence_nr() > self.last_node and node.name() not in _SAVES_NOTHING:
                return False
            ahead.extend([before for before, _ in node.next_functions])
        return len(seen) == num_nodes


def checkpoint(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`."""
    if kwargs.get("use_reentrant") is not False:
        return original(function, *args, **kwargs)
    if not hasattr(torch_checkpoint._CheckpointFrame, "save_inputs") and is_sharded(args, kwargs):
        raise _needs_frames([one.sharding for one in flatten(args) if type(one) is ShardTensor])
    asked = torch_checkpoint._enable_checkpoint_early_stop
    end = _End(kwargs.get("early_stop", True) if asked is None else asked)

    def tied(*given: Any, **named: Any) -> Any:
        with reduce_once.scope(), end.running():
            out = function(*given, **named)
        return end.tie(out) if torch.is_grad_enabled() else out

    return original(tied, *args, **kwargs)


def _needs_frames(layouts: Sequence[Any]) -> UnsupportedOpError:
    """Torch 2.11 saves the inputs by a Function of its own, and compares other tensors."""
    return UnsupportedOpError(
        message("checkpoint(use_reentrant=False)", f"torch {torch.__version__} saves inputs by a "
                "Function, which sees local tensors", "checkpoints without reentrance take "
                "ShardTensors from torch 2.13 on", list(map(str, layouts)),
                "checkpoint(function, x, use_reentrant=True)    # or a newer torch")
    )


def save_inputs(original: Any, frame: Any, *args: Any) -> None:
    """Checkpoint without reentrance: save the local tensors, with their graph."""
    frame.metas = [arg._meta if type(arg) is ShardTensor else None for arg in args]
    original(frame, *map(local_of, args))


def get_inputs(original: Any, frame: Any) -> list[Any]:
    """What `save_inputs` has saved, as ShardTensors again."""
    return [
        arg if meta is None else wrap(arg, meta.replace(requires_grad=arg.requires_grad))
        for arg, meta in zip(original(frame), frame.metas)
    ]
