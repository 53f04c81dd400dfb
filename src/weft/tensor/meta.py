"""The description of a ShardTensor without its data, interned so that a cache key is a tuple of
pointers.

A `Meta` belongs to one bound mesh, hence to one rank. Two tensors of one rank that agree in layout,
dtype, strides, device and requires_grad share one `Meta`. It holds the recipes of calls whose first
sharded operand has it. So a look-up hashes identities, never layouts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.tensor.counts import METAS, Hits
from weft.transport.order import (
    Gaps,
    Order,
    gaps_of,
    memory_order,
    order_of,
    strides_in_order,
)

__all__ = [
    "NONE", "Meta", "alive", "autocast_state", "bounded_put", "contiguous_strides", "dense",
    "expanded_dims", "forget_recipes", "forget_unused", "intern", "is_dense", "keep_recipe", "kept",
    "replicated_meta",
]

MAX_METAS = 4096
MAX_RECIPES = 512
MAX_RECIPES_OF_MESH = 32768
MAX_KEPT = 4096

T = TypeVar("T")

NONE: frozenset[int] = frozenset()
"""No axes."""


class Form:
    """The parts of a Meta that stay the same when only lengths change; one object per rank and
    content.

    `gaps`: of a part of a dense tensor, the dims of which it has a part (see `gaps_of`).
    """

    __slots__ = ("gaps",)

    def __init__(self, gaps: Gaps) -> None:
        self.gaps = gaps


class Meta:
    """Layout, dtype, strides (None = contiguous), device and requires_grad of a ShardTensor.

    `alias` is None, or the reason why the tensor shares no memory with the one that it represents:
    then an in-place write raises. In the meta of a future result it names the view op whose data
    had to move, and the tensor follows its base (see `moved`). `was_reduced` marks partial values
    whose sum is known (see `call.reduce_once`). `varying` are axes over which the tensor is R:
    replicated, and its gradient partial (see `call.varying`). `recipes` caches the calls that start
    with such a tensor.
    """

    __slots__ = (
        "mesh", "layout", "shape", "dtype", "strides", "device", "requires_grad", "alias",
        "local_shape", "recipes", "on_cpu", "plain", "to_replicated", "of_grad", "slice_of",
        "was_reduced", "varying", "_form", "_twin", "__weakref__",
    )

    def __init__(
        self,
        mesh: BoundMesh,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        strides: tuple[int, ...] | None,
        alias: str | None,
        varying: frozenset[int],
        like: Meta | None = None,
        local_shape: tuple[int, ...] = (0,),
    ) -> None:
        """`like`: a meta that differs in lengths alone; it spares checks, given the local shape."""
        here = mesh.here
        if like is None:
            layout.check_dtype(str(dtype).removeprefix("torch."))
            local_shape = (0,) if here is None else layout.local_shape_at(here)
        self.mesh, self.layout, self.dtype, self.device = mesh, layout, dtype, device
        self.shape = torch.Size(layout.shape)
        self.strides, self.requires_grad, self.alias = strides, requires_grad, alias
        self.local_shape = local_shape
        self.varying = varying
        self.recipes: dict[Any, Any] = {}
        # The Transition to Replicate; None where there is nothing to do; False: not asked yet.
        self.to_replicated: Any = False
        self.of_grad: Meta | None = None  # see `autograd.grad_meta`; None: not asked yet
        self.was_reduced = False
        self.slice_of: tuple[Layout, tuple[int, ...]] | None = None
        self._twin: Meta | None = None
        self._form: Any = False if like is None else like._form
        _ALIVE[id(self)] = self
        self.on_cpu = device.type == "cpu"
        self.plain = strides is None and self.on_cpu

    @property
    def form(self) -> Form | None:
        """The form; None where strides are not those of a dense tensor, or dims are in stretches.
        """
        if self._form is False:
            self._form = _form(self)
        return self._form

    def lines(self) -> tuple[int, ...]:
        """Of a part of a dense tensor, the lengths that this has in the dims of `form.gaps`."""
        strides = self.stride()
        return tuple([strides[outer] // strides[dim] for dim, outer in self.form.gaps])  # type: ignore[union-attr]

    def resized(
        self, layout: Layout, local_shape: tuple[int, ...], strides: tuple[int, ...] | None
    ) -> Meta:
        """The interned meta of this form with other lengths."""
        return _interned(
            self.mesh, (layout, self.dtype, self.device, self.requires_grad, strides, self.alias,
                        self.varying), self, local_shape)

    def replace(self, **parts: Any) -> Meta:
        """The interned meta with some parts exchanged."""
        return intern(
            self.mesh,
            parts.get("layout", self.layout),
            parts.get("dtype", self.dtype),
            parts.get("device", self.device),
            parts.get("requires_grad", self.requires_grad),
            parts.get("strides", self.strides),
            parts.get("alias", self.alias),
            parts.get("varying", self.varying),
        )

    def as_reduced(self) -> Meta:
        """The same meta with the mark; `replace()` removes it."""
        if self._twin is None:
            self._twin = self._marked("was_reduced")
            self._twin.was_reduced = True
        return self._twin

    def as_slice(self, base: Layout, starts: tuple[int, ...]) -> Meta:
        """The same meta, marked as a slice of a tensor of this layout; `replace()` removes the
        mark."""
        meta = self._marked("slice of", base, starts)
        meta.slice_of, meta._form = (base, starts), None
        return meta

    def _marked(self, *mark: Any) -> Meta:
        """The same meta, to which the caller adds this mark."""
        return _interned(
            self.mesh, (self.layout, self.dtype, self.device, self.requires_grad, self.strides,
                        self.alias, self.varying), self, self.local_shape, mark)

    def stride(self) -> tuple[int, ...]:
        """Global strides, in elements."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    def order(self) -> Order | None:
        """The memory order of the global dims; None if it is that of the dims."""
        return None if self.strides is None else order_of(self.shape, self.strides)


