"""What some ops return, told from their arguments where torch takes a millisecond to find out.

The meta kernels of these ops are decompositions in Python, run whole: most of what the first call
of `cross_entropy` or `scaled_dot_product_attention` costs. A form is told for the plain cases
alone, of which nothing can be wrong; the others, errors among them, are left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

from weft.tensor.trace.trees import map_tensors

__all__ = ["AsKernels", "asks_device", "known_result"]


def known_result(overload: Any, args: Any, kwargs: Any) -> Any:
    """A meta tensor like the op's result, or several; None where torch has to be asked."""
    form = _FORMS.get(overload)
    if form is None or torch.is_grad_enabled():
        return None
    return form(*args, **kwargs)


@functools.cache
def asks_device(overload: Any, turned: bool) -> bool:
    """Whether strides or dtypes of the op's results are a matter of the device that computes it:
    torch's meta kernels take meta tensors to lie on a GPU. `turned`: of operands that do not all
    lie row by row."""
    name = overload._schema.name
    return (
        overload in _BY_DEVICE or name.startswith(("aten::fft_", "aten::_fft_"))
        or (turned and name.startswith((
            "aten::conv", "aten::_conv", "aten::group_norm", "aten::native_group_norm",
        )))
    )


def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    if (
        target.dtype is not torch.int64 or not x.is_floating_point() or x.ndim < 2
        or target.shape != (x.shape[0], *x.shape[2:])
        or (weight is not None and (weight.dtype, weight.shape) != (x.dtype, x.shape[1:2]))
        or reduction not in (0, 1, 2) or not 0.0 <= label_smoothing <= 1.0
    ):
        return None
    return x.new_empty(() if reduction else target.shape)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:
    batch = query.shape[:-2]
    if (
        dropout_p or query.ndim < 3
        or not query.is_floating_point() or query.dtype != key.dtype or key.dtype != value.dtype
        or key.shape[:-2] != value.shape[:-2] or key.shape[-2] != value.shape[-2]
        or query.shape[-1] != key.shape[-1] or 0 in query.shape or 0 in key.shape
        or not (key.shape[:-2] == batch or (enable_gqa and _in_groups(query, key)))
    ):
        return None
    if (
        query.ndim == 4 and query.shape[-1] == value.shape[-1]
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and (attn_mask is None or _masks(attn_mask, query, key))
        and torch.backends.cuda.flash_sdp_enabled()
    ):
        # The fused kernel, whose result lies as the queries do (what torch asks before it takes
        # that: aten/native/transformers/sdp_utils_cpp.cpp). Heads are a view of the features, and
        # to flatten them into features again is a view, too. Torch's meta kernel knows only the
        # composition of matmuls.
        return torch.empty_like(query)
    if attn_mask is not None or enable_gqa:
        return None
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _in_groups(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Several heads of the queries to one of the keys."""
    return (
        query.ndim == key.ndim and query.shape[:-3] == key.shape[:-3]
        and query.shape[-3] % key.shape[-3] == 0
    )


def _masks(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether it is a mask that the fused kernel takes."""
    whole = (*query.shape[:-1], key.shape[-2])
    return (
        mask.dtype in (torch.bool, query.dtype) and mask.ndim in (2, 4)
        and not mask.requires_grad
        and all(mine in (1, other) for mine, other in zip(reversed(mask.shape), reversed(whole)))
    )


def _broadcast(x: torch.Tensor, *others: Any, **_: Any) -> torch.Tensor:
    """Ops of which torch has no meta kernel: like the first operand, broadcast."""
    shapes = [one.shape for one in others if isinstance(one, torch.Tensor)]
    return x.new_empty(torch.broadcast_shapes(x.shape, *shapes))


def _multilabel_margin(
    x: torch.Tensor, target: torch.Tensor, reduction: int = 1
) -> torch.Tensor | None:
    """Of a single row it is a number, also without reduction: torch's meta kernel says a row."""
    return x.new_empty(()) if x.ndim == 1 and target.shape == x.shape and x.numel() else None


def _view_copy(x: torch.Tensor, size: Any) -> torch.Tensor | None:
    """Of any strides: torch's meta kernel refuses those of which there is no view."""
    if x.is_contiguous():
        return None
    return torch.empty_like(x.reshape(size), memory_format=torch.contiguous_format)


def _batch_norm(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Contiguous, or with channels last if the input is; torch's meta kernel keeps any strides."""
    if x.is_contiguous():
        return None
    out = torch.ops.aten.batch_norm.default(x, *args, **kwargs)
    return torch.empty_like(out, memory_format=suggest_memory_format(x))


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor | None:
    """Contiguous; torch's meta kernel compares, and keeps any strides."""
    if x.is_contiguous() or x.dtype is not torch.int64 or num_classes < 1:
        return None
    return x.new_empty((*x.shape, num_classes))


def _of_all(overload: Any) -> Callable[..., torch.Tensor | None]:
    """Reductions of which torch's meta kernels take no dims for none, and the others for all."""
    def form(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
        return overload(x, None, keepdim, **named) if dim is not None and not len(dim) else None

    return form


_aten = torch.ops.aten


def _fits(view: Any) -> Callable[..., torch.Tensor | None]:
    """What is written to a view has its shape; torch's meta kernels do not look."""
    def form(x: torch.Tensor, source: torch.Tensor, *args: Any, **named: Any) -> None:
        slot = view(x, *args, **named)
        if source.shape != slot.shape:
            raise RuntimeError(
                "expected src to have a size equal to the slice of self. src size = "
                f"{list(source.shape)}, slice size = {list(slot.shape)}"
            )

    return form


def _of_some(name: str) -> Callable[..., torch.Tensor | None]:
    """Nothing has no extremum; torch's meta kernels do not look."""
    def form(x: torch.Tensor) -> None:
        if not x.numel():
            raise RuntimeError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )

    return form


def _shift(x: torch.Tensor, by: Any) -> torch.Tensor | None:
    """Of bools and integers as sums are; torch's meta kernels refuse bools."""
    dtypes = [one.dtype for one in (x, by) if isinstance(one, torch.Tensor)]
    if torch.bool not in dtypes or any(dtype.is_floating_point for dtype in dtypes):
        return None
    return None if isinstance(by, (float, complex)) else torch.add(x, by)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Of the dtypes that kernels take; torch's meta kernel knows bfloat16 alone."""
    dtype, line = a.dtype, 16 // a.element_size()
    if dtype not in (torch.float32, torch.float16) or b.dtype != dtype or bias is not None:
        return None
    if out_dtype not in (None, dtype):
        raise RuntimeError("Grouped gemm output dtype must match `mat_a` dtype")

    def like(matrix: torch.Tensor) -> torch.Tensor:
        inner = matrix.stride()[-2:]
        if 1 in inner and max(inner) % line:
            raise RuntimeError("strides should be multiple of 16 bytes")
        shape = matrix.shape
        padded = torch.empty((*shape[:-1], shape[-1] + 8 - shape[-1] % 8), dtype=torch.bfloat16,
                             device="meta")
        return padded.narrow(-1, 0, shape[-1])

    if min(a.dim(), b.dim()) < 2:
        return None
    shape = torch.ops.aten._grouped_mm.default(like(a), like(b), offs).shape
    padded = -(-shape[-1] // line) * line if torch.version.cuda else shape[-1]
    return a.new_empty((*shape[:-1], padded)).narrow(-1, 0, shape[-1])


def _geqrf(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The factors of a matrix lie column by column; torch has no meta kernel."""
    if x.dim() < 2 or not (x.is_floating_point() or x.is_complex()):
        return None
    factors = x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2])).mT
    return factors, x.new_empty((*x.shape[:-2], min(x.shape[-2:])))


def _segments(
    x: torch.Tensor, reduce: str, *, lengths: torch.Tensor | None = None,
    indices: torch.Tensor | None = None, offsets: torch.Tensor | None = None, axis: int = 0,
    **_: Any,
) -> torch.Tensor | None:
    """A row for each segment; torch has no meta kernel."""
    given = lengths if offsets is None else offsets
    if given is None or axis < 0 or given.dim() != axis + 1 or not x.is_floating_point() or (
        x.shape[:axis] != given.shape[:axis] or x.dim() <= axis
        or reduce not in ("sum", "mean", "max", "min", "prod")
    ):
        return None
    num = given.shape[axis] - (offsets is not None)
    return x.new_empty((*given.shape[:axis], num, *x.shape[axis + 1 :]))


_FORMS: dict[Any, Callable[..., Any]] = {
    _aten.geqrf.default: _geqrf,
    _aten.segment_reduce.default: _segments,
    **dict.fromkeys((
        _aten.__lshift__.Scalar, _aten.__lshift__.Tensor, _aten.__rshift__.Scalar,
        _aten.__rshift__.Tensor,
    ), _shift),
    _aten.cross_entropy_loss.default: _cross_entropy,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.multilabel_margin_loss.default: _multilabel_margin,
    _aten.binomial.default: _broadcast,
    _aten._standard_gamma.default: _broadcast,
    _aten._standard_gamma_grad.default: _broadcast,
    _aten._sample_dirichlet.default: _broadcast,
    _aten.view_copy.default: _view_copy,
    _aten.one_hot.default: _one_hot,
    _aten.slice_scatter.default: _fits(_aten.slice.Tensor),
    _aten.select_scatter.default: _fits(_aten.select.int),
    _aten.diagonal_scatter.default: _fits(_aten.diagonal.default),
    _aten.max.default: _of_some("max"),
    _aten.min.default: _of_some("min"),
    _aten._grouped_mm.default: _grouped_product,
    _aten.nansum.default: _of_all(_aten.nansum.default),
    _aten.nanmean.default: _of_all(_aten.nanmean.default),
    _aten.batch_norm.default: _batch_norm,
}

_BY_DEVICE = {
    _aten.linalg_eig.default, _aten.linalg_svd.default, _aten._linalg_svd.default,
    _aten.svd.default,
    _aten.native_layer_norm.default, _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats,
    _aten._batch_norm_with_update.default,
}


class AsKernels(TorchDispatchMode):
    """Gives results on meta tensors the strides that the device's kernels give them.

    Torch's meta kernels of many ops are references in Python, which lay results out by rules of
    their own. A mode sees the ops that others consist of, too. Where all operands are contiguous
    the references say the same, and nobody needs it.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.on_cpu = device_type == "cpu"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CONTIGUOUS or (self.on_cpu and func in _CONTIGUOUS_ON_CPU):
            return map_tensors(_contiguous, out)
        if self.on_cpu and func in _CHANNELS_LAST_ON_CPU and (
            func is not _aten.roll.default or (len(args) > 2 and args[2])  # else of one dim
        ):
            return torch.empty_like(out, memory_format=suggest_memory_format(args[0]))
        return _laid_like_sum(out, args, func in _LAST_FIRST) if _is_elementwise(func) else out


def _contiguous(one: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(one, memory_format=torch.contiguous_format)


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
    if overload in _UNTAGGED:
        return True
    return (
        torch.Tag.pointwise in overload.tags and torch._C.DispatchKey.Meta in overload.py_kernels
        and not any(one.alias_info for one in overload._schema.returns)
        and overload not in _OTHERWISE
    )


_UNTAGGED = {
    _aten.floor_divide.default, _aten.complex.default, _aten.polar.default,
}
"""Elementwise ops that torch does not tag so."""

_OTHERWISE = {_aten.masked_fill.Scalar, _aten.where.self}
"""They bring an operand to the result's shape or dtype before, as their meta kernels know."""

_LAST_FIRST = {_aten.threshold_backward.default}
"""Their kernels ask the last operand before the others."""

_CONTIGUOUS = {
    _aten.pow.Scalar, _aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar,
    _aten.rrelu_with_noise.default,
}
"""Their results are contiguous, whatever the operands are."""

_CONTIGUOUS_ON_CPU = {_aten.log_sigmoid_forward.default}

_CHANNELS_LAST_ON_CPU = {
    _aten.reflection_pad2d.default, _aten.reflection_pad3d.default,
    _aten.replication_pad2d.default, _aten.replication_pad3d.default, _aten.roll.default,
    _aten.pixel_shuffle.default, _aten.channel_shuffle.default,
    _aten.native_channel_shuffle.default,
}
"""Their results have channels last where the first operand has, and are contiguous elsewhere."""
