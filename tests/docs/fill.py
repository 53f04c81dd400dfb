"""Writes what the programs of pages print below them: `python -m tests.docs.fill PAGE...`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.docs.test_readme import blocks, outputs

__all__ = ["filled"]


def filled(page: str, name: str) -> str:
    """The page, with the output of each program in the block of text below it."""
    found = blocks(page)
    for block, printed in zip(found, outputs(found, name)):
        shown = f"{block.program}```\n\n```text\n"
        page = page.replace(f"{shown}{block.shown}```", f"{shown}{printed}```", 1)
    return page


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        once = filled(path.read_text(), path.name)
        path.write_text(filled(once, path.name))  # outputs may name lines, which moved
