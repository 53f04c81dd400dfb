"""A model of transformers over gloo trains as it does in one process."""

from __future__ import annotations

from tests.gloo import GlooWorld
from tests.models.training import WAYS, compare, on_mesh, plain


def test_llama_over_gloo(gloo: GlooWorld) -> None:
    """Data and tensor parallel, of a size that nothing divides."""
    given = "dp x tp", "llama", "uneven", "sdpa", 20
    expected = plain(*given[1:])
    for mine in gloo.run(on_mesh, WAYS["dp x tp"].mesh, *given):
        compare(mine, expected)
