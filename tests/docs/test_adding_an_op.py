"""docs/adding_an_op.md quotes the source as it is."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

HERE = Path(__file__).parents[2]
TEXT = (HERE / "docs" / "adding_an_op.md").read_text()


def test_what_is_quoted_stands_in_the_source() -> None:
    files = [*(HERE / "src" / "weft" / "ops").glob("*.py"), HERE / "tests" / "cases" / "calls.py"]
    sources = [textwrap.dedent(re.sub(r"^ +", "", file.read_text(), flags=re.M)) for file in files]
    quoted = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(quoted) == 7
    for text in quoted:
        flat = re.sub(r"^ +", "", text.strip(), flags=re.M)
        assert any(flat in source for source in sources), text


def test_files_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:src|tests)/[\w/]+\.py)`", TEXT):
        assert (HERE / name).exists(), name
