"""Meshes over two networks: blocks of ranks with fast links inside and slow ones between them."""

from __future__ import annotations

import math
import socket
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from typing import Any

from weft.comm.bound_mesh import BoundMesh
from weft.comm.init import init_mesh, this_world
from weft.core.torus import assign, devices_in_order, in_blocks
from weft.errors import MeshError

__all__ = ["hybrid_mesh", "hybrid_ranks"]


def hybrid_mesh(
    fast: Mapping[str, int],
    slow: Mapping[str, int] | None = None,
    *,
    device_type: str = "cpu",
    hosts: Sequence[Hashable] | None = None,
    torus: Sequence[int] | None = None,
    coordinates: Sequence[Sequence[int]] | None = None,
    split: bool = True,
) -> BoundMesh:
    """A mesh whose fast axes stay within a host, and whose slow axes run between hosts.

    The axes of `slow` come first, outermost. An axis that both name is as long as their product,
    with the slow part outermost. Within a host, axes are given by rising need of bandwidth: the
    last one gets the best links of the torus.

    Args:
        fast: map axis name -> length, within a host (a slice).
        slow: map axis name -> length, between hosts; both together contain all ranks of the world.
        device_type: see `init_mesh`.
        hosts: the host (slice) of each rank, as its index or its name. Slices are ordered by
            index, named ones by their first ranks. None asks all ranks for the name of their host;
            if it is the same for all, consecutive ranks count as a host.
        torus: the lengths of the physical network within a host (of a TPU slice, of a board of
            GPUs); None is one row, in the order of the ranks.
        coordinates: the place of each rank in its torus; None takes the ranks of a host row-major.
        split: whether one physical axis may serve several logical ones.

    Raises:
        MeshError: on all ranks, if the lengths do not fit the hosts or the torus.

    The assignment is that of JAX's `mesh_utils`.
    """
    slow = slow or {}
    names = [*(name for name in slow if name not in fast), *fast]
    ranks = hybrid_ranks(
        [fast.get(name, 1) for name in names], [slow.get(name, 1) for name in names],
        hosts=hosts, torus=torus, coordinates=coordinates, split=split,
    )
    sizes = {name: fast.get(name, 1) * slow.get(name, 1) for name in names}
    return init_mesh(sizes, device_type, ranks)


def hybrid_ranks(
    fast: Sequence[int],
    slow: Sequence[int],
    *,
    hosts: Sequence[Hashable] | None = None,
    torus: Sequence[int] | None = None,
    coordinates: Sequence[Sequence[int]] | None = None,
    split: bool = True,
) -> list[int]:
    """The ranks of such a mesh, row-major: axis i is as long as `slow[i] * fast[i]`."""
    size = this_world().size
    if math.prod(fast) * math.prod(slow) != size:
        raise MeshError(
            "hybrid_mesh", f"fast {tuple(fast)} times slow {tuple(slow)} is "
            f"{math.prod(fast) * math.prod(slow)}, and the world has {size} ranks",
            "the mesh holds every rank once", [tuple(fast), tuple(slow)],
            "lengths whose product is the number of ranks")
    blocks = _blocks(_hosts(hosts, size), math.prod(slow), math.prod(fast))
    if coordinates is not None:
        placed = [tuple(place) for place in coordinates]
        blocks = [sorted(block, key=placed.__getitem__) for block in blocks]
    order = list(range(math.prod(fast)))
    if torus is not None:
        order = devices_in_order(torus, assign(torus, fast, split))
    return [blocks[block][order[inner]] for block, inner in in_blocks(fast, slow)]


def _hosts(hosts: Sequence[Hashable] | None, size: int) -> list[Hashable]:
    if hosts is None:
        name = socket.gethostname()
        return list(init_mesh(size).comm((0,)).exchange(name)) if size > 1 else [name]
    if len(hosts) != size:
        raise MeshError(
            "hybrid_mesh(hosts=)", f"{len(hosts)} hosts are given for {size} ranks",
            "each rank has a host", [f"{len(hosts)} hosts"], f"hosts=[0] * {size}")
    return list(hosts)


def _blocks(hosts: Sequence[Hashable], num_blocks: int, length: int) -> list[list[int]]:
    """The ranks of each host: by its index, or in the order of appearance."""
    of_host: dict[Any, list[int]] = {}
    for rank, host in enumerate(hosts):
        of_host.setdefault(host, []).append(rank)
    if len(of_host) == 1:
        ranks = next(iter(of_host.values()))
        return [ranks[at : at + length] for at in range(0, len(ranks), length)]
    wrong = [f"host {host}: {len(ranks)} ranks" for host, ranks in of_host.items()
             if len(ranks) != length]
    if wrong or len(of_host) != num_blocks:
        raise MeshError(
            "hybrid_mesh", f"{len(of_host)} hosts have "
            f"{sorted(map(len, of_host.values()))} ranks; the slow lengths make "
            f"{num_blocks} blocks of {length}",
            "each host is one block", wrong or [f"{len(of_host)} hosts"],
            "slow lengths whose product is the number of hosts, or hosts=")
    if all(isinstance(host, Integral) for host in of_host):
        return [of_host[host] for host in sorted(of_host)]
    return list(of_host.values())
