"""torch_xla's barrier between the backwards of modules, for an eager library."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.errors import ModuleError, ShardTypeError
from weft.tensor import ShardTensor
from weft.tensor.grad.bucketed_reduction import barrier
from weft.tensor.trace.trees import leaves

__all__ = ["apply_backward_optimization_barrier"]


def apply_backward_optimization_barrier(
    module: nn.Module, max_outstanding: int = 1
) -> RemovableHandle:
    """Reduce a module's gradients when its backward is over, while the backward of others goes on.

    Without it all gradients of replicated parameters are reduced at the end of the backward, in as
    few collectives as possible. With it the gradients of the module, and of later ones, are one
    reduction, which proceeds during the backward of earlier modules. At most `max_outstanding`
    reductions proceed at a time; then the oldest is waited for. Values are the same.

    It has no effect for parameters that are not ShardTensors, or have hooks: they are reduced in
    the backward itself, one after the other. It has none either for a module whose inputs need no
    gradient, such as the first one: the end of the backward comes next.

    Args:
        module: a module whose inputs are, or contain, ShardTensors.
        max_outstanding: the number of reductions, over all modules of a program; at least 1.

    Returns:
        A handle whose `remove` removes the barrier.

    Raises:
        ModuleError: `max_outstanding` is not a positive number.
        ShardTypeError: not a module.

    The name is that of torch_xla.distributed.spmd, where it keeps the compiler from moving one
    module's backward into another's.
    """
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ShardTypeError(
            "apply_backward_optimization_barrier(module)", f"it is of type {kind}",
            "the barrier stands before the backward of a torch.nn.Module", [kind],
            "apply_backward_optimization_barrier(model.layers[1])")
    if type(max_outstanding) is not int or max_outstanding < 1:
        raise ModuleError(
            "apply_backward_optimization_barrier(max_outstanding=)",
            f"it is {max_outstanding!r}", "at least one reduction is under way",
            [repr(max_outstanding)],
            "apply_backward_optimization_barrier(block, max_outstanding=2)")

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in leaves((args, kwargs), ShardTensor):
            barrier(tensor, max_outstanding)

    return module.register_forward_pre_hook(before, with_kwargs=True)
