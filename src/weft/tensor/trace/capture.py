"""Captures the ATen ops that a torch function consists of.

The function runs on meta tensors of global shape with a recorder on torch's pre-dispatch key,
above autograd and above decomposition, so `linear`, `layer_norm` and
`scaled_dot_product_attention` stay whole. torch keeps the stack of such modes in one global
object, hence the lock. 0.02 to 1 ms a function, against 4 to 27 ms of make_fx.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload, _pop_mode_from_pre_dispatch, _set_mode_pre_dispatch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import UnsupportedOpError
from weft.tensor.meta import contiguous_strides, dense
from weft.tensor.trace import casts
from weft.tensor.trace.meta_results import AsKernels, asks_device, known_result
from weft.tensor.trace.taken_dtypes import check_dtypes
from weft.tensor.trace.trees import Slot, flatten, map_tensors

__all__ = [
    "NotCapturable", "Op", "Trace", "as_autocast", "asks_for_grad", "capture", "check_dense",
    "meta_like", "reshaped", "shape_at", "unsaved", "unseen_meta", "unwatched",
    "with_defaults",
]

_LOCK = threading.Lock()
_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_num_modes: Any = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


_OF_META = ("meta tensor", "Meta", " meta ", "no fake impl", "not allocated yet")
"""Words of errors of which meta tensors are the cause."""


_OF_FAKES = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise of data that they have not."""


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded ATen call; tensors are Slots in `args`, `kwargs` and `results`."""

    overload: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any


class NotCapturable(Exception):
    """The function needs the data itself: its result's size or value depends on it.

    `op` is what could not be recorded, without results, if nothing came before it.
    """

    def __init__(self, reason: str, op: Op | None = None) -> None:
        super().__init__(reason)
        self.op = op

    def alone(self) -> NotCapturable:
        """The same without frames, whose tensors would live as long as a frame that keeps it."""
        return NotCapturable(str(self), self.op)


@dataclass(frozen=True, slots=True)
class Trace:
    """The ops of a function, its result, and every tensor's meta tensor, by slot.

    The first slots are the function's tensor arguments, in order.
    """

    ops: tuple[Op, ...]
    result: Any
    metas: tuple[torch.Tensor, ...]


def unwatched() -> AbstractContextManager[Any]:
    """Others' TorchDispatchModes (selective checkpoints, counters) are not shown meta tensors."""
    return _disable_current_modes() if _num_modes() else nullcontext()


def unsaved() -> AbstractContextManager[Any]:
    """Hooks on saved tensors, of the user and of checkpoints, are not shown meta tensors."""
    if not _autograd._saved_tensors_hooks_is_enabled():  # so that there are none
        return nullcontext()
    # A result that is saved with its history would keep the graph that keeps it.
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda kept: kept)


class _Recorder(SchemaCheckMode):
    """A pre-dispatch mode that writes down each op and runs it (torch only asks for the class)."""

    def __init__(self, device_type: str) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.last: tuple[Any, Any, Any] | None = None
        self.device_type = device_type
        self.autocast = torch.is_autocast_enabled(device_type)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch would import its compiler at the first call of each process, over a
        second."""
        return False

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
        if self.autocast and has_kernel(name, f"Autocast{self.device_type.upper()}"):
            return self._as_there(func, args, kwargs)
        has_parts = self.autocast and has_kernel(name, "CompositeImplicitAutograd") and not any(
            one.alias_info is not None for one in func._schema.returns
        )
        known = None if has_parts else known_result(func, args, kwargs)
        if known is not None:
            return known
        turned, first = _any_turned(args, kwargs), args[0] if args else None
        if asks_device(func, turned, isinstance(first, torch.Tensor) and not first.numel()):
            return self._as_there(func, args, kwargs)
        try:
            out = self._meta_result(func, args, kwargs, turned)
        except RuntimeError:  # of dtypes that differ, unless its parts cast
            if not has_parts:
                raise
            return self._as_there(func, args, kwargs)
        if not has_parts:
            return out
        cast = self._as_there(func, args, kwargs)  # of what it consists of, something may cast
        return out if _dtypes(cast) == _dtypes(out) else cast

    def _meta_result(self, func: Any, args: Any, kwargs: Any, turned: bool) -> Any:
        if kwargs.get("generator") is not None:  # nothing is drawn here, and some ops refuse one
            kwargs = {**kwargs, "generator": None}
        with AsKernels(self.device_type) if turned else nullcontext():
            return func(*args, **kwargs)

    def _as_there(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op's result on the device meant, whose autocast and strides meta tensors do not
        know: by fake tensors. A torch without CUDA, or without a driver, refuses some ops
        (`grid_sampler`): the CPU's autocast then stands for CUDA's."""
        kind = self.device_type
        try:
            return _on_fakes(func, args, kwargs, kind)
        except (RuntimeError, AssertionError) as error:
            named = any(one in str(error) for one in ("cuda", "CUDA", "NVIDIA"))
            if kind != "cuda" or torch.cuda.is_available() or not named:
                raise
            with torch.autocast("cpu", torch.get_autocast_dtype(kind), self.autocast):
                return _on_fakes(func, args, kwargs, "cpu")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.last = func, args, kwargs
        with torch._C._DisablePythonDispatcher():
            out = self._result(func, args, kwargs)
        if func.overloadpacket is _POW and out.dtype is torch.int64:
            out = out.to(torch.result_type(*args))  # torch's meta kernel takes bools for integers
        self.calls.append((func, args, kwargs, out))
        return out

    def first(self, inputs: Sequence[torch.Tensor]) -> Op | None:
        """The op that was to be recorded when there was none yet, of the function's inputs."""
        if self.calls or self.last is None:
            return None
        overload, args, kwargs = self.last
        slots = {id(tensor): Slot(at) for at, tensor in enumerate(inputs)}
        args, kwargs = with_defaults(overload, args, kwargs)
        if any(id(tensor) not in slots for tensor in flatten((args, kwargs))):
            return None
        args, kwargs = map_tensors(lambda tensor: slots[id(tensor)], (args, kwargs))
        return Op(overload, args, kwargs, None)


