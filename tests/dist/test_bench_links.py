"""`weft bench links` as a user starts it, by itself and under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from tests.dist.test_cli import refused, start
from tests.dist.test_exit import torchrun
from weft import Links
from weft.core import Mesh

OPTIONS = ("bench", "links", "--mesh", "dp=2", "--sizes", "1KiB,64KiB", "--rounds", "2", "--out")


def check(out: Path, said: str) -> None:
    """What is written and what is printed are the same links."""
    links = Links.load(out)
    assert [name for name, _ in links.axes] == ["dp"] and links.node_size == 8
    assert links.near == links.far == links.axes[0][1]
    assert links.seconds_over(Mesh({"dp": 2}), (0,), 1 << 16, 1) > 0, links
    assert said.count("weft.set_links(weft.Links(\n") == 1
    text = said[said.index("weft.Links(\n"):said.index("\n))") + 2]
    printed = eval(text, {"weft": weft})
    assert printed.near.latency_s == pytest.approx(links.near.latency_s, rel=0.01)
    assert printed.axes[0][1].seconds_per_byte == pytest.approx(
        links.axes[0][1].seconds_per_byte, rel=0.01
    )


def test_it_starts_its_ranks(tmp_path: Path) -> None:
    out = tmp_path / "links.json"
    done = start(*OPTIONS, str(out))
    assert done.returncode == 0, done.stderr
    check(out, done.stdout)
    assert f'written to {out}: weft.set_links(weft.Links.load("{out}"))' in done.stdout


def test_under_torchrun_it_is_a_rank(tmp_path: Path) -> None:
    out, script = tmp_path / "links.json", tmp_path / "weft.py"
    script.write_text("import sys\nsys.path.pop(0)\nfrom weft.cli.main import main\nmain()\n")
    done = torchrun(script, *OPTIONS, str(out), num_ranks=2)
    assert done.returncode == 0, done.stderr
    check(out, done.stdout)


def test_a_mesh_of_one_rank_has_no_network() -> None:
    assert "has one rank" in refused("bench", "links", "--mesh", "dp=1")
