"""Relative links of the pages lead to files and headings that exist."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import setuptools

import weft

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


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


def test_an_index_shows_the_readme_with_absolute_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of the files; pictures are files themselves, and not pages about them."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: told.update(given))
    runpy.run_path(str(REPOSITORY / "setup.py"))
    page, readme = told["long_description"], (REPOSITORY / "README.md").read_text()
    links = r"\]\(([^)\s]+)\)"
    old, new = re.findall(links, readme), re.findall(links, page)
    assert len(old) == len(new) > 30 and any(one.endswith(".png") for one in old)
    for one, other in zip(old, new):
        view = "raw" if one.endswith((".png", ".svg")) else "blob"
        assert other == one if ":" in one else other == f"https://weft.example/{view}/main/{one}"
    assert re.sub(links, "", page) == re.sub(links, "", readme)


def test_every_page_is_linked_from_the_first() -> None:
    first = (DOCS / "index.md").read_text().partition("## All pages\n")[2]
    assert [path.name for path in DOCS.glob("*.md")
            if path.name != "index.md" and f"({path.name})" not in first] == []
    assert "(docs/index.md#all-pages)" in (REPOSITORY / "README.md").read_text()


def test_the_navigation_of_the_site_names_every_page() -> None:
    """Once each; `make docs` itself fails where a page of the navigation is missing."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"^ +- (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_reference_names_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert [each for each in named if not _is_there(each)] == []
    rooms = {"collectives", "spmd", "testing"}
    assert {*weft.__all__} - rooms - {each.rpartition(".")[2] for each in named} == set()


def _is_there(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return hasattr(importlib.import_module(module), last)


def test_docstrings_name_arguments_that_there_are() -> None:
    """One by one, as `make docs` reads them: it fails where a name is none of the arguments."""
    named = re.findall(r"^::: (\S+)\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    wrong = []
    for module, last in named:
        public = getattr(importlib.import_module(module), last)
        calls = [public, *vars(public).values()] if inspect.isclass(public) else [public]
        wrong += [f"{module}.{last}: {name}" for call in calls for name in unknown(call)]
    assert wrong == []


def unknown(call: Any) -> list[str]:
    """The arguments that a docstring describes and that the call does not take."""
    own = inspect.unwrap(call) if callable(call) else call
    written = inspect.isfunction(own) and own.__doc__ in own.__code__.co_consts  # not torch's
    text = inspect.cleandoc(own.__doc__ or "") if written or inspect.isclass(own) else ""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    if section is None:
        return []
    named = re.findall(r"^    (\S[^:`]*):", section[1], re.MULTILINE)
    return [name for name in named if name not in inspect.signature(call).parameters]


def test_arguments_that_are_none_are_found() -> None:
    def one(a: int, b: int) -> None:
        """Both.

        Args:
            a, b: numbers.
            b: a number,
                twice: no name.
        """

    assert unknown(one) == ["a, b"]


def test_tables_stand_apart() -> None:
    """A code host, and mkdocs, take a table for text that follows a line of text."""
    glued = [f"{path.name}: {line}" for path in PAGES for before, line in
             pairwise(path.read_text().splitlines())
             if line.startswith("| ") and before and not before.startswith("|")]
    assert glued == []


def test_broken_links_are_found() -> None:
    page = "[a](nowhere.md) [b](README.md#nowhere) [c](README.md#meshes-and-layouts) `[d](x)`"
    assert broken(REPOSITORY / "README.md", page) == [
        "README.md: nowhere.md", "README.md: README.md#nowhere"
    ]
