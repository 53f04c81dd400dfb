"""What `show` refuses, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core import Layout, Mesh, P
from weft.drawing import show
from weft.errors import LayoutError, ShardTypeError

LAYOUT = Layout(Mesh({"dp": 2}), (4,), P("dp"))


def test_what_has_no_layout():
    with pytest.raises(ShardTypeError) as raised:
        show([1, 2])
    assert str(raised.value) == (
        "show(what): an object of type list has no layout.\n"
        "  Rule: a layout, a ShardTensor, a torch DTensor or a plan can be drawn.\n"
        "  Offenders: list\n"
        "  Fix: weft.show(weft.distribute_tensor(x, mesh, P('dp')))"
    )


@pytest.mark.parametrize("name", ["a.png", "a.pdf", "a"])
def test_other_files(tmp_path: Path, name: str):
    path = tmp_path / name
    with pytest.raises(LayoutError) as raised:
        show(LAYOUT, out=path)
    assert str(raised.value) == (
        f"show(out=): {str(path)!r} ends in {path.suffix!r}.\n"
        "  Rule: show writes .svg and .txt; a .png is drawn by matplotlib, on the command line.\n"
        f"  Offenders: {path}\n"
        f"  Fix: out={str(path.with_suffix('.svg'))!r}; or weft show ... --out "
        f"{path.with_suffix('.png')}"
    )
    assert not path.exists()
