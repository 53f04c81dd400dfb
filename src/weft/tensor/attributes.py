"""Functions without a recipe: attributes, conversions, autograd's borders, refusals.

`TABLE` maps a function to its handler. Metadata is read from the wrapper, which has the global
shape, dtype and strides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from weft.comm import check_device_type
from weft.errors import UnsupportedOpError
from weft.tensor.call.dispatch import call, keep_constant
from weft.tensor.grad import autograd, clipping, hooks
from weft.tensor.meta import intern
from weft.tensor.modes import check_traced
from weft.tensor.placing.storage import Storage, memory_refused
from weft.tensor.shard_tensor import ShardTensor, watch_gradient, wrap
from weft.tensor.trace.trees import local_of, map_tensors

__all__ = ["TABLE", "other_device"]

_Tensor: Any = torch.Tensor
_parse_to: Any = torch._C._nn._parse_to  # type: ignore[attr-defined]

_METADATA = (
    "dim", "ndimension", "numel", "nelement", "size", "stride", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "dim_order",
    "is_sparse", "is_sparse_csr", "is_mkldnn", "is_quantized", "is_distributed", "result_type",
    "is_nested", "is_xpu", "is_mps", "is_ipu", "is_maia", "is_mtia", "is_vulkan", "is_xla",
    "itemsize", "nbytes", "names", "name", "_base", "grad_dtype",
)

_OF_LOCAL = (
    "retains_grad", "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "_cdata",
    "is_conj", "is_inference", "is_neg", "is_pinned", "is_set_to",
)
"""Facts of the local tensor that no meta holds."""

_OWN_METHODS = (
    "__array__", "__array_wrap__", "__bool__", "__complex__", "__deepcopy__", "__float__",
    "__format__", "__index__", "__int__", "__len__", "__reduce_ex__", "__repr__", "backward",
    "detach", "item", "numpy", "requires_grad_", "set_", "tolist",
)
"""Methods of the class, for calls as `torch.Tensor.item(x)`."""

_OWN_ATTRIBUTES = (
    "_version", "data", "device", "dtype", "grad", "grad_fn", "is_leaf", "is_meta", "ndim",
    "requires_grad", "shape",
)

_REFUSED = {
    "storage_type": "no single storage holds a global tensor",
    "storage_offset": "no single storage holds a global tensor",
    "__dlpack__": "no single storage holds a global tensor",
    "__dlpack_device__": "no single storage holds a global tensor",
    "as_strided_": "strides of the global tensor do not describe local memory",
    "resize_": "the op would change the shape in place",
    "resize_as_": "the op would change the shape in place",
    "share_memory_": "a rank's block cannot be shared with processes of another mesh position",
    "apply_": "torch runs a Python function over the memory of one tensor",
    "map_": "torch runs a Python function over the memory of one tensor",
    "map2_": "torch runs a Python function over the memory of one tensor",
}


class Metadata:
    """Reads the wrapper. The answer depends on the meta alone, so the short route keeps it."""

    __slots__ = ("func",)

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = self.func(*args, **kwargs)
        if len(args) == 1 and not kwargs and type(args[0]) is ShardTensor:
            keep_constant(self.func, args[0], value)
        return value


def _refusal(name: str, reason: str) -> Callable[..., Any]:
    def refuse(tensor: Any, *args: Any, **kwargs: Any) -> NoReturn:
        check_traced(name)  # a tracer asks what memory its arguments have
        sharded = next(one for one in (tensor, *args) if type(one) is ShardTensor)
        raise UnsupportedOpError(
            f"{name}()", f"{reason}; the tensor is {sharded.sharding}",
            "what reads or changes memory layout works on local tensors", [name],
            f"x.to_local().{name}(...)")

    return refuse


def _memory(name: str) -> Callable[..., Any]:
    def refuse(tensor: ShardTensor) -> NoReturn:
        check_traced(name)  # a tracer asks what memory its arguments have
        raise memory_refused(name, tensor)

    return refuse


def _on_local(func: Any) -> Callable[..., Any]:
    """The function of local tensors."""
    return lambda *args: func(*map_tensors(local_of, args))


def _retain_grad(tensor: ShardTensor) -> None:
    watch_gradient(tensor)
    tensor._local.retain_grad()


def _detach_(tensor: ShardTensor) -> ShardTensor:
    tensor._local.detach_()
    tensor._meta = tensor._meta.replace(requires_grad=False)
    if tensor._memo is not None:
        tensor._memo.clear()
    return tensor


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`to` in all its forms. On another device the mesh is that of the same ranks there."""
    if type(tensor) is not ShardTensor:  # plain.to(sharded): the other's dtype and device
        return tensor.to(*map(_dtype_of, args), **kwargs)
    if isinstance(kwargs.get("other"), torch.Tensor):
        args = (kwargs.pop("other"),)
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].dtype, *args[1:])
    place = 2 if args and isinstance(args[0], torch.dtype) else 3  # of copy
    copy = kwargs.pop("copy", False) or (len(args) > place and bool(args[place]))
    device, dtype, _, memory_format = _parse_to(*args[:place], **kwargs)
    if memory_format is torch.preserve_format:
        memory_format = None
    more = {} if memory_format is None else {"memory_format": memory_format}
    if device is not None and device.type != tensor.device.type:
        if device.type != "meta":
            return _to_device(_to(tensor, dtype, **more) if dtype else tensor, device)
        return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)
    if dtype in (None, tensor.dtype) and not copy and not more:
        return tensor
    return call(torch.ops.aten.to.dtype, (tensor, dtype or tensor.dtype, False, copy), more)


