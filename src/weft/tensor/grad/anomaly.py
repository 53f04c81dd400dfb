"""torch's anomaly mode in a backward of ShardTensors: it may not look for NaNs.

torch checks what each node of the graph returns, and raises at a NaN, in the middle of the
backward. A NaN may be in one rank's block alone: that rank would leave the others waiting in their
next collective. So the check is refused, on all ranks, before the backward begins. The rest of the
mode, the traceback of the forward call where a backward fails, works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import UnsupportedOpError
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.transition import Transition

__all__ = ["refuse_nan_check"]


def refuse_nan_check(outputs: Sequence[Tensor]) -> None:
    """Called before the engine runs from these outputs: torch would look for NaNs in a graph that
    the ranks share."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and _is_shared(outputs):
        raise UnsupportedOpError(
            "torch.autograd.detect_anomaly()",
            "a backward of ShardTensors begins, and NaNs are looked for",
            "a NaN may be in one rank's block alone, and all ranks raise or none",
            ["check_nan=True"],
            "torch.autograd.detect_anomaly(check_nan=False), for the tracebacks\n"
            "of a NaN: x.register_hook(lambda g: print(g.isnan().any().item()))")


def _is_shared(outputs: Sequence[Tensor]) -> bool:
    """Whether ShardTensors are among the outputs, or transitions in the graph behind them."""
    if any(type(output) is ShardTensor for output in outputs):
        return True
    seen, line = set(), [output.grad_fn for output in outputs]
    while line:
        node: Any = line.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        moves = (*getattr(node, "transitions", ()), getattr(node, "transition", None),
                 getattr(node, "back", None))
        if any(type(move) is Transition for move in moves):
            return True
        line += [following for following, _ in node.next_functions]
    return False
