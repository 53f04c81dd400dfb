"""From a call to its recipe: look up, or capture, decide, build.

`call` is the general route; the short one is `ShardTensor.__torch_function__`, with the same keys.
A key holds what the recipe depends on: the function, the operands' metas, the other arguments by
type and value, and the flags that change meaning. Floats count by type alone, because learning
rates change every step; where a recipe has baked a float in, `BY_VALUE` stands in the cache and
the floats' values join the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _is_any_autocast_enabled as is_autocast_enabled

from weft.errors import MeshError, message
from weft.tensor.call import build, fallback
from weft.tensor.call.compiled import unseen
from weft.tensor.call.out import write_out
from weft.tensor.call.own.functions import OwnFunction
from weft.tensor.call.recipe import Alias, Recipe, flatten
from weft.tensor.call.reduce_once import UseReduced, has_reduced
from weft.tensor.call.sizes import structure_key
from weft.tensor.call.torchs_errors import with_layouts
from weft.tensor.counts import AGAIN, CALLS, MISSES, NAN
from weft.tensor.meta import Meta, autocast_state, dense, keep_recipe
from weft.tensor.modes import (
    STRICT,
    check_plain,
    check_traced,
    check_transforms,
    num_dispatch_modes,
    transforms,
)
from weft.tensor.placing.foreign import any_foreign, call_with
from weft.tensor.shard_tensor import ShardTensor, now_requires_grad

__all__ = ["SPECIAL", "call", "keep_constant", "learn", "mesh_of"]

SPECIAL: dict[Any, Callable[..., Any]] = {}
"""Functions that are answered without a recipe: attributes, values, autograd. Filled by
`weft.tensor.attributes`; ops that have users' handlers join it."""

