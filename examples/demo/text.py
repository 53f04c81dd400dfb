"""The text that every machine with Python has: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["SEPARATOR", "Corpus", "standard_library"]

SEPARATOR = 256
"""The token that stands before every file; the other tokens are bytes."""

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class Corpus:
    """Tokens in one row, and batches of windows drawn from it.

    Args:
        files: the files, in order.
    """

    def __init__(self, files: list[Path]) -> None:
        self.num_files = len(files)
        self.tokens = torch.cat(list(_tokens(files)))

    def batch(self, step: int, num_windows: int, context: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step, (num_windows, context) each: the same everywhere."""
        generator = torch.Generator().manual_seed(step)
        last = self.tokens.numel() - context - 1
        starts = torch.randint(last, (num_windows, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def standard_library() -> Corpus:
    """The standard library's own sources without its tests, in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT & {*path.relative_to(root).parts} and path.stat().st_size
    ]
    return Corpus(files)


def _tokens(files: list[Path]) -> Iterator[Tensor]:
    for file in files:
        yield torch.tensor([SEPARATOR], dtype=torch.int16)
        yield torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).to(torch.int16)
