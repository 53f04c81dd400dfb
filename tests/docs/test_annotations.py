"""The program of docs/annotations.md runs, and the names in its table exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.test_readme import blocks, outputs
from weft import spmd

PAGE = (Path(__file__).parents[2] / "docs" / "annotations.md").read_text()


def test_the_programs_run() -> None:
    found = blocks(PAGE)
    assert len(found) == 2
    assert outputs(found, "annotations.md") == [block.shown for block in found]


def test_the_table_has_every_name() -> None:
    table = PAGE.split("| torch_xla | here |")[1]
    assert set(re.findall(r"\w+", table)) >= set(spmd.__all__) - {"LocalShard", "ShardingType"}
