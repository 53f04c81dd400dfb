"""The parameters and buffers of a module, each with all of its names.

A weight that several modules hold (tied weights), or a module that occurs in several places, is one
tensor: it gets one layout and is replaced by one tensor in all of its places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.errors import ModuleError

__all__ = [
    "Named", "Place", "first_matches", "named_tensors", "outermost_matches", "places_of", "put",
    "refuse_lazy", "replace_references", "set_where",
]


class Place(NamedTuple):
    """Where a module holds a tensor: the tensor's full name, its owner's, the owner, the key."""

    name: str
    path: str
    owner: nn.Module
    key: str

    @property
    def store(self) -> dict[str, Any]:
        """The owner's parameters or buffers, whichever have the key."""
        owner = self.owner
        return owner._parameters if self.key in owner._parameters else owner._buffers


@dataclass(slots=True)
class Named:
    """A parameter or buffer with every place that holds it, in order of registration."""

    tensor: torch.Tensor
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names, which is what `named_parameters` gives."""
        return self.places[0].name

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


def places_of(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """All places, in order of registration, which is the same on every rank."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for store in (owner._parameters, owner._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    yield Place(f"{path}.{key}" if path else key, path, owner, key), tensor


def named_tensors(module: nn.Module) -> list[Named]:
    """Each parameter and buffer once."""
    found: dict[int, Named] = {}
    for place, tensor in places_of(module):
        found.setdefault(id(tensor), Named(tensor)).places.append(place)
    return list(found.values())


def put(named: Named, tensor: torch.Tensor) -> None:
    """Replace a tensor at all of its places."""
    for place in named.places:
        set_where(place, tensor)


def set_where(place: Place, tensor: torch.Tensor) -> None:
    """Put a tensor at one place, without the checks and the new order of `register_parameter`."""
    place.store[place.key] = tensor


def replace_references(module: nn.Module, new: dict[int, torch.Tensor]) -> None:
    """Replace tensors (by id) in the lists and dicts that modules hold.

    `nn.LSTM` keeps its weights in a list too, and so do modules of users.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, list):
                value[:] = [new.get(id(one), one) for one in value]
            elif isinstance(value, dict):
                for key, one in value.items():
                    if id(one) in new:
                        value[key] = new[id(one)]
            elif isinstance(value, tuple) and type(value) is tuple and any(
                id(one) in new for one in value
            ):
                vars(part)[name] = tuple(new.get(id(one), one) for one in value)


def first_matches(
    module: nn.Module, patterns: Mapping[str, Any]
) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """The modules whose names match a pattern: the first that does, name, module, what is given. A
    module of several names comes once, by the first of them that matches."""
    seen: set[int] = set()
    for path, inner in module.named_modules(remove_duplicate=False):
        for pattern, given in patterns.items():
            if id(inner) not in seen and fnmatchcase(path, pattern):
                seen.add(id(inner))
                yield pattern, path, inner, given
                break


def outermost_matches(
    module: nn.Module, patterns: Mapping[str, Any]
) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """The same; of modules that contain each other and match one pattern, the outermost."""
    outer: dict[str, list[str]] = {}
    for pattern, path, inner, given in first_matches(module, patterns):
        above = outer.setdefault(pattern, [])
        if not any(path.startswith(f"{one}." if one else "") for one in above):
            above.append(path)
            yield pattern, path, inner, given


def refuse_lazy(call: str, tensors: list[Named]) -> None:
    """Raise ModuleError for lazy modules, whose parameters have no shape before the first
    forward."""
    lazy = [named.name for named in tensors if is_lazy(named.tensor)]
    if lazy:
        raise ModuleError(
            call, f"{len(lazy)} of {len(tensors)} parameters and buffers have no shape yet",
            "a layout needs a known shape", lazy,
            "module(batch)  # one forward on plain tensors, before it is distributed")
