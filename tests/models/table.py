"""Prints peaks of memory and bytes of halos: `python -m tests.models.table`."""

from __future__ import annotations

from collections.abc import Sequence

from tests.models import peaks, test_autoencoders, test_sequences, test_stencils
from tests.models.fields import FIELDS

SIZES = ("even", "uneven")


def row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def of_fields() -> None:
    """Peaks, and in parentheses the bytes of halos in those that convolutions read."""
    ways = [(mesh, size) for mesh in peaks.MESHES for size in SIZES]
    row(["model", *[", ".join(way) for way in ways]])
    row(["---"] * (1 + len(ways)))
    for name in FIELDS:
        cells = [name]
        for way in ways:
            found = peaks.measured(name, *way)
            halos = "" if found.halos is None else f" ({found.halos:.2f})"
            cells.append(f"{found.share:.2f}{halos}")
        row(cells)


def of_others() -> None:
    """Peaks."""
    row(["model", "sharded", "peak"])
    row(["---"] * 3)
    for name, mesh in test_autoencoders.ROWS:
        row([f"diffusers: {name}", mesh, f"{test_autoencoders.measured(name, mesh)[0]:.2f}"])
    for heads in (1, 2, 4, 8):
        row([f"Llama, heads: {heads}", "tokens", f"{test_sequences.share(heads):.2f}"])
    for name in test_stencils.SOLVERS:
        for way in test_stencils.LAYOUTS:
            row([f"shallow water by {name}", way, f"{test_stencils.measured(name, way)[0]:.2f}"])


if __name__ == "__main__":
    of_fields()
    print()
    of_others()
