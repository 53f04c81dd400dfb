"""From a call to its recipe: look up, or decide.

`call` is the general route; the short one is `ShardTensor.__torch_function__`, with the same keys.
Floats count in a key by type alone, because learning rates change every step; a recipe that has
baked a float in is kept under the key with the floats' values.

A call is decided once: `_decided` returns one recipe, including what happens before the op (reduced
operands) and after it (`out=`). It never calls `call` again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh, this_world
from weft.errors import MeshError
from weft.tensor.call import build
from weft.tensor.call.compiled import unseen
from weft.tensor.call.func_transforms import is_mapping, through_torch
from weft.tensor.call.losses import JoiningLosses, joins_losses
from weft.tensor.call.out import function_of, without_out, writing
from weft.tensor.call.own.functions import OwnFunction
from weft.tensor.call.recipe import Alias, Recipe
from weft.tensor.call.reduce_once import UsingReduced, has_reduced, unmarked
from weft.tensor.call.torchs_errors import in_torchs_words, told_of, with_layouts
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
    source_line,
    transforms,
)
from weft.tensor.placing.foreign import any_foreign, taken_in
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.torch_collectives import check_mixing
from weft.tensor.trace.trees import flatten

__all__ = ["SPECIAL", "call", "failed", "keep_constant", "learn", "mesh_of"]

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
    kwargs = kwargs or {}
    if is_mapping():
        return through_torch(func, args, kwargs)
    if func not in _AS_THEY_ARE and any_foreign(args, kwargs):
        args, kwargs, given_back = taken_in(func, args, kwargs)
        return given_back(_answered(func, args, kwargs))
    return _answered(func, args, kwargs)


def _answered(func: Any, args: Any, kwargs: Any) -> Any:
    special = SPECIAL.get(func)
    return _carry_out(func, args, kwargs) if special is None else special(*args, **kwargs)


def _carry_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out a call that needs a recipe."""
    key, met = key_of(func, args, kwargs)
    metas = [one._meta for one in met if type(one) is ShardTensor]
    if not metas:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    plain = [one for one in met if isinstance(one, torch.Tensor) and type(one) is not ShardTensor]
    _check_modes(func, args, kwargs, plain)
    mesh = mesh_of(_name(func), metas)
    is_hashable = len(metas) + len(plain) == len(met)
    if not is_hashable and func in _OPERATORS:
        return _against_array(func, *args)
    CALLS.step()
    if is_hashable and all(map(dense, plain)):
        recipe = _found(func, args, kwargs, mesh, metas[0], key)
    else:
        recipe = _learned(func, args, kwargs, mesh, metas[0], None)
    try:
        return recipe.run(func, args, kwargs)
    except Exception as error:
        raise failed(error, func, (args, kwargs), mesh) from error.__cause__


def failed(error: Exception, func: Any, given: Any, mesh: BoundMesh) -> Exception:
    """The error of a call that this rank has begun, with layouts. The call may succeed on other
    ranks; they can then read why this one does not come."""
    if told_of(error):
        return error
    name = _name(func)
    said = str(error).strip().partition("\n")[0].rstrip(".")
    this_world().stopped(f"raised {type(error).__name__}: {said}, in {name}, at {source_line()}")
    return with_layouts(error, name, flatten(given), mesh)


def _check_modes(func: Any, args: Any, kwargs: Any, plain: Sequence[torch.Tensor]) -> None:
    """Raise where strict mode forbids a plain operand, a tracer watches the call, or a Function
    that was given full tensors makes it."""
    if STRICT.on:
        check_mixing(_name(func))
        check_plain(_name(func), flatten((args, without_out(kwargs))))
        check_traced(_name(func))
    if plain:
        if transforms() is not None:
            check_transforms(_name(func))
        if num_dispatch_modes():
            check_traced(_name(func))


def _found(
    func: Any, args: Any, kwargs: Any, mesh: BoundMesh, home: Meta, key: list[Any]
) -> Recipe:
    """The cached recipe of a call, or a new one."""
    floats = floats_of((*args, *kwargs.values()))
    found = home.recipes.get(tuple(key)) or _with_floats(home, key, floats)
    return found or _learned(func, args, kwargs, mesh, home, key, floats)


def _unmarked(func: Any, args: Any, kwargs: Any) -> Recipe:
    """The recipe of a call whose operands count as if they had not been reduced."""
    key, met = key_of(func, args, kwargs)
    home = next(one._meta for one in met if type(one) is ShardTensor)
    if has_reduced(key):
        key, home = unmarked(key), home.replace()
    return _found(func, args, kwargs, home.mesh, home, key)


