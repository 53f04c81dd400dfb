"""Runs all exhibits and prints docs/museum.md: `python -m tests.museum > docs/museum.md`."""

from __future__ import annotations

import inspect
import sys
from collections import Counter

import torch

from tests.museum.exhibits import EXHIBITS
from tests.museum.halls import RIGHT, Exhibit, judge

HEAD = """# The museum

Public reports of sharded tensors that went wrong, each as the smallest program that shows it.
`python -m tests.museum > docs/museum.md` ran every program on weft's ShardTensor and on DTensor of
torch {version}, over gloo, and wrote this page. The numbers are those of issues and pull requests
of pytorch/pytorch, unless another project is named; *own sweep* is found by weft's own
[sweep](sweep.md). Some reports have been fixed since; those rows show it.

In a program, `put(tensor, dim)` shards a dim over the mesh (without a dim it replicates, "sum"
makes a partial value), and `n` is a length: mostly one that divides evenly, one that does not, and
one that leaves ranks without rows. A result is right if all ranks have the values, shapes, dtypes
and gradients that plain tensors give. DTensor takes plain operands as replicated
(`implicit_replication`). `_loss_parallel` is torch's `loss_parallel` for a DTensor, and nothing
for others.

{totals}
"""


def code_of(exhibit: Exhibit) -> str:
    """The program as its module has it."""
    return "def " + inspect.getsource(exhibit.program).partition("def ")[2].rstrip()


def _row(exhibit: Exhibit, told: dict[str, list[str]]) -> str:
    lines = [f"## {exhibit.says}", "", f"{_source(exhibit.number)}; mesh of "
             f"{' x '.join(map(str, exhibit.mesh))} ranks.", "", "```py",
             code_of(exhibit), "```", "", "| n | weft | DTensor |", "|---|---|---|"]
    lines += [f"| {rows} | {ours} | {theirs} |"
              for rows, ours, theirs in zip(exhibit.rows, told["weft"], told["DTensor"])]
    return "\n".join(lines) + "\n"


def _source(number: str) -> str:
    if number.isdigit():
        return f"[pytorch {number}](https://github.com/pytorch/pytorch/issues/{number})"
    return number


def _short(verdict: str) -> str:
    text = verdict.replace("|", "\\|")
    return text if len(text) <= 150 else text[:147] + "..."


def _totals(all_told: list[dict[str, list[str]]]) -> str:
    lines = ["| system | programs | runs | right | wrong | error | ends or hangs |",
             "|---|---|---|---|---|---|---|"]
    for system in ("weft", "DTensor"):
        runs = [each for told in all_told for each in told[system]]
        kinds = Counter(each.split()[0].rstrip(":") for each in runs)
        lines.append(f"| {system} | {len(all_told)} | {len(runs)} | {kinds[RIGHT]} | "
                     f"{kinds['wrong']} | {kinds['error']} | {kinds['ends'] + kinds['hangs']} |")
    return "\n".join(lines)


def main() -> None:
    runs = [(exhibit, rows) for exhibit in EXHIBITS for rows in exhibit.rows]
    runs.sort(key=lambda run: run[0].mesh)
    told: dict[tuple[Exhibit, str], list[str]] = {}
    for system in ("weft", "DTensor"):
        for (exhibit, rows), verdict in zip(runs, judge(runs, system)):
            sys.stderr.write(f"{system} {exhibit.number} {exhibit.says}, n={rows}: {verdict}\n")
            told.setdefault((exhibit, system), []).append(_short(verdict))
    all_told = [{system: told[exhibit, system] for system in ("weft", "DTensor")}
                for exhibit in EXHIBITS]
    sys.stdout.write(HEAD.format(version=torch.__version__.split("+")[0],
                                 totals=_totals(all_told)))
    for exhibit, each in zip(EXHIBITS, all_told):
        sys.stdout.write("\n" + _row(exhibit, each))


if __name__ == "__main__":
    main()
