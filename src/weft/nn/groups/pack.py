"""Parameters that one collective gathers: their memory, filled, freed, filled again.

Theory of operation. A parameter is gathered in place: its `_local` and `_meta` are exchanged for
those of the gathered parameter, which lies in the pack's one storage, and is R over the axes (see
`tensor.call.varying`). So every name and every list that holds the parameter sees the gathered one.
Afterwards the parameter gets its own back, and the storage is freed: autograd's graph keeps tensors
without bytes. Their readers fill the storage first (`tensor.placing.freed`).

The gathered parameter is a leaf of its own. torch's engine accumulates its gradient, a partial
value, which waits there until the group is freed. Then the gradients are copied into the buffer of
the reduce-scatter, and dropped.

If weights have been written to since, the same storage gets other values. Then the version counters
of the gathered parameters step, so that graphs of the old values raise torch's error. As in torch,
a write to a `.data` gives other values without an error.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]
from torch.autograd.graph import increment_version

from weft.comm import Finish
from weft.core import Layout
from weft.nn.groups.kind import Kind
from weft.nn.groups.member import Member, places_of
from weft.nn.groups.memory import gathered_layout, packing_of
from weft.tensor import ShardTensor
from weft.tensor.backward import arrive, in_backward, running
from weft.tensor.leaf_gradients import borrow, stand_for
from weft.tensor.meta import Meta, intern
from weft.tensor.placing.freed import Freed, register
from weft.tensor.placing.transitions import transition_between
from weft.tensor.versions import detached_data, version_of
from weft.tensor.views.cast_weight import cast_weight
from weft.transport import traffic
from weft.transport.transition import Transition
from weft.transport.unselected import unselected

__all__ = ["Pack"]

_Counts = tuple[int, int]
"""What `_counts` gives: writes to memory, and those that autograd knows."""

_MADE = itertools.count()


class Pack(Freed):
    """Parameters of one kind.

    Args:
        tensors: the parameters.
        label: the name of their module, for the log.
        group: the group of the pack (`group.Group`). A graph that may need the pack keeps it alive.
        in_own_dtype: ids of parameters that travel in their own dtype, and not in autocast's,
            because they were needed in it before.
    """

    def __init__(
        self, kind: Kind, tensors: Sequence[ShardTensor], label: str, group: Any,
        in_own_dtype: Container[int],
    ) -> None:
        self.kind, self.label, self.group, self.number = kind, label, group, next(_MADE)
        self.axes = kind.axes | kind.rest
        self.comm = kind.mesh.comm(tuple(sorted(kind.axes)))
        layouts: list[Any] = [gathered_layout(one.sharding, kind.axes) for one in tensors]
        dtype = kind.dtype if kind.for_autocast else kind.whole_dtype
        wholes = [
            intern(kind.mesh, layout, dtype, one._meta.device, one._meta.requires_grad, None, None,
                   self.axes)
            for one, layout in zip(tensors, layouts)
        ]
        self.is_full = self.is_kept = not kind.is_copied
        self.versions: tuple[_Counts | None, ...] | None = None
        self.pending: tuple[Finish, tuple[_Counts | None, ...]] | None = None
        self.storage: Any = None
        if kind.is_copied:
            own = [kind.for_autocast and id(one) in in_own_dtype for one in tensors]
            self.members = self._in_storage(tensors, wholes, layouts, own)
        else:
            self.members = [Member(one, whole, kind.dtype) for one, whole in zip(tensors, wholes)]
        self._watch()

    def _in_storage(
        self, tensors: Sequence[ShardTensor], wholes: Sequence[Meta], layouts: Sequence[Layout],
        own: Sequence[bool],
    ) -> list[Member]:
        """The members, in one storage; `own` says which of them travel in their own dtype."""
        kind = self.kind
        metas = [one._meta for one in tensors]
        dtypes = [kind.dtype if mine else kind.whole_dtype for mine in own]
        widths = [dtype.itemsize // kind.whole_dtype.itemsize for dtype in dtypes]
        if kind.axes:
            self.packing = packing_of(kind.mesh, self.comm, metas, layouts)
            self.sent = packing_of(kind.mesh, self.comm, metas, layouts, widths)
        offsets, self.nbytes = places_of(wholes, dtypes)
        base = torch.empty(0, dtype=kind.whole_dtype, device=kind.mesh.device)
        self.storage = base.untyped_storage()
        self.may_free = bool(self.axes) and self.storage.resizable()
        if not self.may_free:  # nothing tells of its uses, or a device whose memory stays
            self.storage = base.new_empty(self.nbytes, dtype=torch.uint8).untyped_storage()
        members = [
            Member(one, whole, dtype, self.storage, offset)
            for one, whole, dtype, offset in zip(tensors, wholes, dtypes, offsets)
        ]
        if self.may_free:
            self.storage.resize_(0)
        if self.axes:
            register(self.storage, self)
        return members

    def _watch(self) -> None:
        """Hook the gathered parameters, to see their gradients arrive."""
        me: weakref.ref[Pack] = weakref.ref(self)
        self.arrivals = [_Arrival(me, at) for at in range(len(self.members))]
        for member, arrival in zip(self.members, self.arrivals):
            member.hide = arrival.hide
            if member.full.requires_grad:
                self._stand_for(member)
                member.full.register_post_accumulate_grad_hook(arrival)

    def _stand_for(self, member: Member) -> None:
        mesh, layout = self.kind.mesh, member.meta.layout
        move = transition_between(mesh, layout, member.whole_meta.layout, frozenset(), self.axes)
        member.use = stand_for(
            member.local, move or Transition(mesh, layout, layout, copy=True), member.full)
        if not self.kind.axes:  # further axes are reduced with those that it is R over, at once
            borrow(member.full, member.local, self.kind.reduce_dtype, lambda wanted:
                   transition_between(mesh, layout, wanted.dst, frozenset(), wanted.dst_varying))

    def release(self) -> None:
        """Let go of the pack: no module has it any more, only graphs that are yet to be
        differentiated."""
        for member, arrival in zip(self.members, self.arrivals):
            member.release()
            member.hide, arrival.held = None, self
        self.arrivals = []

    @property
    def is_current(self) -> bool:
        """Whether the pack still has the module's parameters."""
        for member in self.members:
            tensor, local = member.tensor, member.local
            if tensor._meta is not member.meta or tensor._local is not local:
                return False
            if member.times_set != tensor._times_set:
                return False
        return True

    # The storage.

    def ask(self, gradients: Any) -> None:
        self.group.line.asked(self.group)
        if not self.is_full:
            self.fill()

    def keep(self) -> None:
        self.is_kept = True

    def start(self) -> None:
        """Begin to gather, if the storage is not filled."""
        if not self.kind.axes:
            return
        versions = self._versions()
        if self.pending is not None and self.pending[1] == versions:
            return
        if self._is_current(versions):
            return
        packing, dtype = self.sent, self.kind.whole_dtype
        nbytes = (packing.numel - packing.sizes[packing.index]) * dtype.itemsize
        with torch.no_grad(), _DisableAutocast(), unselected(), self.told(
            "AllGather", "S->R", nbytes
        ):
            if packing is self.packing:
                blocks = [member.local.reshape(-1) for member in self.members]
                flat = torch.cat(blocks).to(dtype)
            else:
                flat = torch.cat([
                    member.local.reshape(-1).to(member.whole.dtype).view(dtype)
                    for member in self.members
                ])
            self.pending = self.comm.start_all_gather(flat, packing.sizes), versions

    def fill(self) -> None:
        if self.storage is None:
            return
        versions = self._versions()
        if self._is_current(versions):
            return
        self.start()
        pending, self.pending = self.pending, None
        with torch.no_grad(), _DisableAutocast(), unselected():
            flat = pending[0]() if pending is not None else None
            if not self.is_full and self.may_free:
                self.storage.resize_(self.nbytes)
            if flat is None:
                for member in self.members:
                    member.whole.copy_(member.local)
            else:
                self.sent.spread(
                    flat, [member.whole.view(self.kind.whole_dtype) for member in self.members])
            if self.versions is not None:
                changed = [
                    full for member, old, new in zip(self.members, self.versions, versions)
                    if old and new and old[1] != new[1] and (full := member.full) is not None
                ]
                increment_version(changed)
        self.is_full, self.versions = True, versions

    def free(self) -> None:
        is_due = self.is_full and not self.is_kept and self.may_free
        if is_due and self.storage.resizable() and not self.is_shown:  # a backward in a forward
            self.storage.resize_(0)
            self.is_full = False

    def _is_current(self, versions: tuple[_Counts | None, ...]) -> bool:
        return self.is_full and self.versions == versions and None not in versions

    def _versions(self) -> tuple[_Counts | None, ...]:
        return tuple([_counts(member.local) for member in self.members])

    # The parameters.

    def show(self) -> None:
        """Show the gathered parameters: the storage is filled."""
        for at, member in enumerate(self.members):
            tensor = member.tensor
            if tensor._local is member.local and member.another is None:
                member.memo, member.version = tensor._memo, _counts(member.full)
                if member.shown is None:
                    member.shown = self._shown(at)
                tensor._local, tensor._meta, tensor._memo = member.shown, member.whole_meta, None
                tensor._gathered = member

    def _shown(self, at: int) -> Tensor:
        """The local tensor of a gathered parameter."""
        full = self.members[at].full
        if full.dtype is self.members[at].whole_meta.dtype:
            return full
        me: weakref.ref[Pack] = weakref.ref(self)
        return cast_weight(full, lambda: me().group.widen(me(), at))  # type: ignore

    @property
    def is_shown(self) -> bool:
        """Whether the parameters are gathered ones now."""
        return any(member.tensor._local is member.shown for member in self.members)

    def hide(self) -> None:
        """Give the parameters their shards back, with whatever was written to the gathered ones."""
        for at in range(len(self.members)):
            self.hide_one(at)

    def hide_one(self, at: int) -> None:
        member = self.members[at]
        tensor = member.tensor
        if tensor._local is not member.shown:
            return
        wanted = member.full.requires_grad
        tensor._local, tensor._meta, tensor._memo = member.local, member.meta, member.memo
        tensor._gathered = member.memo = None
        version = member.version if self.storage is None else _counts(member.full)
        if version and member.version and version != member.version and self.is_full:
            by_data = version[1] == member.version[1]
            with torch.no_grad():
                own = self.packing.own(member.whole, at) if self.kind.axes else member.whole
                (detached_data(member.local) if by_data else member.local).copy_(own)
            if self.versions is not None:  # its graphs have these values already
                known = list(self.versions)
                known[at] = _counts(member.local)
                self.versions = tuple(known)
        if wanted != member.local.requires_grad:
            tensor.requires_grad_(wanted)

    # Gradients.

    def arrived(self, at: int, full: Tensor) -> None:
        """The gradient of a gathered parameter has arrived."""
        member = self.members[at]
        if full.grad is None:
            return
        if torch.is_grad_enabled():  # create_graph: by the transition, which is differentiable
            if member.use is not None:
                member.use.arrived(full)
            return
        member._full = full  # until its gradient is taken
        holding = running().holding
        if holding is not None and id(member.local) in holding.leaves:  # the engine adds to it
            holding.others[self] = self.number
            if full.dtype is not self.kind.reduce_dtype:
                member.hold(self.kind.reduce_dtype)
            return
        member.has_arrived = True
        self.group.line.touch(self.group)

    def start_reducing(self, add: Callable[[Self], None]) -> list[Callable[[], None]]:
        """Begin to reduce the gradients that have arrived; the returned function waits, and
        accumulates. `add` puts a pack whose gradients only have to be summed into the buckets."""
        if not self.kind.axes and self.kind.rest:
            add(self)
            return []
        members, grads = self.taken()
        if not self.kind.axes:
            for member, grad in zip(members, grads):
                arrive(member.local, grad.to(self.kind.reduce_dtype).to(self.kind.dtype))
            return []
        if not members:
            return []
        packing = self.packing
        if len(members) < len(self.members):
            packing = packing.of([member in members for member in self.members])
        with torch.no_grad(), _DisableAutocast():
            buffer = torch.empty(
                packing.numel, dtype=self.kind.reduce_dtype, device=self.kind.mesh.device)
            packing.collect(buffer, grads)
            grads.clear()
            mine = packing.sizes[packing.index] * buffer.element_size()
            nbytes = (len(packing.sizes) - 1) * mine
            with self.told("ReduceScatter", "P(sum)->S", nbytes):
                finish = self.comm.start_reduce_scatter(buffer, packing.sizes, "sum")

        def land() -> None:
            with torch.no_grad(), _DisableAutocast():
                flat = finish()
                if self.kind.rest:
                    rest = self.kind.mesh.comm(tuple(sorted(self.kind.rest)))
                    flat = rest.all_reduce(flat, "sum")
                blocks = packing.mine(flat.to(self.kind.dtype))
            for member, block in zip(members, blocks):
                arrive(member.local, block)

        return [land]

    def taken(self) -> tuple[list[Member], list[Tensor]]:
        """The gradients that have arrived, with their members."""
        members, grads = [], []
        for member in self.members:
            grad = member.take() if member.has_arrived else None
            member.has_arrived = False
            if grad is not None:
                members.append(member)
                grads.append(grad)
        return members, grads

    def release_held(self) -> None:
        """Reduce what was kept over several backwards."""
        for member in self.members:
            full = member.full
            found = full is not None and full.grad is not None
            member.has_arrived = found or member.held is not None

    def drop(self) -> None:
        """A backward has failed: drop what has arrived."""
        for member in self.members:
            member.has_arrived = False
            member.take()

    @contextmanager
    def told(
        self, collective: str, what: str, nbytes: int, over: frozenset[int] | None = None
    ) -> Iterator[None]:
        """Around a collective: names its purpose for the log and the debug mode."""
        if not traffic.STATE.on:
            yield
            return
        mesh, axes = self.kind.mesh, tuple(sorted(over or self.kind.axes))
        names = tuple(map(str, mesh.names(axes)))
        text = f"{what} on {', '.join(names)}"
        gathers = collective == "AllGather"
        label = traffic.Label(
            self.label, "", "gathered for its module" if gathers else "its gradients",
            self.label.removeprefix("parameters of "))
        backward = not gathers or in_backward()
        with traffic.resume(traffic.Note(label), label.reason) if backward else traffic.label(
            label.op, label.reason, label.line
        ), traffic.moving(f"{text}: {self.label}"):
            traffic.emit(text, names, collective, nbytes)
            yield


def _counts(local: Tensor) -> _Counts | None:
    """All writes to the tensor's memory, and those that autograd knows: not through a `.data`.
    None of tensors of inference mode, which count no writes."""
    return None if local.is_inference() else (version_of(local), local._version)


class _Arrival:
    """The hook of a gathered parameter. It holds its pack only after the pack has let go of the
    parameter: a cycle would never be freed."""

    __slots__ = ("at", "held", "pack")

    def __init__(self, pack: weakref.ref[Pack], at: int) -> None:
        self.pack, self.at = pack, at
        self.held: Pack | None = None

    def __call__(self, full: Tensor) -> None:
        pack = self.pack()
        if pack is not None:
            pack.arrived(self.at, full)

    def hide(self) -> None:
        """Give the parameter its shard back."""
        pack = self.pack()
        if pack is not None:
            pack.hide_one(self.at)
