"""`%%ranks` in IPython: a cell that all simulated ranks of one session execute."""

from __future__ import annotations

from typing import Any

from weft.core.parse import parse_mesh
from weft.errors import MeshError
from weft.testing.session import PerRank, Session

__all__ = ["load_ipython_extension"]


def load_ipython_extension(ipython: Any) -> None:
    """Register `%%ranks`; IPython calls it for `%load_ext weft.testing`.

    `%%ranks dp=2,tp=2` starts ranks, or goes on with those of the same mesh; `%%ranks` goes on. A
    cell reads the notebook's names and assigns names of the rank's own. `ranks` is the session.

    Args:
        ipython: the shell of the notebook.
    """
    held: list[Session] = []

    def ranks(line: str, cell: str) -> PerRank | None:
        if line.strip():
            mesh = parse_mesh(line.strip(), call="%%ranks")
            if not held or held[-1].mesh != mesh:
                held[:] = [Session(mesh)]
                ipython.user_ns["ranks"] = held[-1]
        if not held:
            raise MeshError(
                "%%ranks", "no ranks have been started", "the first cell names the axes "
                "of a mesh and their sizes", ["%%ranks"], "%%ranks dp=2,tp=2")
        given = {name: value for name, value in ipython.user_ns.items() if name[:1] != "_"}
        return held[-1].exec(cell, given)

    ipython.register_magic_function(ranks, "cell")
