"""One tensor on many devices: ordinary PyTorch code on global tensors with layouts.

    mesh = weft.init_mesh({"dp": 2, "tp": 2})  # on every rank
    x = weft.distribute_tensor(torch.randn(7, 4), mesh, P("dp"))
    weft.distribute_module(model, mesh, shardings={"*.weight": P("tp")})

`weft.testing.run` simulates ranks in one process. `weft.explain` shows what moves, `weft.plan` what
a move costs, and `weft.dry_run` what a program costs on any number of ranks. docs/api.md lists the
names by purpose.

Names are imported when they are first used (PEP 562), and layouts, plans and drawings need no
torch. What needs torch is loaded as soon as torch is: `weft.startup` says why.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from weft import startup
from weft._version import __version__ as __version__

if TYPE_CHECKING:
    from weft import network, nn, random, ray, spmd, testing  # noqa: F401
    from weft.comm import BoundMesh, as_bound_mesh, current_mesh, hybrid_mesh, init_mesh
    from weft.core import (
        KINDS,
        Layout,
        Mesh,
        P,
        Partial,
        Placement,
        Replicate,
        Shard,
        StridedShard,
    )
    from weft.drawing import show
    from weft.dry import Compute, DryRun, dry_classes, dry_run, measure_compute
    from weft.errors import (
        CommunicationError,
        LayoutError,
        MeshError,
        ModuleError,
        PlacementError,
        ShardTypeError,
        StrictError,
        UnsupportedOpError,
        WeftError,
        WeftWarning,
    )
    from weft.interop import from_dtensor, to_dtensor
    from weft.local import collectives, local_map
    from weft.nn import distribute_module, linear_scan, reshard, zigzag
    from weft.own import (
        op_by_op,
        register_handler,
        register_rule,
        unregister_handler,
        unregister_rule,
    )
    from weft.planner import Link, Links, plan, set_links
    from weft.plotting import plot
    from weft.rng import fork_rng, manual_seed, rng_state, set_rng_state
    from weft.spmd import ShardedLoader
    from weft.tensor import (
        ShardTensor,
        arange,
        cache_clear,
        cache_info,
        debug,
        distribute_tensor,
        empty,
        explain,
        from_callback,
        full,
        ones,
        rand,
        randint,
        randn,
        randperm,
        scatter_tensor,
        sharded_factories,
        strict,
        to_callback,
        warn_if_whole,
        zeros,
    )
    from weft.transport import measure_links, trace

__all__ = [
    "KINDS", "P", "BoundMesh", "CommunicationError", "Compute", "DryRun", "Layout", "LayoutError",
    "Link", "Links", "Mesh", "MeshError", "ModuleError", "Partial", "Placement",
    "PlacementError", "Replicate", "Shard", "ShardTensor", "ShardTypeError", "ShardedLoader",
    "StrictError", "StridedShard", "UnsupportedOpError", "WeftError", "WeftWarning", "arange",
    "as_bound_mesh",
    "cache_clear", "cache_info", "collectives", "current_mesh", "debug", "distribute_module",
    "distribute_tensor", "dry_classes", "dry_run", "empty", "explain", "fork_rng", "from_callback",
    "from_dtensor", "full", "hybrid_mesh", "init_mesh", "linear_scan", "local_map", "manual_seed",
    "measure_compute", "measure_links", "ones", "op_by_op", "plan", "plot", "rand", "randint",
    "randn", "randperm", "register_handler", "register_rule", "reshard", "rng_state",
    "scatter_tensor", "set_links", "set_rng_state", "sharded_factories", "show", "spmd", "strict",
    "testing", "to_callback", "to_dtensor", "trace", "unregister_handler", "unregister_rule",
    "warn_if_whole", "zeros", "zigzag",
]

_ROOMS = ("errors", "core", "planner", "drawing", *startup.WITH_TORCH)
"""Where public names come from, in the order in which they are searched."""

_PUBLIC_ROOMS = ("network", "nn", "random", "ray", "spmd", "testing")
"""`from weft import *` leaves out those of which other packages have namesakes."""


def __getattr__(name: str) -> Any:
    """A public name, or a room of the package, imported at its first use."""
    if name in __all__ and name not in _PUBLIC_ROOMS:
        for room in _ROOMS:
            module = importlib.import_module(f"weft.{room}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    if not name.startswith("__"):
        try:
            return importlib.import_module(f"weft.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"weft.{name}":
                raise
    place = _in_its_place(name)
    told = f"module 'weft' has no attribute {name!r}{place}"
    if place and sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ImportError(told, name=name)  # of `from weft import`, which would drop the text
    raise AttributeError(
        told, name=name, obj=sys.modules[__name__]
    )  # with both, Python suggests a name


def _in_its_place(name: str) -> str:
    """What weft has under another name, or in one of its rooms."""
    for room in (*_PUBLIC_ROOMS, "local.collectives"):
        if name in getattr(sys.modules.get(f"weft.{room}"), "__all__", ()):
            return f"; it is weft.{room.removeprefix('local.')}.{name}"
    told = importlib.import_module("weft.core.counterparts").said_of(name)
    if not told and callable(getattr(sys.modules.get("torch"), name, None)):
        return (f"; torch has torch.{name}, which takes ShardTensors; what it makes without any is "
                "sharded by weft.distribute_tensor(value, mesh, P(...))")
    return told


def __dir__() -> list[str]:
    hidden = [name for name in globals() if name.startswith("__")]
    return sorted({*hidden, *__all__, *_PUBLIC_ROOMS})


startup.watch()
