"""Which world this thread is in, and how a mesh is bound to it.

A simulated rank is in its run's world. Any other thread is in that of torch.distributed, which
is started from a launcher's environment if necessary. Without either, the world is one rank.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.bound_mesh import BoundMesh, World, check_device_type, innermost_mesh
from weft.comm.collective_call import timeout
from weft.comm.launchers import did_not_meet, environment_of
from weft.comm.process_world import backend_for, process_world
from weft.comm.recording import current_recording_world
from weft.comm.simulated import current_simulated_world
from weft.core import Mesh, P, is_placements
from weft.core.arguments import MeshLike
from weft.core.names import also_called
from weft.errors import CommunicationError, MeshError, ShardTypeError

__all__ = [
    "as_bound_mesh", "current_mesh", "get_global_mesh", "init_mesh", "set_global_mesh",
    "this_world",
]


_solo = World(0, 1)


def this_world() -> World:
    """The world that this thread is in."""
    return _made_up() or process_world() or _solo


def _made_up() -> World | None:
    """The world of this thread whose ranks are no processes."""
    return current_recording_world() or current_simulated_world()


@also_called({
    "device": 'weft.init_mesh({"dp": 2, "tp": 2}, "cuda")',
    "devices": 'weft.init_mesh({"dp": 2, "tp": 2}, ranks=[0, 2, 1, 3])',
    "": 'weft.init_mesh({"dp": 2, "tp": 2})',
}, mesh_shape="axes", axis_shapes="axes", axis_names="mesh_dim_names", device_ids="ranks")
def init_mesh(
    axes: Mapping[str, int] | Sequence[int] | int | Mesh | str,
    device_type: str | Sequence[int] = "cpu",
    ranks: Iterable[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] | None = None,
) -> BoundMesh:
    """A mesh on the ranks of this world; the same object for the same value.

    Every rank of the world calls it. On a rank that is not in the mesh, the result has `here` None.
    Where torch.distributed does not run, it is started from torchrun's environment, also if
    torchrun has started the ranks again.

    Args:
        axes: map axis name -> size, or only sizes, or a mesh value. One size may be -1: it takes
            all ranks that the others leave.
        device_type: where local tensors live. With "cuda", rank r of a host takes device r.
        ranks: the ranks in row-major order; None takes 0, 1, ..., size - 1.
        mesh_dim_names: the names of axes for which only sizes are given.

    torch's own order is accepted too: `init_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))`.

    Returns:
        The mesh, bound to this rank.

    Raises:
        MeshError: a mesh that does not fit into the world; names that do not match the sizes.
        ShardTypeError: invalid sizes.
        CommunicationError: not all ranks of a launcher have come, or their port is taken.
    """
    if isinstance(axes, str):  # torch's order
        if isinstance(device_type, str):
            raise _no_sizes(axes)
        axes, device_type = device_type, axes
    if not isinstance(device_type, str):
        raise _no_device_type(axes, device_type)
    if mesh_dim_names is not None:
        axes = _named(axes, mesh_dim_names)
    return _bound(axes, device_type, ranks, "init_mesh(axes)")


def _bound(axes: Any, device_type: str, ranks: Iterable[int] | None, call: str) -> BoundMesh:
    """The mesh of these axes on this rank; `call` names the argument in an error."""
    if not isinstance(axes, Mesh) and _sizes_of(axes).count(-1) > 1:
        raise MeshError(
            call, f"{_sizes_of(axes).count(-1)} sizes of {axes!r} are -1",
            "one size may be left out, as -1: it takes all ranks that the others leave",
            [repr(axes)], 'weft.init_mesh({"dp": -1, "tp": 2})')
    if not _leaves_out(axes):  # what is wrong with it comes before a world starts
        axes = axes.abstract if isinstance(axes, Mesh) else Mesh(axes, ranks)
    if _made_up() is None and process_world() is None:
        _start_from_environment(device_type)
    world = this_world()
    ranks = None if ranks is None else tuple(ranks)
    value = axes if isinstance(axes, Mesh) else Mesh(
        _inferred(axes, world.size if ranks is None else len(ranks)), ranks)
    value, device_type = world.meant(value, device_type)
    _check_fits(value, world, call)
    return world.bind(value, device_type)


def _sizes_of(axes: Any) -> list[Any]:
    sizes = axes.values() if isinstance(axes, Mapping) else axes
    return list(sizes) if isinstance(sizes, Iterable) else [sizes]


def _leaves_out(axes: Any) -> bool:
    """Whether one size is -1, and all others are sizes."""
    if isinstance(axes, Mesh):
        return False
    sizes = _sizes_of(axes)
    known = [size for size in sizes if size != -1]
    return len(known) == len(sizes) - 1 and all(type(size) is int and size > 0 for size in known)


def _inferred(axes: Any, num_ranks: int) -> Any:
    """The axes, with a size in place of -1."""
    known = -math.prod(_sizes_of(axes))
    if num_ranks % known:
        raise MeshError(
            "init_mesh(axes)", f"axes is {axes!r}: the sizes that are given make {known}, "
            f"and there are {num_ranks} ranks", "the size that is left out takes all ranks "
            "that the others leave", [f"{num_ranks} ranks by {known}"],
            "sizes that divide the number of ranks")
    if isinstance(axes, Mapping):
        return {name: num_ranks // known if size == -1 else size for name, size in axes.items()}
    if isinstance(axes, int):
        return num_ranks
    return [num_ranks // known if size == -1 else size for size in axes]


def _no_sizes(device_type: str) -> ShardTypeError:
    return ShardTypeError(
        "init_mesh(axes)", f"axes is {device_type!r}, and no sizes follow",
        "a mesh is made of sizes of axes; where the device type stands first, as in torch, "
        "they come next", [repr(device_type)],
        'weft.init_mesh({"dp": 2, "tp": 2}' + (
            f', "{device_type}")' if device_type.isalpha() else ")"))


def _no_device_type(axes: Any, given: Any) -> ShardTypeError:
    """For names in second place, where JAX's `make_mesh` has them, and all else there."""
    sizes, names = _sizes_of(axes), list(given) if isinstance(given, Iterable) else []
    named = dict(zip(names, sizes)) if len(names) == len(sizes) else {}
    if not all(isinstance(name, str) for name in named):
        named = {}
    return ShardTypeError(
        "init_mesh(device_type)", f"it is {given!r}, of type {type(given).__name__}",
        "a type of device is a text; names of axes stand with their sizes, and ranks in "
        "ranks=", [repr(given)], f"weft.init_mesh({named or {'dp': 2, 'tp': 2}})")


