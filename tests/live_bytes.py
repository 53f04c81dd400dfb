"""How many bytes of storages live on a rank at once, while a program runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that calls of torch make on this thread, or are given; `peak` bytes
    lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if address not in self._known and nbytes:
            self.live += nbytes
            self._known[address] = weakref.finalize(storage, self._forget, address, nbytes)

    def _forget(self, address: int, nbytes: int) -> None:
        self.live -= nbytes
        self._known.pop(address, None)
