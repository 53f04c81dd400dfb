"""Properties and methods of a ShardTensor: from its meta, in other layouts, and from its value.

They are properties and methods on the class because reading an attribute through
`__torch_function__` costs 2.4 us. `hooks` has the functions that they call and cannot import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from weft.comm import BoundMesh
from weft.core import Layout, P, Placement
from weft.core.arguments import MeshLike, Placements
from weft.core.names import ADVICE, PLACEMENTS, also_called
from weft.errors import ShardTypeError
from weft.tensor.meta import Meta

__all__ = ["AsValue", "FromMeta", "Hooks", "InLayouts", "hooks"]

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
    seen: Callable[[Meta], Layout]
    layout_of_view: Callable[[Meta], Layout]


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
        layout = self._meta.layout
        return hooks.seen(self._meta) if layout.is_stretched else layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self.sharding.placements

    @property
    def spec(self) -> P:
        """The partition spec: one entry per dim."""
        return self.sharding.spec

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


class InLayouts:
    """The tensor in other layouts, whole, and as local tensors."""

    __slots__ = ()

    @also_called(ADVICE, "ShardTensor.redistribute", mesh="device_mesh", **PLACEMENTS)
    def redistribute(
        self, device_mesh: MeshLike | Placements | None = None,
        placements: Placements | None = None, *, async_op: bool = False,
        forward_dtype: torch.dtype | None = None, backward_dtype: torch.dtype | None = None,
        grad_placements: Placements | None = None,
    ) -> Self:
        """The same tensor in another layout; differentiable.

        Args:
            device_mesh: the target mesh, also accepted as `mesh=`; None is this tensor's own. With
                another mesh, the ranks of both meshes call it. A rank outside the mesh of a tensor
                has an empty local part.
            placements: placements, P or Layout; None replicates on a given mesh. On this tensor's
                own mesh they may stand first: `x.redistribute(P("tp"))`.
            async_op: start to communicate and return; the first use of the result waits. Until
                then this tensor must not be written to (the use would raise UnsupportedOpError).
                The backward does not change.
            forward_dtype: the dtype of the result, to which the blocks are cast before they travel
                (partial values before they are reduced).
            backward_dtype: the dtype to which gradients are cast before they travel back; None is
                this tensor's dtype, in which they arrive in any case.
            grad_placements: the placements of the result's gradient: sharded as the result; where
                that is replicated, Replicate() (the default) or Partial(). A partial gradient is
                reduced only when it is moved back. So for a sharded weight
                `w.redistribute(P(), grad_placements=[Partial()])` is an all-gather whose gradient
                is reduce-scattered.

        Raises:
            PlacementError: other placements of the gradient.
            LayoutError: a dtype that a partial kind cannot carry. UnsupportedOpError: a dtype given
                where a gradient is wanted of partial products, maxima or minima.
        """
        return hooks.redistribute.redistribute(
            self, device_mesh, placements, async_op, forward_dtype, backward_dtype,
            grad_placements)

    def to_local(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """This rank's block, a plain tensor; gradients flow back, where autograd records.

        Args:
            grad_placements: the placements of the gradients of the local tensors, one per mesh
                axis. Default: sharded as the tensor is; replicated over partial axes, and where the
                tensor is replicated. Pass Partial() when ranks use the replicas differently,
                Partial("avg") when the gradient is the mean over them, and so on.

        Raises:
            PlacementError: gradients that are not sharded as the tensor is.
        """
        return hooks.redistribute.to_local(self, grad_placements)

    @also_called(None, "ShardTensor.to_dtensor", device_mesh="mesh")
    def to_dtensor(self, mesh: MeshLike | None = None) -> Any:
        """See `weft.to_dtensor`."""
        return hooks.to_dtensor(self, mesh)

    def full_tensor(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """The whole tensor as a plain tensor on every rank; a collective unless replicated.

        Args:
            grad_placements: the placements of the gradient; replicated by default.
        """
        return hooks.redistribute.full_tensor(self, grad_placements)

    def offsets(self, mesh_dim: Any = None) -> Any:
        """Where this rank's shard begins, in elements, per mesh axis; None outside the mesh.

        Args:
            mesh_dim: one axis, by name or number; by default all of them, as a tuple. An axis
                that shards no dim gives 0. Offsets per tensor dim: `x.sharding.box(rank)`.
        """
        return hooks.redistribute.offsets(self, mesh_dim)


class AsValue:
    """The global value as Python and numpy have it (a collective unless replicated), and copies."""

    __slots__ = ()

    def item(self) -> Any:
        if _num_modes():
            return _Tensor.item(self)
        return hooks.values.one_value(self).item()

    def tolist(self) -> Any:
        if _num_modes():
            return _Tensor.tolist(self)
        return hooks.values.global_value(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return hooks.values.numpy(self, force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return hooks.values.array(self, dtype, copy)

    def __array_wrap__(self, array: Any, context: Any = None, *_: Any) -> Any:
        return hooks.values.from_array(self, array, context)

    def __bool__(self) -> bool:
        return bool(hooks.values.one_value(self))

    def __float__(self) -> float:
        return float(hooks.values.one_value(self))

    def __int__(self) -> int:
        return int(hooks.values.one_value(self))

    def __index__(self) -> int:
        return hooks.values.one_value(self).__index__()

    def __complex__(self) -> complex:
        return complex(hooks.values.one_value(self))

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

    def _typed_storage(self) -> Any:  # torch's own passes __torch_function__ by
        hooks.saved.refuse_to_share(self)
