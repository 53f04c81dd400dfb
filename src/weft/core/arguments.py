"""What public functions accept: types of meshes and placements, and alternative argument names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.partition_spec import P
from weft.errors import ShardTypeError

__all__ = ["MeshLike", "Placements", "also_called"]

A = ParamSpec("A")
R = TypeVar("R")


class DeviceMesh(Protocol):
    """torch's DeviceMesh, by the attributes that distinguish it from weft's meshes."""

    @property
    def mesh_dim_names(self) -> Any: ...

    @property
    def mesh(self) -> Any: ...


class HasLayout(Protocol):
    """A ShardTensor, by the attributes that give its layout."""

    @property
    def sharding(self) -> Layout: ...


MeshLike = Mesh | DeviceMesh
"""A mesh of weft (a value, or bound to this rank) or torch's DeviceMesh."""

Placements = P | Layout | HasLayout | Sequence[Any]
"""A spec (`P("dp", None)`), one placement per mesh axis (weft's or torch's), a layout, or a
ShardTensor that has the wanted layout."""


def also_called(**names: str) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Let a function also take arguments by other names: other name -> its own.

    >>> @also_called(device_mesh="mesh")
    ... def size(mesh):
    ...     return mesh.size()
    >>> size(device_mesh=Mesh({"dp": 2}))
    2
    """

    def decorate(function: Callable[A, R]) -> Callable[A, R]:
        @functools.wraps(function)
        def call(*args: A.args, **kwargs: A.kwargs) -> R:
            for other in names.keys() & kwargs.keys():
                _rename(function.__qualname__, kwargs, other, names[other])
            return function(*args, **kwargs)

        return call

    return decorate


def _rename(call: str, kwargs: dict[str, Any], other: str, name: str) -> None:
    value = kwargs.pop(other)
    if kwargs.get(name) is not None:
        call = call.removesuffix(".__init__")
        raise ShardTypeError(
            f"{call}({other}=, {name}=)", "both are given",
            f"{other} is another name of {name}, which is given once", [other, name],
            f"{call}(..., {name}=...)")
    kwargs[name] = value
