"""Programs whose ranks go different ways, and what debug mode says of them.

Each runs on four ranks, `{"dp": 2, "tp": 2}`, in whichever world. `said_on_rank` gives the error's
text; `{name}` in an expected text is the line of this file that ends with `# name`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
from weft import P, Replicate

MESH = {"dp": 2, "tp": 2}

RULE = (
    "  Rule: all ranks of a group issue the same collectives in the same order, at the same line, "
    "with the same kind, dtype and sizes."
)
FIX = (
    "  Fix: call on every rank of the group what any of them calls: no `if rank == 0:` around it"
)


def world(mesh: Any) -> Any:
    return mesh.comm((0, 1))


def other_collective(mesh: Any) -> None:
    if mesh.rank == 2:
        world(mesh).all_gather(torch.ones(2), (2, 2, 2, 2))  # gather
    else:
        world(mesh).all_reduce(torch.ones(2), "sum")  # reduce


def other_kind(mesh: Any) -> None:
    world(mesh).all_reduce(torch.ones(2), "max" if mesh.rank in (1, 3) else "sum")  # kind


def other_dtype(mesh: Any) -> None:
    dtype = torch.int32 if mesh.rank == 0 else torch.float32
    world(mesh).broadcast(torch.ones(2, 3, dtype=dtype), 1)  # dtype


def other_sizes(mesh: Any) -> None:
    x = torch.ones(3 if mesh.rank == 3 else 5)
    world(mesh).all_gather(x, (x.numel(),) * 4)  # sizes


def nothing_on_one(mesh: Any) -> None:
    world(mesh).all_reduce(torch.ones(0 if mesh.rank == 1 else 4), "sum")  # nothing


def other_splits(mesh: Any) -> None:
    """Rank 1 sends rank 2 an element more than rank 2 expects."""
    send = [1, 1, 2, 1] if mesh.rank == 1 else [1, 1, 1, 1]
    world(mesh).all_to_all(torch.ones(sum(send)), send, (1, 1, 1, 1))  # splits


def other_source(mesh: Any) -> None:
    world(mesh).broadcast(torch.ones(2), mesh.rank % 2)  # source


def other_axes(mesh: Any) -> None:
    flat = weft.init_mesh({"all": 4})
    comm = flat.comm((0,)) if mesh.rank == 0 else world(mesh)
    comm.exchange(None)  # axes


def other_call(mesh: Any) -> None:
    """The same bytes move, for different calls."""
    x = weft.ones(4, mesh=mesh, spec=P("dp"))
    if mesh.rank == 3:
        x.redistribute(placements=[Replicate(), Replicate()])  # redistribute
    elif mesh.rank == 1:
        x.tolist()  # list


def other_transition(mesh: Any) -> None:
    """Another dim is gathered, of as many elements."""
    if mesh.rank in (0, 2):
        x = weft.ones(4, 4, mesh=mesh, spec=P("dp") if mesh.rank else P(None, "dp"))
        x.full_tensor()  # transition


def unnoticed(mesh: Any, *shape: int) -> torch.Tensor:
    """No leaf, which debug mode would compare at its first use."""
    with weft.debug(False):
        return weft.ones(*shape, mesh=mesh, spec=P()).requires_grad_().clone()


def other_in_backward(mesh: Any) -> None:
    """Rank 0 has a smaller w, which nothing but the reduction of its gradient shows."""
    x = weft.ones(8, 6, mesh=mesh, spec=P(("dp", "tp")))
    w = unnoticed(mesh, 6, 4 if mesh.rank else 2)
    y = (x @ w).sin()  # forward
    y.backward(torch.ones_like(y))  # backward


def other_line(mesh: Any) -> float | None:
    """Calls that look alike in everything that moves: each would get numbers of both."""
    x = weft.ones(6, mesh=mesh, spec=P("dp"))
    if mesh.rank == 3:
        return x.sum().item()  # sum
    if mesh.rank == 1:
        return (x * 2).mean().item()  # mean
    return None


def other_branch_of_a_line(mesh: Any) -> float:
    x = weft.ones(8, mesh=mesh, spec=P(("dp", "tp")))
    return x.sum().item() if mesh.rank == 2 else x.mean().item()  # branches


def other_line_in_forward(mesh: Any) -> None:
    """Where backward communicates, all are at one line again."""
    x = weft.ones(8, 6, mesh=mesh, spec=P(("dp", "tp")))
    w = unnoticed(mesh, 6, 4)
    if mesh.rank == 1:
        y = x @ w.sin()  # sin
    else:
        y = x @ w.sin() * 2  # twice
    y.backward(torch.ones_like(y))  # together


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A program, and what the ranks of one group say of it, while the others go on.

    `said`: the two facts, then the offenders.
    """

    program: Callable[[Any], Any]
    said: tuple[str, ...]
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    axes: str = "dp, tp"

    def __str__(self) -> str:
        return self.program.__name__

    @property
    def texts(self) -> list[str | None]:
        """What each rank says."""
        facts, *sides = (one.format(**_lines()) for one in self.said)
        text = "\n".join((
            f"collectives over axes ({self.axes}), ranks {', '.join(map(str, self.ranks))}: "
            f"{facts}.", RULE, "  Offenders: " + f"\n{'':13}".join(sides), FIX,
        ))
        return [text if rank in self.ranks else None for rank in range(4)]


