"""Whole states moved between meshes and tables: from a trainer to inference, for example.

The tensors are planned together and travel in buckets (`tensor.placing.states`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout, P
from weft.core.names import also_called
from weft.errors import LayoutError, ShardTypeError, WeftError
from weft.tensor import ShardTensor
from weft.tensor.placing.layouts import as_layout
from weft.tensor.placing.operands import as_value
from weft.tensor.placing.states import moved
from weft.tensor.views.moved import unwrap_view
from weft.transport import traffic
from weft.transport.in_flight import landed

__all__ = ["reshard"]

_CALL = "reshard(state, to)"


@also_called(mesh="to", device_mesh="to")
def reshard(
    state: Mapping[str, Any], to: Any, shardings: Mapping[str, Any] | None = None, *,
    bucket_nbytes: int = 64 << 20,
) -> dict[str, Any]:
    """Move a state dict to another mesh or to other layouts.

    All tensors are planned together. Each rank receives exactly the bytes of its new blocks that it
    lacks, from the nearest rank that has them. Ranks that hold the same send equally much.
    Beside old and new blocks a rank holds two buckets at most: one that it sends, one that it
    receives. Every rank of the old and of the new meshes calls it; ranks that are in neither may.

    Args:
        state: a state dict, of a module or of an optimizer: maps, lists and tuples, nested.
            Plain tensors are copied, and other values stay as they are.
        to: a state dict of the same names, whose ShardTensors say mesh and layout (they may be on
            the meta device); or a mesh; or `shardings` alone, for the mesh that all tensors are on.
        shardings: with a mesh, a map from patterns of names to specs, of which the first that
            matches counts; other tensors are replicated. Names of nested maps are joined by dots.
        bucket_nbytes: the most bytes of a bucket.

    Returns:
        A new state dict; its tensors are detached. A tensor that is under several names (tied
        weights) moves once.

    Raises:
        LayoutError: names or shapes that `to` does not have; partial values.
        PlacementError: specs that do not fit.
        ShardTypeError: `to` is none of these; a pattern that matches nothing; a table alone, and
            tensors on several meshes.
    """
    named = [(name, one) for name, one in _tensors(state) if type(one) is ShardTensor]
    targets = _targets(named, to, shardings)
    _check(named, targets)
    jobs: dict[Any, int] = {}
    tensors: list[tuple[ShardTensor, BoundMesh, Layout]] = []
    places: dict[str, int] = {}
    for name, tensor in named:
        mesh, layout = targets[name]
        local = unwrap_view(landed(tensor._local))
        memory = local.untyped_storage()._cdata, local.storage_offset(), local.stride()
        key = (memory, tensor._meta, mesh, layout)
        places[name] = jobs.setdefault(key, len(tensors))
        if places[name] == len(tensors):
            tensors.append((as_value(tensor.detach()), mesh, layout))  # type: ignore[arg-type]
    with traffic.label("reshard", "asked for"):
        found = moved(tensors, bucket_nbytes)

    def result(name: str, leaf: Any) -> Any:
        if name in places:
            return found[places[name]]
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return _changed(state, result)


def _targets(
    named: list[tuple[str, ShardTensor]], to: Any, shardings: Mapping[str, Any] | None
) -> dict[str, tuple[BoundMesh, Layout]]:
    """Name -> the new layout of the tensor; names that `to` does not have are left out."""
    if shardings is None and _is_table(to):
        to, shardings = _one_mesh(named), to
    if isinstance(to, Mapping) and shardings is None:
        return {
            name: (one._meta.mesh, one.sharding) for name, one in _tensors(to)
            if type(one) is ShardTensor
        }
    if isinstance(to, Mapping):
        raise ShardTypeError(
            _CALL, "to is a state dict, and shardings are given", "a state dict says mesh "
            "and layouts itself", ["shardings="], "weft.reshard(state, mesh, shardings)")
    mesh, table = as_bound_mesh(to, "reshard(to)"), dict(shardings or {})
    idle, out = set(table), {}
    for name, tensor in named:
        found = next((one for one in table if fnmatchcase(name, one)), None)
        idle.discard(found)
        try:
            spec = None if found is None else table[found]
            out[name] = mesh, as_layout(mesh, tensor.shape, spec, "reshard(shardings)")
        except WeftError as error:
            error.add_note(f"  in reshard, for {name}")
            raise
    if idle:
        raise ShardTypeError(
            "reshard(shardings=)", f"{len(idle)} of {len(table)} patterns match no tensor",
            "the first pattern that matches a name counts; * matches dots too",
            sorted(idle), f"names are {[name for name, _ in named[:4]]}")
    return out


def _is_table(to: Any) -> bool:
    """Whether it maps to specs, and to no tensors."""
    return isinstance(to, Mapping) and bool(to) and all(
        isinstance(one, (P, Layout, list, tuple)) for one in to.values()
    ) and not any(isinstance(one, torch.Tensor) for _, one in _tensors(to))


def _one_mesh(named: list[tuple[str, ShardTensor]]) -> BoundMesh:
    meshes = list(dict.fromkeys(tensor._meta.mesh for _, tensor in named))
    if len(meshes) != 1:
        raise ShardTypeError(
            _CALL, f"to is a table alone, and the tensors are on {len(meshes)} meshes",
            "a table alone is for the mesh that all tensors are on", list(map(str, meshes)),
            "weft.reshard(state, mesh, table)")
    return meshes[0]


def _check(
    named: list[tuple[str, ShardTensor]], targets: Mapping[str, tuple[BoundMesh, Layout]]
) -> None:
    wrong: list[str] = []
    for name, tensor in named:
        if name not in targets:
            wrong.append(f"{name}: it is not in `to`")
        elif targets[name][1].shape != tuple(tensor.shape):
            wrong.append(f"{name}: {tensor.sharding}, and {targets[name][1]} in `to`")
        else:
            wrong += [
                f"{name}: {layout} is partial" for layout in (tensor.sharding, targets[name][1])
                if layout.is_partial
            ]
    if wrong:
        raise LayoutError(
            _CALL, f"{len(wrong)} of {len(named)} tensors cannot move",
            "each ShardTensor of the state has one in `to`, of the same shape; neither is "
            "partial",
            wrong[:8] + [f"and {len(wrong) - 8} more"] * (len(wrong) > 8),
            "x.redistribute(placements=P()) for partial values; the state dict of the same "
            "model as `to`")


def _tensors(tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of nested maps, lists and tuples."""
    found: list[tuple[str, Any]] = []
    _changed(tree, lambda name, leaf: found.append((name, leaf)))
    return found


def _changed(tree: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Nested maps, lists and tuples with each leaf changed; names are joined by dots."""
    def inner(key: Any, one: Any) -> Any:
        return _changed(one, change, f"{name}.{key}" if name else str(key))

    match tree:
        case Mapping():
            return {key: inner(key, one) for key, one in tree.items()}
        case list() | tuple():
            parts = [inner(key, one) for key, one in enumerate(tree)]
            if isinstance(tree, list):
                return parts
            return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        case _:
            return change(name, tree)
