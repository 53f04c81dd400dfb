"""Relative links of the pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def broken(path: Path, page: str) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            found.append(f"{path.name}: {target}")
    return found


def test_links_lead_somewhere() -> None:
    assert [each for path in PAGES for each in broken(path, path.read_text())] == []


def test_every_page_is_linked_from_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert [path.name for path in (REPOSITORY / "docs").glob("*.md")
            if f"(docs/{path.name})" not in readme] == []


def test_broken_links_are_found() -> None:
    page = "[a](nowhere.md) [b](README.md#nowhere) [c](README.md#meshes-and-layouts) `[d](x)`"
    assert broken(REPOSITORY / "README.md", page) == [
        "README.md: nowhere.md", "README.md: README.md#nowhere"
    ]
