"""docs/ops.md is what the tables say."""

from __future__ import annotations

from tests.soundness.page import PAGE, page


def test_the_page_is_printed_from_the_tables() -> None:
    assert PAGE.read_text() == page(), "python -m tests.soundness.page prints it again"
