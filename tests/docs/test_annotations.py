"""The table of docs/annotations.md has every name of weft.spmd."""

from __future__ import annotations

import re
from pathlib import Path

from weft import spmd

PAGE = (Path(__file__).parents[2] / "docs" / "annotations.md").read_text()


def test_the_table_has_every_name() -> None:
    table = PAGE.split("| torch_xla | here |")[1]
    assert set(re.findall(r"\w+", table)) >= set(spmd.__all__) - {"LocalShard", "ShardingType"}
