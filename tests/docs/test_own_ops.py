"""docs/own_ops.md: its programs run, in order, and print what stands below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from tests.docs.test_readme import blocks, outputs
from weft.tensor.call.own.functions import OWN

PAGE = Path(__file__).parents[2] / "docs" / "own_ops.md"


@pytest.fixture
def registered() -> Any:
    """Takes back what a page has registered."""
    before = dict(OWN)
    yield
    for op in [op for op in OWN if op not in before]:
        weft.unregister_rule(op)
        weft.unregister_handler(op)


def test_programs_print_what_is_shown(registered: None) -> None:
    page = PAGE.read_text()
    found = blocks(page)
    assert len(found) == page.count("```python\n") == page.count("```text\n") == 6
    assert outputs(found, PAGE.name) == [block.shown for block in found]
