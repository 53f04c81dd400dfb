"""`weft.ray.run`: ranks that are actors of Ray. Ray is imported when `run` is called.

All actors are placed together or not at all (one placement group), ranks of one machine next to
each other. The ranks meet as those of any launcher do: each is given torchrun's variables, and
`init_mesh` reads them. The first rank that fails ends all others, and the error is raised here.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from weft.comm import BoundMesh, init_mesh
from weft.comm.collective_call import timeout
from weft.comm.simulated import mesh_of_ranks
from weft.core import Mesh
from weft.errors import CommunicationError, ShardTypeError, UnsupportedOpError
from weft.tensor import ShardTensor
from weft.tensor.trace.trees import flatten

__all__ = ["run"]

T = TypeVar("T")

_TOGETHER_S = 0.5
"""How long a failure waits for others: Ray prints those that nobody has asked for."""

_CAUSE_S = 5.0
"""How long a failure that may follow from another rank's waits for that one."""


def run(
    fn: Callable[[BoundMesh], T],
    num_ranks: int | Mapping[str, int] | Sequence[int] | Mesh | None = None,
    mesh: Mapping[str, int] | Sequence[int] | Mesh | None = None,
    device_type: str = "cpu",
    *,
    resources: Mapping[str, float] | None = None,
) -> list[T]:
    """Call `fn(mesh)` as each of `num_ranks` ranks, each of them an actor of Ray.

    It takes what `weft.testing.run` takes. A program that has not called `ray.init` gets the
    cluster that Ray finds, or one on this machine. Ranks of one machine have neighbouring numbers.

    Args:
        fn: what each rank does. Ray pickles it, and what it returns: plain tensors and numbers, no
            ShardTensors.
        num_ranks: the number of ranks; or the mesh, in its place.
        mesh: map axis -> size, only sizes, or a mesh value.
        device_type: where local tensors live.
        resources: what Ray reserves for each rank; None takes {"CPU": 1}, and with "cuda"
            {"GPU": 1} as well.

    Returns:
        The results in rank order.

    Raises:
        UnsupportedOpError: Ray is not installed.
        MeshError: the mesh needs more ranks.
        ShardTypeError: fn returns a ShardTensor.
        CommunicationError: a rank died; or the cluster did not have room for all ranks within
            WEFT_TIMEOUT seconds.
        Exception: whatever the first failing rank raised, with its rank in a note.
    """
    value, size = mesh_of_ranks(num_ranks, mesh)
    ray = _imported("ray")
    if not ray.is_initialized():
        ray.init()
    share = dict(resources or ({"CPU": 1} if device_type == "cpu" else {"CPU": 1, "GPU": 1}))
    group = _placed(ray, size, share)
    try:
        ranks = _started(ray, group, size, share)
        calls = [rank.call.remote(fn, value, device_type) for rank in ranks]
        return _results(ray, calls)
    finally:
        _imported("ray.util").remove_placement_group(group)  # ends the actors in it


