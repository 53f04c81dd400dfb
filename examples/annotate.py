"""Annotations: a vision transformer learns handwritten digits over four ranks.

    pip install rich scikit-learn
    weft run -n 4 examples/annotate.py

Model, optimizer and training loop are ordinary PyTorch and know of no mesh. A mesh and three calls
of `mark_sharding` make the same program run over four ranks: two on weights, by which the hidden
units of each block are sharded over `model`, and one on the images, over `data`.
Rank 0 first trains the same model by itself; the losses of all steps, and the accuracy on images
that no step has seen, must agree, or the program fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft import ShardTensor, as_bound_mesh
from weft.spmd import Mesh, mark_sharding

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as missing:
    name = (missing.name or "").partition(".")[0]
    sys.exit(f"examples/annotate.py needs {name}: pip install rich scikit-learn")

TOLERANCE = 1e-4
"""How far two float32 losses of a step may be apart, as a part of the loss."""

GOAL = 0.95
"""The share of held-out images that has to be recognised."""


# An ordinary model.


class Block(nn.Module):
    """Attention over the patches, then a layer of hidden units, each added to what was there."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Images of 8 x 8 pixels, in patches of 2 x 2, to the scores of ten digits."""

    def __init__(self, width: int = 48, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.place = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks: Any = nn.ModuleList(
            Block(width, num_heads, 4 * width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


# Ordinary training.


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of shape (n, 1, 8, 8) in [0, 1] and their digits; a fifth is held out."""

    images: Tensor
    digits: Tensor
    held_images: Tensor
    held_digits: Tensor

    @classmethod
    def load(cls) -> Digits:
        found: Any = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
        images = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
        digits = torch.tensor(found.target)[order]
        held = len(order) // 5
        return cls(images[held:], digits[held:], images[:held], digits[:held])


@dataclass(slots=True)
class Training:
    """A model that is trained step by step; `place` is all that a program over ranks adds."""

    data: Digits
    num_epochs: int
    batch: int = 96
    place: Callable[[Tensor], Tensor] = lambda images: images
    model: VisionTransformer = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = VisionTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    @property
    def num_steps(self) -> int:
        return self.num_epochs * -(-len(self.data.digits) // self.batch)

    def steps(self) -> Iterator[float]:
        """Train; the loss of every step. The last batch of an epoch is smaller."""
        order = torch.Generator().manual_seed(2)
        slow = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=2e-3, total_steps=self.num_steps)
        for _ in range(self.num_epochs):
            for rows in torch.randperm(len(self.data.digits), generator=order).split(self.batch):
                scores = self.model(self.place(self.data.images[rows]))
                loss = F.cross_entropy(scores, self.data.digits[rows])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                slow.step()
                yield loss.item()

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of the held-out images that is recognised."""
        scores = self.model(self.place(self.data.held_images))
        right = scores.argmax(1) == self.data.held_digits
        return right.sum().item() / len(right)


def annotated(data: Digits, num_epochs: int, mesh: Mesh) -> Training:
    """The same training over the ranks of a mesh: three marks."""
    training = Training(
        data, num_epochs, place=lambda images: mark_sharding(images, mesh, ("data",)))
    for block in training.model.blocks:
        mark_sharding(block.up.weight, mesh, ("model", None))
        mark_sharding(block.down.weight, mesh, (None, "model"))
    return training


# Both, and what they say of each other.


def followed(training: Training, name: str, console: Console) -> list[float]:
    """The losses of all steps, with a bar that follows them."""
    bar = Progress(
        TextColumn("[bold]{task.description:12}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("loss [cyan]{task.fields[loss]:.4f}"), TimeElapsedColumn(), console=console,
    )
    losses = []
    with bar:
        task = bar.add_task(name, total=training.num_steps, loss=float("nan"))
        for loss in training.steps():
            losses.append(loss)
            bar.update(task, advance=1, loss=loss)
    return losses


def apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two losses of a step, as a part of the loss."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))


def report(
    console: Console, cut: Training, accuracies: tuple[float, float], difference: float
) -> bool:
    """Print what came out; whether it is what it has to be."""
    up: Any = cut.model.blocks[0].up.weight
    rows = [
        ("marked", f"blocks.0.up.weight is {up.sharding}, its gradient {up.grad.sharding}",
         isinstance(up, ShardTensor)),
        ("losses", f"of all steps agree to {difference:.1e}; {TOLERANCE:.0e} is allowed",
         difference <= TOLERANCE),
        ("accuracy", f"{accuracies[0]:.2%} on one process, {accuracies[1]:.2%} over four ranks",
         accuracies[0] == accuracies[1]),
        ("goal", f"more than {GOAL:.0%} of the images that no step has seen",
         min(accuracies) > GOAL),
    ]
    for name, said, is_right in rows:
        verdict = "[green]yes[/]" if is_right else "[bold red]NO[/]"
        console.print(rf"{name:10}{escape(said)}  {verdict}", highlight=False, soft_wrap=True)
    return all(is_right for *_, is_right in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="rounds over the images (20)")
    num_epochs = parser.parse_args().epochs
    mesh = Mesh(range(4), (2, 2), ("data", "model"))
    data = Digits.load()
    cut = annotated(data, num_epochs, mesh)
    console = Console(quiet=as_bound_mesh(mesh).rank != 0)
    console.print(
        f"A vision transformer, {len(data.digits)} handwritten digits, {len(data.held_digits)} "
        f"held out\nmesh {dict(mesh.shape())}\n", highlight=False)
    if console.quiet:
        list(cut.steps())
        cut.accuracy()
        return
    whole = Training(data, num_epochs)
    expected = followed(whole, "one process", console)
    losses = followed(cut, "four ranks", console)
    accuracies = whole.accuracy(), cut.accuracy()
    console.print()
    if not report(console, cut, accuracies, apart(losses, expected)):
        sys.exit(1)


if __name__ == "__main__":
    main()
