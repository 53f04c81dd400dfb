"""The functions that docs/random.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import weft

PAGE = (Path(__file__).parents[2] / "docs" / "random.md").read_text()


def test_the_functions_exist() -> None:
    named = re.findall(r"`(weft|torch)\.([\w.]+)", PAGE)
    assert len(named) > 12
    for module, path in named:
        owner = {"weft": weft, "torch": torch}[module]
        for name in path.split("."):
            owner = getattr(owner, name)
