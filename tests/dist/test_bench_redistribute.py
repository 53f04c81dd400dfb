"""`weft bench redistribute`: every row, right values, no byte too many; and as a user starts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.redistribution.ranks import measure
from bench.redistribution.rows import GRID, LINE, ROWS, Row, layouts_of, shape_of
from bench.redistribution.table import Measured
from tests.dist.test_cli import refused, start
from tests.gloo import GlooWorld
from weft.core import Layout, Mesh

SMALL, LARGE = 1 << 14, 1 << 20
"""Below and above the size from which gloo's messages are used."""


@pytest.fixture(scope="module")
def eight() -> Iterator[GlooWorld]:
    world = GlooWorld(8)
    yield world
    world.close()


def all_rows(mesh: Any, rows: list[Row], nbytes: int) -> list[dict[str, Any]]:
    return [measure(row, nbytes, num_rounds=0) for row in rows]


def missing(src: Layout, dst: Layout) -> int:
    """Bytes of the ranks' new boxes that they do not hold, by plain arithmetic."""
    total = 0
    for rank in range(src.mesh.size()):
        held, wanted = ([set(range(*ends)) for ends in it.box(rank)] for it in (src, dst))
        rows, columns = (new & old for new, old in zip(wanted, held))
        total += len(wanted[0]) * len(wanted[1]) - len(rows) * len(columns)
    return 4 * total


def check_rows(world: GlooWorld, mesh: Mesh, nbytes: int) -> None:
    rows = [row for row in ROWS if row.mesh == mesh]
    seen = world.run(all_rows, mesh, rows, nbytes)[0]
    for row, event in zip(rows, seen, strict=True):
        it = Measured(**event)
        src, dst = layouts_of(row, nbytes)
        assert it.row == row.name and it.nbytes == 4 * src.shape[0] * src.shape[1]
        assert src.shape == shape_of(row, nbytes)
        # A wrong or refused result would be a fault.
        assert not {"weft", *it.by_hand} & set(it.faults) and it.by_hand, row
        assert {"weft"} <= set(it.forward) == set(it.both)
        if not src.is_partial:
            due = missing(src, dst)
            assert it.minimum == it.received["weft"] == it.received["all-to-all"] == due > 0, row
            assert (it.received.get("DTensor") or due) >= due
            assert ("DTensor" in it.forward) == (not row.parts)
            assert ("all-gather" in it.by_hand) == (row.name == "S0 -> R")


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_every_row_of_four_ranks(gloo: GlooWorld, nbytes: int) -> None:
    check_rows(gloo, LINE, nbytes)


def test_every_row_of_eight_ranks(eight: GlooWorld) -> None:
    check_rows(eight, GRID, LARGE)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = start("bench", "redistribute", "--row", "S0 -> R", "--row", "ragged -> S1", "--rounds",
                 "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    for shown in ("4 ranks, 1 MiB of float32, 1 rounds", "S0 ragged -> S1", "figures met"):
        assert shown in done.stdout
    seen = [Measured(**event) for event in json.loads(out.read_text())]
    assert [it.row for it in seen] == ["S0 -> R", "S0 -> R, uneven", "S0 ragged -> S1"]


def test_what_is_refused() -> None:
    said = refused("bench", "redistribute", "--row", "S7")
    assert "weft bench redistribute --row: none of 22 rows contains 'S7'." in said
    assert "'much' is no size" in refused("bench", "redistribute", "--sizes", "1MiB,much")
