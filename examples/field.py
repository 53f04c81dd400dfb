"""A field that no rank holds: a U-Net learns one step of the shallow-water equations.

    pip install rich matplotlib
    weft run -n 4 examples/field.py

Solver, model and training loop are ordinary PyTorch and know of no mesh. The field is sharded by
rows and columns from its first value on: each rank computes its own block of the initial state,
solver and network exchange borders, and no rank ever holds the whole field. Rank 0 first does the
same by itself; the losses of all steps must agree, or the program fails. At the end stand the bytes
of the halos beside the fewest possible, the peak of tensor memory beside that of one process, and a
picture of the field with the borders of its shards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.testing import peak_memory

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as missing:
    name = (missing.name or "").partition(".")[0]
    sys.exit(f"examples/field.py needs {name}: pip install rich matplotlib")

TOLERANCE = 1e-4
"""How far two float32 losses of a step may be apart, as a part of the loss."""

SHARE = 1.5
"""The most memory that a rank may need, in 1 / ranks of what one process needs."""


# The equations, on a torus of unit cells: height h and velocities u, v; one explicit step.


def step(state: Tensor, dt: float = 0.2, depth: float = 1.0) -> Tensor:
    """Height and velocities after `dt`: velocities follow the slope, the height what flows in.

    Args:
        state: (1, 3, rows, columns): h, u and v.
    """
    h, u, v = state.unbind(1)
    u = u - dt * (torch.roll(h, -1, -2) - torch.roll(h, 1, -2)) / 2
    v = v - dt * (torch.roll(h, -1, -1) - torch.roll(h, 1, -1)) / 2
    flow_u, flow_v = (depth + h) * u, (depth + h) * v
    h = h - dt * (torch.roll(flow_u, -1, -2) - torch.roll(flow_u, 1, -2)) / 2
    h = h - dt * (torch.roll(flow_v, -1, -1) - torch.roll(flow_v, 1, -1)) / 2
    return torch.stack([h, u, v], 1)


def drops(rows: Tensor, columns: Tensor, shape: tuple[int, int], seed: int) -> Tensor:
    """Still water with four drops: the state (1, 3, ...) at these rows and columns."""
    places = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
    h = torch.zeros(len(rows), len(columns))
    for row, column, height in places.tolist():
        apart = [
            (place - at * size + size / 2) % size - size / 2
            for place, at, size in ((rows, row, shape[0]), (columns, column, shape[1]))
        ]
        h += 0.2 * (0.5 + height) * torch.exp(-(apart[0][:, None] ** 2 + apart[1] ** 2) / 40)
    return torch.stack([h, torch.zeros_like(h), torch.zeros_like(h)])[None]


# An ordinary network.


class UNet(nn.Module):
    """Two levels of convolutions; it predicts what a step adds to the state."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1, padding_mode="circular")
        self.first = self._block(width, width)
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.middle = self._block(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = self._block(2 * width, width)
        self.leave = nn.Conv2d(width, 3, 1)

    def _block(self, given: int, made: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(3, made), nn.GELU(),
            nn.Conv2d(made, made, 3, padding=1), nn.GELU(),
        )

    def forward(self, state: Tensor) -> Tensor:
        first = self.first(self.enter(state))
        middle = self.up(self.middle(self.down(first)))
        return state + self.leave(self.last(torch.cat([first, middle], 1)))


# Ordinary training.


@dataclass(slots=True)
class Training:
    """A network that learns from the solver's states; `begin` makes the first one.

    `place` is all that a program over ranks adds to the network.
    """

    begin: Callable[[], Tensor]
    num_steps: int
    place: Callable[[nn.Module], object] = lambda model: model
    model: Any = None
    optimizer: Any = None
    state: Any = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = UNet()
        self.place(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state = self.begin()

    def steps(self) -> Iterator[float]:
        """Train, one step of the solver after the other; the loss of every step."""
        for _ in range(self.num_steps):
            with torch.no_grad():
                following = step(self.state)
            loss = F.mse_loss(self.model(self.state), following) / 1e-3
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.state = following
            yield loss.item()


def alone(shape: tuple[int, int], num_steps: int) -> Training:
    """The training on one process."""
    rows, columns = map(torch.arange, shape)
    return Training(lambda: drops(rows, columns, shape, 3), num_steps)


def sharded(shape: tuple[int, int], num_steps: int, mesh: Any) -> Training:
    """The same over a mesh: two lines say where the field lies, and whose the weights are."""
    def block(index: tuple[slice, ...]) -> Tensor:
        rows, columns = [torch.arange(one.start, one.stop) for one in index[2:]]
        return drops(rows, columns, shape, 3)

    spec = weft.P(None, None, *mesh.axis_names)
    return Training(
        lambda: weft.from_callback((1, 3, *shape), mesh, spec, block), num_steps,
        lambda model: weft.distribute_module(model, mesh))


# Both, and what they say of each other.


def followed(training: Training, name: str, console: Console) -> tuple[list[float], int]:
    """The losses of all steps and the peak of memory, with a bar that follows the steps."""
    bar = Progress(
        TextColumn("[bold]{task.description:12}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("loss [cyan]{task.fields[loss]:.4f}"), TimeElapsedColumn(), console=console,
    )
    losses = []
    with bar, peak_memory(training.model, training.state) as memory:
        task = bar.add_task(name, total=training.num_steps, loss=float("nan"))
        for loss in training.steps():
            losses.append(loss)
            bar.update(task, advance=1, loss=loss)
    return losses, memory.peak


def halo_bytes(training: Training) -> tuple[int, int]:
    """Bytes that this rank receives for the convolutions of one step forward: all, and the fewest.

    A convolution of 3 x 3 reads one row or column of each neighbour, where there is one.
    """
    mesh = training.state.device_mesh
    with weft.explain() as log, torch.no_grad():
        training.model(training.state)
    moved = sum([event.nbytes for event in log.events if "conv2d" in event.op])
    fewest = 0
    for shape, channels in convolved(training):
        layout = weft.Layout(mesh, shape, training.state.spec)
        box = layout.box(mesh.get_rank())[2:]
        read = [(max(start - 1, 0), min(stop + 1, size))
                for (start, stop), size in zip(box, shape[2:])]
        areas = [(one[1] - one[0]) * (other[1] - other[0]) for one, other in (read, box)]
        fewest += channels * (areas[0] - areas[1]) * 4
    return moved, fewest


def convolved(training: Training) -> list[tuple[tuple[int, ...], int]]:
    """Per convolution of 3 x 3 with zeros around it, the shape of its field and its channels."""
    rows, columns = training.state.shape[2:]
    found = []
    for name, module in training.model.named_modules():
        zeros = isinstance(module, nn.Conv2d) and module.padding_mode == "zeros"
        if zeros and module.kernel_size == (3, 3):
            scale = 2 if name.startswith("middle") else 1
            found.append(((1, 3, rows // scale, columns // scale), module.in_channels))
    return found


def picture(training: Training, path: str) -> None:
    """Write the height of the water with the borders of its shards; rank 0 writes."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = weft.plot(training.state[0, 0], figure.add_subplot(), cmap="RdBu_r")
    axes.set_title(f"Height of the water after {training.num_steps} steps, "
                   f"{training.state.sharding}")
    figure.colorbar(axes.images[0])
    if training.state.device_mesh.get_rank() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def report(
    console: Console, difference: float, halos: tuple[int, int], peaks: tuple[int, int],
    num_ranks: int, path: str,
) -> bool:
    """Print what came out; whether it is what it has to be."""
    share = peaks[1] / peaks[0] * num_ranks
    rows = [
        ("losses", f"of all steps agree to {difference:.1e}; {TOLERANCE:.0e} is allowed",
         difference <= TOLERANCE),
        ("halos", f"{halos[0]:,} bytes for the convolutions of a step, the fewest are "
         f"{halos[1]:,}: {halos[0] / max(halos[1], 1):.2f}", halos[0] <= 1.3 * halos[1]),
        ("memory", f"{peaks[1] / 2**20:.1f} MB at the peak of a rank, {peaks[0] / 2**20:.1f} MB of "
         f"one process: {share:.2f} of 1/{num_ranks}", share <= SHARE),
        ("picture", path, True),
    ]
    for name, said, is_right in rows:
        verdict = "[green]yes[/]" if is_right else "[bold red]NO[/]"
        console.print(f"{name:10}{said}  {verdict}", highlight=False, soft_wrap=True)
    return all(is_right for *_, is_right in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of training (40)")
    parser.add_argument("--rows", type=int, default=92, help="of the field, even (92)")
    parser.add_argument("--columns", type=int, default=136, help="of the field, even (136)")
    parser.add_argument("--picture", default="out/field.png",
                        help="where to write it (out/field.png)")
    asked = parser.parse_args()
    shape = asked.rows, asked.columns
    mesh = weft.init_mesh({"y": 2, "x": 2})
    console = Console(quiet=mesh.get_rank() != 0)
    console.print(f"A field of {shape[0]} x {shape[1]}, {asked.steps} steps, mesh 2 x 2\n",
                  highlight=False)
    training = sharded(shape, asked.steps, mesh)
    halos = halo_bytes(training)
    losses, peak = followed(training, "four ranks", console)
    everywhere: Any = mesh.comm((0, 1)).exchange((peak, halos))
    picture(training, asked.picture)
    if console.quiet:
        return
    expected, whole = followed(alone(shape, asked.steps), "one process", console)
    difference = max(abs(one - other) / abs(other) for one, other in zip(losses, expected))
    console.print()
    busiest = max([one for _, one in everywhere])
    if not report(console, difference, busiest, (whole, max([one for one, _ in everywhere])),
                  mesh.size(), asked.picture):
        sys.exit(1)


if __name__ == "__main__":
    main()
