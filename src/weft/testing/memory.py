"""Bytes of tensors that are alive on one rank, now and at the peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weft.tensor import ShardTensor
from weft.tensor.trace.trees import flatten, local_of

__all__ = ["Meter", "local_tensors", "peak_memory"]


class Meter:
    """Bytes of the storages of dense tensors, each counted once and whole while it lives.

    A storage that has changed its size counts with its size now.

    Args:
        counts: whether a tensor's memory is counted.

    Attributes:
        peak: the most bytes that were alive after any call of `see`.
        live: bytes that are alive now.
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool]) -> None:
        self.peak = 0
        self._counts = counts
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._left_out: dict[int, StorageWeakRef] = {}
        self._nbytes = 0
        """Of all that is in `_alive`, some of which may be gone, or smaller."""

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Count what is new among the tensors, and what has grown or shrunk since.

        Before a new peak, storages that have shrunk unseen are measured again.
        """
        for tensor in tensors:
            if type(tensor) in _DENSE and self._counts(tensor):
                storage = tensor.untyped_storage()
                nbytes = storage.nbytes()
                known = self._alive.get(storage._cdata)
                if known is None:
                    if not nbytes or self.leaves_out(tensor):
                        continue
                    known = StorageWeakRef(storage), 0
                elif known[1] == nbytes:
                    continue
                self._alive[storage._cdata] = known[0], nbytes
                self._nbytes += nbytes - known[1]
        if self._nbytes > self.peak:
            self.peak = max(self.peak, self.live)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count the storage of a tensor that has not been seen."""
        storage = tensor.untyped_storage()
        self._left_out[storage._cdata] = StorageWeakRef(storage)

    def leaves_out(self, tensor: torch.Tensor) -> bool:
        """Whether its storage is not counted."""
        if not self._left_out:
            return False
        key = tensor.untyped_storage()._cdata
        known = self._left_out.get(key)
        if known is not None and known.expired():  # another storage stands there now
            del self._left_out[key]
            return False
        return known is not None

    @property
    def live(self) -> int:
        for key, (known, nbytes) in list(self._alive.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(known.cdata)  # type: ignore
            now = 0 if storage is None else storage.nbytes()
            if storage is None:
                del self._alive[key]
            elif now != nbytes:
                self._alive[key] = known, now
            self._nbytes += now - nbytes
        return self._nbytes


class peak_memory(TorchDispatchMode):
    """Measures the tensors that are alive on this rank while the block runs.

        with weft.testing.peak_memory(model, x) as memory:
            loss(model(x)).backward()
        print(memory.peak)

    It counts the memory of every tensor that an operation takes or returns, once and whole, from
    its first use on: a view of a large tensor counts as the large tensor, and memory that has been
    freed by resizing it counts as what is left. Memory that a kernel uses only internally is not
    seen. In a simulated run each rank measures its own tensors.

    Args:
        held: tensors, modules, optimizers, or lists and dicts of tensors, that count from the
            start.

    Attributes:
        start: bytes of `held`.
        peak: the largest number of bytes alive at the end of any operation, or at the start.
        live: bytes that are alive now.
    """

    def __init__(self, *held: Any) -> None:
        super().__init__()
        self._meter = Meter(_has_memory)
        for one in held:
            self._meter.see(local_tensors(one))
        self.start = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if ShardTensor in types:  # under a transform of torch.func: what it does to local tensors
            with self:
                return ShardTensor.__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **kwargs)
        self._meter.see(flatten((args, kwargs, out)))
        return out

    @property
    def peak(self) -> int:
        return self._meter.peak

    @property
    def live(self) -> int:
        return self._meter.live


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta"


_DENSE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def local_tensors(held: Any) -> list[torch.Tensor]:
    """The local tensors of what is held, gradients included."""
    if isinstance(held, torch.nn.Module):
        found = [*held.parameters(), *held.buffers()]
    elif isinstance(held, torch.optim.Optimizer):
        found = flatten([*held.state.values(), [group["params"] for group in held.param_groups]])
    else:
        found = flatten(held)
    grads = [one.grad for one in found if one.is_leaf and one.grad is not None]
    return [local_of(one) if type(one) is ShardTensor else one for one in (*found, *grads)]
