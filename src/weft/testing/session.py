"""Simulated ranks that stay: each keeps its variables, tensors and random numbers between calls.

`%%ranks` in IPython is a cell that all of them execute.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from weft.comm import BoundMesh, SimulatedRanks, this_world
from weft.comm.simulated import SimulatedWorld
from weft.core import Mesh, P
from weft.core.display import preformatted
from weft.core.parse import parse_mesh
from weft.drawing.ranks import ranks_text
from weft.errors import CommunicationError, MeshError

__all__ = ["PerRank", "Session", "load_ipython_extension", "session"]

T = TypeVar("T")


class PerRank(list[Any]):
    """The values of all ranks, in rank order; ranks with the same text are shown together."""

    def __repr__(self) -> str:
        return _together([repr(each) for each in self])

    def _repr_html_(self) -> str:
        blocks = _groups([_as_html(each) for each in self])
        if len(blocks) == 1:
            return blocks[0][1]
        return "".join(f"<div><b>{ranks}</b>{shown}</div>" for ranks, shown in blocks)


class Session:
    """Simulated ranks that stay between the cells of a notebook, or the lines of a prompt.

        ranks = weft.testing.session({"dp": 2, "tp": 2})
        ranks.exec("x = weft.ones(4, 6, mesh=mesh, placements=P('dp', 'tp'))")
        ranks.exec("x.sum().item()")
        ranks["x"]

    Lines find `mesh` (the current mesh), `rank`, `weft`, `P`, `torch`, and earlier variables. After
    an exception each rank keeps the variables that it had, so ranks may differ.

    In a notebook `%load_ext weft.testing` gives `%%ranks dp=2,tp=2`: a cell that all ranks execute.

    Args:
        mesh: map axis -> size, only sizes, or a mesh value.
        device_type: where local tensors live.

    Raises:
        ShardTypeError: not a mesh.
    """

    def __init__(
        self, mesh: Mapping[str, int] | Sequence[int] | Mesh, device_type: str = "cpu"
    ) -> None:
        self._ranks = SimulatedRanks(None, mesh, device_type, lasting=True)
        self._spaces: list[dict[str, Any]] = [{} for _ in self._ranks.baton.runners]
        self._count = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh, as a value."""
        return self._ranks.mesh

    def run(self, fn: Callable[[BoundMesh], Any]) -> PerRank:
        """What `fn(mesh)` returns on each rank, called as by `weft.testing.run`.

        Raises:
            Exception: whatever the first failing rank raised, with its rank in a note.
            CommunicationError: ranks wait for different collectives; or a rank of an interrupted
                call has not stopped yet.
        """
        if self._ranks.baton.is_stuck:
            axes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes))
            raise CommunicationError(
                "session.run(fn)", "a rank of a call that was interrupted still computes",
                "ranks run one call at a time", [repr(self)],
                f"ranks = weft.testing.session({axes!r})")
        return PerRank(self._ranks.run(fn))

    def exec(self, code: str, given: Mapping[str, Any] | None = None) -> PerRank | None:
        """Execute lines on every rank; what they print is printed when all are done.

        Args:
            code: Python. If its last line is an expression, its values are returned.
            given: other names that the lines may read, such as a notebook's. Assigned names belong
                to the rank.

        Returns:
            The value of the last line on each rank; None if there is none.

        Raises:
            SyntaxError: not Python.
            Exception: as `run`.
        """
        self._count += 1
        lines, last = _compiled(code, f"ranks[{self._count}]")
        printed = [io.StringIO() for _ in self._spaces]

        def execute(mesh: BoundMesh) -> Any:
            rank = this_world().rank
            known = {
                **(given or {}), "weft": sys.modules["weft"], "torch": torch, "P": P, "mesh": mesh,
                "rank": rank, "__name__": "__main__",
            }
            with mesh:
                return _execute(lines, last, self._spaces[rank], known)

        with contextlib.redirect_stdout(_ByRank(printed, sys.stdout)):
            try:
                values = self.run(execute)
            finally:
                texts = [each.getvalue().rstrip("\n") for each in printed]
        if any(texts):
            print(_together(texts))
        return None if all(value is None for value in values) else values

    def __getitem__(self, name: str) -> PerRank:
        """A variable, as each rank has it."""
        return PerRank(space[name] for space in self._spaces)

    def __repr__(self) -> str:
        names = sorted(set().union(*self._spaces))
        return f"session({self.mesh!r}, {', '.join(names) or 'no variables'})"


session = Session
"""`Session`, by the name of a function."""


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


def _compiled(code: str, name: str) -> tuple[Any, Any]:
    """The lines, and the expression at their end or None. Tracebacks find the text by the name."""
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    tree, last = ast.parse(code, name), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body[-1].value), name, "eval")
        del tree.body[-1]
    return compile(tree, name, "exec"), last


def _execute(lines: Any, last: Any, own: dict[str, Any], known: dict[str, Any]) -> Any:
    """Run the lines on one rank; names that differ from `known` afterwards are its own."""
    names = {**known, **own}
    try:
        exec(lines, names)
        return None if last is None else eval(last, names)
    finally:
        names.pop("__builtins__", None)
        own.update({name: value for name, value in names.items()
                    if name not in known or value is not known[name]})


class _ByRank(io.TextIOBase):
    """Standard output, separate for each simulated rank."""

    def __init__(self, ranks: Sequence[io.StringIO], outer: Any) -> None:
        self.ranks, self.outer = ranks, outer

    def write(self, text: str) -> int:
        world = this_world()
        is_rank = isinstance(world, SimulatedWorld)
        return (self.ranks[world.rank] if is_rank else self.outer).write(text)


def _groups(shown: Sequence[str]) -> list[tuple[str, str]]:
    """Which ranks show what, in the order of the first of them."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(shown):
        ranks.setdefault(text, []).append(rank)
    return [(f"rank{'s' * (len(which) > 1)} {ranks_text(which)}", text)
            for text, which in ranks.items()]


def _together(shown: Sequence[str]) -> str:
    blocks = _groups(shown)
    if len(blocks) == 1:
        return blocks[0][1]
    return "\n".join(
        f"{ranks}:\n{text}" if "\n" in text else f"{ranks}: {text}" for ranks, text in blocks
    )


def _as_html(value: Any) -> str:
    own = getattr(value, "_repr_html_", None) or getattr(value, "_repr_svg_", None)
    return own() if own is not None else preformatted(repr(value))
