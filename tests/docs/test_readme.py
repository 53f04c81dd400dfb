"""The README's programs run, in order, and print what stands below them."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.cli.main import main

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"

_BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A program, the line of its first line in the page, and the output that the page shows."""

    line: int
    program: str
    shown: str


def blocks(page: str) -> list[Block]:
    return [
        Block(page.count("\n", 0, match.start(1)) + 1, match[1], match[2])
        for match in _BLOCK.finditer(page)
    ]


def outputs(found: list[Block], name: str) -> list[str]:
    """What the programs print, one after the other in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed, source = [], ""
    for block in found:
        # Blank lines before the program let error messages name the page's own lines.
        source += "\n" * (block.line - 1 - source.count("\n")) + block.program
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        code = compile("\n" * (block.line - 1) + block.program, name, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(code, names)
        printed.append(output.getvalue())
    return printed


def test_programs_print_what_is_shown() -> None:
    page = README.read_text()
    found = blocks(page)
    assert len(found) == page.count("```python\n") == page.count("```text\n") > 3
    assert outputs(found, README.name) == [block.shown for block in found]


def test_commands_do_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = re.findall(r"^    weft ((?:show|plan) .*)$", README.read_text(), re.MULTILINE)
    assert len(commands) == 3
    monkeypatch.chdir(tmp_path)
    for command in commands:
        result = CliRunner().invoke(main, shlex.split(command))
        assert result.exit_code == 0, result.output
    written = (tmp_path / "layout.svg").read_text()
    assert written == (REPOSITORY / "docs" / "layout.svg").read_text()


def test_the_first_screen_has_a_short_program_and_both_commands() -> None:
    page = README.read_text()
    program = blocks(page)[0].program
    assert len([line for line in program.splitlines() if line]) == 12
    screen = "\n".join(page.splitlines()[:35])
    assert program in screen
    assert "make demo" in screen and "make test" in screen


def row(page: str, *begin: str) -> list[str]:
    """The cells of the first row of a page in docs that begins so."""
    lines = (REPOSITORY / "docs" / f"{page}.md").read_text().splitlines()
    start = "| " + " | ".join(begin)
    found = next(line for line in lines if line.startswith(start))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_figures_are_those_of_the_pages() -> None:
    """What README says was measured stands in the pages that the measurements wrote."""
    words = " ".join(README.read_text().split())
    ops, calls, right, gathered, costly, refused = map(int, row("sweep", "weft", "all", "all")[3:9])
    dtensor = row("sweep", "DTensor", "all", "all")
    modules, of_modules, all_right = map(int, row("sweep_modules", "weft", "all", "all")[3:6])
    add, block = row("performance", "add, µs"), row("performance", "transformer block")
    measured = (REPOSITORY / "docs" / "measurements.md").read_text()
    most = max(map(float, re.findall(r"^\| \w.* -> .* \| 1\.00, ([0-9.]+) \|", measured, re.M)))
    by_hand, theirs = (int(block[at].replace(",", "")) for at in (2, 4))
    slower = theirs / by_hand
    for said in (
        f"Of the {ops} entries", f"({calls:,} calls)",
        f", {right + gathered + costly} are right in every call", f"{gathered} of these gather",
        f"{refused} (`as_strided`", f"for {dtensor[5]} of the {dtensor[3]} that",
        f"All {modules} of `torch.nn`", f"{of_modules:,} calls, without a gather",
        f"takes {add[3]} µs (plain torch {add[1]}, DTensor {add[4]})",
        f"{block[5].split()[-1]} times as long as code written by hand",
        f"(DTensor {slower:.1f} times)", f"up to {most:.1f} times as many",
        f"{right + gathered + costly} of the {ops} ops", f"DTensor: {dtensor[5]} of {dtensor[3]}",
        f"takes {block[5].split()[-1]} times as long", f"(DTensor: {slower:.1f} times)",
    ):
        assert said in words, said
    assert modules == all_right


def test_the_examples_are_found_and_compared() -> None:
    page = "text\n```python\nprint(1)\n```\n\n```text\n2\n```\n```python\nprint(3)\n```\n"
    assert blocks(page) == [Block(3, "print(1)\n", "2\n")]
    assert outputs(blocks(page), "page") == ["1\n"]
