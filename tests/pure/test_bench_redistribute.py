"""What `weft bench redistribute` says of what it has measured."""

from __future__ import annotations

from typing import Any

import pytest

from bench.redistribution import table
from bench.redistribution.rows import ROWS, layouts_of
from bench.redistribution.table import Measured

TABLE = """\
4 ranks, 1 MiB of float32, 3 rounds
                             bytes              forward, ms               weft to        and back
                           missing  weft DTensor by hand   weft DTensor  hand DTensor  hand DTensor
S0 -> R                      3,000  1.00    4.00    2.00   3.00    1.00  1.00    2.00  1.00    2.00
S0 -> R                  1,234,567  0.00 refused    4.00   2.00       -  0.50       -  0.50       -
"""


def rounds(*milliseconds: float) -> dict[str, list[float]]:
    seconds = [each / 1e3 for each in milliseconds]
    return {"seconds": seconds, "cpu_seconds": [1e3 * each**2 for each in seconds]}


def measured(weft: Any = (2, 4, 3), **parts: Any) -> Measured:
    times = {"weft": rounds(*weft), "all-to-all": rounds(4, 4, 4), "all-gather": rounds(2, 2, 3),
             "DTensor": rounds(1, 2, 1)}
    event: Any = {
        "row": "S0 -> R", "num_ranks": 4, "nbytes": 1 << 20, "minimum": 3000,
        "received": {"weft": 3000, "all-to-all": 3000, "all-gather": 3000, "DTensor": 12000},
        "faults": {}, "forward": times, "both": times, **parts,
    }
    return Measured(**event)


def test_ratios_are_of_neighbours_in_time() -> None:
    it = measured()
    assert it.milliseconds("forward", "weft") == pytest.approx(3)
    assert it.hand("both") == "all-gather"
    assert it.ratio("forward", "all-gather") == pytest.approx(1)  # of 1, 2 and 1
    assert it.ratio("both", "DTensor") == pytest.approx(2)  # of 2, 2 and 3
    assert it.ratio("both", "DTensor", "cpu_seconds") == pytest.approx(4)  # of 4, 4 and 9
    assert it.ratio("both", "nothing") is None
    assert it.excess("DTensor") == 4


def test_figures_and_their_limits() -> None:
    limits = {figure.what: (figure.limit, figure.is_met) for figure in measured().figures()}
    assert limits == {
        "bytes, to the fewest": (1.0, True),
        "forward, time to all-gather": (1.15, True), "forward, time to DTensor": (1.0, False),
        "forward and backward, time to all-gather": (1.15, True),
        "forward and backward, time to DTensor": (1.0, False),
    }
    same = measured(received={"weft": 3001, "all-gather": 3000, "DTensor": 3000}).figures()
    assert [figure.limit for figure in same] == [1.0, 1.15, 1.05, 1.15, 1.05]
    assert not same[0].is_met
    assert len(measured(nbytes=999_999).figures()) == 1
    assert len(measured(nbytes=999_999, minimum=None).figures()) == 0


def test_the_table() -> None:
    refused = measured(
        received={"weft": 3000, "DTensor": None}, faults={"DTensor": "refused"},
        forward={"weft": rounds(2), "all-to-all": rounds(4)},
        both={"weft": rounds(2), "all-to-all": rounds(4)},
        minimum=1_234_567,
    )
    lines = [table.header(4, 1 << 20, 3), table.line(measured()), table.line(refused)]
    assert "\n".join([*lines, ""]) == TABLE
    said = table.summary([measured(), measured((1, 1, 1))])
    assert "8 of 10 figures met" in said
    assert "S0 -> R, 1,048,576 bytes: forward, time to DTensor 2.00, at most 1\n" in said


def test_rows_have_the_sizes_they_say() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        src, dst = layouts_of(row, 1 << 20)
        assert src.shape == dst.shape and src != dst
        nbytes = 4 * src.shape[0] * src.shape[1]
        assert abs(nbytes - (1 << 20)) < 0.05 * (1 << 20)
        odd = {length % row.mesh.size() for length in src.shape}
        assert (0 not in odd) if row.uneven else odd == {0}
        cuts = [cut for cut in src.cuts if cut]
        assert bool(cuts) == bool(row.parts)
