"""The tensor room on real processes: training, values on one rank, faults of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases.autograd import PROGRAMS, WAYS, differences
from tests.cases.backward import ragged_checkpoint, terms
from tests.cases.own import own_ops
from tests.effort import EFFORT
from tests.gloo import GlooWorld
from weft import Layout, LayoutError, Mesh, P, ShardTensor, WeftError
from weft.errors import CommunicationError

MESH = {"dp": 2, "tp": 2}
TIMEOUT = 3


class Mlp(nn.Module):
    """Two linears and a norm, with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 3)
        self.double()
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) * (k + 1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(9, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (9,), generator=generator)


def train(model: nn.Module, lay: Any) -> tuple[list[float], list[Tensor]]:
    """The losses of five steps, and the weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    losses = []
    for step in range(5):
        x, target = (lay(one) for one in batch(step))
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def full(tensors: list[Any]) -> list[Tensor]:
    return [one.full_tensor() if isinstance(one, ShardTensor) else one for one in tensors]


def train_on_rank(mesh: Any, distributed: bool) -> tuple[list[float], list[Tensor]]:
    model = Mlp()
    if distributed:
        shardings = {"up.weight": P("tp"), "up.bias": P("tp"), "down.weight": P(None, "tp")}
        weft.distribute_module(model, mesh, shardings=shardings)
    losses, weights = train(model, lambda one: weft.distribute_tensor(one, mesh, P("dp")))
    return losses, full(weights)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_training(gloo: GlooWorld, distributed: bool) -> None:
    losses, weights = train(Mlp(), lambda one: one)
    for got, held in gloo.run(train_on_rank, MESH, distributed):
        assert got == pytest.approx(losses, rel=1e-9)
        for mine, due in zip(held, weights):
            torch.testing.assert_close(mine, due)


def item_on_rank_0(mesh: Any) -> float | None:
    x = weft.ones(9, 5, mesh=mesh, spec=P("dp", "tp"), requires_grad=True)
    loss = (x * x).mean() * 2
    loss.backward()
    value = None
    if mesh.rank == 0:
        with weft.explain() as log:
            value = loss.item() + float(f"{loss.detach():.2f}")
        assert not log.events
    return value


def test_one_rank_prints_the_loss(gloo: GlooWorld) -> None:
    assert gloo.run(item_on_rank_0, MESH) == [4.0, None, None, None]


def infer(mesh: Any) -> tuple[str, float]:
    rows = (3, 0, 4, 2)[mesh.rank]
    x = ShardTensor.from_local(torch.full((rows, 2), 1.0), mesh, P(("dp", "tp")), run_check=True)
    return str(x.sharding), x.sum().item()


def test_from_local_of_ragged_rows(gloo: GlooWorld) -> None:
    assert gloo.run(infer, MESH) == [("[9@(dp,tp){3,0,4,2}, 2]", 18.0)] * 4


def fault_of_one_rank(mesh: Any, kind: str) -> list[str]:
    odd = mesh.rank == 2
    with pytest.raises(LayoutError) as caught:
        if kind == "infer":
            ShardTensor.from_local(torch.ones(2, 3 + odd), mesh, P("dp"))
        else:
            ShardTensor.from_local(
                torch.full((2, 3), float(odd)), mesh, P("dp"), sizes="chunk", run_check=True
            )
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("kind", "offenders"),
    [("infer", "  Offenders: rank 2: 4 in dim 1, which no axis shards"),
     ("run_check", "  Offenders: rank 3: other values than its replica, rank 2")],
)
def test_faults_of_one_rank_are_raised_on_all(
    gloo: GlooWorld, kind: str, offenders: str
) -> None:
    said = gloo.run(fault_of_one_rank, MESH, kind)
    assert said == [said[0]] * 4 and said[0][2] == offenders


@pytest.mark.parametrize("reentrant", [True, False])
def test_ranks_that_save_less_recompute_at_the_same_time(gloo: GlooWorld, reentrant: bool) -> None:
    outcomes = gloo.run(ragged_checkpoint, MESH, reentrant)
    for found, moved in outcomes:
        torch.testing.assert_close(found, ragged_checkpoint(None, reentrant)[0])
        assert moved == outcomes[0][1] and len(moved) > 4


def test_terms_of_leaves(gloo: GlooWorld) -> None:
    for found in gloo.run(terms, MESH):
        for one, due in zip(found, terms(None)):
            torch.testing.assert_close(one, due)


def test_own_ops(gloo: GlooWorld) -> None:
    for found in gloo.run(own_ops, MESH):
        for one, due in zip(found, own_ops(None)):
            torch.testing.assert_close(one, due)


ALL = list(itertools.product(PROGRAMS, WAYS))
ONCE = list(zip(PROGRAMS, itertools.cycle(WAYS)))


@pytest.mark.parametrize("kind, way", ALL if EFFORT >= 1 else ONCE)
def test_autograd(gloo: GlooWorld, kind: str, way: str) -> None:
    """All programs of the simulated tests, of each kind in one way, and all ways."""
    assert gloo.run(differences, MESH, kind, way) == [[]] * 4


@pytest.fixture(scope="module")
def short() -> Iterator[GlooWorld]:
    world = GlooWorld(2, timeout=TIMEOUT, patience=8 * TIMEOUT)
    yield world
    world.close()


def one_rank_raises(mesh: Any, where: str) -> None:
    x = weft.ones(4, 4, mesh=mesh, spec=P(0), requires_grad=True)

    def fail(gradient: Any) -> None:
        raise ValueError("only here")

    y = x * 2
    if mesh.rank == 1:
        if where == "forward":
            raise ValueError("only here")
        y.register_hook(fail)
    w = torch.ones(4, 4, requires_grad=True)
    (y.exp() @ w).sum().backward()
    (x @ w).sum().item()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_one_rank_ends_the_others_in_time(short: GlooWorld, where: str) -> None:
    short.run(item_on_rank_0_of_two, (2,))
    waited, cause = short.outcomes(one_rank_raises, (2,), where)  # within the world's patience
    assert isinstance(cause, ValueError) and isinstance(waited, CommunicationError)
    said = str(waited).splitlines()
    assert said[1].startswith("  Rule: every rank of a group issues the same")
    if where == "backward":
        line = one_rank_raises.__code__.co_firstlineno + 12
        assert said[3].strip() == (
            f"rank 1 raised ValueError: only here, in backward, at {__file__}:{line}"
        )


def item_on_rank_0_of_two(mesh: Any) -> float:
    return weft.ones(3, mesh=mesh, spec=P(0)).sum().item()


CHUNKS = (P(("dp", "tp")), P("dp"), P(None, "tp"), P("dp", "tp"))


def chunks_on_rank(mesh: Any) -> list[tuple[float, str]]:
    out = []
    for spec in CHUNKS:
        whole = torch.arange(35.0).view(7, 5)
        box = Layout(mesh, (7, 5), spec).box(mesh.rank)
        local = whole[tuple(slice(*side) for side in box)].clone()
        x = ShardTensor.from_local(local, mesh, spec, sizes="chunk")
        out.append((x.mean().item(), str(x.sharding)))
    return out


def test_chunks_of_uneven_dims(gloo: GlooWorld) -> None:
    due = [(17.0, str(Layout(Mesh(MESH), (7, 5), spec))) for spec in CHUNKS]
    assert gloo.run(chunks_on_rank, MESH) == [due] * 4


KINDS: dict[str, tuple[Callable[[bool], Any], str]] = {
    "dtype": (lambda odd: torch.ones(2, 3, dtype=torch.float64 if odd else torch.float32),
              "rank 2: torch.float64, rank 0: torch.float32"),
    "order": (lambda odd: torch.ones(3, 2).t() if odd else torch.ones(2, 3),
              "rank 2: strides (1, 2) of shape (2, 3), rank 0: (3, 1) of (2, 3)"),
    "gradient": (lambda odd: torch.ones(2, 3, requires_grad=odd),
                 "rank 2: requires_grad=True, rank 0: False"),
    "list": (lambda odd: [1.0] if odd else torch.ones(2, 3),
             "rank 2: from_local(local_tensor): it is of type list"),
}


def other_kind_on_rank(mesh: Any, kind: str, sizes: str) -> tuple[str, float]:
    with pytest.raises(WeftError) as caught:
        ShardTensor.from_local(KINDS[kind][0](mesh.rank == 2), mesh, P("dp"), sizes=sizes)
    again = ShardTensor.from_local(torch.ones(2, 3), mesh, P("dp")).sum().item()  # in step
    return str(caught.value), again


@pytest.mark.parametrize("sizes", ["infer", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_local_tensors_of_two_kinds(gloo: GlooWorld, kind: str, sizes: str) -> None:
    said = gloo.run(other_kind_on_rank, MESH, kind, sizes)
    assert [total for _, total in said] == [12.0] * 4
    texts = [text for text, _ in said]
    assert all(f"Offenders: {KINDS[kind][1]}" in texts[rank] for rank in (0, 1, 3)), texts
    assert texts[2] == texts[0] or texts[2].startswith("from_local(local_tensor): it is of type")


GIVEN: dict[str, Callable[[bool], Any]] = {
    "rows": lambda odd: torch.ones(6 if odd else 4, 3),
    "fewer rows": lambda odd: torch.ones(2 if odd else 4, 3),
    "dtype": lambda odd: torch.ones(4, 3, dtype=torch.float64 if odd else torch.float32),
    "list": lambda odd: [1.0] if odd else torch.ones(4, 3),
    "order": lambda odd: torch.arange(12.0).view(4, 3) if odd else torch.arange(
        12.0).view(4, 3).t().contiguous().t(),
}


def given_on_rank(mesh: Any, kind: str, source: int) -> tuple[list[str], float]:
    said = []
    for spec in (P("dp"), P(), P("dp", "tp")):
        try:
            x = weft.distribute_tensor(
                GIVEN[kind](mesh.rank == 2), mesh, spec, src_data_rank=source)
            said.append(f"{x.stride()} {x.full_tensor().tolist()}")
        except WeftError as error:
            said.append(str(error))
    return said, weft.distribute_tensor(torch.ones(4), mesh, P("dp")).sum().item()  # in step


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("kind", GIVEN)
def test_ranks_distribute_one_tensor(gloo: GlooWorld, kind: str, source: int) -> None:
    outcomes = gloo.run(given_on_rank, MESH, kind, source)
    assert [total for _, total in outcomes] == [4.0] * 4
    for said in zip(*[said for said, _ in outcomes]):
        if kind == "order":  # the source's counts
            due = f"{(1, 4) if source == 0 else (3, 1)} "
            assert said == (due + str(torch.arange(12.0).view(4, 3).tolist()),) * 4
        else:
            assert said[0] == said[1] == said[3] and said[0].startswith("distribute_tensor(")
            assert "Offenders: " in said[0] and "Offenders: " in said[2]
