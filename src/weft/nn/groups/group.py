"""Groups of parameters, one per module, and the order in which they are used.

A group is gathered when its module's forward begins, and freed when it ends. It is gathered again
when the backward reaches a result of the module, and freed when the gradient of the module's input
is there. Waiting for a group starts to gather the next one: in forward the one that followed in the
last forward, in backward the one that came before.

The end of a group in backward is a hook on the gradient of the module's input, not a count of
gradients. The engine runs first what the forward recorded last, so the same gradients have arrived
by then on every rank, in whatever order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import StrictError
from weft.nn.groups.buckets import Buckets
from weft.nn.groups.kind import Dtypes, Kind, autocast_dtype, kind_of
from weft.nn.groups.pack import Pack
from weft.nn.groups.policy import AUTOMATIC, Gather
from weft.tensor import ShardTensor
from weft.tensor.backward import Backward, in_backward, running
from weft.tensor.modes import is_strict
from weft.tensor.shard_tensor import watch_gradient
from weft.tensor.trace.trees import flatten
from weft.tensor.views.moved import unwrap_view

__all__ = ["Group", "Line"]


_MADE = itertools.count()


def _implicit(pack: Pack, path: str) -> StrictError:
    names = [str(member.meta.layout) for member in pack.members]
    axes = ", ".join(map(str, pack.kind.mesh.names(sorted(pack.kind.axes))))
    return StrictError(
        f"forward of {path or 'the module'}", f"{len(names)} parameters are sharded over "
        f"{axes}, as the batch is, and are gathered for it",
        "under weft.strict() gather= names what is gathered", names,
        f"distribute_module(..., gather={{{path!r}: weft.nn.Gather()}})")


class Line:
    """The groups of one outermost module in the order of their use, and its backward.

    Args:
        of_parts: the groups of parts that are called one after the other instead. The order begins
            anew when a part comes again.
    """

    def __init__(self, of_parts: bool = False) -> None:
        self.of_parts = of_parts
        self.order: list[weakref.ref[Group]] = []
        self.last: list[weakref.ref[Group]] = []
        self.backward: weakref.ref[Backward] | None = None
        self.keeps = False
        self.passed: set[Group] = set()
        self.touched: list[Group] = []
        self.buckets = Buckets()
        self.outstanding: Sequence[Callable[[], None]] = ()

    def begin(self) -> None:
        """The forward of the outermost module begins."""
        if self.backward is not None:  # a backward that failed, of which nobody has told
            self.failed()
        if not self.of_parts:
            self.order = []

    def entered(self, group: Group) -> None:
        """A group has been gathered: start the next one."""
        if self.of_parts and any(each() in (group, None) for each in self.order):
            self.last, self.order = self.order, []
        at = len(self.order)
        self.order.append(weakref.ref(group))
        if at + 1 < len(self.last) and self.last[at]() is group:
            following = self.last[at + 1]()
            if following is not None:
                following.start()

    def end(self) -> None:
        if not self.of_parts:
            self.last = self.order

    def asked(self, group: Group, by_forward: bool = False) -> None:
        """In backward: a group is needed, for a gradient or by a forward that recomputes."""
        self.touch(group)
        if torch.is_grad_enabled() and not by_forward:  # a graph of the backward reads it, whenever
            self.keeps = True
        if group in self.passed or group.was_asked:
            return
        group.was_asked = True
        group.fill()
        order = [each for one in self.last or self.order if (each := one()) is not None]
        at = next((at for at in reversed(range(len(order))) if order[at] is group), 0)
        for before in reversed(order[:at]):
            if not before.was_asked and before not in self.passed:
                before.start()
                break

    def touch(self, group: Group) -> None:
        """In backward: a group is needed, or has a gradient."""
        if self.backward is None:
            backward = running()
            self.backward = weakref.ref(backward)
            self.keeps = False
            backward.when_found(self.over, self.failed)
        if not group.is_open:
            group.is_open = True
            if group not in self.touched:
                self.touched.append(group)

    def passes(self, group: Group, given: Sequence[Layout]) -> None:
        """In backward: everything after the group's input, of these layouts, has its gradients."""
        if self.backward is None or not group.is_open:
            return
        if group.is_left and any(one.has_empty_shards for one in given):  # see `_end_at`
            return
        if not self.keeps:
            self.passed.add(group)
            group.is_open = group.was_asked = False
            group.free()
        started = group.start_reducing(self.buckets.add)
        started += self.buckets.start(False)
        self.land()
        self.outstanding = started

    def land(self) -> None:
        under_way, self.outstanding = self.outstanding, ()
        for land in under_way:
            land()

    def over(self) -> None:
        """The backward is over."""
        if self.backward is None:
            return
        touched = sorted(self.touched, key=lambda group: -group.number)  # not as they came
        self._free()
        started = [land for group in touched for land in group.start_reducing(self.buckets.add)]
        started += self.buckets.start(True)
        self.land()
        self.outstanding = started
        self.land()
        self._close()

    def failed(self) -> None:
        """The backward has failed: its gradients are dropped."""
        self.outstanding = ()
        self.buckets.drop()
        for group in self.touched:
            group.drop()
        self._close()

    def _free(self) -> None:
        for group in self.touched:
            group.is_open = group.was_asked = False
            if self.keeps:
                group.leave_to_graphs()
            else:
                group.free()

    def _close(self) -> None:
        self._free()
        self.touched, self.passed, self.backward = [], set(), None


