"""Collectives of torch.distributed, which take a rank's own tensors: on ShardTensors they raise.
So do ops that reach torch's dispatcher below autograd, where a ShardTensor has no data.

Collectives reach weft in four ways. Functions of torch.distributed are replaced
(`weft.interop.wrappers`), because most pass lists of tensors to C++, which would read the
wrappers' memory. Ops of c10d arrive at `__torch_function__` or, in lists, at the trap below
autograd. Functions of torch.distributed.nn are autograd Functions.

A plain tensor to which a ShardTensor was added (`total += loss`) holds a global value, too, until
something else is written to it. So do all tensors in the forward of a user's autograd Function on
full tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from weft.core.scopes import setting
from weft.errors import UnsupportedOpError

__all__ = [
    "Mixing", "beneath", "check_mixing", "filled", "function_of", "is_global", "on_full", "refusal",
    "refusal_of_plain", "refused_below_autograd", "sends",
]

_FILLED: Any = WeakTensorKeyDictionary()
"""Plain tensors that were last written to with a global value -> their version then."""

_NAMESPACES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional")
)


def sends(func: Any) -> bool:
    """Whether a function, op or autograd Function is a collective of torch's."""
    packet = getattr(func, "overloadpacket", func)  # an overload's is torch.ops.<space>.<name>
    name = getattr(packet, "_qualified_op_name", None)
    if name is not None:
        return name.partition("::")[0] in _NAMESPACES
    module = getattr(func, "__module__", None) or ""
    return module in ("torch.distributed.nn.functional", "torch.distributed.distributed_c10d")


def filled(target: torch.Tensor) -> None:
    """Remember that a plain tensor was written to with a global value."""
    if not target.is_inference():
        _FILLED[target] = target._version


class _Thread(threading.local):
    function: str | None = None


_thread = _Thread()


class Mixing(UnsupportedOpError):
    """A ShardTensor is used inside of `on_full`."""


def check_mixing(op: str) -> None:
    """Raise `Mixing` inside of `on_full`."""
    if _thread.function is not None:
        raise Mixing(
            f"{_thread.function}.apply", f"its forward was given full tensors, and calls "
            f"{op} on a ShardTensor", "a Function uses ShardTensors beside its arguments "
            "only without a rule", [op],
            f"without weft.register_rule({_thread.function}, ...)")


def on_full(name: str) -> AbstractContextManager[None]:
    """Inside runs the forward of a Function of this name, on full tensors."""
    return setting(_thread, function=name)


def beneath() -> AbstractContextManager[None]:
    """Inside are weft's own uses of ShardTensors, in whatever Function they are."""
    return setting(_thread, function=None)


def function_of() -> str | None:
    """The name of the Function whose forward runs on full tensors; None where none does."""
    return _thread.function


def is_global(plain: torch.Tensor) -> bool:
    """Whether a plain tensor is known to hold a global value."""
    return bool(_FILLED) and plain in _FILLED and _FILLED[plain] == plain._version


def refusal(func: Any, layouts: Iterable[object]) -> UnsupportedOpError:
    """The error of a collective of torch's that was given ShardTensors of these layouts."""
    call = _name(func)
    return UnsupportedOpError(
        f"{call}(...)", "a ShardTensor is among its arguments",
        "a ShardTensor is one global value, the same on all ranks: there is nothing to "
        "reduce, gather or send", list(dict.fromkeys(map(str, layouts))),
        "leave the call out: x.item() and x.full_tensor() give the global value on every "
        f"rank\n{_METRICS}\nof this rank's own block: {call}(x.to_local(), ...)")


def refusal_of_plain(func: Any, tensor: torch.Tensor) -> UnsupportedOpError:
    """The error of a collective of torch's that was given a plain tensor of global value."""
    call, function = _name(func), function_of()
    facts = "a plain tensor is among its arguments that was last written to with the value of a " \
        "ShardTensor (as by total += loss)"
    if function is not None:
        facts = f"it is called in {function}.forward, which was given full tensors for ShardTensors"
    return UnsupportedOpError(
        f"{call}(...)", facts,
        "the value of a ShardTensor is global, the same on all ranks: there is nothing to "
        "reduce, gather or send", [f"shape {tuple(tensor.shape)}, {tensor.dtype}"],
        f"leave the call out: the tensor is the same on every rank\n{_METRICS}\n"
        f"if it is not: {call}(x.clone(), ...)")


_METRICS = "torchmetrics, whose metrics gather by themselves: Metric(..., sync_on_compute=False)"


def _name(func: Any) -> str:
    return f"torch.distributed.{getattr(func, '__name__', str(func)).lstrip('_')}"


_ASKED_BY = {
    "aten.detach.default": " (as of torch.tensor(x))",
    "aten._to_copy.default": " (as of torch.as_tensor(x, dtype), torch.asarray(x, dtype))",
    "aten.clone.default": " (as of torch.asarray(x, copy=True))",
    "aten.alias.default": " (as of torch.Tensor(x), x.as_subclass(cls))",
}
"""What torch does not show `__torch_function__`."""


def refused_below_autograd(func: Any, types: Iterable[type]) -> UnsupportedOpError:
    if sends(func):
        return refusal(func, [])
    kinds = [str(kind.__name__) for kind in types]
    if "sparse_" in str(func):
        return UnsupportedOpError(
            f"{func} (as of torch.sparse_coo_tensor)", "a ShardTensor holds indices or values",
            "ShardTensors are dense, and so is what a sparse tensor is made of on each rank", kinds,
            "torch.sparse_coo_tensor(indices, x.full_tensor(), size), of plain indices\n"
            "a dense one: weft.zeros(size, mesh=mesh).index_put(tuple(indices), x)")
    return UnsupportedOpError(
        f"{func}{_ASKED_BY.get(str(func), '')}",
        "a ShardTensor reached torch's dispatcher below autograd",
        "weft intercepts above autograd; forward AD, torch.jit, torch.tensor(x), some of "
        "torch.func and tensor classes of other libraries pass it by", kinds,
        "use the tensor method (x.clone(), x.detach(), x.to(dtype)), or x.full_tensor() "
        "and plain torch\n"
        "of torch.func: vmap, grad, vjp, jvp, jacrev, jacfwd and hessian, with the "
        "ShardTensors as arguments")
