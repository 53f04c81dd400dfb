"""A device that is not the CPU: "twin", of torch's private-use kind, whose kernels are the CPU's.

torch keeps its tensors apart from those of the CPU: they do not mix, are not read as numpy arrays,
and gloo does not take them. An op that reaches the device runs on CPU tensors that share the
memory, by DLPack, whose device type is exchanged on the way. Views are made by the CPU's own
kernels, which only look at sizes. `host_reads` counts what makes a program wait for a GPU.

`install` is for a process of its own: a private-use device stays until the process ends.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as trees
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["NAME", "host_reads", "install", "on_cpu"]

NAME = "twin"
_CPU, _PRIVATE = 1, 12
"""Of DLPack."""

_READS = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::masked_select",
    "aten::nonzero",
}
_ANY_INDEX = {"aten::index", "aten::_index_put_impl_", "aten::index_put"}
"""torch itself takes indices from the CPU here."""

_NARROW = ("mm", "bmm", "addmm", "linear", "matmul", "scaled_dot_product_attention")
_WIDE = ("softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss", "layer_norm", "sum")
"""Ops that autocast runs in its dtype, and in float32."""

_native: Any = torch._C
_CPU_KERNEL: Any = _native.DispatchKey.CPU
_libraries: list[torch.library.Library] = []
_seen = threading.local()


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Managed(ctypes.Structure):
    """The beginning of DLPack's structure."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Stream:
    """The only one: what is issued to it is done at once."""

    def wait_stream(self, *other: Any) -> None:
        """It has nothing left to do."""

    synchronize = wait_event = record_event = wait_stream


