"""What the demo shows, as rich renderables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from weft.cli.demo.events import Box, Parameter, Traffic
from weft.cli.demo.follow import Told
from weft.cli.demo.picture import draw, holders
from weft.cli.demo.train import MESH, NUM_RANKS, Run, Step, shardings

__all__ = ["bar", "differences", "header", "losses", "parameters", "pictures", "summary",
           "traffic", "written_shardings"]

T = TypeVar("T")


def header(run: Run, num_files: int, num_bytes: int) -> RenderableType:
    """What is going to happen."""
    settings = run.settings
    axes = " x ".join(f"{name}={size}" for name, size in MESH.items())
    rows = [
        ("mesh", f"four gloo processes on this machine, {axes}"),
        ("model", f"decoder-only transformer: {settings.num_blocks} blocks, width "
                  f"{settings.width}, {settings.num_heads} heads, vocabulary "
                  f"{settings.vocabulary}"),
        ("data", f"Python's standard library, {num_files} files, {num_bytes / 1e6:.1f} MB"),
        ("batch", f"{run.batch} windows of {settings.context} bytes; {run.num_steps} steps of "
                  f"AdamW, float32"),
        ("uneven", f"dp=2 cuts {run.batch} windows; tp=2 cuts {settings.num_heads} heads, "
                   f"{settings.vocabulary} tokens, {settings.hidden} hidden units"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), value)
    return Panel(grid, title="[bold]weft[/]: one model over four ranks", title_align="left",
                 box=box.ROUNDED, border_style="cyan", expand=False)


def written_shardings(run: Run) -> RenderableType:
    """What the user writes to distribute the model."""
    grid = Table.grid(padding=(0, 2))
    for pattern, spec in shardings(run.settings).items():
        grid.add_row(Text(f"{pattern!r}:", style="green"), Text(repr(spec), style="cyan"))
    return Panel(
        grid, title="weft.distribute_module(model, mesh, shardings=...)", title_align="left",
        subtitle="all other parameters: replicated", subtitle_align="left", box=box.ROUNDED,
        border_style="dim", expand=False,
    )


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
    """The layout of every parameter, those of equal name and layout in all blocks together."""
    table = Table(title="Parameters", title_justify="left", title_style="bold",
                  box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name")
    table.add_column("", justify="right", style="dim")
    table.add_column("shape", justify="right")
    table.add_column("layout", style="cyan")
    table.add_column("block at tp=0", justify="right")
    table.add_column("at tp=1", justify="right")
    for name, group in _grouped(found, lambda one: (_pattern(one.name), one.layout)).items():
        first = group[0]
        blocks = [_block(each) for each in holders(first.boxes)]
        table.add_row(name[0], f"x{len(group)}" if len(group) > 1 else "",
                      _times(first.shape), first.layout, *blocks)
    held = _elements(found)
    whole = sum(math.prod(one.shape) for one in found)
    return Group(table, Text(
        f"{whole:,} parameters; ranks 0 to {len(held) - 1} hold "
        + ", ".join(f"{each:,}" for each in held) + "\n", style="dim"))


def pictures(found: Sequence[Parameter]) -> RenderableType:
    """The same as pictures, one per way to be cut."""
    cut = [one for one in found if len(set(one.boxes)) > 1]
    cells = []
    for group in _grouped(cut, lambda one: (one.shape, one.boxes)).values():
        one = group[0]
        names = dict.fromkeys(_pattern(each.name).removeprefix("blocks.*.") for each in group)
        caption = Text(_times(one.shape) + "\n", style="dim")
        caption.append("\n".join(names), style="not dim")
        tall = len(one.shape) > 1 and one.shape[0] > one.shape[1]
        cells.append(Group(draw(one.shape, one.boxes, 29, 10 if tall else 7), caption, Text()))
    rest = dict.fromkeys(_pattern(one.name) for one in found if len(set(one.boxes)) == 1)
    return Group(
        Text("Where they live\n", style="bold"), Columns(cells, padding=(0, 2)),
        Text("whole on every rank: " + ", ".join(rest), style="dim"), Text(),
    )


def losses(ranks: Sequence[Step], single: Sequence[Step], num_groups: int = 3) -> RenderableType:
    """The loss of every step, over the ranks and in one process."""
    title = "Loss of every step: four ranks, one process, relative difference"
    table = Table(title=title if single else "Loss of every step", title_justify="left",
                  title_style="bold", box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(num_groups):
        table.add_column(justify="right", style="dim")
        table.add_column(justify="right", style="cyan")
        table.add_column(justify="right")
        table.add_column(justify="right", style="dim")
    length = -(-len(ranks) // num_groups)
    for line in range(length):
        cells: list[str] = []
        for step in range(line, len(ranks), length):
            cells += [str(step), f"{ranks[step].loss:.5f}"]
            if single:
                mine, theirs = ranks[step].loss, single[step].loss
                cells += [f"{theirs:.5f}", f"{abs(mine - theirs) / theirs:.0e}"]
            else:
                cells += ["", ""]
        table.add_row(*cells)
    return table


def traffic(rows: Iterable[Traffic]) -> RenderableType:
    """What one step moves, per mesh axis and op."""
    table = Table(title="Bytes received in one step, per mesh axis and op, over all ranks",
                  title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("axis", "left"), ("op", "left"), ("pass", "left"),
                          ("collective", "left"), ("times", "right"), ("received", "right")):
        table.add_column(name, justify=justify, style="cyan" if name == "axis" else None)
    by_axis = _grouped(rows, lambda row: row.axes)
    for axes, of_axis in by_axis.items():
        kinds = _grouped(of_axis, lambda row: (row.op, row.direction, row.collective))
        for (op, direction, collective), same in kinds.items():
            times = max(row.num_calls for row in same)
            table.add_row(axes, _op_name(op), direction, collective, str(times), _size(same))
        table.add_row(axes, "all", "", "", "", _size(of_axis), style="bold", end_section=True)
    return table


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two runs are apart: the largest relative difference of a step, and that step."""

    largest: float = 0.0
    step: int = 0


