"""Memory and values, shard by shard, for modules that were built on the meta device.

`distribute_module` gives layouts to tensors without memory. `materialize` gives each rank the
memory of its blocks and lets the modules initialize themselves. weft draws their random numbers,
which depend only on the position in the global tensor. So the module is the same on one rank as on
any mesh. No rank ever holds more than its blocks.

The order is that of construction: parts before what contains them. In this order each module calls
`reset_parameters` (some of torch's `_reset_parameters`), as constructors do, or all are passed to a
function of the user's, as by `Module.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from weft.errors import ModuleError
from weft.nn.named import Named, named_tensors, refuse_lazy, set_where
from weft.tensor import ShardTensor
from weft.tensor.shard_tensor import version_of

__all__ = ["materialize"]

M = TypeVar("M", bound=nn.Module)

_RESETS = ("reset_parameters", "_reset_parameters")


@torch.inference_mode(False)  # by the counts of writes it knows what is initialized
def materialize(module: M, init: Callable[[nn.Module], Any] | None = None) -> M:
    """Give the meta tensors of a distributed module memory and values; returns the module.

    The parameters stay the same objects, so tied weights stay tied, and an optimizer may already
    have been built. A collective of the mesh. Tensors that are not on the meta device keep their
    values, unless `init` writes to them.

    Args:
        module: a module on the meta device that has been through `distribute_module`.
        init: called with every submodule, parts first, as by `Module.apply`. Without it, the
            modules that hold meta tensors call their own `reset_parameters`, and so do the modules
            that contain them, if they have one. For tied weights, the module of the first name
            initializes, because its values survive `head.weight = token.weight`.

    Returns:
        `module`.

    Raises:
        ModuleError: plain meta tensors; modules that cannot initialize themselves; tensors that
            nothing was written to. The first two are raised before any memory is taken.
    """
    tensors = named_tensors(module)
    refuse_lazy("materialize(module)", tensors)
    waiting = [named for named in tensors if named.tensor.is_meta]
    _refuse_plain(waiting)
    holders = {id(place.owner): place.path for named in waiting for place in named.places}
    if init is None:
        _refuse_helpless(module, holders, waiting)
    for named in waiting:
        tensor: Any = named.tensor
        tensor.data = torch.empty_like(tensor, device=tensor.device_mesh.device)
    before = [(named, version_of(named.tensor)) for named in waiting]  # type: ignore[arg-type]
    for part in _parts_first(module):
        if init is not None:
            init(part)
        elif not holders.keys().isdisjoint(map(id, part.modules())):
            reset = _reset_of(part)
            if reset is not None:
                with _without_tied(part, waiting):
                    getattr(part, reset)()
    _refuse_unwritten(before)
    return module


def _parts_first(module: nn.Module) -> Iterator[nn.Module]:
    """All modules once, in the order in which `Module.apply` comes to them."""
    seen: set[int] = set()

    def walk(one: nn.Module) -> Iterator[nn.Module]:
        if id(one) in seen:
            return
        seen.add(id(one))
        for child in one.children():
            yield from walk(child)
        yield one

    return walk(module)


def _reset_of(module: nn.Module) -> str | None:
    return next((name for name in _RESETS if callable(getattr(module, name, None))), None)


@contextmanager
def _without_tied(part: nn.Module, waiting: Sequence[Named]) -> Iterator[None]:
    """Inside, a weight that another module has initialized is replaced by one without memory."""
    lent = []
    for named in waiting:
        if len(named.places) > 1 and named.places[0].owner is not part:
            for place in named.places:
                if place.owner is part:
                    lent.append((place, named.tensor))
                    empty: torch.Tensor = torch.empty_like(named.tensor.detach(), device="meta")
                    if isinstance(named.tensor, nn.Parameter):
                        empty = nn.Parameter(empty, named.tensor.requires_grad)
                    set_where(place, empty)
    try:
        yield
    finally:
        for place, tensor in lent:
            set_where(place, tensor)


def _refuse_plain(waiting: Sequence[Named]) -> None:
    plain = [named.name for named in waiting if not isinstance(named.tensor, ShardTensor)]
    if plain:
        raise ModuleError(
            "materialize(module)", f"{len(plain)} of {len(waiting)} tensors on the meta "
            "device are plain", "a module is distributed before it gets memory", plain,
            "weft.distribute_module(module, mesh, shardings={...})")


def _refuse_helpless(module: nn.Module, holders: dict[int, str], waiting: Sequence[Named]) -> None:
    helpless = {
        id(part) for part in module.modules() if id(part) in holders and _reset_of(part) is None
    }
    names = [place.name for named in waiting for place in named.places[:1]
             if id(place.owner) in helpless]
    kinds = {type(part).__name__ for part in module.modules() if id(part) in helpless}
    if names:
        raise ModuleError(
            "materialize(module)", f"{len(names)} of {len(waiting)} tensors belong to "
            f"modules without reset_parameters: {', '.join(sorted(kinds))}",
            "a module has reset_parameters, or `init` gives its tensors values", names,
            "def init(module):\n    if isinstance(module, ...): "
            "nn.init.normal_(module.weight)\n"
            "weft.nn.materialize(model, init)")


def _refuse_unwritten(before: Sequence[tuple[Named, int]]) -> None:
    """A rank with an empty block does not know, so the ranks exchange what they found."""
    unwritten, mesh = [], None
    for named, version in before:
        tensor: Any = named.tensor
        mesh = tensor.device_mesh
        place = named.places[0]
        held = place.store.get(place.key)
        if held is tensor and tensor._local.numel() and version_of(tensor) == version:
            unwritten.append(named.name)
    if mesh is not None and mesh.here is not None and mesh.size() > 1:
        told: list[Any] = mesh.everyone().exchange(unwritten)
        unwritten = list(dict.fromkeys(name for names in told for name in names))
    if unwritten:
        raise ModuleError(
            "materialize(module)", f"{len(unwritten)} of {len(before)} tensors have "
            "memory now, and nothing was written to it",
            "every tensor gets its values in the initialization", unwritten,
            "an `init` that writes to them, or load_state_dict with a module that was "
            'given memory by to_empty(device="cpu")')
