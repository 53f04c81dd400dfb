"""Activation checkpoints inside a module whose parameters are gathered.

A checkpoint may recompute a part of a module. The module's own hooks do not run then, so its
parameters are gathered again here.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from weft.nn.groups.group import in_backward
from weft.nn.groups.hooks import entering, entering_only, gathered_now
from weft.tensor.grad import torch_patches

__all__ = ["checkpoint"]


def checkpoint(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`: what was gathered in forward is gathered again.

    With reentrance nothing of the forward is compared or replaced: there what is recomputed may lie
    otherwise.
    """
    if kwargs.get("use_reentrant") is not False:
        return torch_patches.checkpoint(original, function, *args, **kwargs)
    groups, entered = gathered_now(), set[nn.Module]()
    is_first = True

    def run(*given: Any, **named: Any) -> Any:
        nonlocal is_first
        with ExitStack() as stack:
            if in_backward():
                for group in groups:
                    stack.enter_context(group.again())
            stack.enter_context(entering(entered) if is_first else entering_only(entered))
            is_first = False
            return function(*given, **named)

    run.leaves = [group.leaves() for group in groups]  # type: ignore  # no graph has them yet
    return torch_patches.checkpoint(original, run, *args, **kwargs)
