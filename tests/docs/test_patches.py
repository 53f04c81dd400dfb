"""docs/architecture.md lists what of torch is taken over, which is what `weft.patches` replaces.

`python -m tests.docs.test_patches` prints the table again.
"""

from __future__ import annotations

import gc
import inspect
import pkgutil
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from weft.patches import PATCHES, Patch, functions_of

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
HEAD = "| what | why | by |\n|---|---|---|\n"


def table() -> str:
    rows = []
    for patch in PATCHES:
        names = patch.names.removesuffix(".__wrapped__").split()
        text = f"`{patch.home}.{names[0]}`"
        if len(names) > 1:
            text = f"of `{patch.home}`: " + ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {text} | {patch.reason} | `{file_of(patch)}` |")
    count = sum(len(found(patch)) for patch in PATCHES)
    return HEAD + "\n".join(rows) + (
        f"\n\n{count} functions of torch and beside it, in {len(PATCHES)} rows, by "
        f"{len(set(map(file_of, PATCHES)))} files.\n"
    )


def file_of(patch: Patch) -> str:
    return patch.replacement.__module__.removeprefix("weft.").replace(".", "/") + ".py"


def found(patch: Patch) -> list[tuple[Any, str]]:
    pkgutil.resolve_name(patch.home)  # weft imports no home that is late
    return list(functions_of(patch))


def printed(page: str) -> str:
    """The page with its table as it should be."""
    before, mark, after = page.partition("by `python -m tests.docs.test_patches`.\n\n")
    assert mark
    start = after.index("## Tests")
    return f"{before}{mark}{table()}\n{after[start:]}"


def test_the_table_is_printed_from_the_list() -> None:
    assert PAGE.read_text() == printed(PAGE.read_text()), (
        "python -m tests.docs.test_patches prints it again"
    )


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.home}: {patch.names[:20]}")
def test_a_reason_is_a_sentence_and_every_name_is_there(patch: Patch) -> None:
    assert len(patch.reason.split()) > 4 and patch.reason.endswith(".")
    assert len(found(patch)) >= len(patch.names.split())  # `*` stands for several


def test_nothing_else_is_taken_over() -> None:
    """Functions that users register apart."""
    listed = set()
    for patch in PATCHES:
        for owner, name in found(patch):
            one = inspect.getattr_static(owner, name)
            listed.add(place_of(getattr(one, "__func__", one)))
    gc.unfreeze()  # the suite freezes what there is, for its collections to be quick
    functions: list[Any] = [one for one in gc.get_objects() if type(one) is FunctionType]
    gc.freeze()
    taken = [
        one for one in functions
        if one.__kwdefaults__ and "_weft_answer_" in one.__kwdefaults__
        and str(one.__module__).startswith("torch.")
    ]
    assert len(taken) > 90
    assert {place_of(one) for one in taken} <= listed


def place_of(function: Any) -> str:
    """Where it was defined: the compiler wraps some of these when it is imported."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text()))