def _to_device(tensor: ShardTensor, device: torch.device) -> ShardTensor:
    """The blocks of all ranks on another device."""
    meta = tensor._meta
    if tensor.is_meta:
        raise other_device("to(device)", tensor, device)
    check_device_type(device.type, "to(device)", 'to("cpu")')
    mesh = meta.mesh.world.bind(meta.mesh, device.type, meta.mesh.origin)
    local = local_of(tensor).to(mesh.device)
    return wrap(local, intern(
        mesh, meta.layout, meta.dtype, mesh.device, local.requires_grad, meta.strides,
        varying=meta.varying,
    ))


def other_device(call: str, tensor: ShardTensor, device: torch.device) -> UnsupportedOpError:
    if tensor.is_meta and device.type == tensor._meta.mesh.device.type:
        fix = f'module.to_empty(device="{device.type}"), or weft.nn.materialize(module)'
        rule = "a tensor on the meta device has no values to bring along"
    else:
        fix = f'weft.init_mesh(..., device_type="{device.type}") and distribute onto it'
        rule = "a ShardTensor lives on its mesh's device type"
    return UnsupportedOpError(
        call, f"the tensor is on {tensor.device.type}, asked for is {device}", rule,
        [str(device)], fix)


def _dtype_of(value: Any) -> Any:
    return value.dtype if type(value) is ShardTensor else value


