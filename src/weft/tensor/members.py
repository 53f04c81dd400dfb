"""Properties and methods of a ShardTensor: from its meta, and from its value.

They are properties and methods on the class because reading an attribute through
`__torch_function__` costs 2.4 us. `hooks` has the functions that they call and cannot import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout, P, Placement
from weft.errors import ShardTypeError
from weft.tensor.meta import Meta

__all__ = ["AsValue", "FromMeta", "Hooks", "hooks"]

_Tensor: Any = torch.Tensor
_num_modes: Any = torch._C._len_torch_function_stack  # type: ignore[attr-defined]


class Hooks:
    """Functions that the class calls but cannot import, because they are built on the class.

    `weft.tensor` and `weft.interop` fill these in when they are imported; nothing else does.
    """

    call: Callable[[Any, Any, Any], Any]
    add: Callable[[list[Any], Any, list[Any]], None]
    learn: Callable[[Any, Any, Any, Meta, list[Any]], Any]
    beneath: Callable[[Any, Any, Any], Any]
    failed: Callable[[Exception, Any, Any, BoundMesh], Exception]
    move_operands: Callable[[Any, Any, Any, Any], None]
    construct: Any
    redistribute: Any
    data_of: Callable[[Any], Any]
    hold: Callable[[Any], Any]
    from_local: Callable[..., Any]
    from_dtensor: Callable[..., Any]  # these two by weft.interop
    to_dtensor: Callable[..., Any]
    autograd: Any
    values: Any
    saved: Any


hooks = Hooks()


class FromMeta:
    """Properties from the meta: of the global tensor, and of its sharding."""

    __slots__ = ()
    _meta: Meta
    _local: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self._meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._meta.dtype

    @property
    def device(self) -> torch.device:
        return self._meta.device

    @property
    def is_meta(self) -> bool:
        return self._meta.device.type == "meta"

    @property
    def ndim(self) -> int:
        return len(self._meta.shape)

    def dim(self) -> int:
        return len(self._meta.shape)

    def size(self, dim: int | None = None) -> Any:
        return self._meta.shape if dim is None else self._meta.shape[dim]

    def numel(self) -> int:
        return self._meta.shape.numel()

    def stride(self, dim: int | None = None) -> Any:
        strides = self._meta.stride()
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        if not self._meta.shape:
            raise ShardTypeError(
                "len(x)", "x has no dims", "len() of a 0-d tensor has no meaning (torch."
                "tensor([x]) asks for it too)", [str(self.sharding)], "x.item()")
        return self._meta.shape[0]

    @property
    def sharding(self) -> Layout:
        """The layout: mesh, global shape, how each dim is sharded, what is partial.

        `x.layout` is torch's attribute of that name: `torch.strided`, of every ShardTensor.
        """
        return self._meta.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._meta.layout.placements

    @property
    def spec(self) -> P:
        """The partition spec: one entry per dim."""
        return self._meta.layout.spec

    @property
    def device_mesh(self) -> BoundMesh:
        """The mesh that the tensor lives on."""
        return self._meta.mesh

    @property
    def is_leaf(self) -> bool:
        return self._local.is_leaf

    @property
    def _version(self) -> int:
        return self._local._version


class AsValue:
    """The global value as Python and numpy have it (a collective unless replicated), and copies."""

    __slots__ = ()

    def item(self) -> Any:
        if _num_modes():
            return _Tensor.item(self)
        return hooks.values.global_value(self).item()

    def tolist(self) -> Any:
        if _num_modes():
            return _Tensor.tolist(self)
        return hooks.values.global_value(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return hooks.values.numpy(self, force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return hooks.values.array(self, dtype, copy)

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        return hooks.values.from_array(self, array)

    def __bool__(self) -> bool:
        return bool(hooks.values.global_value(self))

    def __float__(self) -> float:
        return float(hooks.values.global_value(self))

    def __int__(self) -> int:
        return int(hooks.values.global_value(self))

    def __index__(self) -> int:
        return hooks.values.global_value(self).__index__()

    def __complex__(self) -> complex:
        return complex(hooks.values.global_value(self))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return hooks.values.text(self)

    def _repr_html_(self) -> str:
        return hooks.values.shown(self)

    def __format__(self, spec: str) -> str:
        return hooks.values.formatted(self, spec)

    def __copy__(self) -> Any:
        return hooks.construct.shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return hooks.construct.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return hooks.saved.reduced(self)