def differences(ranks: Sequence[Step], single: Sequence[Step]) -> Difference:
    """The largest relative difference of two runs' losses. Infinite for a loss that is no number.

    With no single run there is nothing to differ from.
    """
    apart = [abs(one.loss - other.loss) / abs(other.loss) for one, other in zip(ranks, single)]
    apart = [each if math.isfinite(each) else math.inf for each in apart]
    return Difference(max(apart), apart.index(max(apart))) if apart else Difference()


def summary(
    run: Run, told: Told, single: Sequence[Step], tolerance: float, plot: Path, seconds: float
) -> RenderableType:
    """What came out."""
    grid = Table.grid(padding=(0, 2))
    losses = [step.loss for step in told.steps]
    rows = [("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")]
    apart = differences(told.steps, single)
    agree = apart.largest <= tolerance
    if single:
        rows.append((
            "agreement",
            f"[bold {'green' if agree else 'red'}]{'yes' if agree else 'NO'}[/]: the losses of "
            f"four ranks and one process differ by at most {apart.largest:.1e} of the loss "
            f"(step {apart.step}; allowed {tolerance:.0e})",
        ))
    speed = f"four ranks {_rate(told.steps, run):,.0f} tokens/s"
    if single:
        speed += f", one process {_rate(single, run):,.0f} tokens/s"
    rows += [
        ("speed", speed),
        ("traffic", f"{_size(told.traffic)} received per step, over all ranks"),
        ("plot", str(plot)),
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


def _block(each: Box) -> str:
    return _times(stop - start for start, stop in each)


def _volume(each: Box) -> int:
    return math.prod(stop - start for start, stop in each)


def _elements(found: Sequence[Parameter]) -> list[int]:
    return [sum(_volume(one.boxes[rank]) for one in found) for rank in range(NUM_RANKS)]


def _size(rows: Iterable[Traffic]) -> str:
    nbytes = sum(row.nbytes for row in rows)
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.2f} kB"
