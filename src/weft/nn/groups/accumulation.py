"""One reduction of gradients for several backwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from weft.core.scopes import block
from weft.errors import ShardTypeError
from weft.nn.groups.buckets import Buckets
from weft.tensor import ShardTensor
from weft.tensor.backward import Holding, has_hooks, holding
from weft.tensor.leaf_gradients import reduce_held

__all__ = ["accumulate"]


@block("weft.nn.accumulate(model)")
def accumulate(module: nn.Module) -> Iterator[None]:
    """Inside, the gradients of a module's parameters stay partial; at the end they are reduced.

    Several backwards then cost the reductions of one. Until the end `parameter.grad` keeps its old
    value, so clip and step afterwards. Each rank keeps whole gradients of parameters that are
    sharded and gathered. Parameters with hooks, and those that are neither replicated nor gathered
    where they are used, are reduced in each backward, as without this block.

    Args:
        module: a module whose parameters are ShardTensors.

    Raises:
        ShardTypeError: not a module.

    If the block raises, its gradients are dropped.
    """
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ShardTypeError(
            "weft.nn.accumulate(module)", f"it is of type {kind}",
            "gradients of the parameters of a torch.nn.Module stay partial", [kind],
            "with weft.nn.accumulate(model): ...")
    held = Holding(_locals_of(module))
    try:
        with holding(held):
            yield
    except BaseException:
        held.drop()
        raise
    _reduce(held)


def _reduce(held: Holding) -> None:
    """Reduce the kept gradients, in the same order on every rank."""
    buckets, landings = Buckets(), []
    for pack in sorted(held.others, key=held.others.__getitem__):
        pack.release_held()
        landings += pack.start_reducing(buckets.add)
    landings += buckets.start(True)
    reduce_held(held.uses.values())
    for land in landings:
        land()


def _locals_of(module: nn.Module) -> Any:
    """The leaves without hooks: a hook is called in each backward."""
    every: list[Any] = [one._local for one in module.parameters() if type(one) is ShardTensor]
    return [one for one in every if not has_hooks(one)]