def _on_fakes(func: Any, args: Any, kwargs: Any, device: str) -> Any:
    """The op's result on a device, as meta tensors."""
    def like(device: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )

    there = partial(like, device)
    with FakeTensorMode():
        out = func(*map_tensors(there, args), **map_tensors(there, kwargs))
    return map_tensors(partial(like, "meta"), out)


_POW = torch.ops.aten.pow


def _any_turned(args: Any, kwargs: Any) -> bool:
    """Whether a tensor does not lie row by row, dims of length 1 and all: they may be broadcast."""
    return any(
        one.layout is torch.strided and one.stride() != contiguous_strides(one.shape)
        for one in flatten((args, kwargs))
    )


def as_autocast(
    function: Callable[..., Any], dtype: torch.dtype | None, device_type: str,
    results: bool = True,
) -> Callable[..., Any]:
    """A function that replaces a whole op, as autocast runs the op: operands are cast once, and no
    policy applies inside.

    Operands come to `dtype`, which autocast gives the op's result, and so do the results, if they
    are not left as they are; float64 ones stay. `function` is its `__wrapped__`.
    """
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
            return tensor
        return casts.cast(tensor, dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            out = function(*map_tensors(cast, args), **map_tensors(cast, kwargs))
            return map_tensors(cast, out) if results else out

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def _dtypes(tree: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in flatten(tree)]


def capture(
    func: Callable[..., Any], args: Any, kwargs: Any, metas: Sequence[torch.Tensor],
    device_type: str = "cpu", grad: bool = False, has_kernels: bool = False,
) -> Trace:
    """Run `func` on meta tensors (`metas` lists those in `args`, in order) and record its ops;
    NotCapturable if it reads values.

    `device_type` is that of the tensors meant; its autocast applies. `grad`: with autograd as it
    is, for functions that ask about it. `has_kernels`: the ops will run by kernels of the CPU,
    which are asked whether they take the dtypes.
    """
    recorder = _Recorder(device_type)
    with _LOCK, unsaved() if grad else torch.no_grad(), unwatched():
        _set_mode_pre_dispatch(recorder)
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch._C._EnablePythonDispatcher():
                result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise NotCapturable(_said(error), recorder.first(metas)) from error
        except RuntimeError as error:
            if isinstance(error, _OF_FAKES) or any(said in str(error) for said in _OF_META):
                raise NotCapturable(_said(error), recorder.first(metas)) from error
            raise
        finally:
            _pop_mode_from_pre_dispatch()
        if has_kernels and not recorder.autocast:
            check_dtypes(recorder.calls)
    trace = _trace(recorder.calls, result, metas)
    if grad:
        with unwatched():
            metas = [meta.detach() for meta in trace.metas]
        trace = Trace(trace.ops, trace.result, tuple(metas))
    return trace


def asks_for_grad(func: Any) -> bool:
    """Whether a Python function checks if a gradient is needed, so that its ops may differ."""
    code = getattr(func, "__code__", None)
    return code is not None and "requires_grad" in code.co_names


_RESHAPES = {
    torch.Tensor.view: torch.ops.aten.view.default,
    torch.Tensor.reshape: torch.ops.aten.reshape.default,
}
"""Methods that are one op whatever the numbers, and whose meta kernel costs nothing: recording
them would be most of what a new size costs."""


def reshaped(func: Any, args: Any, tensor: torch.Tensor) -> Trace | None:
    """The trace of `view` and `reshape` with numbers, without recording; None for other calls."""
    overload = _RESHAPES.get(func)
    if overload is None:
        return None
    size = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not size or not all(type(length) is int for length in size):
        return None
    meta = meta_like(tensor)
    with torch.no_grad(), unwatched():
        out = overload(meta, list(size))
    return Trace((Op(overload, (Slot(0), list(size)), {}, Slot(1)),), Slot(1), (meta, out))


def _trace(calls: Sequence[Any], result: Any, inputs: Sequence[torch.Tensor]) -> Trace:
    slots: dict[int, Slot] = {}
    metas: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> Slot:
        known = slots.get(id(tensor))
        if known is None:
            check_dense(tensor)
            known = slots[id(tensor)] = Slot(len(metas))
            metas.append(tensor)
        return known

    def used_slot(tensor: torch.Tensor) -> Slot:
        # torch's factory functions hand out a new tensor over what the op returned.
        if id(tensor) not in slots:
            for index, meta in enumerate(metas[len(inputs) :], start=len(inputs)):
                if _same_memory(tensor, meta):
                    return Slot(index)
            raise NotCapturable("it makes a tensor of numbers")
        return slots[id(tensor)]

    for tensor in inputs:
        slots[id(tensor)] = Slot(len(metas))
        metas.append(tensor)
    ops = []
    for overload, args, kwargs, out in calls:
        full_args, full_kwargs = with_defaults(overload, args, kwargs)
        ops.append(
            Op(
                overload,
                map_tensors(used_slot, full_args),
                map_tensors(used_slot, full_kwargs),
                map_tensors(slot, out),
            )
        )
    return Trace(tuple(ops), map_tensors(used_slot, result), tuple(metas))


def _said(error: Exception) -> str:
    """The reason in a few words; it does not mention meta tensors, which users do not see."""
    text = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    if "item()" in text or "_local_scalar_dense" in text:
        return "it reads a number by item()"
    of_meta = isinstance(error, _OF_FAKES) or any(said in text for said in _OF_META)
    return "torch cannot tell its result without the data" if of_meta else text


def check_dense(tensor: torch.Tensor, call: str = "an op") -> None:
    """Raise UnsupportedOpError where a result of a call is sparse, nested, quantized, or of some
    library's own format."""
    if not dense(tensor) or tensor.is_quantized:
        shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
        form = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedOpError(
            call, f"its result{shape} is {tensor.dtype} of {form}",
            "ShardTensors are dense and not quantized", [form],
            "the op on x.to_local(), or on x.full_tensor()")


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.shape, one.stride(), one.dtype, one.storage_offset())
        == (other.shape, other.stride(), other.dtype, other.storage_offset())
    )


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the tensor's (global) shape, strides and dtype."""
    return unseen_meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def unseen_meta(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A meta tensor that others' TorchDispatchModes do not see made."""
    with unwatched():
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def shape_at(shape: Sequence[int], index: Any) -> torch.Size:
    """The shape of `x[index]`, with torch's errors; others' TorchDispatchModes see nothing."""
    with unwatched():
        return torch.empty(tuple(shape), device="meta")[index].shape


@cache
def _schema(overload: OpOverload) -> tuple[list[Any], dict[str, Any]]:
    arguments = overload._schema.arguments
    positional = [(a.name, a.default_value) for a in arguments if not a.kwarg_only]
    keywords = {a.name: a.default_value for a in arguments if a.kwarg_only}
    return positional, keywords


def with_defaults(overload: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of the op's schema: positional ones in order, keyword-only ones by name."""
    if not isinstance(overload, OpOverload):
        return tuple(args), dict(kwargs)
    positional, keywords = _schema(overload)
    full = list(args)
    for name, default in positional[len(args) :]:
        full.append(kwargs.get(name, default))
    return tuple(full), {name: kwargs.get(name, default) for name, default in keywords.items()}