_ALIVE: weakref.WeakValueDictionary[int, Meta] = weakref.WeakValueDictionary()
"""By id: of such a dictionary, unlike a WeakSet, a list can be made while threads add to it."""


def alive() -> list[Meta]:
    """The metas of this process that are in use or kept."""
    metas = [ref() for ref in _ALIVE.valuerefs()]
    return [meta for meta in metas if meta is not None]


def forget_recipes() -> None:
    """Drop all recipes, of all ranks of this process: a rule has changed, for example."""
    for meta in alive():
        meta.recipes.clear()
        meta.mesh.cache.pop("structures", None)


def forget_unused(mesh: BoundMesh) -> None:
    """Drop the metas that only the table of this mesh keeps."""
    table: dict[Any, Meta] = mesh.cache.get("metas", {})
    kept = [(key, weakref.ref(meta)) for key, meta in list(table.items())]
    table.clear()
    for key, ref in kept:
        meta = ref()
        if meta is not None:
            table.setdefault(key, meta)


def intern(
    mesh: BoundMesh,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
    strides: tuple[int, ...] | None = None,
    alias: str | None = None,
    varying: frozenset[int] = NONE,
) -> Meta:
    """The one Meta of these parts on this rank."""
    return _interned(mesh, (layout, dtype, device, requires_grad, strides, alias, varying))


def _interned(
    mesh: BoundMesh, parts: tuple[Any, ...], like: Meta | None = None,
    local_shape: tuple[int, ...] = (0,), mark: tuple[Any, ...] = (),
) -> Meta:
    table: dict[Any, Meta] = mesh.cache.setdefault("metas", {})
    key = (*mark, *parts) if mark else parts
    meta = table.get(key)
    if meta is not None:
        METAS.hits.step()
        return meta
    METAS.misses.step()
    _make_room(table, MAX_METAS)
    # Another thread may have put one there meanwhile: one object is kept.
    return table.setdefault(key, Meta(mesh, *parts, like=like, local_shape=local_shape))


def is_dense(meta: Meta) -> bool:
    """Whether the elements lie side by side, in whatever order: the strides of dims of one element
    say nothing."""
    shape, strides = meta.layout.shape, meta.strides
    if strides is None or 0 in shape:
        return True
    due = strides_in_order(shape, memory_order(shape, strides))
    return all(
        mine == other for length, mine, other in zip(shape, strides, due) if length > 1
    )


def _form(meta: Meta) -> Form | None:
    layout, strides = meta.layout, meta.strides
    if layout.is_stretched:
        return None
    order, gaps = tuple(range(len(layout.shape))), ()
    if strides is not None:
        order = memory_order(layout.shape, strides)
        found = gaps_of(layout.shape, strides, order)
        if found is None:
            return None
        gaps = found
    key = (
        layout.dims, layout.partial, tuple([cut is None for cut in layout.cuts]), meta.dtype,
        meta.requires_grad, meta.alias, order, gaps, meta.device, meta.varying,
    )
    return kept(meta.mesh.cache.setdefault("forms", {}), key, lambda: Form(gaps))


def replicated_meta(mesh: BoundMesh, tensor: torch.Tensor) -> Meta:
    """The Meta of a plain tensor that is the same on every rank."""
    layout = Layout.replicated(mesh.abstract, tensor.shape)
    strides = None if tensor.is_contiguous() else tensor.stride()
    return intern(mesh, layout, tensor.dtype, tensor.device, tensor.requires_grad, strides)


def autocast_state() -> tuple[Any, ...]:
    """The state of autocast, as part of a key. Read only while some autocast is on."""
    return tuple([
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    ])


def bounded_put(table: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Put into a dict that forgets its older half when it is full (same program, same choice)."""
    _make_room(table, limit)
    table[key] = value


_ABSENT: Any = object()


def kept(
    table: dict[Any, Any], key: Any, make: Callable[[], T], limit: int = MAX_KEPT,
    counts: Hits | None = None,
) -> T:
    """The value of a key in a bounded table, made where it is not there yet; None is a value."""
    found = table.get(key, _ABSENT)
    if counts is not None:
        (counts.misses if found is _ABSENT else counts.hits).step()
    if found is _ABSENT:
        found = make()
        bounded_put(table, key, found, limit)
    return found


def _make_room(table: dict[Any, Any], limit: int) -> None:
    if len(table) < limit:
        return
    with _LOCK:
        if len(table) >= limit:
            for old in list(table)[: limit // 2]:
                table.pop(old, None)


_LOCK = threading.Lock()


def keep_recipe(home: Meta, key: Any, recipe: Any) -> None:
    """Keep the recipe of a call that starts with such a tensor: bounded, for the mesh too."""
    bounded_put(home.recipes, key, recipe, MAX_RECIPES)
    cache = home.mesh.cache
    count = cache["num_recipes"] = cache.get("num_recipes", 0) + 1  # a lost step does no harm
    if count > MAX_RECIPES_OF_MESH:
        cache["num_recipes"] = 0
        for meta in list(cache["metas"].values()):
            meta.recipes.clear()


def dense(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor lies in memory by strides: sparse and nested ones do not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def expanded_dims(tensor: torch.Tensor | Meta) -> list[int]:
    """The dims along which elements share memory, as `expand` leaves them."""
    pairs = enumerate(zip(tensor.shape, tensor.stride()))
    return [dim for dim, (length, step) in pairs if length > 1 and not step]


def contiguous_strides(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides as torch gives them (a dim of size 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
