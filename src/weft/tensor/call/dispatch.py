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

from weft.errors import MeshError, message
from weft.tensor.call import build, fallback
from weft.tensor.call.compiled import unseen
from weft.tensor.call.out import write_out
from weft.tensor.call.own.functions import OwnFunction
from weft.tensor.call.recipe import Alias, Recipe
from weft.tensor.call.reduce_once import has_reduced, using_reduced
from weft.tensor.call.torchs_errors import with_layouts
from weft.tensor.call.varying import has_varying, of_varying
from weft.tensor.counts import AGAIN, CALLS, MISSES
from weft.tensor.keys import floats_of, key_of
from weft.tensor.meta import Meta, dense, keep_recipe
from weft.tensor.modes import (
    STRICT,
    check_plain,
    check_traced,
    check_transforms,
    num_dispatch_modes,
    transforms,
)
from weft.tensor.placing.foreign import any_foreign, call_with
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import flatten

__all__ = ["SPECIAL", "call", "keep_constant", "learn", "mesh_of"]

SPECIAL: dict[Any, Callable[..., Any]] = {}
"""Functions that are answered without a recipe: attributes, values, autograd. Filled by
`weft.tensor.attributes`; ops that have users' handlers join it."""

_OPERATORS = frozenset(
    getattr(torch.Tensor, f"__{name}__")
    for name in ("eq", "ne", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
)
_AS_THEY_ARE = frozenset((torch.autograd.grad,))
"""Functions that are asked of very objects: a ShardTensor made of a DTensor is in no graph yet."""


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
    key, met = key_of(func, args, kwargs)
    metas = [one._meta for one in met if type(one) is ShardTensor]
    if not metas:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    home = metas[0]
    if STRICT.on:
        check_plain(_name(func), flatten((args, kwargs)))
        check_traced(_name(func))
    plain = [one for one in met if isinstance(one, torch.Tensor) and type(one) is not ShardTensor]
    if plain:
        if transforms() is not None:
            check_transforms(_name(func))
        if num_dispatch_modes():
            check_traced(_name(func))
    odd = ["nested" if one.is_nested else str(one.layout) for one in plain if not dense(one)]
    if odd:
        reason = f"an operand is no dense tensor ({odd[-1]})"
        return fallback.runner(mesh_of(_name(func), metas), reason)(func, args, kwargs)
    CALLS.step()
    if len(metas) + len(plain) < len(met):  # an argument that cannot be hashed: nothing is kept
        if func in _OPERATORS:
            AGAIN.step()
            return _against_array(func, *args)
        MISSES.step()
        with unseen():
            recipe = build.recipe(func, args, kwargs, mesh_of(_name(func), metas))[0]
        if has_varying(metas):
            recipe = of_varying(recipe)
        return recipe.run(func, args, kwargs)
    recipe = home.recipes.get(tuple(key)) or _with_floats(home, key, (*args, *kwargs.values()))
    if recipe is None:
        recipe = _learned(func, args, kwargs, mesh_of(_name(func), metas), home, key)
    return recipe.run(func, args, kwargs)


def _with_floats(home: Meta, key: Sequence[Any], given: Sequence[Any]) -> Recipe | None:
    """The recipe that is kept for a call with just these floats."""
    floats = floats_of(given)
    return home.recipes.get((*key, *floats)) if floats else None


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
    found = _with_floats(home, key, (*args, *kwargs.values()) if kwargs else args)
    if found is not None:
        return found
    kwargs = kwargs or {}
    if func in SPECIAL or STRICT.on or kwargs.get("out") is not None:
        AGAIN.step()
        return None
    mesh = home.mesh
    for item in key:
        if type(item) is Meta and item.mesh is not mesh:
            AGAIN.step()
            return None
    return _learned(func, args, kwargs, mesh, home, key)


def _learned(
    func: Any, args: Any, kwargs: Any, mesh: Any, home: Meta, key: list[Any]
) -> Recipe:
    """Build the recipe of a call, and keep it under its key."""
    MISSES.step()
    if num_dispatch_modes():
        check_traced(_name(func))
    if has_reduced(key):
        recipe = using_reduced(build.reads(func, args, kwargs, key))
        keep_recipe(home, tuple(key), recipe)
        return recipe
    try:
        with unseen():
            recipe, floats_flow = build.recipe(func, args, kwargs, mesh, key)
    except Exception as error:
        raise with_layouts(error, _name(func), flatten((args, kwargs)), mesh) from error.__cause__
    if has_varying(key):
        recipe = of_varying(recipe)
    floats = () if floats_flow else floats_of((*args, *kwargs.values()))
    keep_recipe(home, (*key, *floats), recipe)
    return recipe


def keep_constant(func: Any, tensor: ShardTensor, value: Any) -> None:
    """Let the short route answer `func(tensor)` from now on: optimizers ask often."""
    keep_recipe(tensor._meta, tuple(key_of(func, (tensor,), {})[0]), Alias(value))


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


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
