"""Calls of ops that users have registered rules or handlers for.

An `Own` stands for one op: a Python function or an `autograd.Function` (which never come here by
themselves: see `takeover` and `torch_patches`), or an op that torch knows. It carries the op out
by the handler, else by the rule (see `own_local`), else as if nothing had been registered.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from weft.errors import ShardTypeError
from weft.rules import OwnRule
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import with_defaults
from weft.tensor.trace.trees import flatten

__all__ = ["OWN", "Own", "OwnFunction", "handled", "is_sharded", "keys_of", "rule_of"]


class OwnFunction:
    """The function as which an op is called while its rule runs: it has its own key in the caches.

    Args:
        name: the op, for messages.
        run: the op itself, on plain tensors.
        otherwise: the op on ShardTensors where the rule does not cover a call.
        rule: the user's rule, or None.
        is_op: whether torch's dispatcher knows it, and so may know the shapes of its results.
        keeps_edges: whether results of empty tensors keep their edges in autograd's graph, as those
            of an autograd.Function do.
    """

    __slots__ = ("__name__", "is_op", "keeps_edges", "otherwise", "rule", "run")

    def __init__(
        self, name: str, run: Callable[..., Any], otherwise: Callable[..., Any],
        rule: OwnRule | None, is_op: bool = False, keeps_edges: bool = False,
    ) -> None:
        self.__name__, self.run, self.otherwise, self.rule = name, run, otherwise, rule
        self.is_op, self.keeps_edges = is_op, keeps_edges

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Own:
    """One op with a user's rule or handler.

    Args:
        target: the function, the autograd.Function or the op that torch knows.
        name: for messages.
        run: the op on plain tensors.
        otherwise: the op on ShardTensors, as if nothing had been registered.
        signature: of its arguments, where tensors may come by keyword.
    """

    __slots__ = ("function", "handler", "name", "otherwise", "run", "signature", "target", "undo")

    def __init__(
        self, target: Any, name: str, run: Callable[..., Any], otherwise: Callable[..., Any],
        signature: inspect.Signature | None,
    ) -> None:
        self.target, self.name, self.run, self.otherwise = target, name, run, otherwise
        self.signature = signature
        self.handler: Callable[..., Any] | None = None
        self.function = self.function_with(None)
        self.undo: Callable[[], None] = lambda: None

    def function_with(self, rule: OwnRule | None) -> OwnFunction:
        """A new key, of which no recipe has been made."""
        is_op = isinstance(self.target, (OpOverload, OpOverloadPacket))
        keeps_edges = isinstance(self.target, type) or (
            is_op and not str(self.target).startswith("aten.")
        )
        return OwnFunction(self.name, self.run, self.otherwise, rule, is_op, keeps_edges)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op on arguments among which there is a ShardTensor."""
        if self.handler is not None and self not in _INSIDE.ops:
            out = self._handled(self.handler, args, kwargs)
            if out is not NotImplemented:
                return out
        if self.function.rule is None:
            return self.otherwise(*args, **kwargs)
        if kwargs:
            args, kwargs = self.in_order(args, kwargs)
        return ShardTensor.__torch_function__(self.function, (), args, kwargs)

    def _handled(self, handler: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        _INSIDE.ops.append(self)
        try:
            out = handler(*args, **kwargs)
        finally:
            _INSIDE.ops.pop()
        plain = [str(tuple(one.shape)) for one in flatten(out) if type(one) is not ShardTensor]
        if plain:
            raise ShardTypeError(
                f"the handler of {self.name}", f"it returned {len(plain)} plain tensors",
                "a handler gets ShardTensors and returns ShardTensors, whose layouts say "
                "what each rank holds", [f"shape {shape}" for shape in plain],
                "ShardTensor.from_local(local, x.device_mesh, x.sharding)")
        return out

    def in_order(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments in the order of the signature: a rule counts tensors."""
        if isinstance(self.target, OpOverload):
            return with_defaults(self.target, args, kwargs)
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            return bound.args, bound.kwargs
        named = [name for name, value in kwargs.items() if flatten(value)]
        if named:
            raise ShardTypeError(
                f"{self.name}(...)", f"{len(named)} tensors are given by name, and the op "
                "does not say where they stand", "a rule counts the tensors of a call",
                named, "give tensors by position")
        return args, kwargs


class _Inside(threading.local):
    def __init__(self) -> None:
        self.ops: list[Own] = []


_INSIDE = _Inside()
"""The ops whose handlers run now: calls of theirs mean what they would mean without."""

OWN: dict[Any, Own] = {}
"""By what users call: the function, the autograd.Function, the op."""


def is_sharded(*trees: Any) -> bool:
    """Whether there is a ShardTensor in nested arguments."""
    return any(type(tensor) is ShardTensor for tensor in flatten(trees))


def rule_of(func: Any) -> OwnFunction | None:
    """The registered function that `func` is or is called by, if it has a rule."""
    if type(func) is OwnFunction:
        return func if func.rule is not None else None
    own = OWN.get(func)
    return None if own is None or own.function.rule is None else own.function


def keys_of(target: Any) -> list[Any]:
    """The objects by which an op is called: itself, its overloads, the packet of its only
    overload."""
    if isinstance(target, OpOverloadPacket):
        return [target, *(getattr(target, name) for name in target.overloads())]
    if isinstance(target, OpOverload) and len(target.overloadpacket.overloads()) == 1:
        return [target, target.overloadpacket]
    return [target]


def handled(overload: OpOverload, func: Any = None) -> bool:
    """Whether the op that `func` consists of is to go to its handler."""
    own = OWN.get(overload)
    return own is not None and own.handler is not None and own.function is not func
