"""Convolutions in groups, cut where groups are: each rank has its own, and fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft import propagate
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Local
from weft.rules import Call, TensorArg
from weft.rules.windows import convolution

__all__ = ["convolution_lookup"]


def convolution_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """Convolutions of several groups with something cut: how many there are, a block tells."""
    rule = convolution(call)
    if "g" not in rule.sizes or not any(any(layout.dims) for layout in layouts):
        return None
    decision = propagate.decide(
        replace(rule, whole=rule.whole - {"g"}), call, layouts, wants_grad
    )
    namespace, name, overload = call.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    at = 8 if name == "convolution" else 6  # of `groups`
    channels = 1 - len(call.tensors[1].shape)  # of the input
    per_group = call.tensors[0].shape[channels] // rule.sizes["g"]
    numbers = [None if isinstance(arg, TensorArg) else arg for arg in call.args]

    def local(*tensors: Tensor) -> Tensor:
        args = list(numbers)
        args[: len(tensors)] = tensors
        args[at] = tensors[0].shape[channels] // per_group
        return op(*args)

    return Local(decision, lambda mesh: local)
