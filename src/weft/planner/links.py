"""The network, as the cost function sees it: the cost of a message over each mesh axis.

The time of a collective has four parts: a start, a round of messages for each doubling of its
group, a little for each member, and the bytes that a device receives. The slowest network involved
counts. An all-reduce passes through its group twice.

These figures must be the same on every rank: the planner compares plans by them, and ranks that
chose different plans would wait for each other. So they are given, never measured during planning.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

from weft.core.mesh import Mesh
from weft.errors import ShardTypeError

__all__ = ["GLOO", "NCCL", "NODE_SIZE", "Link", "Links", "as_links", "is_near",
           "name_of", "set_links"]

NODE_SIZE = 8
"""Devices per node, by default."""

_FIX = 'weft.set_links("nccl"), or weft.Links(near=weft.Link(15e-6, 4e-12), far=...)'


@dataclass(frozen=True, slots=True)
class Link:
    """One network.

    Args:
        latency_s: seconds per round of messages.
        seconds_per_byte: seconds for each byte that a device receives.

    Raises:
        ShardTypeError: not a number of seconds.
    """

    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        _check_seconds("Link", self, "latency_s", "seconds_per_byte")


@dataclass(frozen=True, slots=True)
class Links:
    """The networks of a machine.

    Args:
        near: between devices of one node.
        far: between nodes.
        start_s: seconds to start a collective, whatever it moves.
        member_s: seconds that a device spends on each other member of its group.
        node_size: devices per node; device ids that are equal after division by it share a node.
        axes: map axis name -> Link, for axes with a network of their own.

    Raises:
        ShardTypeError: an argument of the wrong type or range.
    """

    near: Link
    far: Link
    start_s: float = 0.0
    member_s: float = 0.0
    node_size: int = NODE_SIZE
    axes: Any = ()

    def __post_init__(self) -> None:
        axes: Any = self.axes
        given = cast(Iterable[Any], axes.items() if isinstance(axes, Mapping) else axes)
        object.__setattr__(self, "axes", tuple(given))
        size: Any = self.node_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise _wrong("Links(node_size)", f"node_size is {size!r}",
                         "a node has a whole number of devices, at least 1", repr(size))
        _check_seconds("Links", self, "start_s", "member_s")
        links: list[Any] = [self.near, self.far, *(link for _, link in self.axes)]
        wrong = [it for it in links if not isinstance(it, Link)]
        if wrong:
            raise _wrong("Links", f"{len(wrong)} networks are no weft.Link",
                         "a network is a Link(latency_s, seconds_per_byte)", *wrong)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a file, for `Links.load`.

        Args:
            path: the path of the file, which holds JSON.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json() + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Links:
        """Read what `save` has written.

        Args:
            path: the path of the file.

        Raises:
            ShardTypeError: a file that does not exist or was not written by `save`.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return Links.from_json(file.read())
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _wrong("Links.load(path)", f"{os.fspath(path)} gives {error!r}",
                         "links are read from what Links.save or weft bench links wrote",
                         os.fspath(path)) from error

    def to_json(self) -> str:
        """These links as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Links:
        """Read what `to_json` has written; any error is raised as it is."""
        found = json.loads(text)
        near, far = Link(**found.pop("near")), Link(**found.pop("far"))
        axes = [(name, Link(**link)) for name, link in found.pop("axes")]
        return Links(near, far, axes=axes, **found)

    def seconds_over(self, mesh: Mesh, axes: Sequence[int], nbytes: float, passes: int) -> float:
        """Seconds of a collective over some axes that passes through its group `passes` times.
        """
        given = dict(self.axes)
        crossed = [
            given.get(mesh.axis_names[axis])
            or (self.near if is_near(mesh, axis, self.node_size) else self.far)
            for axis in axes
        ]
        latency = max(link.latency_s for link in crossed)
        others = math.prod([mesh.axis_sizes[axis] for axis in axes]) - 1
        once = others.bit_length() * latency + others * self.member_s
        slowest = max(link.seconds_per_byte for link in crossed)
        return self.start_s + passes * once + nbytes * slowest

    def seconds_between(self, src: Mesh, dst: Mesh, nbytes: float) -> float:
        """Seconds of a transfer from one mesh to another, as one round."""
        spans = src.rank_span, dst.rank_span
        nodes = {end // self.node_size for low, high in spans for end in (low, high - 1)}
        link = self.near if len(nodes) == 1 else self.far
        return self.start_s + link.latency_s + nbytes * link.seconds_per_byte


@lru_cache(maxsize=4096)
def is_near(mesh: Mesh, axis: int, node_size: int) -> bool:
    """Whether devices that differ only in one axis are on one node."""
    low, high = mesh.rank_span
    if low // node_size == (high - 1) // node_size:
        return True
    stride = mesh.axis_strides[axis]
    block = stride * mesh.axis_sizes[axis]
    even = mesh.rank_range
    if even is not None:  # blocks of consecutive ids: whole blocks must fit into nodes
        return node_size % (block * even.step) == 0 and low % (block * even.step) == 0
    nodes = [mesh.rank_at(place) // node_size for place in range(mesh.size())]
    return all(
        node == nodes[place - place % block + place % stride] for place, node in enumerate(nodes)
    )


def _check_seconds(call: str, value: object, *names: str) -> None:
    for name in names:
        it = getattr(value, name)
        if isinstance(it, bool) or not isinstance(it, (int, float)) or not it >= 0:
            raise _wrong(f"{call}({name})", f"{name} is {it!r}", "seconds are at least 0", repr(it))


def _wrong(call: str, facts: str, rule: str, *offenders: object) -> ShardTypeError:
    return ShardTypeError(call, facts, rule, offenders, _FIX)


GLOO = Links(near=Link(50e-6, 1e-9), far=Link(100e-6, 1e-9), start_s=100e-6, member_s=5e-6)
"""Processes of one machine, as measured on one, or machines on 10 Gbit/s; orders of magnitude."""

NCCL = Links(near=Link(3e-6, 4e-12), far=Link(10e-6, 25e-12), start_s=10e-6, member_s=0.2e-6)
"""NVLink within a node, 400 Gbit/s a device between nodes; orders of magnitude, not measured."""


def _of_datasheet(near: float, far: float, node_size: int = NODE_SIZE) -> Links:
    """Links from a data sheet: bytes per second and direction, within a node and between nodes."""
    return Links(Link(3e-6, 1 / near), Link(10e-6, 1 / far), 10e-6, 0.2e-6, node_size)


_NAMED = {
    "gloo": GLOO, "nccl": NCCL,
    "a100": _of_datasheet(300e9, 25e9), "h100": _of_datasheet(450e9, 50e9),
    "b200": _of_datasheet(900e9, 50e9), "gb200": _of_datasheet(900e9, 50e9, 72),
}
"""By NVIDIA's data sheets of DGX A100, H100 and B200 and of GB200 NVL72: NVLink of the third,
fourth and fifth generation has 600, 900 and 1,800 GB/s a GPU, half of it in each direction. Between
nodes there is a network card per GPU: 200 Gbit/s (ConnectX-6, HDR), 400 Gbit/s (ConnectX-7, NDR).
Latencies are those of `NCCL`. These rates are peaks, which collectives approach for large messages
only."""


class _Default:
    links: Links = GLOO


def set_links(links: Links | str) -> None:
    """Set the networks that the planner assumes from now on: `Links`, "gloo" (default) or "nccl".

    Every rank must make the same call before the affected tensors move.

    Args:
        links: the networks, or the name of a default.

    Raises:
        ShardTypeError: neither.
    """
    _Default.links = as_links(links, "set_links(links)")


def name_of(links: Links | None) -> str:
    """The name by which a user gets these links; "" for others."""
    return next((name for name, named in _NAMED.items() if named == links), "")


def as_links(links: Links | str | None, call: str) -> Links:
    """`Links` for what a user passes: itself, a name, or None for the default."""
    if links is None:
        return _Default.links
    found = _NAMED.get(links) if isinstance(links, str) else links
    if not isinstance(found, Links):
        raise _wrong(call, f"{links!r} is no network",
                     f"links are weft.Links or one of {', '.join(_NAMED)}", repr(links))
    return found
