"""docs/ops.md is what the book says."""

from __future__ import annotations

from tests.soundness.page import PAGE, page
from weft.ops import BOOK


def test_the_page_is_printed_from_the_book() -> None:
    assert PAGE.read_text() == page(), "python -m tests.soundness.page prints it again"


def test_every_kernel_and_composition_says_what_it_does() -> None:
    silent = [
        (name, function) for name, entry in BOOK.items()
        for function in (entry.kernel, entry.compose, entry.layouts)
        if function is not None and len((function.__doc__ or "").split()) < 4
    ]
    assert silent == []
