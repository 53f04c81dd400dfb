"""ShardTensor: a torch.Tensor of global shape whose data are local tensors on many ranks.

It intercepts above autograd (`__torch_function__`): a call runs on the local tensors, which carry
their own autograd graph, so backward is torch's own C++ graph. The wrapper itself has no data and
no graph; `requires_grad`, `grad`, `grad_fn` are read from the local tensor.

A cached call is one loop over the arguments (key and local tensors at once), one dict look-up, the
torch function, one wrapper. `members` has properties and methods of the class, `operators` the
methods that torch code calls most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import is_grad_enabled
from torch._C import _is_any_autocast_enabled as is_autocast_enabled

from weft.core.arguments import MeshLike, Placements
from weft.core.counterparts import ATTRIBUTES, attribute_elsewhere
from weft.core.names import PLACEMENTS, also_called
from weft.errors import message
from weft.tensor.counts import CALLS
from weft.tensor.leaves import on_shard, track_leaf
from weft.tensor.members import AsValue, FromMeta, InLayouts, hooks
from weft.tensor.meta import Meta, autocast_state
from weft.tensor.modes import STRICT, num_dispatch_modes
from weft.tensor.module_name import ServedByTorch
from weft.tensor.torch_collectives import refused_below_autograd
from weft.tensor.versions import version_of as version_of_memory
from weft.transport.nodes import transforms

if TYPE_CHECKING:
    from weft.tensor.typed import Typed as _Base
else:
    _Base = torch.Tensor

__all__ = [
    "ShardTensor", "attributes_of", "now_requires_grad", "pass_known", "version_of",
    "watch_gradient", "wrap",
]

_is_complex = torch.is_complex
_read_number = torch.ops.aten._local_scalar_dense.default
_make_wrapper = torch.Tensor._make_wrapper_subclass
_Tensor, _Parameter, _strided = torch.Tensor, torch.nn.Parameter, torch.strided
_get_default_dtype = torch.get_default_dtype
_count_call = CALLS.step
_num_modes: Any = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_INTS = {int}
_VALUES = frozenset((bool, str, type(None), torch.dtype, torch.device, torch.Size,
                     torch.memory_format, type(Ellipsis)))


class ShardTensor(FromMeta, InLayouts, AsValue, _Base):
    """One global tensor whose blocks are on the ranks of a mesh.

    To make one, use `distribute_tensor`, `ShardTensor.from_local`, `weft.zeros` and the like.
    `shape`, `dtype` and strides are those of the global tensor. What torch.Tensor does not have:

        where it is   sharding (the Layout), placements, spec, device_mesh, offsets()
        move it       redistribute(placements=...)
        all of it     full_tensor()
        one's own     to_local(), ShardTensor.from_local(local, mesh, placements)
        DTensor       to_dtensor(), ShardTensor.from_dtensor(d)

    `help(weft.ShardTensor.redistribute)` explains one of them. All else is torch's and means what
    it means on the global tensor in one process; `backward`, `item` and the like are collectives
    where ranks hold parts.
    """

    __module__ = ServedByTorch(__name__)

    # No slots: a plain Parameter can become a ShardTensor only where instances of both classes
    # are laid out alike (`placing.in_place`).

    _local: torch.Tensor
    _meta: Meta
    _memo: Any = None
    _grad_view: ShardTensor | None = None
    _slice_of: Any = None
    _gathered: Any = None
    """While it is gathered for its module: what knows its shard (`nn.groups.member`)."""
    _is_gradient: bool
    _known: Any
    _terms: Any = ()
    _node: Any
    _followers: Any
    _refuse_gradient: Any = None
    """Raises, of a tensor whose own gradient cannot be complete (`placing.spectra`)."""
    _times_set: int = 0
    """How often `x.data = ` has given it other memory: the same on all ranks, as no address is."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _is_complex:  # optimizers ask it of every parameter
            return args[0]._meta.dtype.is_complex
        default_dtype = _get_default_dtype()
        recorded = is_grad_enabled()
        key: list[Any] = [
            func, recorded, is_autocast_enabled() and autocast_state(), default_dtype
        ]
        given = args
        if kwargs:
            key.append(tuple(kwargs))
            given = (*args, *kwargs.values())
        locals_ = []
        home = None
        for arg in given:
            kind = type(arg)
            if kind is ShardTensor:
                meta = arg._meta
                local = arg._local
                if recorded and not meta.requires_grad and local.requires_grad:
                    meta = now_requires_grad(arg)
                if home is None:
                    home = meta
                key.append(meta)
                locals_.append(local)
                continue
            if kind is int:
                key.append(arg)
            elif kind is float:  # zeros and what is not finite count by value: rules look at them
                key.append(float if arg and arg - arg == 0.0 else repr(arg))
            elif kind in _VALUES or (kind is tuple and set(map(type, arg)) == _INTS):
                key += (kind, arg)
            elif kind is _Parameter or kind is _Tensor:
                if STRICT.on or transforms() is not None or num_dispatch_modes() or (
                    arg.layout is not _strided or arg.is_nested
                ):
                    return hooks.call(func, args, kwargs)
                key += (arg.shape, arg.stride(), arg.dtype, arg.requires_grad)
            elif (kind is list or kind is tuple) and arg and type(arg[0]) is ShardTensor:
                try:
                    if recorded:
                        for item in arg:
                            if not item._meta.requires_grad and item._local.requires_grad:
                                now_requires_grad(item)
                    parts = [item._meta for item in arg]
                    inner = [item._local for item in arg]
                except AttributeError:  # not all are sharded
                    return hooks.call(func, args, kwargs)
                key += (kind, len(arg), *parts)
                locals_.append(inner if kind is list else tuple(inner))
                if home is None:
                    home = parts[0]
                continue
            else:
                met: list[Any] = []
                hooks.add(key, arg, met)
                if met:
                    return hooks.call(func, args, kwargs)
            locals_.append(arg)
        if home is None:
            return hooks.call(func, args, kwargs)
        _count_call()
        recipe = home.recipes.get(tuple(key)) or hooks.learn(func, args, kwargs, home, key)
        if recipe is None:
            return hooks.call(func, args, kwargs)
        meta = recipe.fast
        try:
            if meta is None:
                if kwargs:
                    return recipe.run(func, args, kwargs)
                return recipe.run_opened(func, args, locals_)
            moves = recipe.moves
            if moves:
                hooks.move_operands(given, moves, locals_, recipe.caller)
            bound = recipe.bound
            if bound is not None:
                local = bound(locals_)
            elif kwargs:
                count = len(args)
                local = func(*locals_[:count], **dict(zip(kwargs, locals_[count:])))
            else:
                local = func(*locals_)
            leave = recipe.leave
            if leave is not None:
                local = leave(local)
        except Exception as error:
            raise hooks.failed(error, func, given, home.mesh) from error.__cause__
        if not meta.plain:
            return wrap(local, meta)
        if meta.dtype is default_dtype:  # naming it takes 0.2 us
            out = _make_wrapper(ShardTensor, meta.shape)
        else:
            out = _make_wrapper(ShardTensor, meta.shape, dtype=meta.dtype)
        out._local = local
        out._meta = meta
        return out

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _read_number:  # torch.full(size, x), torch.arange(x), torch.tensor([x, 2.0])
            return args[0].item()
        out = hooks.beneath(func, args, kwargs)
        if out is not NotImplemented:
            return out
        raise refused_below_autograd(func, types)

    # Attributes.

    is_sparse = is_sparse_csr = is_mkldnn = is_quantized = is_nested = False
    layout = _strided  # type: ignore[assignment]

    __hash__ = _Tensor.__hash__  # of a Parameter that became one, an optimizer knows it

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:
        if _num_modes():  # as in `_method`
            return _Tensor.requires_grad_(self, requires_grad)  # type: ignore[return-value]
        already = self._local.requires_grad
        if requires_grad and not already and self._gathered is not None:
            self._gathered.hide()  # the gathered one waits for no gradient
        self._local.requires_grad_(requires_grad)
        if not already:
            track_leaf(self._local)
        self._meta = self._meta.replace(requires_grad=requires_grad)
        if self._memo is not None:
            self._memo.clear()
        return self

    @property
    def grad(self) -> ShardTensor | Any:  # type: ignore[override]
        local = self._local.grad
        if local is None:
            if self._gathered is not None:
                return on_shard(self, ShardTensor.grad.fget)  # type: ignore[attr-defined]
            return None
        kept = self._grad_view
        if kept is not None and kept._local is local:
            return kept
        return hooks.autograd.wrap_grad(self, local)

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if self._gathered is not None:
            on_shard(self, ShardTensor.grad.fset, grad)  # type: ignore[attr-defined]
            return
        self._grad_view = None  # it would keep the old gradient alive
        if grad is None:
            self._local.grad = None
        else:
            hooks.autograd.set_grad(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        node = getattr(self, "_node", None)
        return self._local.grad_fn if node is None else node

    @property
    def data(self) -> ShardTensor:  # type: ignore[override]
        return hooks.data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        hooks.construct.set_data(self, value)

    # From local tensors.

    @staticmethod
    @also_called(mesh="device_mesh", global_shape="shape", **PLACEMENTS)
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: MeshLike | Placements | None = None,
        placements: Placements | None = None,
        sharding_shapes: Any = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
        sizes: Any = "infer",
        sync: bool = False,
    ) -> ShardTensor:
        """Make one global tensor of the local tensors of all ranks.

        Args:
            local_tensor: this rank's block (its partial value, over partial axes). It keeps its
                memory and its autograd graph: gradients flow back into it. If it is on another
                device, it is moved to the mesh's.
            device_mesh: the mesh, `mesh=` as well; None means the current one.
            placements: placements, P or Layout; None replicates.
            sharding_shapes: as PhysicsNeMo: "infer", "chunk", or a map mesh dim -> shapes of all
                shards along it.
            run_check: compare shapes and dtypes, and values of replicas, over the ranks, and raise
                on all of them when they disagree.
            shape: the global shape, when known.
            stride: the global strides, when known.
            grad_placements: the placements of the gradients of the local tensors. Default: sharded
                as these are, else replicated; Partial() where ranks hold one value that they have
                computed together, so that their gradients add up to its gradient.
            sizes: "infer" exchanges the local sizes once, and compares dtypes, order in memory and
                requires_grad; "chunk" also raises where the cuts are not the default ones; a map
                tensor dim -> sizes in shard order needs no exchange. With `shape` and without a
                map, the cuts are the default ones, and nothing is exchanged.
            sync: broadcast replicas from the first coordinate.

        Raises:
            LayoutError: the local tensor contradicts the layout. PlacementError: gradients that are
                not sharded as the local tensors are.
        """
        return hooks.from_local(
            local_tensor, device_mesh, placements, run_check=run_check, shape=shape,
            stride=stride, sizes=sizes, sharding_shapes=sharding_shapes, sync=sync,
            grad_placements=grad_placements,
        )

    @staticmethod
    @also_called(device_mesh="mesh")
    def from_dtensor(dtensor: Any, mesh: MeshLike | None = None) -> ShardTensor:
        """See `weft.from_dtensor`."""
        return hooks.from_dtensor(dtensor, mesh)

    # Autograd, values and the rest live in files of their own.

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """As torch's: of a one-element tensor in any layout, or with `gradient=`."""
        if _num_modes():
            return _Tensor.backward(self, gradient, retain_graph, create_graph, inputs)
        hooks.autograd.backward_all([self], [gradient], retain_graph, create_graph, inputs)

    def detach(self) -> ShardTensor:
        if _num_modes():
            return _Tensor.detach(self)  # type: ignore[return-value]
        meta = self._meta
        if meta.requires_grad:
            meta = meta.replace(requires_grad=False)
        out = wrap(self._local.detach(), meta)
        if meta.varying:
            hooks.hold(out._local)
        return out if meta.shape and meta.shape.numel() != 1 else pass_known(self, out)

    @property
    def __cuda_array_interface__(self) -> NoReturn:  # type: ignore[override]
        raise AttributeError(  # so that it has none, to those who ask
            message("__cuda_array_interface__", f"the tensor is {self.sharding}",
                    "no single address holds a global tensor", [str(self.sharding)],
                    "x.to_local().__cuda_array_interface__, or x.full_tensor()")
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return hooks.construct.set_(self, *args, **kwargs)


def wrap(local: torch.Tensor, meta: Meta) -> ShardTensor:
    """The ShardTensor of a local tensor."""
    out: Any
    if not meta.on_cpu:
        # One without memory may get some later, for which the wrapper has to be of that device.
        device = meta.mesh.device if meta.device.type == "meta" else meta.device
        out = _make_wrapper(
            ShardTensor, meta.shape, meta.stride(), dtype=meta.dtype, device=device
        )
    elif meta.dtype is not _get_default_dtype():
        out = _make_wrapper(ShardTensor, meta.shape, meta.strides, dtype=meta.dtype)
    elif meta.strides is None:  # each part that is not named saves 0.2 us or more
        out = _make_wrapper(ShardTensor, meta.shape)
    else:
        out = _make_wrapper(ShardTensor, meta.shape, meta.strides)
    out._local = local
    out._meta = meta
    return out


_ITS_OWN = frozenset((
    "_boxed", "_followers", "_gathered", "_local", "_meta", "_memo", "_grad_view", "_is_gradient",
    "_known", "_node", "_refuse_gradient", "_slice_of", "_terms", "_times_set",
))


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that users, and torch, have set on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in _ITS_OWN}


def watch_gradient(tensor: Any) -> None:
    """The gradient of this very tensor is needed, even if it is a slice."""
    if type(tensor) is ShardTensor:
        if tensor._slice_of is not None:
            tensor._slice_of.watch.is_set = True
        if tensor._refuse_gradient is not None:
            tensor._refuse_gradient()


def now_requires_grad(tensor: ShardTensor) -> Meta:
    """The new meta of a view whose base was written to with a tensor that requires grad."""
    tensor._memo = None
    meta = tensor._meta = tensor._meta.replace(requires_grad=True)
    return meta


def version_of(tensor: ShardTensor) -> int:
    """A number that grows with every write to the tensor, also through a `.data`."""
    return version_of_memory(tensor._local)


def pass_known(tensor: ShardTensor, out: ShardTensor) -> ShardTensor:
    """Give `out`, which has the same value, the known value of `tensor`: a loss after its
    backward."""
    known = getattr(tensor, "_known", None)
    if known is not None and known[0] == version_of(tensor):
        out._known = [version_of(out), known[1]]
    return out


for _name, _code in ATTRIBUTES.items():
    setattr(ShardTensor, _name, attribute_elsewhere(_name, _code))
