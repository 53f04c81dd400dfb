"""The hooks of modules whose parameters are gathered while they run.

An activation checkpoint may recompute a part of a module. The module's own hooks do not run then,
so its parameters are gathered again by `checkpoint`.

Their state is kept beside the module, not in it: a copied or unpickled module starts anew.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weft.comm import BoundMesh
from weft.core.scopes import setting
from weft.nn.groups.group import Group, Line
from weft.nn.groups.policy import Gather
from weft.nn.pins import BringHook, InputFn, _Hook, has_hook
from weft.tensor import ShardTensor
from weft.tensor.backward import in_backward
from weft.tensor.grad import checkpoints
from weft.tensor.trace.trees import map_tensors
from weft.transport.unselected import unselected

__all__ = ["Entering", "Leaving", "checkpoint", "has_group", "install"]


class _State:
    """State of one module: its group, and the order of groups if it is the outermost called
    module."""

    __slots__ = ("group", "line")

    def __init__(self) -> None:
        self.line = Line()
        self.group: Group | None = None

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Leave the group to the graphs that were recorded with it."""
        if self.group is not None:
            self.group.release()


_STATES: WeakKeyDictionary[nn.Module, _State] = WeakKeyDictionary()


class _Forward:
    """A forward that is under way: its outermost module, what its batch is sharded over, and the
    groups that are gathered now; one whose module calls itself stands there for each call."""

    __slots__ = ("batch", "frame", "groups", "line", "mesh", "module")

    def __init__(
        self, module: nn.Module, mesh: BoundMesh, batch: frozenset[int], line: Line, frame: Any
    ) -> None:
        self.module, self.mesh, self.batch, self.line = module, mesh, batch, line
        self.groups: list[Group] = []
        self.frame = frame

    def was_interrupted(self) -> bool:
        """Whether nothing runs it any more: torch calls no hooks after a KeyboardInterrupt."""
        frame = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.again: list[Group] = []
        """In a backward, the groups whose modules run again."""
        self.of_parts = Line(of_parts=True)
        """The groups of parts that are called without their root."""

    forward: _Forward | None = None
    entered: set[nn.Module] | None = None
    """The modules whose groups were entered since somebody has asked."""
    only: set[nn.Module] | None = None
    """In a backward, the modules that enter their groups; None: all."""


_thread = _Thread()


def install(module: nn.Module, path: str, policy: Gather | None, casts: bool = False) -> None:
    """Gather the module's parameters while it runs; with None leave them as they are. `casts`: a
    policy of the outermost module names dtypes, which hold for any batch."""
    turns = ("first", "last") if has_hook(module, InputFn) else ("only",)
    for turn in turns:
        module.register_forward_pre_hook(
            Entering(path, policy, casts, turn), prepend=turn != "last", with_kwargs=True)
    module.register_forward_hook(Leaving(), always_call=True)


def _under_way() -> list[Group]:
    """The groups whose modules run now, in a forward or again in a backward."""
    if in_backward():
        return _thread.again
    return [] if _thread.forward is None else _thread.forward.groups