def _named(axes: Any, names: Sequence[str]) -> dict[str, int]:
    """Axes from sizes and names."""
    sizes = (axes,) if isinstance(axes, int) else axes
    fits = isinstance(sizes, Sequence) and len(sizes) == len(names) == len(set(names))
    if not fits or isinstance(names, str):
        raise MeshError(
            "init_mesh(mesh_dim_names=)", f"the axes are {axes!r}, the names {names!r}",
            "there is one name for each size, and no two are the same; a map of axes has "
            "its names", [repr(names)],
            'weft.init_mesh((2, 2), mesh_dim_names=("dp", "tp")), or '
            'weft.init_mesh({"dp": 2, "tp": 2})')
    return dict(zip(names, sizes))


def as_bound_mesh(mesh: MeshLike | None = None, call: str = "device_mesh") -> BoundMesh:
    """The bound mesh for the argument of a public call: a bound mesh, a value, or a DeviceMesh.

    None means that of the innermost `with mesh:`, else the global one (`set_global_mesh`). A value
    gives the mesh of that value on this rank, which is bound if necessary.

    Args:
        mesh: the argument of the call.
        call: the name of the argument in an error.

    Raises:
        MeshError: None without a default mesh.
        ShardTypeError: not a mesh.
    """
    if mesh is None:
        mesh = innermost_mesh()
        mesh = get_global_mesh() if mesh is None else mesh
    if isinstance(mesh, BoundMesh):
        return mesh
    if mesh is None:
        raise MeshError(
            call, "no mesh is given, and there is no default mesh",
            "a call without a mesh takes that of the innermost `with mesh:`, else the "
            "global one", ["no mesh"],
            'give the call the mesh of the program, mesh = weft.init_mesh({"dp": 2, "tp": 2}); '
            "or with mesh: ... around it")
    if isinstance(mesh, Mesh):
        is_cuda = dist.is_initialized() and "nccl" in dist.get_backend_config()
        return this_world().bound(mesh) or _bound(mesh, "cuda" if is_cuda else "cpu", None, call)
    adopted = this_world().adopt(mesh) if isinstance(mesh, DeviceMesh) else None
    if adopted is not None:
        return adopted
    fix = 'weft.init_mesh({"dp": 2, "tp": 2})'
    if isinstance(mesh, P) or is_placements(mesh):
        fix = f"placements={mesh!r}"
    elif isinstance(mesh, str):
        fix = f"placements=P({mesh!r})"
    elif isinstance(mesh, (tuple, list)) and any(isinstance(one, str) for one in mesh):
        fix = f"P({', '.join(map(repr, mesh))}), after the mesh"
    elif isinstance(mesh, Mapping) or type(mesh) is int:
        fix = f"weft.init_mesh({mesh!r})"
    said = "it" if isinstance(mesh, torch.Tensor) else repr(mesh)  # not all of its values
    raise ShardTypeError(
        call, f"{said} is of type {type(mesh).__name__}",
        "a mesh is a weft mesh, or a torch DeviceMesh while torch.distributed runs",
        [type(mesh).__name__ if said == "it" else said], fix)


