"""n ranks in this process: communicators whose data meets under a baton.

Ranks meet for a `CollectiveCall`. Ranks that request different ops or facts, or at another
place of the program, never meet, and the baton reports this. (The splits of an all-to-all are
compared at the meeting.) In debug mode the ranks of a group meet before each collective, whatever
they request, and compare.

What a rank gets from a meeting is always fresh memory, computed by the last to arrive
while the others wait, so no rank sees another's later writes. Reductions are those of
`weft.comm.reduction`: torch's own, in rank order.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.baton import Baton, Finish, current_runner
from weft.comm.bound_mesh import BoundMesh, World, check_device_type
from weft.comm.collective_call import (
    PROCESS,
    CollectiveCall,
    Switch,
    agree,
    digest,
    disagreement,
    pairs_that_differ,
)
from weft.comm.communicator import Communicator
from weft.comm.recording import current_recording_world
from weft.comm.reduction import reduce_partials
from weft.comm.source import point
from weft.comm.turns import Runner
from weft.core import Mesh
from weft.core.names import also_called
from weft.errors import CommunicationError, MeshError, ShardTypeError, WeftWarning

__all__ = [
    "SimulatedRanks", "SimulatedWorld", "current_simulated_world", "mesh_of_ranks", "run_simulated",
]

T = TypeVar("T")

_num_modes: Any = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _RollCall:
    """The meeting of ranks that compare their requests: any of them is equal to any other."""

    ask: CollectiveCall = field(compare=False)

    def __str__(self) -> str:
        return f"the comparison before {self.ask}"

    @property
    def reason(self) -> str:
        return self.ask.reason


class SimulatedCommunicator(Communicator):
    """Collectives by meetings under the baton."""

    __slots__ = ()
    world: SimulatedWorld

    def _meet(self, op: str, facts: tuple[Hashable, ...], deposit: Any, finish: Finish) -> Any:
        what = CollectiveCall(op, self.axes, self.ranks, facts, point())
        world, is_watched = self.world, _num_modes() > 0
        if is_watched:  # one rank computes for all: its own TorchDispatchModes must not see it
            finish = _unwatched(finish)
        found = world.baton.meet(world.runner, self.ranks, self.index, what, deposit, finish)
        # A meter of this rank's memory sees what the rank gets from here on, as on a process group.
        return found.detach() if is_watched and isinstance(found, Tensor) else found

    def _all_reduce(self, x: Tensor, kind: str, own: bool) -> Tensor:
        def finish(partials: list[Tensor]) -> list[Tensor]:
            total = reduce_partials(partials, kind)
            return [total, *(total.clone() for _ in partials[1:])]

        return self._meet("all_reduce", (kind, x.dtype, tuple(x.shape)), x, finish)

    def _all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        def finish(parts: list[Tensor]) -> list[Tensor]:
            return [torch.cat(parts) for _ in parts]

        return self._meet("all_gather", (x.dtype, sizes), x, finish)

    def _reduce_scatter(self, x: Tensor, sizes: tuple[int, ...], kind: str) -> Tensor:
        def finish(partials: list[Tensor]) -> list[Tensor]:
            pieces = [one.split(sizes) for one in partials]
            return [reduce_partials(mine, kind) for mine in zip(*pieces)]

        return self._meet("reduce_scatter", (kind, x.dtype, sizes), x, finish)

    def _all_to_all(self, x: Tensor, send: tuple[int, ...], recv: tuple[int, ...]) -> Tensor:
        def finish(given: list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]) -> list[Tensor]:
            self._check_splits([(send, recv) for _, send, recv in given])
            pieces = [x.split(send) for x, send, _ in given]
            return [torch.cat(mine) for mine in zip(*pieces)]

        return self._meet("all_to_all", (x.dtype,), (x, send, recv), finish)

    def _check_splits(self, splits: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        wrong = pairs_that_differ(self.ranks, splits)
        if wrong:
            raise CommunicationError(
                f"all_to_all over {self.where}",
                f"{len(wrong)} pairs of ranks disagree about the elements between them",
                "recv[i] of rank j equals send[j] of rank i", wrong,
                "compute both from the same layouts")

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        def finish(given: list[Tensor]) -> list[Tensor]:
            return [given[source].clone() for _ in given]

        return self._meet("broadcast", (x.dtype, tuple(x.shape), source), x, finish)

    def _exchange(self, value: object) -> list[object]:
        def finish(given: list[bytes]) -> list[list[object]]:
            return [[pickle.loads(one) for one in given] for _ in given]

        return self._meet("exchange", (), pickle.dumps(value), finish)


class SimulatedWorld(World):
    """The simulated ranks of one run, seen from one of them."""

    communicates = SimulatedCommunicator

    def __init__(self, baton: Baton, runner: Runner, debug: bool) -> None:
        super().__init__(runner.rank, len(baton.runners))
        self.baton, self.runner, self.debug = baton, runner, Switch(debug)

    def call_roll(self, ask: CollectiveCall) -> str:
        def finish(asks: list[CollectiveCall]) -> list[str]:
            same = agree(digest(ask, rank) for ask, rank in zip(asks, ask.ranks))
            return ["" if same else disagreement(asks, ask.ranks)] * len(asks)

        place, what = ask.ranks.index(self.rank), _RollCall(ask)
        return self.baton.meet(self.runner, ask.ranks, place, what, ask, finish)


def _unwatched(finish: Finish) -> Finish:
    def quietly(deposits: list[Any]) -> Sequence[Any]:
        with _disable_current_modes():
            return finish(deposits)

    return quietly


def current_simulated_world() -> SimulatedWorld | None:
    """The world of the simulated rank of this thread, or None."""
    runner = current_runner()
    return None if runner is None else runner.world


@also_called(None, "run", world_size="num_ranks", nprocs="num_ranks")
def run_simulated(
    fn: Callable[[BoundMesh], T],
    num_ranks: int | Mapping[str, int] | Sequence[int] | Mesh | None = None,
    mesh: Mapping[str, int] | Sequence[int] | Mesh | None = None,
    device_type: str = "cpu",
) -> list[T]:
    """Call `fn(mesh)` as each of `num_ranks` simulated ranks.

    Without `mesh` there is one unnamed axis of all ranks; without `num_ranks` as many ranks as the
    mesh needs; without both there are four. On ranks outside the mesh it has `here` None. Each rank
    starts from the caller's default dtype and generator state, which remain untouched, and in debug
    mode if the caller is.

    Args:
        fn: what each rank does, in a thread of its own; one of them runs at a time.
        num_ranks: the number of ranks; or the mesh, in its place.
        mesh: map axis -> size, only sizes, or a mesh value.
        device_type: where local tensors live.

    Returns:
        The results in rank order.

    Raises:
        MeshError: the mesh needs more ranks.
        ShardTypeError: fn is a coroutine function.
        CommunicationError: ranks wait for different collectives; or inside a dry run.
        Exception: whatever the first failing rank raised, with its rank in a note.
    """
    check_takes_mesh("run", fn)
    if inspect.iscoroutinefunction(fn):
        raise ShardTypeError(
            "run(fn)", f"{fn.__name__} is a coroutine function: a call of it only makes a "
            "coroutine, which nobody awaits", "fn is an ordinary function: ranks are "
            "threads, with or without an event loop around the run", [fn.__name__],
            "run(lambda mesh: asyncio.run(fn(mesh)))")
    ranks = SimulatedRanks(num_ranks, mesh, device_type)
    _tell_if_launched()
    return ranks.run(fn)


def _tell_if_launched() -> None:
    """Warn on the first of several processes that each of them simulates all ranks."""
    size = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("RANK") == "0" and size != "1" and not dist.is_initialized():
        warnings.warn(
            f"each of the {size} processes that were started simulates all ranks: "
            "weft.testing.run needs one process, python script.py. A program over processes makes "
            "its mesh by weft.init_mesh", WeftWarning, stacklevel=4)


def check_takes_mesh(call: str, fn: Any) -> None:
    """Raise ShardTypeError if a function cannot be called with a mesh alone."""
    facts = f"it is of type {type(fn).__name__}"
    if callable(fn):
        try:
            inspect.signature(fn).bind(None)
            return
        except TypeError as error:
            facts = f"fn(mesh) is no call of it: {error}"
        except ValueError:  # of a builtin that does not say what it takes
            return
    raise ShardTypeError(
        f"{call}(fn)", facts, "every rank calls fn(mesh)", [getattr(fn, "__name__", repr(fn))],
        f"{call}(lambda mesh: fn(mesh, ...), ...)")


class SimulatedRanks:
    """Simulated ranks that call one function after another; arguments as in `run_simulated`.

    With `lasting` they keep their world and their global state from call to call.
    """

    def __init__(self, num_ranks: Any, mesh: Any, device_type: str, lasting: bool = False) -> None:
        self.mesh, num_ranks = mesh_of_ranks(num_ranks, mesh)
        recorded = current_recording_world()
        if recorded is not None:
            axes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes))
            raise CommunicationError(
                "weft.testing.run", f"it starts {num_ranks} simulated ranks inside a dry run, "
                f"which is rank {recorded.rank} of {recorded.size}",
                "a dry run calls the program as one rank, on the mesh that it is given",
                [repr(self.mesh)],
                f"in a script: mesh = weft.init_mesh({axes}), and program(mesh)\n"
                "in Python: weft.dry_run(program, mesh), not weft.testing.run(program, mesh)")
        self.device_type, self.device_index = device_type, None
        check_device_type(device_type, "run(device_type)", 'run(fn, device_type="cpu")')
        if device_type not in ("cpu", "meta"):
            self.device_index = torch.get_device_module(device_type).current_device()
        self.baton = Baton(num_ranks, _generators(device_type), lasting)
        outer = current_simulated_world()
        debug = (PROCESS if outer is None else outer.debug).on
        for runner in self.baton.runners.values():
            runner.world = SimulatedWorld(self.baton, runner, debug)

    def run(self, fn: Callable[[BoundMesh], T]) -> list[T]:
        """The results of `fn(mesh)`, in rank order."""
        return self.baton.run(lambda runner: fn(self._bound(runner)))

    def _bound(self, runner: Runner) -> BoundMesh:
        if self.device_index is not None:
            torch.get_device_module(self.device_type).set_device(self.device_index)
        return runner.world.bind(self.mesh, self.device_type)


def mesh_of_ranks(num_ranks: Any, mesh: Any) -> tuple[Mesh, int]:
    """The mesh, and the number of ranks, of `run(fn, num_ranks, mesh)`."""
    if isinstance(num_ranks, (Mapping, Sequence, Mesh)):
        if mesh is not None:
            raise MeshError(
                "run(fn, num_ranks, mesh)", f"num_ranks is the mesh {num_ranks!r}, and "
                f"mesh is {mesh!r}", "ranks run on one mesh", [repr(mesh)],
                f"run(fn, mesh={mesh!r})")
        num_ranks, mesh = None, num_ranks
    if mesh is None:
        mesh = (4 if num_ranks is None else num_ranks,)
    value = mesh.abstract if isinstance(mesh, Mesh) else Mesh(mesh)
    _, needed = value.rank_span
    num_ranks = needed if num_ranks is None else num_ranks
    if needed > num_ranks:
        raise MeshError(
            "run(fn, num_ranks, mesh)", f"{value!r} needs {needed} ranks, num_ranks is "
            f"{num_ranks}", "a mesh lies within the world", [num_ranks],
            f"run(fn, num_ranks={math.prod(value.axis_sizes)}, mesh=...)")
    return value, num_ranks


def _generators(device_type: str) -> list[torch.Generator]:
    """The default generators whose state is separate for each rank."""
    generators = [torch.default_generator]
    if device_type not in ("cpu", "meta"):
        module = torch.get_device_module(device_type)
        generators.append(module.default_generators[module.current_device()])
    return generators