def _type(tensor: ShardTensor, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
    """`type` with a dtype, or torch's old types by class or name ("torch.FloatTensor")."""
    if dtype is None:
        return tensor._local.type()
    if isinstance(dtype, torch.dtype):
        return _to(tensor, dtype)
    meant = tensor._local.detach().new_empty(0).type(dtype)
    return _to(tensor, meant.device.type, meant.dtype)


def _make_dual(tensor: Any, tangent: Any, level: int) -> NoReturn:
    raise UnsupportedOpError(
        "forward_ad.make_dual(x, tangent)", "of x and tangent at least one is a "
        "ShardTensor", "forward AD by itself does not reach through communication",
        [str(one.sharding) for one in (tensor, tangent) if type(one) is ShardTensor],
        "torch.func.jvp(fn, (x,), (tangent,)), or make_dual with x.full_tensor()")


def _add_batch_dim(tensor: Any, in_dim: int, level: int) -> NoReturn:
    raise UnsupportedOpError(
        "vmap", f"an argument is a ShardTensor {tensor.sharding}",
        "vmap does not reach local tensors", [str(tensor.sharding)],
        "write the batch dim out: ops on ShardTensors take it as it is")


def _unpack_dual(tensor: ShardTensor, level: int) -> tuple[ShardTensor, ShardTensor | None]:
    """Unpack a dual tensor: the local tensor may be dual, if `from_local` got one."""
    primal, tangent = torch._VF._unpack_dual(local_of(tensor), level)  # type: ignore
    if tangent is None:
        return tensor, None
    meta = tensor._meta
    if not {"sum", "avg", None} >= set(meta.layout.partial):
        raise UnsupportedOpError(
            "forward_ad.unpack_dual(x)", f"x is {meta.layout}, its local tensor dual",
            "partial sums have tangents that are partial sums, other kinds have none",
            [str(meta.layout)], "forward_ad.unpack_dual(x.to_local())")
    return wrap(primal, meta), wrap(tangent, meta.replace(requires_grad=tangent.requires_grad))


def _resolved(is_lazy: str) -> Callable[[ShardTensor], ShardTensor]:
    """`resolve_conj` and `resolve_neg`: a copy is resolved. No meta says what is lazy."""
    return lambda input: input.clone() if getattr(local_of(input), is_lazy)() else input


def _can_take_data(tensor: Any, other: Any) -> bool:
    """Whether `tensor.data = other` is possible; `Module.to` asks for this."""
    if type(tensor) is not ShardTensor:
        return type(other) is not ShardTensor
    if type(other) is not ShardTensor or tensor._meta.mesh.device == other._meta.mesh.device:
        return True
    return torch._has_compatible_shallow_copy_type(local_of(tensor), local_of(other))


def _functions(name: str) -> list[Any]:
    """The method, or the getter of the attribute, and torch's function; those that this torch
    has."""
    found = [getattr(owner, name) for owner in (_Tensor, torch) if hasattr(owner, name)]
    return [one.__get__ if hasattr(one, "__set__") else one for one in found]


def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        function: handler(function)
        for names, handler in ((_METADATA, Metadata), (_OF_LOCAL, _on_local))
        for name in names for function in _functions(name)
    }
    for name, is_lazy in (("resolve_conj", "is_conj"), ("resolve_neg", "is_neg")):
        table |= dict.fromkeys(_functions(name), _resolved(is_lazy))
    for name in _OWN_METHODS:
        table[getattr(_Tensor, name)] = getattr(ShardTensor, name)
    for name in _OWN_ATTRIBUTES:
        theirs, mine = getattr(_Tensor, name), inspect.getattr_static(ShardTensor, name)
        table[theirs.__get__] = mine.fget
        if mine.fset is not None:
            table[theirs.__set__] = mine.fset
        if mine.fdel is not None:
            table[theirs.__delete__] = mine.fdel
    for name, reason in _REFUSED.items():
        table[getattr(_Tensor, name)] = _refusal(name, reason)
    for name in ("const_data_ptr", "data_ptr", "storage"):
        if hasattr(_Tensor, name):  # torch 2.11 lacks the first
            table[getattr(_Tensor, name)] = _memory(name)
    table[_Tensor.untyped_storage] = Storage
    table |= {
        _Tensor.retain_grad: _retain_grad,
        _Tensor.register_hook: hooks.register_hook,
        _Tensor.register_post_accumulate_grad_hook: hooks.register_post_accumulate_grad_hook,
        torch.autograd.grad: autograd.grad,
        _Tensor.detach_: _detach_,
        torch.detach: lambda input: ShardTensor.detach(input),
        torch.ops.aten.detach.default: ShardTensor.detach,
        _Tensor.to: _to,
        _Tensor.is_cpu.__get__: lambda tensor: tensor.device.type == "cpu",
        _Tensor.is_cuda.__get__: lambda tensor: tensor.device.type == "cuda",
        _Tensor.cpu: lambda tensor, memory_format=None: _to(tensor, "cpu"),
        _Tensor.cuda: lambda tensor, *_, **__: _to(tensor, "cuda"),
        _Tensor.type: _type,
        _Tensor.pin_memory: lambda tensor, *_: wrap(tensor._local.pin_memory(), tensor._meta),
        torch._VF._make_dual: _make_dual,  # type: ignore[attr-defined]
        torch._VF._unpack_dual: _unpack_dual,  # type: ignore[attr-defined]
        torch._add_batch_dim: _add_batch_dim,  # type: ignore[attr-defined]
        torch.is_same_size: lambda input, other: input.shape == other.shape,
        _Tensor.is_same_size: lambda input, other: input.shape == other.shape,
        torch.is_nonzero: lambda input: bool(input),
        _Tensor.is_nonzero: ShardTensor.__bool__,
        _Tensor.__nonzero__: ShardTensor.__bool__,
        _Tensor.__long__: ShardTensor.__int__,
        torch._has_compatible_shallow_copy_type: _can_take_data,
        torch._amp_foreach_non_finite_check_and_unscale_: clipping.unscale,
    }
    return table


TABLE = _table()
