"""The programs of docs/random.md run, and the functions that the page names exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import weft
from tests.docs.test_readme import blocks, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "random.md").read_text()


def test_the_programs_run() -> None:
    found = blocks(PAGE)
    assert len(found) == 2
    assert outputs(found, "random.md") == [block.shown for block in found]


def test_the_functions_exist() -> None:
    named = re.findall(r"`(weft|torch)\.([\w.]+)", PAGE)
    assert len(named) > 12
    for module, path in named:
        owner = {"weft": weft, "torch": torch}[module]
        for name in path.split("."):
            owner = getattr(owner, name)
