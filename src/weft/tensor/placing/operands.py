"""Moves operands into the layouts that a local op needs, and caches them for later uses.

A moved tensor serves later uses too (one all-gather, and one reduction of the gradient, for q, k
and v): see `operand_cache`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled

from weft.comm import BoundMesh
from weft.core import Cover, Layout
from weft.errors import UnsupportedOpError
from weft.tensor import modes, versions
from weft.tensor.leaf_gradients import use_of
from weft.tensor.meta import NONE
from weft.tensor.placing.freed import hold
from weft.tensor.placing.halos import read
from weft.tensor.placing.kept_boxes import SavedBox, offer
from weft.tensor.placing.layouts import layout_of
from weft.tensor.placing.left_whole import LeftWhole, WideHalo
from weft.tensor.placing.operand_cache import OperandCache, cache_of, forget_form
from weft.tensor.placing.transitions import order_in_memory, transition_between
from weft.tensor.shard_tensor import ShardTensor, pass_known, version_of, wrap
from weft.tensor.trace.trees import local_of
from weft.tensor.views.moved import Moved, unwrap_view
from weft.transport import move_together, traffic
from weft.transport.facts import replicated
from weft.transport.in_flight import InFlight, moved_early
from weft.transport.order import Order
from weft.transport.transition import Transition

__all__ = [
    "Caller", "NamedCaller", "as_value", "data_of", "entered", "move_operand", "move_operands",
    "operand_transitions", "settle", "share_memory", "staying", "varying_axes", "writing_back",
]

_running_backward: Any = torch._C._current_graph_task_id  # type: ignore[attr-defined]


class Caller:
    """The call whose operands move, for messages and the traffic log."""

    __slots__ = ()
    name = ""
    why: Callable[[], str] = str
    reductions: Any = None  # what marks the operands that this call reduces: `call.reduce_once`
    left_whole: LeftWhole | WideHalo | None = None
    keeps = True  # whether autograd keeps boxes that are fetched for the call


class NamedCaller(Caller):
    """The cause of a transition that no recipe requests (redistribute, fallback)."""

    __slots__ = ("name", "why")

    def __init__(self, name: str, why: str = "") -> None:
        self.name, self.why = name, lambda: why


def move_operand(tensor: torch.Tensor, transition: Transition, call: Caller) -> torch.Tensor:
    """The local tensor of one operand in the layout that the op needs."""
    locals_: list[Any] = [None]
    move_operands((tensor,), ((0, transition),), locals_, call)
    return locals_[0]


def entered(
    name: str, mesh: BoundMesh, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout], why: str
) -> list[torch.Tensor]:
    """The local tensors of operands in these layouts, for a call that is no recipe; `why` is for
    the log."""
    wants = [is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    sources = [layout_of(tensor, mesh) for tensor in tensors]
    orders = [*map(order_in_memory, tensors)]
    moves = operand_transitions(mesh, sources, layouts, wants, varying_axes(layouts), orders)
    return [
        local_of(tensor) if move is None else move_operand(tensor, move, NamedCaller(name, why))
        for tensor, move in zip(tensors, moves)
    ]


def move_operands(
    tensors: Sequence[Any],
    moves: Sequence[tuple[int, Transition]],
    locals_: list[Any],
    call: Caller,
) -> None:
    """Put the local tensors of operands, in the layouts that the op needs, into `locals_`."""
    if call.left_whole is not None:
        call.left_whole.check()
    if modes.STRICT.on:
        for _, transition in moves:
            modes.check_strict(call.name, transition)
    elif _are_leaf_uses(tensors, moves, locals_):  # nothing to note or to mark
        return
    with traffic.label(call.name, call.why):
        _move_all(tensors, moves, locals_, call.keeps)
    if call.reductions is not None:
        call.reductions.mark(tensors, moves, locals_)


def _are_leaf_uses(
    tensors: Sequence[Any], moves: Sequence[tuple[int, Transition]], locals_: list[Any]
) -> bool:
    """Whether all operands are leaves whose uses are known; puts these into `locals_`."""
    if traffic.STATE.on or not is_grad_enabled():
        return False
    for place, transition in moves:
        tensor = tensors[place]
        views = tensor._memo if type(tensor) is ShardTensor else None
        found = None if views is None else views.leaf_use(transition, tensor._local)
        if found is None:
            return False
        _, locals_[place] = found
    return True


def _move_all(
    tensors: Sequence[Any], moves: Sequence[tuple[int, Transition]], locals_: list[Any],
    keeps: bool,
) -> None:
    pending: list[Any] = []
    grad_mode = is_grad_enabled()
    boxes = _boxes(tensors, moves, keeps)
    for place, transition in moves:
        if boxes and place in boxes:
            locals_[place] = boxes[place]
            continue
        tensor = tensors[place]
        sharded = type(tensor) is ShardTensor
        local = tensor._local if sharded else tensor
        if type(local) is Moved:
            local = unwrap_view(local)
        if type(local) is InFlight and (part := moved_early(local, transition)) is not None:
            locals_[place] = part
            continue
        if not (grad_mode and local.requires_grad):
            if sharded and transition.cover is None and not local.is_inference():
                known = _of_mask if local.dtype is torch.bool else _of_activation
                locals_[place] = known(tensor, local, transition)
                continue
            locals_[place] = out = transition(local, read_only_use=True)
            if grad_mode and keeps and transition.cover is not None:
                offer(out, local, transition)
            continue
        key: Any
        if sharded:
            views = cache_of(tensor)
            found = views.leaf_use(transition, local)
            if found is not None:
                use, locals_[place] = found
                if traffic.STATE.on:
                    use.note = traffic.note()
                continue
            key, state = transition, version_of(tensor)
            if transition.cover is not None:  # what a node has saved, a backward may free
                state = state, _running_backward()
        else:
            views = transition.mesh.cache.setdefault("views", OperandCache())
            if not transition.reduces_only_in_backward:
                # Nothing tells of a write through a plain tensor's `.data`: a copy may be old.
                locals_[place] = transition(local, read_only_use=True)
                continue
            key, state = (id(tensor), transition), (local._version, local.data_ptr())
        kept = views.get(key)
        if kept is not None and kept[0] is local and kept[1] == state:
            locals_[place] = kept[2].box() if type(kept[2]) is SavedBox else kept[2]
            continue
        if not keeps and transition.cover is not None:
            locals_[place] = transition(local, read_only_use=True)
        elif sharded and (made := use_of(local, transition)) is not None:
            views.keep_leaf_use(transition, made)
            locals_[place] = made[1]
        else:
            pending.append((place, transition, local, views, key, state))
    if len(pending) == 1:
        [item] = pending
        _keep(item, item[1](item[2], read_only_use=True), locals_)
    elif pending:
        # A leaf's view may serve several graphs: its node must not lead into another graph.
        leaves = [item for item in pending if item[2].is_leaf]
        for part in (leaves, [item for item in pending if not item[2].is_leaf]):
            if part:
                outs = move_together([item[1] for item in part], [item[2] for item in part])
                for item, out in zip(part, outs):
                    _keep(item, out, locals_)


def _boxes(
    tensors: Sequence[Any], moves: Sequence[tuple[int, Transition]], keeps: bool
) -> dict[int, torch.Tensor]:
    """The operands that are parts of boxes which serve several reads of one tensor."""
    asked: dict[int, tuple[ShardTensor, list[Any]]] = {}
    for place, move in moves:
        tensor = tensors[place]
        if type(tensor) is not ShardTensor:
            continue
        of = tensor._slice_of
        if move.cover is not None:
            found = tensor, (place, move, None, move)
        elif of is not None and (need := of.need(tensor, move)) is not None:
            found = of.base, (place, need[0], need[1], move)
        else:
            continue
        asked.setdefault(id(found[0]), (found[0], []))[1].append(found[1])
    out: dict[int, torch.Tensor] = {}
    for base, reads in asked.values():
        local = unwrap_view(base._local)
        views = cache_of(base)
        halo, boxes = read(base, local, views.halo, [need for _, need, _, _ in reads])
        if halo is not None and halo is not views.halo and local.requires_grad:
            views.end_with_backward()
        views.halo = halo
        for (place, _, part, move), box in zip(reads, boxes):
            if box is not None:
                of = None if move.cover is not None else tensors[place]._slice_of
                out[place] = box if of is None else of.became(box, part, move)
                if of is None and keeps:
                    offer(box, local, move)
    return out


def _of_mask(tensor: ShardTensor, local: torch.Tensor, transition: Transition) -> torch.Tensor:
    """The mask of several layers moves once, until a backward has passed. Other operands without a
    gradient may be large, and a checkpoint would keep them."""
    views, state = cache_of(tensor), version_of(tensor)
    kept = views.get(transition)
    if kept is not None and kept[0] is local and kept[1] == state:
        return kept[2]
    out = transition(local, read_only_use=True)
    if out is local:  # on this rank alone, maybe: what is kept of it has to end as elsewhere
        out = local.detach()
    views.keep(transition, (local, state, out))
    return out


class _Latest(threading.local):
    """The last activation that was gathered under `no_grad`: a weak reference to it, its local
    tensor and version, how it moved, and what it has become."""

    kept: tuple[weakref.ref[ShardTensor], torch.Tensor, int, Transition, torch.Tensor] | None = None


_latest = _Latest()


def _of_activation(
    tensor: ShardTensor, local: torch.Tensor, transition: Transition
) -> torch.Tensor:
    """Queries, keys and values read one activation, as do the halves of a gated layer: under
    `no_grad` it is gathered once for calls that follow each other. The next one that moves takes
    its place, so one is alive besides at most. Parameters are freed after the call."""
    gathers = len(transition.dst.sharded_axes) < len(transition.src.sharded_axes)
    if is_grad_enabled() or not gathers or getattr(tensor, "_is_param", False):
        return transition(local, read_only_use=True)  # maybe on this rank alone: it forgets nothing
    kept, _latest.kept = _latest.kept, None
    version = version_of(tensor)
    if kept is None or kept[0]() is not tensor or kept[1] is not local or (
            kept[2] != version or kept[3] is not transition):
        kept = None
        out = transition(local, read_only_use=True)
        kept = weakref.ref(tensor, _forget), local, version, transition, out
    _latest.kept = kept
    return kept[4]


def _forget(gone: weakref.ref[ShardTensor]) -> None:
    if _latest.kept is not None and _latest.kept[0] is gone:
        _latest.kept = None


def _keep(item: Any, out: torch.Tensor, locals_: list[Any]) -> None:
    """Give a moved operand to the call, and cache it for the next."""
    place, transition, local, views, key, state = item
    locals_[place] = out
    if out is local or not out.requires_grad:
        return
    views.keep(key, (local, state, out))
    if transition.cover is not None:
        offer(out, local, transition, views, key)
    node = out.grad_fn
    if node is not None:
        node.register_prehook(partial(forget_form, weakref.ref(views), key))


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of these ShardTensors share memory. A moved operand counts the writes to
    both; an op that may write to one of them takes copies."""
    sharded = {id(one): one for one in tensors if type(one) is ShardTensor}
    memories = {unwrap_view(one._local).untyped_storage()._cdata for one in sharded.values()}
    return len(memories) < len(sharded)


