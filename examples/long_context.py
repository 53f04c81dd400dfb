"""A long context: a Llama learns from a sequence that no rank's memory holds.

    pip install rich transformers
    weft run -n 4 examples/long_context.py

The model is Hugging Face's Llama, small and with random weights; the text is the source code of
Python's standard library. Every rank may use so many bytes of tensors and no more: a meter counts
them and stops the program at the first that is too many. One process cannot train on the sequence
within this budget. Sharded along the sequence, over four ranks, the same program can: each rank
reads its own stretch of the text, and attention, positions and shifted labels go across the
borders. A shorter sequence, which one process can train on, shows that the losses are the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import weft
from demo.text import Corpus, standard_library
from weft.testing import peak_memory

try:
    from rich.console import Console
    from rich.table import Table
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as missing:
    name = (missing.name or "").partition(".")[0]
    sys.exit(f"examples/long_context.py needs {name}: pip install rich transformers")

TOLERANCE = 1e-4
"""How far two float32 losses of a step may be apart, as a part of the loss."""

MB = 1 << 20


class OverBudget(MemoryError):
    """More bytes of tensors are alive than the budget has."""

    def __init__(self, nbytes: int, budget: int) -> None:
        super().__init__(f"{nbytes:,} bytes of tensors are alive, and the budget has {budget:,}")
        self.nbytes = nbytes


class Budget(peak_memory):
    """Measures tensors that are alive, and stops the program where they are too many.

    Args:
        nbytes: the most bytes that may be alive.
        held: what is alive from the start.
    """

    def __init__(self, nbytes: int, *held: Any) -> None:
        super().__init__(*held)
        self.nbytes = nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > self.nbytes:
            raise OverBudget(self.peak, self.nbytes)
        return out


def llama(width: int = 64, num_heads: int = 2) -> nn.Module:
    """Two layers; tokens are bytes, and one more that stands before each file."""
    config: Any = LlamaConfig  # it takes more than it declares
    torch.manual_seed(0)
    return LlamaForCausalLM(config(
        vocab_size=257, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=num_heads, num_key_value_heads=1, max_position_embeddings=1 << 20,
        attn_implementation="sdpa", use_cache=False, bos_token_id=None, eos_token_id=None,
    ))


@dataclass(frozen=True, slots=True)
class Step:
    """The loss of a step, the most bytes of tensors that this rank had, and the bytes that it
    received, by op and pass."""

    loss: float
    peak: int
    received: Counter[tuple[str, str]]


@dataclass(slots=True)
class Training:
    """A Llama that learns from one sequence of `length` tokens per step.

    `read` gives the tokens of a step, and `place` is all that a program over ranks adds to the
    model.
    """

    read: Callable[[int], Tensor]
    num_steps: int
    place: Callable[[nn.Module], object] = lambda model: model
    model: Any = None
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.model = llama()
        self.place(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def steps(self, budget: int = sys.maxsize) -> Iterator[Step]:
        """Train within so many bytes of tensors."""
        for number in range(self.num_steps):
            tokens = self.read(number)
            held = self.model, self.optimizer, tokens
            with weft.explain() as log, Budget(budget, *held) as meter:
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            received: Counter[tuple[str, str]] = Counter()
            for event in log.events:
                received[event.op, event.direction] += event.nbytes
            yield Step(loss.item(), meter.peak, received)


def alone(corpus: Corpus, length: int, num_steps: int) -> Training:
    """The training on one process."""
    return Training(lambda number: _stretch(corpus, number, length, slice(0, length)), num_steps)


def sharded(corpus: Corpus, length: int, num_steps: int, mesh: Any) -> Training:
    """The same over a mesh: two lines say where the tokens lie, and whose the weights are."""
    def read(number: int) -> Tensor:
        return weft.from_callback(
            (1, length), mesh, weft.P(None, *mesh.axis_names),
            lambda index: _stretch(corpus, number, length, index[1]))

    return Training(read, num_steps, lambda model: weft.distribute_module(model, mesh))


def _stretch(corpus: Corpus, number: int, length: int, at: slice) -> Tensor:
    """Tokens `at` of the sequence of a step, which is the next of the text."""
    first = number * length % (len(corpus.tokens) - length)
    return corpus.tokens[first + at.start : first + at.stop].long()[None]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of losses, as a part of the loss."""
    return max([abs(mine - due) / abs(due) for mine, due in zip(one, other)])


def reached(training: Training, budget: int) -> int | None:
    """The bytes at which the budget stops the training; None where it does not."""
    try:
        for _ in training.steps(budget):
            pass
    except OverBudget as error:
        return error.nbytes
    return None


def traffic(everywhere: Sequence[Sequence[Step]]) -> Table:
    """What the ranks receive in the last step."""
    table = Table(title="Bytes received in one step", title_justify="left", box=None)
    table.add_column("op")
    table.add_column("pass")
    for name in ("busiest rank", "all ranks"):
        table.add_column(name, justify="right")
    last = [steps[-1].received for steps in everywhere]
    for op, direction in sorted(set().union(*last)):
        found = [one[op, direction] for one in last]
        table.add_row(op, direction, f"{max(found):,}", f"{sum(found):,}")
    found = [one.total() for one in last]
    table.add_row("all", "", f"{max(found):,}", f"{sum(found):,}", style="bold")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence (4096)")
    parser.add_argument("--budget", type=float, default=24, metavar="MB",
                        help="tensor memory of a rank (24)")
    parser.add_argument("--steps", type=int, default=4, help="steps of training (4)")
    parser.add_argument("--check", type=int, default=509, metavar="LENGTH",
                        help="tokens of the sequence that is compared with one process (509)")
    asked = parser.parse_args()
    mesh = weft.init_mesh({"sequence": int(os.environ.get("WORLD_SIZE", "1"))})
    console = Console(quiet=mesh.get_rank() != 0, highlight=False, soft_wrap=True)
    corpus, budget = standard_library(), int(asked.budget * MB)
    console.print(f"{asked.length:,} tokens, {asked.budget:g} MB of tensors a rank, "
                  f"{mesh.size()} ranks, {asked.steps} steps\n")

    short = [step.loss for step in sharded(corpus, asked.check, asked.steps, mesh).steps()]
    steps = []
    for number, step in enumerate(sharded(corpus, asked.length, asked.steps, mesh).steps(budget)):
        console.print(f"step {number}  loss {step.loss:.4f}")
        steps.append(step)
    everywhere: Any = mesh.comm((0,)).exchange(steps)
    if console.quiet:
        return
    console.print()
    console.print(traffic(everywhere))
    console.print()
    due = [step.loss for step in alone(corpus, asked.check, asked.steps).steps()]
    stopped = reached(alone(corpus, asked.length, 1), budget)
    peaks = [max([step.peak for step in found]) for found in everywhere]
    rows = [
        ("losses", f"of {asked.check} tokens are those of one process to {apart(short, due):.1e}; "
         f"{TOLERANCE:.0e} is allowed", apart(short, due) <= TOLERANCE),
        ("one process", "stays within the budget: choose more tokens" if stopped is None else
         f"is stopped at {stopped / MB:.1f} MB", stopped is not None),
        ("ranks", f"have at most {', '.join([f'{peak / MB:.1f}' for peak in peaks])} MB",
         max(peaks) <= budget),
    ]
    for name, said, is_right in rows:
        console.print(f"{name:13}{said}  {'[green]yes[/]' if is_right else '[bold red]NO[/]'}")
    if not all(is_right for *_, is_right in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