class _Rank:
    """One rank: an actor."""

    def host(self) -> tuple[str, str, int]:
        """Its machine, the address of that, and a port that is free there."""
        ray = _imported("ray")
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def enter(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def call(self, fn: Callable[[BoundMesh], Any], mesh: Mesh, device_type: str) -> Any:
        result = fn(init_mesh(mesh, device_type))
        kept = [str(one.sharding) for one in flatten(result) if type(one) is ShardTensor]
        if kept:
            raise ShardTypeError(
                "weft.ray.run(fn)", f"fn returns {len(kept)} ShardTensors",
                "what fn returns leaves its rank, and a ShardTensor is of use on the ranks "
                "of its mesh alone", kept,
                "return x.full_tensor(), or x.to_local() for each rank's own block")
        return result


def _placed(ray: Any, size: int, share: dict[str, float]) -> Any:
    """Room for all ranks."""
    util = _imported("ray.util")
    group = util.placement_group([share] * size, strategy="PACK")
    if group.wait(timeout_seconds=timeout().total_seconds()):
        return group
    util.remove_placement_group(group)
    there = {name: count for name, count in ray.cluster_resources().items() if name in share}
    raise CommunicationError(
        "weft.ray.run(fn, num_ranks)", f"{size} ranks of {share} each have found no room "
        f"within {timeout().total_seconds():g} s; the cluster has {there}",
        "all ranks run at the same time, because they wait for each other",
        [f"{name}: {count * size:g} needed, {there.get(name, 0):g} in the cluster"
         for name, count in share.items()],
        f'fewer ranks, or a share of one: weft.ray.run(fn, {size}, resources={{"CPU": 0.5}}'
        f"); on one machine: ray.init(num_cpus={size})")


def _started(ray: Any, group: Any, size: int, share: dict[str, float]) -> list[Any]:
    """The actors in the order of their ranks, which know where they meet."""
    strategy = _imported("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    more = {name: count for name, count in share.items() if name not in ("CPU", "GPU")}
    actors = [
        ray.remote(_Rank).options(
            num_cpus=share.get("CPU", 0), num_gpus=share.get("GPU", 0), resources=more,
            scheduling_strategy=strategy(group, placement_group_bundle_index=bundle),
        ).remote()
        for bundle in range(size)
    ]
    hosts = _results(ray, [actor.host.remote() for actor in actors])
    order, variables = _ranks(hosts)
    own = {name: text for name, text in os.environ.items() if name.startswith("WEFT_")}
    ranks = [actors[place] for place in order]
    _results(ray, [rank.enter.remote(own | each) for rank, each in zip(ranks, variables)])
    return ranks


def _ranks(hosts: Sequence[tuple[str, str, int]]) -> tuple[list[int], list[dict[str, str]]]:
    """Which actor is which rank, and torchrun's variables of each rank. `hosts`: of each actor, its
    machine, the address of that, and a free port."""
    nodes = [node for node, _, _ in hosts]
    order = sorted(range(len(hosts)), key=lambda actor: nodes.index(nodes[actor]))
    _, address, port = hosts[order[0]]
    shared = {
        "WORLD_SIZE": str(len(hosts)), "MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1" if len(set(nodes)) == 1 else address,
    }
    first = {nodes[actor]: rank for rank, actor in reversed([*enumerate(order)])}
    return order, [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank - first[nodes[actor]])}
        for rank, actor in enumerate(order)
    ]


def _results(ray: Any, calls: list[Any]) -> list[Any]:
    """What each rank returns, in rank order. As soon as a rank fails, the cause is raised."""
    left, failed = list(calls), {}
    while left and not failed:
        done, left = ray.wait(left)
        failed |= _failures(ray, calls, done)
    if failed:
        if left:
            limit = _CAUSE_S if all(map(_follows, failed.values())) else _TOGETHER_S
            done, _ = ray.wait(left, num_returns=len(left), timeout=limit)
            failed |= _failures(ray, calls, done)
        raise _cause(failed, len(calls))
    return ray.get(calls)


def _failures(ray: Any, calls: list[Any], done: list[Any]) -> dict[int, Exception]:
    """The errors of calls that have ended, by rank."""
    died = _imported("ray.exceptions").RayActorError
    failed = {}
    for call in done:
        rank = calls.index(call)
        try:
            ray.get(call)
        except died as error:
            failed[rank] = _died(rank, len(calls), error)
        except Exception as error:
            failed[rank] = getattr(error, "cause", None) or error
            if failed[rank] is not error:
                failed[rank].__cause__ = error  # its text is the traceback of the rank
    return failed


def _follows(error: Exception) -> bool:
    """Whether it may be a consequence of another rank's."""
    return isinstance(error, CommunicationError) and " stopped waiting: " in str(error)


def _cause(failed: Mapping[int, Exception], size: int) -> Exception:
    """The error to raise: the first that does not follow from others."""
    rank = min(failed, key=lambda rank: (_follows(failed[rank]), rank))
    failed[rank].add_note(f"on rank {rank} of {size}, an actor of Ray")
    return failed[rank]


def _died(rank: int, size: int, error: Exception) -> CommunicationError:
    why = next((line.strip() for line in str(error).splitlines() if "Worker exit detail" in line
                or "died" in line), type(error).__name__)
    return CommunicationError(
        "weft.ray.run(fn)", f"rank {rank} of {size} died: {why[:200].rstrip('. ')}",
        "all ranks live until the last has returned", [f"rank {rank}"],
        "look at what that rank wrote last (Ray prints it, and keeps it in its logs); a "
        "rank that needs more memory: resources={\"CPU\": 1, \"memory\": 4e9}")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedOpError(
            "weft.ray.run(fn)", f"{name} cannot be imported ({error})",
            "Ray runs the ranks; weft itself does not need it", [name],
            'pip install "ray>=2.40"') from error
