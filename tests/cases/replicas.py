"""Programs whose ranks hold other values of what is replicated, and what debug mode says of them.

Each runs on four ranks, in whichever world. `SAID` has, per program: the call, the line, what
differs, and the ranks that hear of it. Digests are of known values, so they are known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from weft import P

MESH = {"dp": 2, "tp": 2}


class Net(torch.nn.Module):
    """Two layers, and a buffer that nothing but `scaled` uses."""

    scale: torch.Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.register_buffer("scale", torch.full((2,), value))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # forward

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale  # scale


def batch(mesh: Any) -> weft.ShardTensor:
    return weft.ones(4, 3, mesh=mesh, spec=P("dp"))


def by_rank(mesh: Any, *shape: int) -> torch.Tensor:
    """Ones on ranks 0 and 2, twos on ranks 1 and 3."""
    return torch.full(shape, 1.0 + mesh.rank % 2)


def not_distributed(mesh: Any) -> None:
    Net(1.0 + mesh.rank % 2)(batch(mesh)).sum().backward()


def a_buffer(mesh: Any) -> None:
    net = Net()
    net.scale += mesh.rank // 3
    net.scaled(net(batch(mesh)))


def an_adapter(mesh: Any) -> None:
    """A new part of a module that was distributed before."""
    net = weft.distribute_module(Net(), mesh)
    net.layers[1] = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.constant_(net.layers[1].get_parameter("weight"), float(mesh.rank))
    net(batch(mesh))


def an_operand(mesh: Any) -> None:
    x = batch(mesh)
    torch.cat([x, by_rank(mesh, 1, 3)])  # cat


def a_view(mesh: Any) -> None:
    w = torch.nn.Parameter(by_rank(mesh, 2, 3))
    batch(mesh) @ w.t()  # view


def a_leaf_on_some_axes(mesh: Any) -> None:
    """Columns over tp, so that ranks 0 and 2, and 1 and 3, hold the same ones."""
    local = torch.full((3, 2), 1.0 + (mesh.rank == 2))
    with weft.debug(False):
        w = weft.ShardTensor.from_local(local, mesh, P(None, "tp")).requires_grad_()
    batch(mesh) @ w  # leaf


ALL = (0, 1, 2, 3)
SAID: list[tuple[Callable[[Any], None], str, str, tuple[str, ...], tuple[int, ...]]] = [
    (not_distributed, "linear", "forward", (
        "layers.0.weight of Net, float32 (4, 3): d2b147ac on ranks 0, 2, 6b146927 on ranks 1, 3",
        "layers.0.bias of Net, float32 (4,): 8e55304f on ranks 0, 2, 09fcf4c6 on ranks 1, 3",
    ), ALL),
    (a_buffer, "mul", "scale", (
        "scale of Net, float32 (2,): b2b18785 on ranks 0, 1, 2, 3cdfe7b6 on rank 3",
    ), ALL),
    (an_adapter, "linear", "forward", (
        "layers.1.weight of Net, float32 (2, 4): 2fcbcca4 on rank 0, 0fbbaa3e on rank 1, 0d490dda "
        "on rank 2, 2c2b8050 on rank 3",
    ), ALL),
    (an_operand, "cat", "cat", (
        "operand 2, float32 (1, 3): 1e7cacf3 on ranks 0, 2, 6fff93de on ranks 1, 3",
    ), ALL),
    (a_view, "matmul", "view", (
        "operand 2, float32 (2, 3): 88f8780c on ranks 0, 2, 89099ef2 on ranks 1, 3",
    ), ALL),
    (a_leaf_on_some_axes, "matmul", "leaf", (
        "operand 2, float32 (3, 4): 88f8780c on rank 0, 89099ef2 on rank 2",
    ), (0, 2)),
]


def texts(
    call: str, line: str, wrong: tuple[str, ...], ranks: tuple[int, ...]
) -> list[str | None]:
    """What each rank says, by an entry of `SAID`."""
    [number] = [
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith(f"  # {line}")
    ]
    which = "a replicated tensor differs" if len(wrong) == 1 else (
        f"{len(wrong)} of {len(wrong)} replicated tensors differ")
    axes = "dp, tp" if ranks == ALL else "dp"
    text = (
        f"{call} over axes ({axes}), ranks {str(ranks)[1:-1]}: {which} from rank to rank, at "
        f"{__file__}:{number}.\n"
        "  Rule: a plain tensor is taken as replicated, and what is replicated has one value on "
        "all of its ranks.\n"
        "  Offenders: " + f"\n{'':13}".join(wrong) + "\n"
        "  Fix: weft.distribute_module(module, mesh) gives all ranks the first one's parameters, "
        "weft.distribute_tensor(t, mesh) its tensor;\n"
        "       or make them alike: torch.manual_seed(0) on every rank before; blocks of a rank's "
        "own: weft.ShardTensor.from_local(t, mesh, [weft.Shard(0)])"
    )
    return [text if rank in ranks else None for rank in range(4)]


def said(mesh: Any, program: Callable[[Any], None]) -> str | None:
    """What debug mode says of a program."""
    with weft.debug():
        try:
            program(mesh)
        except weft.CommunicationError as error:
            return str(error)
    return None
