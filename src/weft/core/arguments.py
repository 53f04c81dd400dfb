"""What public functions take: the types of a mesh and of placements, and the names of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.partition_spec import P
from weft.errors import ShardTypeError, message

__all__ = ["MeshLike", "Placements", "also_called"]

A = ParamSpec("A")
R = TypeVar("R")


class DeviceMesh(Protocol):
    """torch's DeviceMesh, by what tells it from weft's meshes."""

    @property
    def mesh_dim_names(self) -> Any: ...

    @property
    def mesh(self) -> Any: ...


class HasLayout(Protocol):
    """A ShardTensor, by what says where it lies."""

    @property
    def sharding(self) -> Layout: ...


MeshLike = Mesh | DeviceMesh
"""A mesh of weft (a value, or bound to this rank) or torch's DeviceMesh."""

Placements = P | Layout | HasLayout | Sequence[Any]
"""A spec (`P("dp", None)`), one placement per mesh axis (weft's or torch's), a layout, or a
ShardTensor that lies as is wanted."""


def also_called(**names: str) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Let a function take arguments by other names as well: other name -> its own.

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
            message(f"{call}({other}=, {name}=)", "both are given",
                    f"{other} is another name of {name}, which is given once", [other, name],
                    f"{call}(..., {name}=...)")
        )
    kwargs[name] = value
