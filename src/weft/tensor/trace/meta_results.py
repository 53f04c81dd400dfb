"""Results of ops on meta tensors, for ops where torch's meta kernel is slow or wrong.

Some meta kernels are decompositions in Python. They take most of the first call of `cross_entropy`
or `scaled_dot_product_attention`. The entries of such ops give the result in plain cases, where
nothing can be wrong. Other cases, errors among them, are left to torch. Strides are those of the
device's kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

from weft import ops
from weft.tensor.trace.trees import map_tensors

__all__ = ["AsKernels", "asks_device", "has_meta_kernel", "known_result"]


def known_result(overload: Any, args: Any, kwargs: Any) -> Any:
    """A meta tensor like the op's result, or several; None if torch's meta kernel has to run."""
    if torch.is_grad_enabled() or overload._schema.is_mutable:
        return None
    entry = ops.find_exactly(str(overload))
    return None if entry is None or entry.result is None else entry.result(*args, **kwargs)


_META_KEYS = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd",
              "CompositeExplicitAutogradNonFunctional")


@functools.cache
def has_meta_kernel(overload: Any) -> bool:
    """Whether torch can run the op on meta tensors; a function in Python it can."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not isinstance(overload, OpOverload) or any(
        has_kernel(overload.name(), key) for key in _META_KEYS
    )


@functools.cache
def asks_device(overload: Any, turned: bool, empty: bool) -> bool:
    """Whether strides or dtypes of the op's results depend on the device: torch's meta kernels
    assume a GPU.

    `turned`: of operands that do not all lie row by row. `empty`: of operands without elements, of
    which most decompositions cannot tell, as they divide by lengths.
    """
    name, laid = overload._schema.name, _LAID.get(overload, "")
    if empty:
        return laid == "by device, empty too"
    return (
        laid.startswith("by device") or name.startswith(("aten::fft_", "aten::_fft_"))
        or (turned and name.startswith((
            "aten::conv", "aten::_conv", "aten::group_norm", "aten::native_group_norm",
        )))
    )


class AsKernels(TorchDispatchMode):
    """Gives results on meta tensors the strides that the device's kernels give them.

    Torch's meta kernels of many ops are references in Python, which lay results out by rules of
    their own. A mode sees the ops that others consist of, too. Where all operands are contiguous
    the references agree with the kernels, and the mode is not needed.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.on_cpu = device_type == "cpu"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        laid = _LAID.get(func, "")
        if laid == "contiguous" or (self.on_cpu and laid == "contiguous on cpu") or (
            laid == "contiguous if complex" and args[0].is_complex()
        ):
            return map_tensors(_contiguous, out)
        if self.on_cpu and laid == "channels last on cpu" and (
            func is not _aten.roll.default or (len(args) > 2 and args[2])  # else of one dim
        ):
            return torch.empty_like(out, memory_format=suggest_memory_format(args[0]))
        if laid == "as a product with a power":
            args = _factors(*args)
        elif not _is_elementwise(func):
            return out
        return _laid_like_sum(out, args, laid == "elementwise, last first")


def _contiguous(one: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(one, memory_format=torch.contiguous_format)


def _factors(x: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ldexp multiplies: of float32 and floats, and of integers, powers that lie row by row."""
    exact = x.is_floating_point() or x.is_complex()
    if x.dtype is torch.float32:
        exact = not (exponents.is_floating_point() or exponents.is_complex())
    return x, exponents if exact else _contiguous(exponents)


def _laid_like_sum(out: torch.Tensor, args: Any, turned: bool) -> torch.Tensor:
    """`out` in memory as TensorIterator lays results of these operands: so it does for sums."""
    operands = [one for one in args if isinstance(one, torch.Tensor)]
    if len(operands) not in (2, 3):
        return out
    if turned:
        operands.reverse()
    like = (torch.add if len(operands) == 2 else torch.addcmul)(*operands)
    if like.shape != out.shape:
        return out
    return torch.empty_strided(like.shape, like.stride(), dtype=out.dtype, device=out.device)


@functools.cache
def _is_elementwise(overload: Any) -> bool:
    """Whether its kernels go by TensorIterator over all operands, and its meta kernel does not."""
    laid = _LAID.get(overload, "")
    if laid == "elementwise":
        return True
    return (
        torch.Tag.pointwise in overload.tags and torch._C.DispatchKey.Meta in overload.py_kernels
        and not any(one.alias_info for one in overload._schema.returns)
        and laid != "as told"
    )


_aten: Any = torch.ops.aten

_LAID: dict[Any, str] = {
    **dict.fromkeys((
        _aten.linalg_eig.default, _aten.linalg_svd.default, _aten._linalg_svd.default,
        _aten.svd.default,
    ), "by device, empty too"),
    **dict.fromkeys((
        _aten.native_layer_norm.default, _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats,
        _aten._batch_norm_with_update.default,
    ), "by device"),
    **dict.fromkeys((
        _aten.pow.Scalar, _aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar,
        _aten.rrelu_with_noise.default,
    ), "contiguous"),
    _aten.log_sigmoid_forward.default: "contiguous on cpu",
    _aten.angle.default: "contiguous if complex",
    **dict.fromkeys((
        _aten.reflection_pad2d.default, _aten.reflection_pad3d.default,
        _aten.replication_pad2d.default, _aten.replication_pad3d.default, _aten.roll.default,
        _aten.pixel_shuffle.default, _aten.channel_shuffle.default,
        _aten.native_channel_shuffle.default,
    ), "channels last on cpu"),
    # Elementwise ops that torch does not tag so.
    **dict.fromkeys(
        (_aten.floor_divide.default, _aten.complex.default, _aten.polar.default), "elementwise"),
    _aten.threshold_backward.default: "elementwise, last first",
    _aten.ldexp.Tensor: "as a product with a power",
    # They bring an operand to the result's shape or dtype before, as their meta kernels know.
    **dict.fromkeys((_aten.masked_fill.Scalar, _aten.where.self), "as told"),
}
"""How kernels lay out results where torch's meta kernels say otherwise. "channels last": where the
first operand has them, else contiguous; "last first": the last operand is asked before the others.
It is about torch's kernels, those inside other ops too, so it stands here and not in the book."""