def _lines() -> dict[str, str]:
    """`file:line` of every line of this file that ends with a name."""
    source = Path(__file__).read_text().splitlines()
    return {
        text.rsplit("  # ", 1)[1]: f"{__file__}:{number}"
        for number, text in enumerate(source, 1) if "  # " in text
    }


DISAGREEMENTS = [
    Disagreement(other_collective, (
        "the collective is all_reduce on ranks 0, 1, 3 and all_gather on rank 2",
        "ranks 0, 1, 3 ask for all_reduce(sum, float32, (2,)), at {reduce}",
        "rank 2 asks for all_gather(float32, (2, 2, 2, 2)), at {gather}",
    )),
    Disagreement(other_kind, (
        "the kind is sum on ranks 0, 2 and max on ranks 1, 3",
        "ranks 0, 2 ask for all_reduce(sum, float32, (2,)), at {kind}",
        "ranks 1, 3 ask for all_reduce(max, float32, (2,)), at {kind}",
    )),
    Disagreement(other_dtype, (
        "the dtype is int32 on rank 0 and float32 on ranks 1, 2, 3",
        "rank 0 asks for broadcast(int32, (2, 3), 1), at {dtype}",
        "ranks 1, 2, 3 ask for broadcast(float32, (2, 3), 1), at {dtype}",
    )),
    Disagreement(other_sizes, (
        "the list of sizes is (5, 5, 5, 5) on ranks 0, 1, 2 and (3, 3, 3, 3) on rank 3",
        "ranks 0, 1, 2 ask for all_gather(float32, (5, 5, 5, 5)), at {sizes}",
        "rank 3 asks for all_gather(float32, (3, 3, 3, 3)), at {sizes}",
    )),
    Disagreement(nothing_on_one, (
        "the shape is (4,) on ranks 0, 2, 3 and (0,) on rank 1",
        "ranks 0, 2, 3 ask for all_reduce(sum, float32, (4,)), at {nothing}",
        "rank 1 asks for all_reduce(sum, float32, (0,)), at {nothing}",
    )),
    Disagreement(other_splits, (
        "1 of 16 pairs of ranks disagree about what they exchange",
        "rank 1 sends 2 to rank 2, which expects 1",
        "ranks 0, 1, 2, 3 ask for all_to_all(float32), at {splits}",
    )),
    Disagreement(other_source, (
        "the source is 0 on ranks 0, 2 and 1 on ranks 1, 3",
        "ranks 0, 2 ask for broadcast(float32, (2,), 0), at {source}",
        "ranks 1, 3 ask for broadcast(float32, (2,), 1), at {source}",
    )),
    Disagreement(other_axes, (
        "the list of mesh axes is (all) on rank 0 and (dp, tp) on ranks 1, 2, 3",
        "ranks 0, 1, 2, 3 ask for exchange(), at {axes}",
    ), axes="all"),
    Disagreement(other_call, (
        "the call is full_tensor on rank 1 and redistribute on rank 3",
        "rank 1 asks for all_gather(float32, (2, 2)), for full_tensor, "
        "S(0)->I on dp: [4@dp] -> [4], at {list}",
        "rank 3 asks for all_gather(float32, (2, 2)), for redistribute, "
        "S(0)->I on dp: [4@dp] -> [4], at {redistribute}",
    ), (1, 3), "dp"),
    Disagreement(other_transition, (
        "the transition is S(1)->I on dp: [4, 4@dp] -> [4, 4] on rank 0 and "
        "S(0)->I on dp: [4@dp, 4] -> [4, 4] on rank 2",
        "rank 0 asks for all_gather(float32, (8, 8)), for full_tensor, "
        "S(1)->I on dp: [4, 4@dp] -> [4, 4], at {transition}",
        "rank 2 asks for all_gather(float32, (8, 8)), for full_tensor, "
        "S(0)->I on dp: [4@dp, 4] -> [4, 4], at {transition}",
    ), (0, 2), "dp"),
    Disagreement(other_in_backward, (
        "the shape is (6, 2) on rank 0 and (6, 4) on ranks 1, 2, 3",
        "rank 0 asks for all_reduce(sum, float32, (6, 2)), for the backward of "
        "aten.matmul.default at {forward}, P(sum)->I on dp, P(sum)->I on tp: "
        "[6, 2] partial(sum@dp, sum@tp) -> [6, 2], at {backward}",
        "ranks 1, 2, 3 ask for all_reduce(sum, float32, (6, 4)), for the backward of "
        "aten.matmul.default at {forward}, P(sum)->I on dp, P(sum)->I on tp: "
        "[6, 4] partial(sum@dp, sum@tp) -> [6, 4], at {backward}",
    )),
    Disagreement(other_line, (
        "the line is {mean} on rank 1 and {sum} on rank 3",
        "rank 1 asks for all_reduce(sum, float32, ()), for full_tensor, "
        "P(sum)->I on dp: [] partial(sum@dp) -> [], at {mean}",
        "rank 3 asks for all_reduce(sum, float32, ()), for full_tensor, "
        "P(sum)->I on dp: [] partial(sum@dp) -> [], at {sum}",
    ), (1, 3), "dp"),
    Disagreement(other_branch_of_a_line, (
        "the line is {branches} (columns 50 to 64) on ranks 0, 1, 3 and "
        "{branches} (columns 12 to 25) on rank 2",
        "ranks 0, 1, 3 ask for all_reduce(sum, float32, ()), for full_tensor, P(sum)->I on dp, "
        "P(sum)->I on tp: [] partial(sum@dp, sum@tp) -> [], at {branches} (columns 50 to 64)",
        "rank 2 asks for all_reduce(sum, float32, ()), for full_tensor, P(sum)->I on dp, "
        "P(sum)->I on tp: [] partial(sum@dp, sum@tp) -> [], at {branches} (columns 12 to 25)",
    )),
    Disagreement(other_line_in_forward, (
        "the line of the call is {twice} on ranks 0, 2, 3 and {sin} on rank 1",
        "ranks 0, 2, 3 ask for all_reduce(sum, float32, (6, 4)), for the backward of "
        "aten.matmul.default at {twice}, P(sum)->I on dp, P(sum)->I on tp: "
        "[6, 4] partial(sum@dp, sum@tp) -> [6, 4], at {together}",
        "rank 1 asks for all_reduce(sum, float32, (6, 4)), for the backward of "
        "aten.matmul.default at {sin}, P(sum)->I on dp, P(sum)->I on tp: "
        "[6, 4] partial(sum@dp, sum@tp) -> [6, 4], at {together}",
    )),
]


def said_on_rank(mesh: Any, program: Callable[[Any], None], turns: int = 3) -> str | None:
    """What debug mode says of a program, after some collectives that agree; None: nothing."""
    with weft.debug():
        for turn in range(turns):
            assert world(mesh).exchange(turn) == [turn] * 4
            for axis in (0, 1):  # whose groups are made by now
                mesh.comm((axis,))
        try:
            program(mesh)
        except weft.CommunicationError as error:
            return str(error)
    return None