def current_mesh() -> BoundMesh | None:
    """The mesh of the innermost `with mesh:` of this thread, weft's or torch's; None without
    one."""
    mesh = innermost_mesh()
    return None if mesh is None else as_bound_mesh(mesh)


def _holder() -> World:
    """The owner of a global mesh: the process, with all of its threads, or a simulated rank."""
    return _made_up() or _solo


def set_global_mesh(mesh: MeshLike | None) -> None:
    """Make this the mesh of all calls without one, if there is no `with mesh:` around them.

    It belongs to the process, with all of its threads; each simulated rank has its own. None
    removes it.

    Args:
        mesh: a mesh, weft's, torch_xla's or torch's.
    """
    _holder().global_mesh = mesh


def get_global_mesh() -> Any:
    """The mesh passed to `set_global_mesh`, or None."""
    return _holder().global_mesh


def _start_from_environment(device_type: str) -> None:
    """Start torch.distributed if a launcher has started this process; torchrun's variables say so
    then, whichever it was."""
    if not dist.is_available():
        return
    found = environment_of(os.environ)
    if not found:
        return
    os.environ.update(found)
    check_device_type(device_type)
    if device_type != "cpu":
        module = torch.get_device_module(device_type)
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        module.set_device(local % module.device_count())
    backend = backend_for(device_type)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout()))
    except (dist.DistError, ValueError) as error:
        raise did_not_meet(found, error, timeout().total_seconds()) from error
    dist.init_process_group(
        "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend}", timeout=timeout(),
        store=_of_this_start(store, rank, size), rank=rank, world_size=size,
    )
    atexit.register(_end)


def _of_this_start(store: dist.Store, rank: int, size: int) -> dist.Store:
    """The part of the store that belongs to this start of the ranks.

    torchrun keeps the store when it starts ranks again, and gloo would look for ranks at the
    addresses of those that have died. Its own count of restarts differs from node to node, where
    one has seen a rank die and another that a node came back. So rank 0 counts, and the others
    take part in the last start in which no rank of their number does.

    Raises:
        CommunicationError: rank 0 has not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # rank 0 serves it, anew with each start
    starts = dist.PrefixStore(f"weft, {size} ranks", store)
    end = time.monotonic() + timeout().total_seconds()
    number = starts.add("starts", 1 if rank == 0 else 0)
    while rank and (number == 0 or starts.add(f"rank {rank} in start {number}", 1) > 1):
        if time.monotonic() > end:
            raise CommunicationError(
                "init_mesh(axes)", f"rank 0 of {size} has not come within "
                f"{timeout().total_seconds():g} s", "all ranks that a launcher starts meet",
                [f"rank {rank} waits"], "look at the output of rank 0")
        time.sleep(0.05)
        number = starts.add("starts", 0)
    return dist.PrefixStore(f"start {number}", starts)


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_fits(value: Mesh, world: World, call: str) -> None:
    ranks = range(value.size()) if value.ranks is None else value.ranks
    outside = [rank for rank in ranks[-8:] if not 0 <= rank < world.size] or [
        rank for rank in ranks if not 0 <= rank < world.size
    ]
    if not outside:
        return
    axes = dict(zip(value.axis_names, value.axis_sizes))
    count = max(value.size(), max(ranks) + 1)
    given = axes if value.ranks is None else repr(value)
    raise MeshError(
        call, f"{value!r} needs {value.size()} ranks up to rank {max(ranks)}, "
        f"the world has {world.size}",
        "a mesh lies within the world: the simulated ranks of weft.testing.run, "
        "or the processes of torch.distributed or torchrun, or else this process alone",
        outside,
        f"weft run -n {count} script.py, or in one process:\n"
        f"weft.testing.run(fn, num_ranks={count}, mesh={given})")