def checkpoint(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`: what was gathered in forward is gathered again.

    A reentrant checkpoint compares and replaces nothing of the forward, so recomputed tensors may
    have another memory order, and groups that were gathered around it are not gathered again.
    """
    forward, entered = _thread.forward, set[nn.Module]()
    is_reentrant = kwargs.get("use_reentrant") is not False
    groups = [] if forward is None or is_reentrant else [*forward.groups]
    again = False

    def run(*given: Any, **named: Any) -> Any:
        nonlocal again
        with ExitStack() as stack:
            if in_backward():
                for group in groups:
                    stack.enter_context(group.again())
            stack.enter_context(_recording(entered, again))
            again = True
            return function(*given, **named)

    run.needs = [(group.leaves(), group.packs) for group in groups]  # type: ignore  # no graph yet
    return checkpoints.checkpoint(original, run, *args, **kwargs)


@contextmanager
def _recording(entered: set[nn.Module], again: bool) -> Iterator[None]:
    """Add to `entered` the modules whose groups begin inside the block. With `again`, in a
    backward, only these modules begin theirs."""
    outer = _thread.entered
    with setting(_thread, **{"only" if again else "entered": entered}):
        try:
            yield
        finally:
            if outer is not None and not again:
                outer |= entered


def has_group(module: nn.Module) -> bool:
    """Whether a module has a group of its own, or is to have none."""
    return has_hook(module, Entering)


def _state_of(module: nn.Module) -> _State:
    found = _STATES.get(module)
    if found is None:
        found = _STATES[module] = _State()
    return found


class Entering(_Hook):
    """The hook before a module's forward. A module with an `input_fn`, which may shard its inputs,
    has one before its other hooks and one after them: the `turn` is "first" and "last"."""

    def __init__(self, path: str, policy: Gather | None, casts: bool, turn: str) -> None:
        self.path, self.policy, self.casts, self.turn = path, policy, casts, turn

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.turn == "last" and (_thread.forward is not None or in_backward()):
            return None
        with unselected():
            self._enter(module, args, kwargs)
        if self.policy is None or self.policy.compute_dtype is None:
            return None
        state = _STATES.get(module)
        if state is None or state.group is None or not state.group.packs:
            return None
        dtype = self.policy.compute_dtype
        return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        forward = _thread.forward
        if in_backward():
            state = _STATES.get(module)
            group = None if state is None else state.group
            if group is None or not (_thread.only is None or module in _thread.only):
                return
            if group in _thread.again or group.is_current:
                _begin(module, group, (args, kwargs))
            return
        if forward is not None and forward.was_interrupted():
            for group in forward.groups:
                group.leave()
            forward = _thread.forward = None
        if forward is None:
            forward = self._outermost(module, (args, kwargs))
        if forward is None or self.policy is None:
            return
        batch = forward.batch
        if self.policy.axes is not None:
            batch = frozenset(forward.mesh.axes(_listed(self.policy.axes), "Gather(axes=)"))
        if not batch and not self.policy.casts:
            return
        state = _state_of(module)
        group = state.group
        if group in forward.groups:  # the module has called itself
            forward.groups.append(group)
            return
        if group is None or group.line is not forward.line or not group.fits(forward.mesh, batch):
            state.release()
            with torch.inference_mode(False):  # the group serves forwards that train as well
                group = state.group = Group(
                    module, list(_parts(module)), self.path, self.policy, forward.mesh, batch,
                    forward.line, group)
        group.is_outermost = forward.module is module and not self.path
        if group.packs:
            _begin(module, group, (args, kwargs))

    def _outermost(self, module: nn.Module, given: Any) -> _Forward | None:
        """The forward that begins with this module. A part that is called without its root begins
        one only for a batch of its own."""
        inputs = [*_sharded(given, set())]
        batch = _batch_of(inputs, module, not self.path)
        if batch:
            mesh = inputs[0]._meta.mesh
        else:
            names_axes = self.policy is not None and self.policy.axes is not None
            is_due = names_axes or self.casts or (bool(inputs) and not self.path)
            held = next((one for one in module.parameters() if type(one) is ShardTensor), None)
            if held is None or not is_due or self.turn == "first":
                return None
            mesh = held._meta.mesh
        line = _thread.of_parts if self.path else _state_of(module).line
        line.begin()
        _thread.forward = _Forward(module, mesh, batch, line, sys._getframe(3))
        return _thread.forward


def _begin(module: nn.Module, group: Group, given: Any) -> None:
    """A group's module runs: gather the group, unless it is gathered for another call."""
    under_way = _under_way()
    if group not in under_way:
        group.enter(given)
    under_way.append(group)
    if _thread.entered is not None:
        _thread.entered.add(module)


class Leaving(_Hook):
    """The hook after a module's forward, also where that has failed."""

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        state = _STATES.get(module)
        forward = _thread.forward
        if state is not None and state.group is not None:
            under_way = _under_way()
            if state.group in under_way:
                under_way.remove(state.group)
            if state.group not in under_way:
                with unselected():
                    state.group.leave()
        if forward is not None and forward.module is module and not in_backward():
            _thread.forward = None
            forward.line.end()


def _sharded(given: Any, seen: set[int]) -> Iterator[ShardTensor]:
    """The ShardTensors in a module's arguments, also in dataclasses and all kinds of maps."""
    if type(given) is ShardTensor:
        yield given
        return
    if isinstance(given, Mapping):
        inner = given.values()
    elif isinstance(given, (list, tuple)):
        inner = given
    elif is_dataclass(given) and not isinstance(given, type) and id(given) not in seen:
        seen.add(id(given))
        inner = [getattr(given, field.name, None) for field in fields(given)]
    else:
        return
    for one in inner:
        yield from _sharded(one, seen)


def _batch_of(inputs: Sequence[ShardTensor], module: nn.Module, is_root: bool) -> frozenset[int]:
    """Those axes that shard a module's inputs over which parameters are gathered."""
    batch, others = set[int](), set[int]()
    for one in inputs:
        meta = one._meta
        if meta.mesh is inputs[0]._meta.mesh and meta.layout.ndim:
            sizes = meta.mesh.axis_sizes
            for dim, axes in enumerate(meta.layout.dims):
                found = others if dim else batch
                found.update(axis for axis in axes if sizes[axis] > 1)
    if is_root:
        return frozenset(batch | _of_all_parameters(module, others - batch, 1))
    return frozenset(_of_all_parameters(module, batch, None) | _of_none(module, batch))


def _of_all_parameters(module: nn.Module, axes: set[int], num_dims: int | None) -> set[int]:
    """The axes that shard one of the first dims of every parameter. An axis of tensor parallelism
    also shards activations, but it leaves norms whole, or its styles keep the weights in place."""
    if not axes:
        return axes
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if type(hook) is BringHook:
                axes = axes.difference(hook.brought.axes)
    for one in module.parameters():
        if not axes or type(one) is not ShardTensor:
            return set()
        axes = axes & _axes_of(one, num_dims)
    return axes


def _of_none(module: nn.Module, axes: set[int]) -> set[int]:
    """The axes that shard no parameter: nothing is gathered over them, and gradients are summed."""
    for one in module.parameters() if axes else ():
        if type(one) is ShardTensor:
            axes = axes - _axes_of(one, None)
    return axes


def _axes_of(tensor: ShardTensor, num_dims: int | None) -> set[int]:
    return {axis for axes in tensor._meta.layout.dims[:num_dims] for axis in axes}


def _listed(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _parts(module: nn.Module) -> Any:
    """The module and its parts, except those with a group of their own."""
    yield module
    for part in module.children():
        if not has_group(part):
            yield from _parts(part)