def _with_floats(home: Meta, key: Sequence[Any], floats: Sequence[float]) -> Recipe | None:
    """The cached recipe of a call with exactly these floats."""
    return home.recipes.get((*key, *floats)) if floats else None


def _against_array(func: Any, tensor: Any, other: Any) -> Any:
    """An operator on an unhashable value, like an array of numpy's. As in torch, only `==` takes
    the array; other operators are left to it."""
    if func is torch.Tensor.__eq__ and hasattr(other, "__array_interface__"):
        return func(tensor, torch.as_tensor(other))
    return NotImplemented


def learn(func: Any, args: Any, kwargs: Any, home: Meta, key: list[Any]) -> Recipe | None:
    """The recipe of a call for whose key the short route has found none.

    None if only `call` can carry it out. It is kept for the next such call.
    """
    floats = floats_of((*args, *kwargs.values()) if kwargs else args)
    found = _with_floats(home, key, floats)
    if found is not None:
        return found
    kwargs = kwargs or {}
    if func in SPECIAL or STRICT.on:
        AGAIN.step()
        return None
    mesh = home.mesh
    for item in key:
        if type(item) is Meta and item.mesh is not mesh:
            AGAIN.step()
            return None
    return _learned(func, args, kwargs, mesh, home, key, floats)


def _learned(
    func: Any, args: Any, kwargs: Any, mesh: Any, home: Meta, key: list[Any] | None,
    floats: Sequence[float] = (),
) -> Recipe:
    """Build the recipe of a call with these floats, and keep it under its key, if it has one."""
    MISSES.step()
    if num_dispatch_modes():
        check_traced(_name(func))
    try:
        with unseen():
            recipe, floats_flow = _decided(func, args, kwargs, mesh, key)
    except Exception as error:
        # No local variable holds what is raised: its traceback holds this frame.
        raise with_layouts(
            in_torchs_words(error, func, args, kwargs), _name(func), flatten((args, kwargs)), mesh
        ) from error.__cause__
    known = key or [getattr(one, "_meta", None) for one in flatten((args, kwargs))]
    if has_varying(known):
        recipe = of_varying(recipe, _carry_out)
    if joins_losses(known):
        recipe = JoiningLosses(recipe)
    if key is not None:
        keep_recipe(home, tuple(key) if floats_flow else (*key, *floats), recipe)
    return recipe


def _decided(
    func: Any, args: Any, kwargs: Any, mesh: BoundMesh, key: list[Any] | None
) -> tuple[Recipe, bool]:
    """The recipe of a call, and whether its floats only flow through. `key`: None where it has
    none."""
    if kwargs.get("out") is not None and type(func) is not OwnFunction:
        function, rest = function_of(func), without_out(kwargs)
        if not any(type(one) is ShardTensor for one in flatten((args, rest))):
            return writing(func, args, kwargs, None), True
        inner = None if key is None else key_of(function, args, rest)[0]
        value, floats_flow = _decided(function, args, rest, mesh, inner)
        return writing(func, args, kwargs, value), floats_flow
    if key is not None and has_reduced(key):
        return UsingReduced(key, build.reads(func, args, kwargs, key), _unmarked), True
    return build.recipe(func, args, kwargs, mesh, key, _carry_out)


def keep_constant(func: Any, tensor: ShardTensor, value: Any) -> None:
    """Let the short route answer `func(tensor)` from now on: optimizers ask often."""
    keep_recipe(tensor._meta, tuple(key_of(func, (tensor,), {})[0]), Alias(value))


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def mesh_of(call_name: str, metas: Sequence[Meta]) -> Any:
    """The one mesh of the operands; MeshError if they live on several."""
    mesh = metas[0].mesh
    others = {str(meta.layout): meta.mesh for meta in metas if meta.mesh != mesh}
    if others:
        whole = max((mesh, *others.values()), key=lambda one: one.ndim)
        fix = "x.redistribute(mesh, placements) first"
        if all({*one.axis_names} < {*whole.axis_names} for one in (mesh, *others.values())
               if one != whole):
            fix += f"; or all on {whole!r}: a layout names those axes alone that it uses"
        raise MeshError(
            call_name, f"operands live on {mesh!r} and on "
            + ", ".join(repr(other) for other in dict.fromkeys(others.values())),
            "all operands of one call live on one mesh", list(others),
            fix)
    return mesh
