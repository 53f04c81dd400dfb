"""Parameters to which something has happened that optimizers learn at their next step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Marked"]


class Marked:
    """Marks of parameters, each a value.

    Args:
        tell: called before a step with the optimizer and those of its parameters that are marked,
            once for an optimizer, and again if there are more marks or parameters.
    """

    def __init__(self, tell: Callable[[Optimizer, Sequence[tuple[Tensor, Any]]], None]) -> None:
        self.tell, self.count = tell, 0
        self.marks: Any = WeakTensorKeyDictionary()
        self.told: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = (
            weakref.WeakKeyDictionary())

    def install(self) -> None:
        """Hook the steps of all optimizers. Once per process."""
        register_optimizer_step_pre_hook(self._look)

    def mark(self, parameter: Tensor, value: Any = True) -> None:
        self.marks[parameter] = value
        self.count += 1

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.count:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        now = self.count, len(parameters)
        if self.told.get(optimizer) != now:
            self.told[optimizer] = now
            found = [(one, self.marks[one]) for one in parameters if one in self.marks]
            if found:
                self.tell(optimizer, found)
