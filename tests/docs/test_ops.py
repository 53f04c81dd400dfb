"""docs/ops.md is what the tables say."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.soundness.page import PAGE, page
from weft.ops import decomposed, loss, margins, weight_norm
from weft.ops.indexing import composed

HERE = Path(__file__).parents[2] / "src" / "weft" / "ops" / "__init__.py"


def test_the_page_is_printed_from_the_tables() -> None:
    assert PAGE.read_text() == page(), "python -m tests.soundness.page prints it again"


def test_every_algorithm_says_what_it_does() -> None:
    rows = PAGE.read_text().split("## By an algorithm")[1].split("## By the operands' cuts")[0]
    said = [row.split("|")[2].strip() for row in rows.splitlines() if row.startswith("| `")]
    assert len(said) > 100
    assert [text for text in said if len(text.split()) < 4] == []  # "lookup", "<lambda>"


def test_no_op_stands_in_two_tables() -> None:
    """The later one would win, and the earlier one be dead code."""
    named = [str(node.value) for node in ast.walk(ast.parse(HERE.read_text()))
             if isinstance(node, ast.Constant) and str(node.value).startswith("aten.")]
    tables = (named, composed.TABLE, decomposed.TABLE, margins.TABLE, weight_norm.TABLE,
              loss.REDUCED_AT)
    listed = [name for table in tables for name in table if name != "aten."]
    assert sorted(listed) == sorted(set(listed))
