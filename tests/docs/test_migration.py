"""The lines of docs/migration give what they are said to, and every name of weft is there."""

from __future__ import annotations

import weft
from tests.docs import test_coverage as coverage
from tests.migration import CODE, DTENSORS, PAGES, lines, rows, run

ORIGINS = [page for page in PAGES if page != "migration"]


def test_the_lines_give_what_is_said() -> None:
    chosen = [line for line in lines() if line.section != DTENSORS]
    assert len(chosen) > 100
    found = weft.testing.run(lambda mesh: run(chosen, mesh), 4, {"dp": 2, "tp": 2})[0]
    assert [
        (line.page, line.code, given) for line, given in zip(chosen, found, strict=True)
        if line.gives not in ("", given)
    ] == []
    assert sum(line.gives != "" for line in chosen) > 90


def names(page: str) -> list[str]:
    """What the tables of a page name of weft."""
    return [name for _, cells in rows(page) for name in coverage.counterparts(cells[-1])]


def test_every_name_exists() -> None:
    found = [name for page in PAGES for name in names(page)]
    assert len(found) > 60
    assert [name for name in found if not coverage.exists(name)] == []
    assert not coverage.exists("weft.nonsense") and not coverage.exists("ShardTensor.nonsense")


def test_all_of_weft_is_there() -> None:
    """Each public name of weft stands in these pages or beside the names of the five systems."""
    told = [name for page in PAGES for name in names(page)]
    told += [line.code for line in lines()]
    told += [name for row in coverage.rows(coverage.PAGE) for name in CODE.findall(row[1])]
    names_alone = [name.removeprefix("with ").split("(")[0] for name in told]
    tops = {name.removeprefix("weft.").split(".")[0] for name in names_alone}
    errors = {name for name in weft.__all__ if name.endswith(("Error", "Warning"))}
    assert set(weft.__all__) - errors - {"collectives", "spmd", "testing"} - tops == set()


def test_every_origin_has_its_page() -> None:
    assert set(ORIGINS) == {"dtensor", "fsdp", "megatron", "physicsnemo", "torch_xla", "jax"}
    assert all(f"(migration/{page}.md)" in PAGES["migration"] for page in ORIGINS)
