"""Which parameters are gathered together, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.nn.groups.memory import gathered_layout
from weft.tensor import ShardTensor

__all__ = ["Dtypes", "Kind", "autocast_dtype", "kind_of"]


class Dtypes(NamedTuple):
    """The dtypes of a policy, and autocast's if it is on."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    autocast: torch.dtype | None = None


def autocast_dtype(mesh: BoundMesh) -> torch.dtype | None:
    """The dtype that autocast casts parameters to now; None if it is off, or saves nothing."""
    kind = mesh.kernel_type
    if not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype.itemsize < torch.float32.itemsize else None


class Kind:
    """What the parameters of one pack share: mesh, gathered axes, further axes over which the
    gradient is partial, dtypes.

    `for_autocast`: they travel in autocast's dtype, and keep their own.
    """

    __slots__ = ("axes", "dtype", "for_autocast", "mesh", "reduce_dtype", "rest", "whole_dtype")

    def __init__(
        self, mesh: BoundMesh, axes: frozenset[int], rest: frozenset[int], dtype: torch.dtype,
        dtypes: Dtypes,
    ) -> None:
        self.mesh, self.axes, self.rest, self.dtype = mesh, axes, rest, dtype
        whole, self.for_autocast = dtypes.compute, False
        if whole is None and dtypes.autocast is not None and dtype is torch.float32:
            whole, self.for_autocast = dtypes.autocast, True
        is_real = dtype.is_floating_point and whole is not None
        self.whole_dtype: torch.dtype = whole if is_real else dtype  # type: ignore
        self.reduce_dtype = dtypes.reduce or (dtype if self.for_autocast else self.whole_dtype)
        self.reduce_dtype = self.reduce_dtype if dtype.is_floating_point else dtype

    @property
    def is_copied(self) -> bool:
        """Whether the parameter is used from other memory than its own."""
        return bool(self.axes) or self.whole_dtype is not self.dtype

    def key(self) -> tuple[Any, ...]:
        return (id(self.mesh), self.axes, self.rest, self.dtype, self.whole_dtype,
                self.reduce_dtype)


def kind_of(tensor: Any, mesh: BoundMesh, batch: frozenset[int], dtypes: Dtypes) -> Kind | None:
    """How a parameter is gathered in a forward whose batch is sharded over these axes; None if it
    is not gathered, because this rank is outside or other axes shard it. Replicated parameters need
    no gather. Packs reduce their gradients, if no other axis has to be reduced as well. A policy of
    dtypes holds for all parameters: those that are not gathered are cast in place."""
    if type(tensor) is not ShardTensor or type(tensor._local) is not Tensor:
        return None
    meta = tensor._meta
    layout = meta.layout
    if meta.mesh is not mesh or mesh.here is None or meta.varying or layout.is_partial:
        return None
    if meta.device != mesh.device or not tensor._local.is_leaf:
        return None
    axes = frozenset(axis for axis in batch if layout.on(axis) is not None)
    is_plain = meta.strides is None
    if axes and is_plain and gathered_layout(layout, axes) is not None:
        return Kind(mesh, axes, batch - axes, meta.dtype, dtypes)
    given = Dtypes(dtypes.compute, dtypes.reduce)
    kind = Kind(mesh, frozenset(), batch - axes, meta.dtype, given)
    if kind.is_copied or (kind.reduce_dtype is not meta.dtype and meta.requires_grad):
        return kind
    sizes = mesh.axis_sizes
    alone = all(size == 1 or axis in batch for axis, size in enumerate(sizes))
    return kind if is_plain and alone and batch and not axes and meta.requires_grad else None
