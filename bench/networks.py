"""What each rank of `weft bench links` measures.

Started as `weft run -n N networks.py ASKED`, ASKED as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

import weft
from weft.core import Mesh
from weft.core.units import seconds_text
from weft.planner import Link, Links
from weft.planner.links import is_near
from weft.transport.network import fit, relative_error, samples

__all__ = ["measure", "text"]


def measure(asked: Mapping[str, Any]) -> None:
    """Measure the links of a mesh; rank 0 prints them, and how far they are from what was seen."""
    mesh = weft.init_mesh(asked["mesh"], asked["device"])
    seen = samples(mesh, asked["sizes"], asked["num_rounds"])
    if mesh.rank != 0:
        return
    links = fit(mesh.abstract, seen, asked["node_size"])
    print(text(mesh.abstract, links, relative_error(mesh.abstract, seen, links)))
    if asked["out"] is not None:
        links.save(asked["out"])
        print(f'written to {asked["out"]}: weft.set_links(weft.Links.load("{asked["out"]}"))')


def text(mesh: Mesh, links: Links, error: float) -> str:
    """The links in words, and as what one writes in a program."""
    lines = [f"{'axis':<12}{'ranks':>6}  {'network':<8}{'latency':>10}{'bandwidth':>12}"]
    for name, link in links.axes:
        axis = mesh.axis_names.index(name)
        network = "near" if is_near(mesh, axis, links.node_size) else "far"
        lines.append(
            f"{name!s:<12}{mesh.axis_sizes[axis]:>6}  {network:<8}"
            f"{seconds_text(link.latency_s):>10}{_bandwidth(link):>12}"
        )
    lines += [
        f"a collective starts in {seconds_text(links.start_s)}, each other member adds "
        f"{seconds_text(links.member_s)}",
        f"these tell the time of a collective to within {error:.0%}, in the median", "",
        "weft.set_links(weft.Links(",
        f"    near={_written(links.near)},",
        f"    far={_written(links.far)},",
        f"    start_s={links.start_s:.3g}, member_s={links.member_s:.3g}, "
        f"node_size={links.node_size},",
        "    axes={",
        *(f"        {name!r}: {_written(link)}," for name, link in links.axes),
        "    },",
        "))",
    ]
    return "\n".join(lines)


def _bandwidth(link: Link) -> str:
    if not link.seconds_per_byte:
        return "no limit"
    rate = 1 / link.seconds_per_byte
    unit, scale = ("GB/s", 1e9) if rate >= 1e9 else ("MB/s", 1e6)
    return f"{rate / scale:.3g} {unit}"


def _written(link: Link) -> str:
    return f"weft.Link({link.latency_s:.3g}, {link.seconds_per_byte:.3g})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(json.loads(sys.argv[1]))
