"""Boxes that autograd saves for an op: the shard, and the borders that others hold.

A convolution saves its input. If that is a box which was fetched, a rank holds its shard twice: the
op before it has often saved the shard, too (a ReLU its result). So when the op has run, its saved
box is taken apart: the borders are copied, and the shard stays where it is. Backward puts the box
together. Nothing is sent for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from weft.planner.geometry import intersect
from weft.tensor.meta import kept
from weft.tensor.trace.trees import flatten
from weft.transport.boxes import Move, joined, outside, part
from weft.transport.nodes import transforms
from weft.transport.transition import Transition

__all__ = ["SavedBox", "offer", "taken_apart"]

_C: Any = torch._C

MIN_NUMEL = 1 << 16
"""Boxes of global tensors with fewer elements stay as they are: to take one apart takes time."""

MAX_NODES = 8
"""An op on a box has so many nodes at most between its result and the one that saves the box."""


class KeptBox:
    """A box, while nobody reads it.

    Args:
        shard: the local tensor that it was fetched for. move: what fetched it.
        views: where it is kept for other calls, under `key`.
    """

    __slots__ = ("borders", "key", "move", "shard", "strides", "version", "views")

    def __init__(self, shard: Tensor, move: Transition, views: Any, key: Any) -> None:
        self.shard, self.move, self.version = shard, move, shard._version
        self.views, self.key = None if views is None else ref(views), key
        self.borders: list[Tensor] | None = None
        self.strides: tuple[int, ...] | None = None

    def apart(self, box: Tensor) -> KeptBox:
        """What stands for the box: the hook of autograd that packs it."""
        if self.borders is None:
            cuts, _ = _ways(self.move)
            self.shard = self.shard.detach()
            self.borders = [cut(box).clone() for cut in cuts]
            if not box.is_contiguous():
                self.strides = torch.empty_like(box, device="meta").stride()
        return self

    def together(self, _: Any = None) -> Tensor:
        """The box: the hook that unpacks it.

        Raises:
            RuntimeError: the shard was written to, as of any saved tensor.
        """
        shard, borders = self.shard, self.borders
        assert borders is not None
        if shard._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{shard.type()} {list(shard.shape)}] is at version "
                f"{shard._version}; expected version {self.version} instead")
        _, join = _ways(self.move)
        box = join(shard, borders)
        if self.strides is None:
            return box.contiguous()
        return box.new_empty_strided(box.shape, self.strides).copy_(box)

    def saved_by(self, box: Tensor, node: Any, name: str) -> None:
        """A node has saved the box in this form, where other calls find it."""
        views: Any = None if self.views is None else self.views()
        if views is not None and self.key in views and views[self.key][2] is box:
            views[self.key] = (*views[self.key][:2], SavedBox(node, name, self))


@dataclass(frozen=True, slots=True, eq=False)
class SavedBox:
    """A box that a node has saved apart. Other calls that read it get it with its own node."""

    node: Any
    name: str
    kept: KeptBox

    def box(self) -> Tensor:
        """The box, with the node that fetched it."""
        box = getattr(self.node, self.name)
        box._weft_kept = self.kept
        return box  # type: ignore[no-any-return]


def offer(box: Any, shard: Tensor, move: Transition, views: Any = None, key: Any = None) -> None:
    """Let the op that reads the box take it apart. The global size decides, as on all ranks."""
    if math.prod(move.src.shape) >= MIN_NUMEL:
        box._weft_kept = KeptBox(shard, move, views, key)


def taken_apart(local: Any) -> Any:
    """The op, whose boxes are taken apart where it saves them."""
    def run(*args: Any, **kwargs: Any) -> Any:
        out = local(*args, **kwargs)
        for box in args:
            mine = getattr(box, "_weft_kept", None)
            if mine is not None:
                _take_apart(out, box, mine)
                del box._weft_kept  # a box that is saved as it is keeps no shard alive
        return out

    return run


def _take_apart(out: Any, box: Any, mine: KeptBox) -> None:
    first = out if isinstance(out, Tensor) else flatten(out)[0]
    if first.grad_fn is None or transforms() is not None or (
        _C._autograd._top_saved_tensors_default_hooks(True) is not None
    ) or not _is_of_shard(box, mine):
        return  # nothing is saved, or somebody else packs what is
    found = _saving(first.grad_fn, box)
    if found is not None:
        node, name = found
        getattr(node, f"_raw{name}").register_hooks(mine.apart, mine.together)
        mine.saved_by(box, node, name)


def _is_of_shard(box: Any, mine: KeptBox) -> bool:
    """Whether the box has the elements of the shard as they are, where they overlap."""
    shard, move = mine.shard, mine.move
    return type(shard) is type(box) is Tensor and move.casts is None and not (
        move.src.is_partial or move.target is not move.mesh or shard.is_inference())


def _saving(node: Any, box: Tensor) -> tuple[Any, str] | None:
    """The node that saves the box, of those that lead to it, and the name under which it does."""
    storage, end = box.untyped_storage()._cdata, box.grad_fn
    nodes = [node]
    for node in nodes:
        if node is None or node is end:
            continue
        for name in _saved(type(node)):
            one = getattr(node, name)
            if isinstance(one, Tensor) and one.shape == box.shape and (
                one.untyped_storage()._cdata == storage
            ):
                return node, name
        if len(nodes) < MAX_NODES:
            nodes += [one for one, _ in node.next_functions]
    return None


@cache
def _saved(node: type) -> tuple[str, ...]:
    """The names of the tensors that a node saves."""
    return tuple([name[4:] for name in dir(node) if name.startswith("_raw_saved_")])


Ways = tuple[Sequence[Move], Callable[[Tensor, Sequence[Tensor]], Tensor]]
"""The parts of a box that are not of the shard; and what joins them with the shard again."""


def _ways(move: Transition) -> Ways:
    return kept(move.mesh.cache.setdefault("kept boxes", {}), move, lambda: _made(move))


def _made(move: Transition) -> Ways:
    here, cover = move.mesh.here, move.cover
    assert here is not None and cover is not None
    own, box = move.src.box_at(here), cover.box_at(move.dst, here)
    inner = intersect(own, box)
    if inner is None:
        return (lambda x: x,), lambda shard, borders: borders[0]
    around, held = outside(box, inner), part(inner, own)
    join = joined([inner, *around], box)
    cuts = [part(one, box) for one in around]
    return cuts, lambda shard, borders: join([held(shard), *borders], shard)
