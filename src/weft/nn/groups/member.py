"""One parameter of a pack: as it is, and gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from weft.tensor import ShardTensor
from weft.tensor.leaf_gradients import LeafUse
from weft.tensor.meta import Meta, contiguous_strides

__all__ = ["Member", "places_of"]

_ALIGNED_NBYTES = 64


class Member:
    """One parameter: as it is, and gathered. Without a storage it is its own memory.

    Args:
        dtype: the dtype in which it is gathered.
        offset: its place in the storage, in elements.
        whole_meta: what it is as a gathered parameter.

    `shown`: the local tensor of the gathered parameter.
    """

    def __init__(
        self, tensor: ShardTensor, whole_meta: Meta, dtype: torch.dtype, storage: Any = None,
        offset: int = 0,
    ) -> None:
        self.tensor, self.meta, self.local = tensor, tensor._meta, tensor._local
        self.whole_meta = whole_meta
        self.held: Tensor | None = None
        """What several backwards have found, in the dtype of the reduction."""
        self.shown: Any = None
        self.another: Any = None
        """The pack that gathers it in its own dtype, once somebody has asked for that."""
        self.memo: Any = None
        self.version: tuple[int, int] | None = (0, 0)
        self.has_arrived = False
        """Whether the gradient of the leaf is to be reduced in this backward."""
        self.times_set = tensor._times_set
        self.use: LeafUse | None = None
        self.hide: Any = None
        """Gives the parameter its shard back."""
        self._released: TensorWeakRef | None = None
        self.whole: Any
        self._full: Any
        if storage is None:
            self.whole = self._full = self.local.detach().requires_grad_()
            return
        shape = whole_meta.local_shape
        strides = contiguous_strides(shape)
        with torch.inference_mode(False):  # they count what is written to them
            make = torch.empty(0, dtype=dtype, device=self.local.device)
            self.whole = make.new_empty(0).set_(storage, offset, shape, strides)
            self._full = make.new_empty(0).set_(storage, offset, shape, strides)
        self._full.requires_grad_(self.local.requires_grad)

    @property
    def full(self) -> Any:
        """The leaf that graphs see; None once it is released and no graph has it."""
        return self._full if self._full is not None else self._released()  # type: ignore

    def release(self) -> None:
        """Let go of the leaf: from now on graphs alone hold it, which do not hold a frozen one."""
        self.shown = None
        if self._released is None:
            self._released = TensorWeakRef(self._full)
            if self.whole is self._full:
                self.whole = None
            if self._full.grad is None and self._full.requires_grad:
                self._full = None

    def hold(self, dtype: torch.dtype) -> None:
        """Add the gradient of the leaf to those of earlier backwards, in this dtype."""
        grad = self.take()
        self.held = None if grad is None else grad.to(dtype)

    def take(self) -> Tensor | None:
        """The gradient of the leaf, with the kept ones."""
        full, held, self.held = self.full, self.held, None
        if full is None or full.grad is None:
            return held
        grad, full.grad = full.grad, None
        if self._released is not None:
            self._full = None
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        return grad if held is None else held.add_(grad)


def places_of(wholes: Sequence[Meta], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Where each gathered parameter begins in their storage, in elements, and its bytes."""
    offsets, end = [], 0
    for whole, dtype in zip(wholes, dtypes):
        offsets.append(end // dtype.itemsize)
        nbytes = torch.Size(whole.local_shape).numel() * dtype.itemsize
        end += -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
    return offsets, end