def data_of(tensor: ShardTensor) -> ShardTensor:
    """`x.data`: the same memory, without history."""
    local = tensor._local
    if type(local) is Moved:
        data = Moved.__torch_function__(versions.detached_data, (), (local,))
    else:
        data = versions.detached_data(local)
    if tensor._meta.varying:
        hold(data)
    return pass_known(tensor, wrap(data, tensor._meta.replace(requires_grad=False)))


_BECOMES = frozenset({"sum", "max", "min", "and", "or", "band", "bor", "product"})
"""The kinds of partial values that can be made of a replicated value."""


def writing_back(
    name: str, mesh: BoundMesh, src: Layout, dst: Layout, src_varying: frozenset[int]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that moves the result of an in-place op to the layout of its target; None if
    nothing has to move.

    An op that is not linear has reduced a partial target. A shard can only become P(sum), so the
    other kinds become partial again from the whole value: but avg and bxor, of which none can be
    made, are refused.
    """
    axes = {
        axis for axis, kind in enumerate(dst.partial)
        if kind not in (None, "sum", src.on(axis)) and mesh.axis_sizes[axis] > 1
    }
    if not axes:
        return transition_between(mesh, src, dst, src_varying)
    lacking = [
        f"{dst.partial[axis]} on axis {mesh.axis_names[axis]!r}" for axis in sorted(axes)
        if dst.partial[axis] not in _BECOMES
    ]
    if lacking:
        raise UnsupportedOpError(
            name, f"it writes to {dst}, and its result is {src}",
            f"a whole value becomes partial by {', '.join(sorted(_BECOMES))}; what is not "
            "linear in partial values of other kinds cannot be written to them", lacking,
            "x = x.redistribute(placements=P()) before")
    whole = dst.without_partial(axes)
    first = transition_between(mesh, src, whole, src_varying)
    second = transition_between(mesh, whole, dst)
    if first is None or second is None:
        return first or second
    return lambda x: second(first(x))


def operand_transitions(
    mesh: BoundMesh, sources: Sequence[Layout], targets: Sequence[Layout],
    wants: Sequence[bool], varying: frozenset[int], orders: Sequence[Order | None],
    reads: Sequence[Cover | None] = (), known: Sequence[frozenset[int]] = (),
) -> list[Transition | None]:
    """Per operand, the transition to the layout that the op needs, or to the boxes that ranks read
    beside it.

    The gradient rule: over an axis on which the call varies, an operand that is replicated and
    needs a gradient passes I -> R. `known` are the axes over which operands are R already.
    """
    return [
        transition_between(
            mesh, source, target, mine if wanted else NONE,
            replicated(target, varying if wanted else ()), order, cover,
        )
        for source, target, wanted, order, cover, mine in zip(
            sources, targets, wants, orders, reads or [None] * len(sources),
            known or [NONE] * len(sources))
    ]


def as_value(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; an R tensor becomes I."""
    if type(tensor) is not ShardTensor or not tensor._meta.varying:
        return tensor
    meta, local = tensor._meta, tensor._local
    if local.requires_grad and is_grad_enabled():
        move = transition_between(meta.mesh, meta.layout, meta.layout, meta.varying)
        local = local if move is None else move(unwrap_view(local))
    return wrap(local, meta.replace(varying=NONE, requires_grad=local.requires_grad))


def settle(tensor: torch.Tensor) -> bool:
    """Make an R tensor an I tensor in place; returns whether it was R."""
    value = as_value(tensor)
    if value is tensor:
        return False
    tensor._local, tensor._meta, tensor._memo = value._local, value._meta, None  # type: ignore
    return True


def staying(
    known: Sequence[frozenset[int]], wants: Sequence[bool], varying: frozenset[int]
) -> frozenset[int]:
    """The axes over which the result is R although nothing varies over them, because all operands
    that need a gradient are R. Otherwise R operands become I."""
    of = [mine for mine, wanted in zip(known, wants) if wanted]
    return frozenset.intersection(*of) - varying if of else NONE


def varying_axes(layouts: Sequence[Layout]) -> frozenset[int]:
    """The axes over which a call with these operands and results computes different things."""
    return frozenset([
        axis for layout in layouts for axis in range(layout.mesh.ndim)
        if layout.on(axis) is not None])