_OPERATORS = frozenset(
    getattr(torch.Tensor, f"__{name}__")
    for name in ("eq", "ne", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_AS_THEY_ARE = frozenset((torch.autograd.grad,))
"""Functions that are asked of very objects: a ShardTensor made of a DTensor is in no graph yet."""


class _ByValue(Recipe):
    """Stands where the floats' values belong to the key; only `call` forms that key."""

    __slots__ = ()
    by_value = True

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return call(func, args, kwargs)


BY_VALUE = _ByValue()


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out `func(*args, **kwargs)`, at least one tensor of which is a ShardTensor."""
    if func not in _AS_THEY_ARE and any_foreign(args, kwargs):
        return call_with(call, func, args, kwargs)
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **(kwargs or {}))
    kwargs = kwargs or {}
    if kwargs.get("out") is not None and type(func) is not OwnFunction:
        return write_out(func, args, kwargs)
    key: list[Any] = [
        func, is_grad_enabled(), is_autocast_enabled() and autocast_state(),
        torch.get_default_dtype(),
    ]
    scan = _Scan(key)
    if kwargs:
        key.append(tuple(kwargs))
    for arg in (*args, *kwargs.values()):
        scan.add(arg)
    home = scan.home
    if home is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if STRICT.on:
        check_plain(_name(func), flatten((args, kwargs)))
        check_traced(_name(func))
    if scan.plain:
        if transforms() is not None:
            check_transforms(_name(func))
        if num_dispatch_modes():
            check_traced(_name(func))
    if scan.odd is not None:
        reason = f"an operand is no dense tensor ({scan.odd})"
        return fallback.runner(_mesh(func, scan), reason)(func, args, kwargs)
    full = tuple(key)
    CALLS.step()
    try:
        recipe = home.recipes.get(full)
    except TypeError:  # an argument that cannot be hashed: not kept
        if func in _OPERATORS:
            AGAIN.step()
            return _against_array(func, *args)
        MISSES.step()
        with unseen():
            recipe = build.recipe(func, args, kwargs, _mesh(func, scan))[0]
        return recipe.run(func, args, kwargs)
    if recipe is BY_VALUE:
        full = (*full, *scan.floats)
        recipe = home.recipes.get(full)
    if recipe is None:
        recipe = _learned(func, args, kwargs, _mesh(func, scan), home, key, scan.floats)
    return recipe.run(func, args, kwargs)


def _is_numpy(kind: type, name: str) -> bool:
    """Whether it is one of numpy's types whose names begin so; numpy itself may be absent."""
    return kind.__module__ == "numpy" and kind.__name__.startswith(name)


def _against_array(func: Any, tensor: Any, other: Any) -> Any:
    """An operator on what cannot be hashed, like an array of numpy's: as torch, it takes the array
    in `==` alone, and leaves the rest to the other."""
    if func is torch.Tensor.__eq__ and hasattr(other, "__array_interface__"):
        return call(func, (tensor, torch.as_tensor(other)), {})
    return NotImplemented


def learn(func: Any, args: Any, kwargs: Any, home: Meta, key: list[Any]) -> Recipe | None:
    """The recipe of a call that the short route has made the key of and found none for.

    None where only `call` serves. It is kept for the next such call.
    """
    if func in SPECIAL or STRICT.on or (kwargs and kwargs.get("out") is not None):
        AGAIN.step()
        return None
    given = (*args, *kwargs.values()) if kwargs else args
    mesh = home.mesh
    floats = [arg if arg == arg else NAN for arg in given if type(arg) is float]
    for item in key:
        if item is list or (type(item) is Meta and item.mesh is not mesh):
            AGAIN.step()
            return None
    return _learned(func, args, kwargs or {}, mesh, home, key, floats)


def _learned(
    func: Any, args: Any, kwargs: Any, mesh: Any, home: Meta, key: list[Any],
    floats: Sequence[float],
) -> Recipe:
    """Build the recipe of a call, and keep it under its key."""
    MISSES.step()
    if num_dispatch_modes():
        check_traced(_name(func))
    if has_reduced(key):
        recipe = UseReduced(build.reads(func, args, kwargs))
        keep_recipe(home, tuple(key), recipe)
        return recipe
    structure = structure_key(key)
    if structure is not None and floats:
        structure = (*structure, *floats)
    try:
        with unseen():
            recipe, floats_flow = build.recipe(func, args, kwargs, mesh, structure)
    except Exception as error:
        raise with_layouts(error, _name(func), flatten((args, kwargs)), mesh) from error.__cause__
    full = tuple(key)
    if floats and not floats_flow:
        keep_recipe(home, full, BY_VALUE)
        full = (*full, *floats)
    keep_recipe(home, full, recipe)
    return recipe


def keep_constant(func: Any, tensor: ShardTensor, value: Any) -> None:
    """Let the short route answer `func(tensor)` from now on: optimizers ask often."""
    meta = tensor._meta
    key = (
        func, is_grad_enabled(), is_autocast_enabled() and autocast_state(),
        torch.get_default_dtype(), meta,
    )
    keep_recipe(meta, key, Alias(value))


class _Scan:
    """Builds the key of a call's arguments and finds the metas in them."""

    __slots__ = ("floats", "home", "key", "metas", "odd", "plain")

    def __init__(self, key: list[Any]) -> None:
        self.key = key
        self.plain = False
        self.odd: str | None = None
        self.home: Meta | None = None
        self.floats: list[float] = []
        self.metas: list[Meta] = []

    def add(self, arg: Any) -> None:
        kind = type(arg)
        key = self.key
        if kind is ShardTensor:
            meta = arg._meta
            if key[1] and not meta.requires_grad and arg._local.requires_grad:
                meta = now_requires_grad(arg)
            if self.home is None:
                self.home = meta
            self.metas.append(meta)
            key.append(meta)
        elif kind is int:
            key.append(arg)
        elif kind is float:
            key.append(float if arg and arg - arg == 0.0 else repr(arg))
            self.floats.append(arg if arg == arg else NAN)
        elif _is_odd(arg):  # it may have no strides
            self.odd = "nested" if arg.is_nested else str(arg.layout)
        elif kind in _PLAIN:
            key.extend((arg.shape, arg.stride(), arg.dtype, arg.requires_grad))
            self.plain = True
        elif kind is list or kind is tuple:
            self._add_sequence(kind, arg)
        elif kind is slice:
            key.append(slice)
            for part in (arg.start, arg.stop, arg.step):
                self.add(part)
        elif isinstance(arg, torch.Tensor):
            key.extend((kind, arg.shape, arg.stride(), arg.dtype, arg.requires_grad))
            self.plain = True
        elif kind is complex:
            key += (complex, repr(arg))  # 0j and -0j are equal
        elif isinstance(arg, float) or _is_numpy(kind, "float"):  # a rate of numpy
            number = float(arg)
            key += (kind, float if number and number - number == 0.0 else repr(number))
            self.floats.append(number if number == number else NAN)
        elif kind is dict:
            key += (dict, tuple(arg))
            for item in arg.values():
                self.add(item)
        else:
            key.append(kind)
            key.append(arg)

    def _add_sequence(self, kind: type, items: Any) -> None:
        self.key.append(kind)
        if kind is tuple and set(map(type, items)) == {int}:
            self.key.append(items)
            return
        self.key.append(len(items))
        if items and set(map(type, items)) == {ShardTensor}:
            if self.key[1]:
                for item in items:
                    if not item._meta.requires_grad and item._local.requires_grad:
                        now_requires_grad(item)
            metas = [item._meta for item in items]
            if self.home is None:
                self.home = metas[0]
            self.metas.extend(metas)
            self.key.extend(metas)
            return
        for item in items:
            self.add(item)


def _is_odd(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not dense(value)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _mesh(func: Any, scan: _Scan) -> Any:
    return mesh_of(_name(func), scan.metas)


def mesh_of(call_name: str, metas: Sequence[Meta]) -> Any:
    """The one mesh of the operands.

    Raises:
        MeshError: they live on several.
    """
    mesh = metas[0].mesh
    others = {str(meta.layout): meta.mesh for meta in metas if meta.mesh != mesh}
    if others:
        raise MeshError(
            message(
                call_name, f"operands live on {mesh!r} and on "
                + ", ".join(repr(other) for other in dict.fromkeys(others.values())),
                "all operands of one call live on one mesh", list(others),
                "x.redistribute(mesh, placements) first",
            )
        )
    return mesh
