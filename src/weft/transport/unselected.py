"""Selective checkpoints do not see the ops that move blocks.

These (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) number the ops of a forward,
and look up each result by its number when they recompute. But in the recomputation a moved block
may still be there, and a gathered parameter may be gone. Then other ops run, and numbers would not
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch._C import (  # type: ignore[attr-defined]
    _len_torch_dispatch_stack as _num_modes,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = ["unselected"]

_SELECTIVE = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)


def unselected() -> AbstractContextManager[None]:
    """Inside, selective checkpoints see no op; other modes do."""
    return _without_selective() if _num_modes() else nullcontext()


@contextmanager
def _without_selective() -> Iterator[None]:
    stack = _get_current_dispatch_mode_stack()
    first = next((at for at, one in enumerate(stack) if isinstance(one, _SELECTIVE)), len(stack))
    above: list[Any] = stack[first:]
    kept = [one for one in above if not isinstance(one, _SELECTIVE)]
    _exchange(len(above), kept)
    try:
        yield
    finally:
        _exchange(len(kept), above)


def _exchange(num: int, modes: list[Any]) -> None:
    """Take the last modes off the stack, and put others on it."""
    for _ in range(num):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
