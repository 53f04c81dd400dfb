"""What the demo shows, as rich renderables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from demo.follow import Parameter, Told, Traffic
from demo.text import Corpus
from demo.train import MESH, NUM_RANKS, TOLERANCE, Run, Step, differences, shardings
from weft.cli.terminal import coloured
from weft.drawing import sketch

__all__ = ["bar", "header", "losses", "parameters", "pictures", "summary",
           "traffic", "written_shardings"]

T = TypeVar("T")


def header(run: Run, corpus: Corpus) -> RenderableType:
    """What is going to happen."""
    settings = run.settings
    axes = " x ".join(f"{name}={size}" for name, size in MESH.items())
    rows = [
        ("mesh", f"{axes}: four gloo processes on this machine"),
        ("model", f"decoder-only transformer, {settings.num_blocks} blocks of width "
                  f"{settings.width}, float32"),
        ("data", f"the sources of Python's standard library: {corpus.num_files} files, "
                 f"{corpus.tokens.numel() / 1e6:.1f} MB"),
        ("task", f"predict the next byte; {run.num_steps} steps of AdamW, {run.batch} windows of "
                 f"{settings.context}"),
        ("uneven", f"dp cuts {run.batch} windows; tp cuts {settings.num_heads} heads, "
                   f"{settings.vocabulary} tokens, {settings.hidden} hidden units"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), value)
    return Panel(grid, title="[bold]weft[/]: one model over four ranks", title_align="left",
                 box=box.ROUNDED, border_style="cyan", expand=False)


def written_shardings(run: Run) -> RenderableType:
    """What the user writes to distribute the model."""
    grid = Table.grid(padding=(0, 1))
    for pattern, spec in shardings(run.settings).items():
        grid.add_row(Text(f" {pattern!r}:", style="green"), Text(f"{spec!r},", style="cyan"))
    return Group(Text("\nweft.distribute_module(model, mesh, shardings={", style="bold"), grid,
                 Text("})  # all other parameters: replicated\n", style="bold"))


@contextmanager
def bar(
    console: Console, name: str, run: Run, single: Sequence[Step] = ()
) -> Iterator[Callable[[Sequence[Step]], None]]:
    """A live bar; call what it gives with the steps so far."""
    shown = Progress(
        TextColumn("[bold]{task.description:12}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"), console=console,
    )
    task = shown.add_task(name, total=run.num_steps, facts="")

    def advance(steps: Sequence[Step]) -> None:
        facts = f"loss [cyan]{steps[-1].loss:.4f}[/]"
        if single:
            facts += f"  [dim]one process {single[len(steps) - 1].loss:.4f}[/]"
        facts += f"  {_rate(steps, run):,.0f} tokens/s"
        shown.update(task, completed=len(steps), facts=facts)

    with shown:
        yield advance


def parameters(found: Sequence[Parameter]) -> RenderableType:
    """The layout of every parameter, those of the same name in all blocks together."""
    table = Table(title="Parameters", title_justify="left", title_style="bold",
                  box=box.SIMPLE_HEAD, padding=0)
    table.add_column("name")
    table.add_column("shape", justify="right")
    table.add_column("layout", style="cyan")
    table.add_column("at tp=0", justify="right")
    table.add_column("at tp=1", justify="right")
    by_name = _grouped(found, lambda one: (_pattern(one.name), one.layout))
    for name, layout in by_name:
        boxes = dict.fromkeys(map(layout.box, range(NUM_RANKS)))
        blocks = [_times(stop - start for start, stop in box) for box in boxes]
        table.add_row(name, _times(layout.shape), str(layout), *blocks)
    whole = sum(math.prod(one.layout.shape) for one in found)
    held = _elements(found)
    return Group(table, Text(
        f"{whole:,} parameters; ranks 0 to {NUM_RANKS - 1} hold "
        + ", ".join(f"{each:,}" for each in held) + "\n", style="dim"))


def pictures(found: Sequence[Parameter]) -> RenderableType:
    """The same as pictures, one per way to be cut."""
    cut = [one for one in found if not one.layout.is_replicated]
    cells = []
    for layout, group in _grouped(cut, lambda one: one.layout).items():
        names = dict.fromkeys(_pattern(each.name).removeprefix("blocks.*.") for each in group)
        caption = Text("\n".join([_times(layout.shape), *names, ""]), style="dim")
        cells.append(Group(coloured(sketch(layout)), caption))
    rest = dict.fromkeys(_pattern(one.name) for one in found if one.layout.is_replicated)
    return Group(
        Text("Where they live\n", style="bold"), Columns(cells, padding=(0, 2)),
        Text("whole on every rank: " + ", ".join(rest) + "\n", style="dim"),
    )


def losses(ranks: Sequence[Step], single: Sequence[Step], num_groups: int = 3) -> RenderableType:
    """The loss of every step, over the ranks and in one process."""
    title = "Loss of every step" + (": four ranks, one process, difference" if single else "")
    grid = Table.grid(padding=(0, 4))
    apart = differences(ranks, single)
    length = -(-len(ranks) // num_groups)
    for line in range(length):
        cells = []
        for step in range(line, len(ranks), length):
            cell = Text.assemble((f"{step:3} ", "dim"), (f"{ranks[step].loss:.4f}", "cyan"))
            if single:
                shown = f"{apart[step]:.0e}".replace("0e+00", "0")
                cell.append(f" {single[step].loss:.4f}").append(f" {shown:>5}", "dim")
            cells.append(cell)
        grid.add_row(*cells)
    return Group(Text(f"\n{title}\n", style="bold"), grid, Text())


def traffic(rows: Iterable[Traffic]) -> RenderableType:
    """What one step moves, per mesh axis and op."""
    table = Table(title="Bytes received in one step, per mesh axis and op, over all ranks",
                  title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("axis", style="cyan")
    for name in ("op", "pass", "collective"):
        table.add_column(name)
    for name in ("times", "received"):
        table.add_column(name, justify="right")
    by_axis = _grouped(rows, lambda row: row.axes)
    for axes, of_axis in by_axis.items():
        kinds = _grouped(of_axis, lambda row: (row.op, row.direction, row.collective))
        for (op, direction, collective), same in kinds.items():
            times = max(row.num_calls for row in same)
            table.add_row(axes, _op_name(op), direction, collective, str(times), _size(same))
        table.add_row(axes, "all", "", "", "", _size(of_axis), style="bold", end_section=True)
    return table


def summary(run: Run, told: Told, single: Sequence[Step], seconds: float) -> RenderableType:
    """What came out."""
    grid = Table.grid(padding=(0, 2))
    losses = [step.loss for step in told.steps]
    rows = [("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")]
    apart = differences(told.steps, single)
    largest = max(apart, default=0.0)
    agree = largest <= TOLERANCE
    if single:
        rows.append((
            "agreement",
            f"[bold {'green' if agree else 'red'}]{'yes' if agree else 'NO'}[/]: losses differ by "
            f"at most {largest:.0e} of their value, in step {apart.index(largest)} (allowed: "
            f"{TOLERANCE:.0e})",
        ))
    speed = f"{_rate(told.steps, run):,.0f} tokens/s over {os.cpu_count()} cores"
    if single:
        speed += f"; one process, one core: {_rate(single, run):,.0f}"
    rows += [
        ("speed", speed),
        ("traffic", f"{_size(told.traffic)} received per step, over all ranks"),
        ("time", f"{seconds:.0f} s in all"),
    ]
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), value)
    return Panel(grid, box=box.ROUNDED, border_style="green" if agree else "red", expand=False)


def _rate(steps: Sequence[Step], run: Run) -> float:
    # The first step warms up: it counts only while there is no other.
    counted = steps[1:] or steps
    return run.num_tokens * len(counted) / sum(step.seconds for step in counted)


def _op_name(op: str) -> str:
    return op.removeprefix("aten.").split(".")[0]


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _grouped(found: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return groups


def _times(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _elements(found: Sequence[Parameter]) -> list[int]:
    return [
        sum(math.prod(one.layout.local_shape(rank)) for one in found) for rank in range(NUM_RANKS)
    ]


def _size(rows: Iterable[Traffic]) -> str:
    nbytes = sum(row.nbytes for row in rows)
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.2f} kB"
