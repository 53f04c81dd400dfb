"""ATen ops below the ops as which calls reach weft.

weft intercepts above autograd and records the ops of a torch function before torch decomposes them:
`x @ y` is `aten.matmul`, and `aten.mm` within it is never seen. Backward is torch's own graph of
local ops. A registration for such an op would therefore serve no call, or few of the intended ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_testing_overrides

from weft.errors import ShardTypeError

__all__ = ["BENEATH", "refuse_beneath"]

_NORM = ("aten.batch_norm.default",)
_ATTENTION = ("aten.scaled_dot_product_attention.default",)
_CONVOLUTIONS = tuple(
    f"aten.{name}" for name in (
        "conv1d.default", "conv2d.default", "conv3d.default", "conv_transpose1d.default",
        "conv_transpose2d.input", "conv_transpose3d.input",
    )
)

BENEATH: dict[str, tuple[str, ...]] = {
    "mm": ("aten.matmul.default", "aten.linear.default", "aten.einsum.default"),
    "bmm": ("aten.matmul.default", "aten.einsum.default"),
    "addmm": ("aten.linear.default",),
    "convolution": _CONVOLUTIONS,
    "convolution_overrideable": _CONVOLUTIONS,
    "_convolution": _CONVOLUTIONS,
    "mkldnn_convolution": _CONVOLUTIONS,
    "cudnn_convolution": _CONVOLUTIONS,
    "_softmax": ("aten.softmax.int",),
    "_log_softmax": ("aten.log_softmax.int",),
    "native_layer_norm": ("aten.layer_norm.default",),
    "native_group_norm": ("aten.group_norm.default",),
    "_fused_rms_norm": ("aten.rms_norm.default",),
    "native_batch_norm": _NORM,
    "cudnn_batch_norm": _NORM,
    "_native_batch_norm_legit": _NORM,
    "_native_batch_norm_legit_functional": _NORM,
    "_batch_norm_with_update": _NORM,
    "native_dropout": ("aten.dropout.default",),
    "_scaled_dot_product_flash_attention": _ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION,
    "_scaled_dot_product_efficient_attention": _ATTENTION,
    "_scaled_dot_product_cudnn_attention": _ATTENTION,
    "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
    "_scaled_dot_product_attention_math": _ATTENTION,
    "nll_loss_forward": ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"),
    "nll_loss2d_forward": ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"),
    "_adaptive_avg_pool2d": ("aten.adaptive_avg_pool2d.default",),
    "_adaptive_avg_pool3d": ("aten.adaptive_avg_pool3d.default",),
    "max_pool2d_with_indices": ("aten.max_pool2d.default",),
    "_cdist_forward": ("aten.cdist.default",),
    "_weight_norm_interface": ("aten._weight_norm.default",),
}
"""Name of an ATen op -> the ops as which calls that use it reach weft."""


def refuse_beneath(op: Any, call: str) -> None:
    """Raise ShardTypeError for an ATen op that weft does not see, as it lies below another, is a
    gradient's, or writes to `out=`."""
    if not isinstance(op, (OpOverload, OpOverloadPacket)) or not str(op).startswith("aten."):
        return
    name = str(op).split(".")[1]
    overload = op._overloadname if isinstance(op, OpOverload) else ""
    packet = getattr(torch.ops.aten, name)
    verb = call.split("(")[0]
    if name in BENEATH:
        seen = BENEATH[name]
        fact = f"torch reaches it within {', '.join(seen)}, which calls come to weft as"
        fix = " or ".join(f"{verb}(torch.ops.{one}, ...)" for one in seen)
        direct = getattr(torch, name, None)
        if direct is not None and direct in get_testing_overrides():
            fix += f"; {verb}(torch.{name}, ...) for calls of torch.{name} itself"
    elif "_backward" in name:
        fact = "backward is torch's own graph on local tensors, and runs no op of weft's"
        fix = f"{verb}(...) of the forward op, or of an autograd.Function with a backward"
    elif overload.endswith("out") and overload in packet.overloads():
        others = [one for one in packet.overloads() if not one.endswith("out")]
        fact = "weft runs the op without out=, and writes the result there"
        fix = f"{verb}(torch.ops.aten.{name}.{(others or ['default'])[0]}, ...)"
    else:
        return
    raise ShardTypeError(
        call, f"weft never sees {op}: {fact}",
        "a rule or handler is for the op that is called, above autograd and before torch "
        "decomposes it", [str(op)], fix)
