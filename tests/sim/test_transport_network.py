"""Measuring the network: what the fit finds in times that follow from known links."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import Link, Links
from weft.core import Mesh
from weft.errors import MeshError, ShardTypeError
from weft.transport.network import Sample, fit, relative_error, samples

SIZES = (4096, 65536, 1 << 20, 1 << 23)


def timed(mesh: Mesh, links: Links, noise: float = 0.0) -> list[Sample]:
    """What collectives over each axis and over all of them take, if the links are right."""
    draw = random.Random(0)
    axes = [axis for axis, size in enumerate(mesh.axis_sizes) if size > 1]
    groups = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    return [
        Sample(group, passes, nbytes, links.seconds_over(mesh, group, nbytes, passes)
               * math.exp(draw.gauss(0, noise)))
        for group in groups for nbytes in SIZES for passes in (1, 1, 1, 2)
    ]


def test_known_links_are_found() -> None:
    mesh = Mesh({"dp": 4, "tp": 8})
    dp, tp = Link(20e-6, 4e-10), Link(3e-6, 2e-11)
    links = Links(tp, dp, start_s=12e-6, member_s=2e-7, axes={"dp": dp, "tp": tp})
    found = fit(mesh, timed(mesh, links))
    assert found.near == dict(found.axes)["tp"] and found.far == dict(found.axes)["dp"]
    assert found.start_s == pytest.approx(12e-6, rel=1e-6)
    assert found.member_s == pytest.approx(2e-7, rel=1e-6)
    for name, link in (("dp", dp), ("tp", tp)):
        assert dict(found.axes)[name].latency_s == pytest.approx(link.latency_s, rel=1e-6)
        assert dict(found.axes)[name].seconds_per_byte == pytest.approx(
            link.seconds_per_byte, rel=1e-6
        )
    assert relative_error(mesh, timed(mesh, links), found) < 1e-6


def test_noise_does_not_mislead_the_fit() -> None:
    mesh = Mesh({"dp": 2, "tp": 4, "one": 1})
    dp, tp = Link(50e-6, 1e-9), Link(30e-6, 5e-10)
    links = Links(tp, dp, start_s=100e-6, axes={"dp": dp, "tp": tp})
    seen = timed(mesh, links, noise=0.1)
    found = fit(mesh, seen)
    assert set(dict(found.axes)) == {"dp", "tp"}
    for group in ((0,), (1,), (0, 1)):
        for nbytes in SIZES:
            told = found.seconds_over(mesh, group, nbytes, 1)
            assert told == pytest.approx(links.seconds_over(mesh, group, nbytes, 1), rel=0.15)
    assert 0.03 < relative_error(mesh, seen, found) < 0.12


def test_nothing_is_below_zero() -> None:
    """Latency that one round and two cost alike is part of the start."""
    mesh = Mesh({"x": 4})
    seen = [Sample((0,), passes, nbytes, 1e-4 / passes + nbytes * 1e-9)
            for nbytes in SIZES for passes in (1, 2)]
    found = fit(mesh, seen)
    assert found.near.latency_s == found.member_s == 0 and found.start_s > 0
    assert found.near == found.far == dict(found.axes)["x"]


def test_near_and_far_axes() -> None:
    mesh = Mesh({"dp": 2, "tp": 8})
    near, far = Link(1e-6, 1e-11), Link(2e-6, 2e-11)
    found = fit(mesh, timed(mesh, Links(near, far)))
    assert found.node_size == 8 and found.far.seconds_per_byte == pytest.approx(2e-11)
    one_node = fit(mesh, timed(mesh, Links(near, far)), node_size=16)
    assert one_node.near == one_node.far


def test_all_ranks_get_the_same_links(tmp_path: Path) -> None:
    def on_rank(mesh: Any) -> Links:
        seen = samples(mesh, (64, 4096), 1)
        assert {(it.axes, it.passes) for it in seen} == {
            (axes, passes) for axes in ((0,), (2,), (0, 2)) for passes in (1, 2)
        }
        assert {it.nbytes for it in seen if it.axes == (0,)} == {64, 4096}
        return weft.measure_links(mesh, sizes=(64, 4096), num_rounds=1)

    ranks = weft.testing.run(on_rank, num_ranks=4, mesh={"a": 2, "one": 1, "b": 2})
    assert ranks == ranks[:1] * 4 and set(dict(ranks[0].axes)) == {"a", "b"}
    path = tmp_path / "links.json"
    ranks[0].save(path)
    assert Links.load(path) == ranks[0]
    nccl = Links(Link(3e-6, 4e-12), Link(1e-5, 25e-12), 1e-5, 2e-7, 16, {0: Link(1, 2)})
    nccl.save(path)
    assert Links.load(path) == nccl


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"near": 5}', '{"near": {"latency_s": -1}}'])
def test_files_that_hold_no_links(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.json"
    for _ in range(2):
        with pytest.raises(ShardTypeError, match=r"Links.load\(path\): .*links.json gives"):
            Links.load(path)
        path.write_text(text)


def test_what_cannot_be_measured() -> None:
    def on_rank(mesh: Any) -> None:
        wrongs: list[dict[str, Any]] = [{"sizes": ()}, {"sizes": (0,)}, {"num_rounds": 0}]
        for wrong in wrongs:
            with pytest.raises(ShardTypeError, match="measure_links"):
                weft.measure_links(mesh, **wrong)
        with pytest.raises(MeshError, match="has one rank"):
            weft.measure_links(mesh["one"])

    weft.testing.run(on_rank, num_ranks=2, mesh={"a": 2, "one": 1})
