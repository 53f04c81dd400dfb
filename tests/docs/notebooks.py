"""Pages as notebooks: `python -m tests.docs.notebooks [--execute] PAGE...` writes out/notebooks."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat

__all__ = ["executed", "notebook", "printed"]

REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "out" / "notebooks"
_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """The page: its programs are cells of code, and what they print is left to them."""
    cells: list[dict[str, Any]] = []
    end = 0
    for match in _CODE.finditer(page):
        cells += [_cell("markdown", page[end : match.start()]), _cell("code", match[1])]
        end = match.end()
    cells.append(_cell("markdown", page[end:]))
    cells = [cell | {"id": f"cell{at}"} for at, cell in enumerate(cells) if cell["source"]]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _cell(kind: str, text: str) -> dict[str, Any]:
    more = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip("\n"), **more}


def executed(made: dict[str, Any], folder: Path = REPOSITORY) -> Any:
    """The notebook with what its cells gave, run in `folder`."""
    book: Any = nbformat.from_dict(made)
    quiet = ["--log-level=40"]  # an error is one; that a kernel listens at the loopback is none
    where = {"metadata": {"path": folder}}
    nbclient.NotebookClient(book, timeout=300, resources=where, extra_arguments=quiet).execute()
    return book


def printed(cell: Any) -> str:
    """What a cell of code wrote to standard output."""
    return "".join(one.text for one in cell.outputs if one.output_type == "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--execute", action="store_true")
    parser.add_argument("pages", nargs="+", type=Path)
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for page in asked.pages:
        book = notebook(page.read_text())
        book = executed(book) if asked.execute else book
        target = OUT / f"{page.stem}.ipynb"
        target.write_text(json.dumps(book, indent=1) + "\n")
        print(os.path.relpath(target))


if __name__ == "__main__":
    main()
