"""Counts of writes to memory, including writes through a `.data`.

torch gives `x.data` a version counter of its own, so the counter of x, or of a view of x, does not
show writes there. Here all `.data` of one memory share a counter, which belongs to the memory,
beside those of the tensors that they were taken from. A counter is a tensor without elements: it
keeps no memory alive.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter as _set_version  # type: ignore
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved

from weft.transport.nodes import of_bits, with_gradient

__all__ = [
    "counted_version", "detached_data", "share_version", "version_of", "with_own_version",
    "write_counted",
]


class _Taken:
    any = False
    """Whether there has been any `.data`: until then nobody looks for counters."""


def version_of(local: Tensor) -> int:
    """A number that grows with every known write to the tensor's memory."""
    version = local._version
    if _Taken.any:
        for counter, before in getattr(local.untyped_storage(), "_weft_counters", ()):
            version += counter._version - before
    return version


def counted_version(local: Tensor) -> int | None:
    """The version; None of tensors of inference mode, which count no writes."""
    return None if local.is_inference() else local._version


def detached_data(local: Tensor) -> Tensor:
    """`local.data`, of the counter that all `.data` of its memory have."""
    data = local.data
    if data.is_inference():
        return data  # it counts nothing
    share_version(local)
    memory: Any = local.untyped_storage()
    out = _without_elements(memory._weft_data.detach(), data)
    out.data = data
    return out


def write_counted(local: Tensor, value: Tensor, source: Tensor) -> None:
    """`local.copy_(value)`, for a value that was written to `source`.

    Where both count together, the write has been counted, and what was written may be saved.
    """
    with preserved(local) if _count_together(local, source) else nullcontext():
        local.copy_(value)


def with_own_version(local: Tensor, source: Tensor) -> Tensor:
    """`local`, which counts its own writes alone from now on; its gradient is the same."""
    together = _count_together(local, source)
    return with_gradient(local, lambda x: x.data, lambda grad: grad) if together else local


def _count_together(one: Tensor, other: Tensor) -> bool:
    return not (one.is_inference() or other.is_inference()) and _is_same(one, other)


def share_version(local: Tensor) -> None:
    """Count writes to this tensor for every tensor of the same memory."""
    if local.is_inference():
        return
    _Taken.any = True
    memory: Any = local.untyped_storage()
    counters = getattr(memory, "_weft_counters", None)
    if counters is None:
        with torch.inference_mode(False):  # whose tensors count nothing
            memory._weft_data = torch.empty(0, device=local.device)
        counters = memory._weft_counters = [(memory._weft_data, 0)]
    if not any(_is_same(counter, local) for counter, _ in counters):
        counter = local.detach()
        counter.data = _without_elements(torch.empty(0, device=local.device), local)
        counters.append((counter, counter._version))


def _without_elements(empty: Tensor, like: Tensor) -> Tensor:
    return of_bits(empty.view(like.dtype) if like.is_conj() else empty, like)


def _is_same(counter: Tensor, local: Tensor) -> bool:
    """Whether both have one version counter: then what one is set to, the other shows."""
    version, other = counter._version, local._version
    if version != other:
        return False
    _set_version((counter,), (version + 1,))
    same = local._version != other
    _set_version((counter,), (version,))
    return same
