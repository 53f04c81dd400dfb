"""How many bytes of tensors are alive on one rank, and the most that ever were."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.tensor import ShardTensor
from weft.tensor.trace.trees import flatten, local_of

__all__ = ["Meter", "local_tensors", "peak_memory"]


class Meter:
    """Bytes of the storages of dense tensors, each counted once and whole while it lives.

    `live` are those alive now, `peak` the most that ever were. `counts` says of a tensor whether
    its memory is counted.
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool]) -> None:
        self.live = self.peak = 0
        self._counts = counts
        self._known: dict[int, tuple[Any, int]] = {}
        self._elastic: set[int] = set()
        """Storages that have changed their size: they are asked again after each operation."""

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Count what is new among the tensors, and what has grown or shrunk since."""
        for tensor in tensors:
            if type(tensor) in _DENSE and self._counts(tensor):
                storage = tensor.untyped_storage()
                key, nbytes = storage._cdata, storage.nbytes()
                if key not in self._known:
                    me: Any = weakref.ref(self)
                    gone = weakref.ref(storage, lambda _, key=key, me=me: _gone(me, key))
                    self._known[key] = gone, nbytes
                    self.live += nbytes
                    if not nbytes:
                        self._elastic.add(key)
                elif nbytes != self._known[key][1]:
                    self._elastic.add(key)
        for key in tuple(self._elastic):
            alive, before = self._known[key]
            storage = alive()
            if storage is not None and storage.nbytes() != before:
                self._known[key] = alive, storage.nbytes()
                self.live += storage.nbytes() - before
        self.peak = max(self.peak, self.live)

    def forget(self, key: int) -> None:
        """A storage is gone."""
        self.live -= self._known.pop(key)[1]
        self._elastic.discard(key)


def _gone(meter: weakref.ref[Meter], key: int) -> None:
    alive = meter()
    if alive is not None:
        alive.forget(key)


class peak_memory(TorchDispatchMode):
    """Measures the tensors that are alive on this rank while the block runs.

        with weft.testing.peak_memory(model, x) as memory:
            loss(model(x)).backward()
        print(memory.peak)

    It counts the memory of every tensor that an operation takes or returns, once and whole, from
    its first use on: a view of a large tensor counts as the large tensor. Memory that a kernel uses
    only internally is not seen. In a simulated run each rank measures its own tensors.

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