class _Module:
    """`torch.twin`: one device, one generator, and nothing runs beside the program."""

    default_generators = (torch.Generator(),)

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def current_device(self) -> int:
        return 0

    _is_in_bad_fork = current_device

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        """Nothing is under way."""

    set_device = synchronize

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.default_generators[0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def install() -> None:
    """Give this process the device, once and for all."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.serialization.register_package(5, lambda _: None, _restore)
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in (*_NARROW, *_WIDE):
        op = torch._C._jit_get_operation(f"aten::{name.partition('.')[0]}")[0]
        aten.impl(name, _cast(op, name in _WIDE), "AutocastPrivateUse1")
    for name in _composed():
        aten.impl(name, functools.partial(_run, _overload_of(name)), "PrivateUse1")
    for name in ("convolution", "convolution_backward"):
        kernel = _convolution(getattr(torch.ops.aten, name).default)
        aten.impl(f"{name}_overrideable", kernel, "PrivateUse1")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    for lazy in ("Conjugate", "Negative"):  # torch would resolve them by this very copy
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
    _libraries.extend((every, aten))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The ops of this thread in the block whose result the host has to wait for."""
    _seen.reads = []
    try:
        yield _seen.reads
    finally:
        del _seen.reads


def _note(name: str) -> None:
    getattr(_seen, "reads", []).append(name)


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same memory."""
    return _at(tensor, _CPU)


def _at(tensor: Tensor, kind: int) -> Tensor:
    with _native.DisableTorchFunction():
        capsule = _native._to_dlpack(tensor.detach())
        device = _Managed.from_address(_pointer(capsule, b"dltensor")).device
        device.kind, device.index = kind, 0
        return _native._from_dlpack(capsule)


def _composed() -> set[str]:
    """Ops that the CPU has a kernel for, where torch would otherwise compose others."""
    explicit = "CompositeExplicitAutograd"
    cpu, composed, functional = (
        {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
        for names in map(_native._dispatch_get_registrations_for_dispatch_key,
                         ("CPU", explicit, f"{explicit}NonFunctional"))
    )
    return cpu & (composed | functional)


def _overload_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An op on the device: the CPU's kernel on the same memory."""
    name, is_view = _facts(op)[:2]
    if name in _READS or (name in _ANY_INDEX and _by_mask(args[1])):
        _note(name)
    if name == "aten::_fused_sdp_choice":
        return 0  # no fused kernel: torch composes attention
    if name == "aten::_copy_from":
        if _ours(args[0]) and not _ours(args[1]):
            _note(name)
        source, target = (_resolved(one) if _ours(one) else one for one in args[:2])
        target.copy_(source)
        return args[1]
    if name == "aten::resize_":
        return _resize(*args)
    if is_view:
        return op._op_dk(_CPU_KERNEL, *args, **kwargs)
    return _on_host(op, args, _host_arguments(op, kwargs))


def _to_copy(tensor: Tensor, **options: Any) -> Tensor:
    """torch's own, but it would ask a C++ hook for pinned memory, to copy in the background."""
    options["non_blocking"] = False
    kernel = _native.DispatchKey.CompositeExplicitAutograd
    return torch.ops.aten._to_copy.default._op_dk(kernel, tensor, **options)


def _by_mask(indices: Any) -> bool:
    """Whether a read or write by index has as many elements as a mask has ones."""
    return any(one is not None and one.dtype is torch.bool for one in indices)


def _convolution(op: Any) -> Any:
    """A convolution, which torch calls by another name on a device that it does not know."""
    def convolve(*args: Any) -> Any:
        if op is torch.ops.aten.convolution_backward.default:
            args = (*args[:3], None, *args[3:])  # the bias's sizes
        return _on_host(op, args, {})

    return convolve


@functools.cache
def _facts(op: Any) -> tuple[str, bool, bool, tuple[bool, ...]]:
    """Its name, whether it looks at memory only by sizes, whether it takes a generator, and which
    arguments are tensors."""
    schema = op._schema
    aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
    is_view = schema.name == "aten::set_" or any(not one.is_write for one in aliases)
    draws = "generator" in [one.name for one in schema.arguments]
    return schema.name, is_view, draws, tuple([str(one.type) == "Tensor"
                                               for one in schema.arguments])


def _ours(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == NAME


def _resolved(tensor: Tensor) -> Tensor:
    """The CPU's tensor of the same memory, conjugate and negative as this one."""
    if tensor.is_conj():
        return _resolved(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(_resolved(torch._neg_view(tensor)))
    return _at(tensor, _CPU)


def _host_arguments(op: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if _facts(op)[2] and kwargs.get("generator") is None:
        kwargs["generator"] = _Module.default_generators[0]
    return kwargs


def _on_host(op: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = trees.tree_flatten((args, kwargs))
    real: dict[int, Tensor] = {}
    for place, one in enumerate(flat):
        if _ours(one):
            # What is empty may be resized, which borrowed memory cannot be.
            flat[place] = _resolved(one) if one.numel() else torch.empty_like(one, device="cpu")
            real[id(flat[place])] = one
        elif isinstance(one, Tensor) and one.ndim and _facts(op)[0] not in _ANY_INDEX:
            raise RuntimeError("Expected all tensors to be on the same device, but found at least "
                               f"two devices, {NAME}:0 and {one.device}! ({op})")
    host_args, host_kwargs = trees.tree_unflatten(flat, spec)
    out = _overload(op, host_args)(*host_args, **host_kwargs)
    for one in flat:
        if id(one) in real and one.shape != real[id(one)].shape:
            _take(real[id(one)], one)

    def back(one: Tensor) -> Tensor:
        return real[id(one)] if id(one) in real else _at(one, _PRIVATE)

    return trees.tree_map_only(Tensor, back, out)


def _overload(op: Any, args: Sequence[Any]) -> Any:
    """The op, or all of its name: torch brings a number where the op's own type is a tensor."""
    if any(is_tensor and not isinstance(one, Tensor)
           for is_tensor, one in zip(_facts(op)[3], args)):
        return op.overloadpacket
    return op


def _resize(tensor: Tensor, size: Sequence[int], *_: Any) -> Tensor:
    new = torch.empty(size, dtype=tensor.dtype)
    kept = min(new.numel(), tensor.numel())
    new.flatten()[:kept] = _at(tensor, _CPU).flatten()[:kept]
    return _take(tensor, new)


def _take(tensor: Tensor, new: Tensor) -> Tensor:
    """Give a tensor another memory and shape."""
    held = _at(new, _PRIVATE)
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(
        _CPU_KERNEL, tensor, held.untyped_storage(), held.storage_offset(), held.shape,
        held.stride(),
    )
    return tensor


def _restore(storage: Any, location: str) -> Any:
    """What torch.load found, on the device; torch itself would ask a C++ allocator for memory."""
    if not location.startswith(NAME):
        return None
    return _at(torch.empty(0, dtype=torch.uint8).set_(storage), _PRIVATE).untyped_storage()


def _cast(op: Any, wide: bool) -> Any:
    """An op under autocast."""
    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if wide else torch.get_autocast_dtype(NAME)

        def convert(one: Tensor) -> Tensor:
            real = one.is_floating_point() and one.dtype is not torch.float64
            return one.to(dtype) if real else one

        with torch.autocast(NAME, enabled=False):
            return op(*trees.tree_map_only(Tensor, convert, args),
                      **trees.tree_map_only(Tensor, convert, kwargs))

    return cast
