"""The tutorial as notebooks, and ranks that stay between their cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_readme import blocks

pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")

from tests.docs.notebooks import executed, notebook, printed

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"
RANKS = """
```python
%load_ext weft.testing
width = 6
```
```python
%%ranks dp=2,tp=2
torch.manual_seed(0)
x = weft.ones(5, width, spec=P("dp", "tp"))
print("row", mesh.here[0])
```
```python
%%ranks
x.sum().item()
```
```python
%%ranks
x
```
```python
ranks["x"][3].sharding
```
"""


@pytest.mark.parametrize("path", sorted(TUTORIAL.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_becomes_cells(path: Path) -> None:
    page = path.read_text()
    made = notebook(page)
    programs = [cell["source"] for cell in made["cells"] if cell["cell_type"] == "code"]
    assert programs == [block.program.strip("\n") for block in blocks(page)]
    assert not any("```python" in cell["source"] for cell in made["cells"])


def test_a_page_and_cells_of_ranks_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TUTORIAL / "tensor.md").read_text()
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    cells = [cell for cell in executed(notebook(page + RANKS)).cells if cell.cell_type == "code"]
    found = blocks(page)
    assert [printed(cell) for cell in cells[: len(found)]] == [block.shown for block in found]
    printing, value, tensor, layout = cells[-4:]
    assert printed(printing) == "ranks 0,1: row 0\nranks 2,3: row 1\n"
    assert value.outputs[0].data["text/plain"] == "30.0"
    shown = tensor.outputs[0].data["text/html"]
    assert shown.count("<svg") == 4 and "rank 3 holds [3:5, 3:6]" in shown
    assert layout.outputs[0].data["text/html"].startswith("<svg")
