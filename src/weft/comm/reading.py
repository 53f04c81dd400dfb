"""Numbers that a program reads, and the lines at which it does.

`if rank == 0: print(x.sum().item())` is a collective that the other ranks do not issue. Over
processes it would meet their next one of the same size, and all would get wrong numbers. So what
few elements are gathered for a read travel with the line that asks for them, which the other ranks
compare with theirs. (Simulated ranks meet at the same line alone, and debug mode compares before.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.comm.collective_call import who
from weft.comm.source import point
from weft.errors import CommunicationError

__all__ = ["LINE_NBYTES", "check_lines", "is_read", "line_here", "reads"]

LINE_NBYTES = 64
"""Of the line, its end."""


class _Inside(threading.local):
    on = False


_INSIDE = _Inside()


@contextmanager
def reads() -> Iterator[None]:
    """Inside, this thread gathers what the program reads."""
    before, _INSIDE.on = _INSIDE.on, True
    try:
        yield
    finally:
        _INSIDE.on = before


def is_read() -> bool:
    return _INSIDE.on


def line_here(device: torch.device) -> Tensor:
    """The line of the program that this rank is at, as bytes."""
    line = bytearray(point().key.encode()[-LINE_NBYTES:].ljust(LINE_NBYTES))
    return torch.frombuffer(line, dtype=torch.uint8).to(device)


def check_lines(group: str, ranks: Sequence[int], lines: Sequence[Tensor]) -> None:
    """Raise CommunicationError if the lines differ, the same on all ranks."""
    if all(torch.equal(line, lines[0]) for line in lines[1:]):
        return
    texts = [line.cpu().numpy().tobytes().decode(errors="replace").strip() for line in lines]
    at = [f"at {text.partition(' ')[0] or 'no line of the program'}" for text in texts]
    raise CommunicationError(
        f"item, bool, full_tensor over {group}", f"its {len(ranks)} ranks read numbers at "
        f"{len(set(texts))} lines of the program",
        "to read a number that is sharded or partial is a collective: all ranks issue the same "
        "ones in the same order, at the same line", who(list(zip(ranks, at))),
        "value = x.sum().item() on all ranks; if rank == 0: print(value)")