class Group:
    """The packs of one module.

    Args:
        path: the module's name, for the log.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[nn.Module], path: str, policy: Gather,
        mesh: BoundMesh, batch: frozenset[int], line: Line, before: Group | None = None,
    ) -> None:
        self.line, self.policy, self.path = line, policy, path
        self.mesh, self.batch, self.autocast = mesh, batch, autocast_dtype(mesh)
        self.in_own_dtype: set[int] = set() if before is None else before.in_own_dtype
        self.num_in_own_dtype = len(self.in_own_dtype)
        dtypes = Dtypes(policy.compute_dtype, policy.reduce_dtype, self.autocast)
        self.is_open = self.was_asked = self.is_outermost = self.is_left = False
        self.number = next(_MADE)
        kinds: dict[Any, tuple[Kind, list[ShardTensor]]] = {}
        seen: set[int] = set()
        for part in parts:
            for tensor in part._parameters.values():
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                kind = kind_of(tensor, mesh, batch, dtypes)
                if kind is not None:
                    kinds.setdefault(kind.key(), (kind, []))[1].append(tensor)  # type: ignore
        self.parts = [
            (weakref.ref(part), list(part._parameters.values())) for part in parts
            if part._parameters
        ]
        self._packs = [self._pack(kind, tensors) for kind, tensors in kinds.values()]
        self._released: list[weakref.ref[Pack]] = []

    @property
    def packs(self) -> list[Pack]:
        """Of a group that was released, those that graphs hold."""
        return self._packs or [pack for one in self._released if (pack := one()) is not None]

    def _pack(self, kind: Kind, tensors: Sequence[ShardTensor]) -> Pack:
        label = f"parameters of {self.path or 'the module'}"
        return Pack(kind, tensors, label, self, self.in_own_dtype)

    def widen(self, pack: Pack, at: int) -> Tensor:
        """Gather a parameter once more, in its own dtype instead of autocast's, and so from the
        next forward on."""
        member, kind = pack.members[at], pack.kind
        if member.another is None:
            tensor = member.tensor
            self.in_own_dtype.add(id(tensor))
            is_shown = tensor._local is member.shown
            pack.hide_one(at)
            dtypes = Dtypes(reduce=kind.reduce_dtype)
            own = Kind(kind.mesh, kind.axes, kind.rest, kind.dtype, dtypes)
            member.another = self._pack(own, [tensor])
            self._packs.append(member.another)
            if is_shown:
                member.another.show()
        member.another.fill()
        return member.another.members[0].full

    def fits(self, mesh: BoundMesh, batch: frozenset[int]) -> bool:
        """Whether the group serves a forward with such a batch."""
        if self.is_left or self.mesh is not mesh or self.batch != batch:
            return False
        if self.autocast != autocast_dtype(mesh):
            return False
        return self.num_in_own_dtype == len(self.in_own_dtype) and self.is_current

    @property
    def is_current(self) -> bool:
        """Whether the group still has its module's parameters, as they are now."""
        for part, known in self.parts:
            if not _holds(part(), known):
                return False
        return all(pack.is_current for pack in self.packs)

    def enter(self, given: Any) -> None:
        """The module's forward begins."""
        if is_strict() and self.policy is AUTOMATIC:
            raise _implicit(self.packs[0], self.path)
        for pack in self.packs:
            pack.fill()
            pack.show()
        if not in_backward():
            self.line.entered(self)
        elif self.packs:
            self.line.asked(self, by_forward=True)
        if torch.is_grad_enabled():
            self._end_at(flatten(given))

    def leave(self) -> None:
        """The module's forward is over, or has failed."""
        for pack in self.packs:
            pack.hide()
        recorded = torch.is_grad_enabled()
        if not in_backward() and not (recorded and (self.is_outermost or not self.policy.free)):
            self.free()

    @contextmanager
    def again(self) -> Iterator[None]:
        """In backward: a part of the module's forward is recomputed."""
        packs = [pack for pack in self.packs if not pack.is_shown]
        for pack in packs:
            pack.fill()
            pack.show()
        if self.packs:
            self.line.asked(self, by_forward=True)
        try:
            yield
        finally:
            for pack in packs:
                pack.hide()

    def _end_at(self, given: Sequence[Tensor]) -> None:
        """End the group when the gradient of the input that was made last arrives.

        On a rank whose shard of it is empty, the graph of a backward may reach the op that made the
        input and not the input, which is tied to that op's operands. So these groups end with the
        backward through such a graph. There the gradient of a leaf may also arrive before those of
        the parameters, and on other ranks after them: groups with such an input end with the
        backward, too.
        """
        last, number, made, layouts = None, -1, None, list[Layout]()
        for one in given:
            local = one
            if type(one) is ShardTensor:
                local = unwrap_view(one._local)
                layouts.append(one._meta.layout)
            if not local.requires_grad:
                continue
            node = local.grad_fn
            mine = 0 if node is None else node._sequence_nr()
            if mine > number:
                last, number, made = local, mine, one
        if last is not None and (last.grad_fn is not None or (
            in_backward() and not any(one.has_empty_shards for one in layouts)
        )):
            me: weakref.ref[Group] = weakref.ref(self)
            watch_gradient(made)
            last.register_hook(lambda _: _passes(me, layouts))

    # Of all packs.

    def leaves(self) -> list[Any]:
        """The gathered parameters that graphs see; their holders may ask for them again."""
        return [member.full for pack in self.packs for member in pack.members]

    def release(self) -> None:
        """Release the group: the module has another one, or is gone."""
        for pack in self._packs:
            pack.release()
        self._released = [weakref.ref(pack) for pack in self._packs]
        self._packs = []

    def leave_to_graphs(self) -> None:
        """The graph of a backward (`create_graph`) reads the memory without asking, so the memory
        lives as long as the graph. The next forward has a group of its own."""
        self.is_left = True
        for pack in self.packs:
            pack.keep()

    def start(self) -> None:
        for pack in self.packs:
            if pack.is_current:  # a parameter may have another layout since
                pack.start()

    def fill(self) -> None:
        for pack in self.packs:
            pack.fill()

    def free(self) -> None:
        for pack in self.packs:
            pack.free()

    def start_reducing(self, add: Callable[[Pack], None]) -> list[Callable[[], None]]:
        return [land for pack in self.packs for land in pack.start_reducing(add)]

    def drop(self) -> None:
        for pack in self.packs:
            pack.drop()


def _holds(part: nn.Module | None, known: Sequence[Any]) -> bool:
    """Whether a module's own parameters are still these."""
    if part is None or len(part._parameters) != len(known):
        return False
    return all(map(is_, part._parameters.values(), known))


def _passes(group: weakref.ref[Group], given: Sequence[Layout]) -> None:
    found = group()
    if found is not None:
        found.line.passes(found, given)
