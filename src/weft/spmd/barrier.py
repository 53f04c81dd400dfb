"""torch_xla's barrier between the backwards of modules, as an eager library means it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.errors import ModuleError, ShardTypeError, message
from weft.tensor import ShardTensor
from weft.tensor.grad.bucketed_reduction import barrier
from weft.tensor.trace.trees import leaves

__all__ = ["apply_backward_optimization_barrier"]


def apply_backward_optimization_barrier(
    module: nn.Module, max_outstanding: int = 1
) -> RemovableHandle:
    """Have a module's gradients reduced when its backward is over, while that of others goes on.

    Without it all gradients of replicated parameters are reduced at the end of the backward, in as
    few collectives as possible. With it those that the module (and what came after it) has made are
    one reduction, which is under way during the backward of what came before; at most
    `max_outstanding` of them are, then the oldest is waited for. Values are the same.

    Nothing is to be done for parameters that are no ShardTensors, or have hooks: they are reduced
    in the backward itself, one after the other; nor for a module whose inputs want no gradient, as
    the first one's: the end of the backward comes next.

    Args:
        module: whose inputs are, or contain, ShardTensors.
        max_outstanding: of reductions, over all modules of a program; at least 1.

    Returns:
        A handle whose `remove` takes the barrier away.

    Raises:
        ModuleError: `max_outstanding` is no positive number. ShardTypeError: no module.

    The name is that of torch_xla.distributed.spmd, where it keeps the compiler from moving one
    module's backward into another's.
    """
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ShardTypeError(
            message("apply_backward_optimization_barrier(module)", f"it is of type {kind}",
                    "the barrier stands before the backward of a torch.nn.Module", [kind],
                    "apply_backward_optimization_barrier(model.layers[1])")
        )
    if type(max_outstanding) is not int or max_outstanding < 1:
        raise ModuleError(
            message("apply_backward_optimization_barrier(max_outstanding=)",
                    f"it is {max_outstanding!r}", "at least one reduction is under way",
                    [repr(max_outstanding)],
                    "apply_backward_optimization_barrier(block, max_outstanding=2)")
        )

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in leaves((args, kwargs), ShardTensor):
            barrier(tensor, max_outstanding)

    return module.register_forward_pre_hook(before, with_kwargs=True)
