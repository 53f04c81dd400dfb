"""Activation checkpoints inside a module whose parameters are gathered.

A checkpoint may recompute a part of a module. The module's own hooks do not run then, so its
parameters are gathered again here.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from weft.nn.groups.group import in_backward
from weft.nn.groups.hooks import gathered_now, recording
from weft.tensor.grad import checkpoints

__all__ = ["checkpoint"]


def checkpoint(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`: what was gathered in forward is gathered again.

    A reentrant checkpoint compares and replaces nothing of the forward, so recomputed tensors may
    have another memory order.
    """
    if kwargs.get("use_reentrant") is not False:
        return checkpoints.checkpoint(original, function, *args, **kwargs)
    groups, entered = gathered_now(), set[nn.Module]()
    again = False

    def run(*given: Any, **named: Any) -> Any:
        nonlocal again
        with ExitStack() as stack:
            if in_backward():
                for group in groups:
                    stack.enter_context(group.again())
            stack.enter_context(recording(entered, again))
            again = True
            return function(*given, **named)

    run.leaves = [group.leaves() for group in groups]  # type: ignore  # no graph has them yet
    return checkpoints.checkpoint(original, run, *args, **kwargs)
