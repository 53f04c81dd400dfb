"""The state of random numbers: seeded, saved, restored, forked; checkpoints; ranks that differ."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import ranks
from weft import P


def draw(mesh: Any) -> Tensor:
    return weft.rand(7, mesh=mesh, spec=P("x")).full_tensor()


def on_two_ranks(program: Callable[[Any], Any]) -> list[Any]:
    return weft.testing.run(program, mesh={"x": 2})


def test_a_seed_means_the_same_numbers_also_twice() -> None:
    def program(mesh: Any) -> None:
        torch.manual_seed(3)
        first, second = draw(mesh), draw(mesh)
        torch.manual_seed(3)
        assert torch.equal(draw(mesh), first) and torch.equal(draw(mesh), second)
        torch.manual_seed(4)
        assert not torch.equal(draw(mesh), first) and not torch.equal(first, second)

    on_two_ranks(program)


@pytest.mark.parametrize("seed", [0, -1, (1 << 64) - 1, 1 << 63])
def test_seeds_of_all_sizes(seed: int) -> None:
    def program(mesh: Any) -> None:
        torch.manual_seed(seed)
        state = weft.rng_state()
        assert state == (seed % (1 << 64), 0)
        found = draw(mesh)
        weft.manual_seed(seed)
        assert torch.equal(found, draw(mesh))
        saved = torch.get_rng_state()
        found = draw(mesh)
        torch.set_rng_state(saved)
        assert torch.equal(found, draw(mesh))

    on_two_ranks(program)


def test_save_and_restore() -> None:
    def program(mesh: Any) -> None:
        torch.manual_seed(3)
        draw(mesh)
        state = weft.rng_state()
        found = draw(mesh)
        draw(mesh)
        weft.set_rng_state(state)
        assert torch.equal(found, draw(mesh)) and weft.rng_state() == (3, 2)
        with weft.fork_rng():
            inside = draw(mesh)
            weft.manual_seed(9)
            draw(mesh)
        assert torch.equal(inside, draw(mesh)) and weft.rng_state() == (3, 3)
        with weft.fork_rng(enabled=False):
            draw(mesh)
        assert weft.rng_state() == (3, 4)

    on_two_ranks(program)


def test_a_state_that_is_none_is_refused() -> None:
    for state in (None, 3, (1, 2, 3), (1.0, 2), (1, -1), (1 << 64, 0), torch.get_rng_state()):
        with pytest.raises(weft.ShardTypeError, match="a pair"):
            weft.set_rng_state(state)  # type: ignore[arg-type]


def test_a_seed_that_is_none_is_refused() -> None:
    before = weft.rng_state()
    for seed in (1 << 64, -(1 << 63) - 1, "none"):
        with pytest.raises(ValueError):
            weft.manual_seed(seed)  # type: ignore[arg-type]
    assert weft.rng_state() == before


def test_torch_carries_the_state() -> None:
    """In `get_rng_state`, through a file too, and in `fork_rng`; its own numbers stay."""
    def program(mesh: Any) -> None:
        torch.manual_seed(3)
        draw(mesh)
        torch.randn(1, dtype=torch.float64)  # torch keeps the other one of the pair in the state
        file = io.BytesIO()
        torch.save(torch.get_rng_state(), file)
        found = draw(mesh), torch.randn(3, dtype=torch.float64), torch.rand(3)
        file.seek(0)
        torch.manual_seed(8)
        torch.set_rng_state(torch.load(file))
        again = draw(mesh), torch.randn(3, dtype=torch.float64), torch.rand(3)
        assert all(map(torch.equal, found, again))
        assert weft.rng_state() == (3, 2)
        with torch.random.fork_rng():
            torch.manual_seed(77)
            draw(mesh)
        assert weft.rng_state() == (3, 2)

    on_two_ranks(program)


def test_a_state_of_torch_alone_is_that_of_its_seed() -> None:
    before = torch.Generator().manual_seed(12).get_state()

    def program(mesh: Any) -> None:
        torch.manual_seed(12)
        assert torch.equal(torch.get_rng_state(), before)
        found = draw(mesh)
        assert not torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(13)
        torch.set_rng_state(before)
        assert weft.rng_state() == (12, 0) and torch.equal(found, draw(mesh))

    on_two_ranks(program)


def test_torch_reads_a_state_that_carries_more() -> None:
    """What weft writes is where a generator without weft does not look."""
    torch.manual_seed(5)
    weft.manual_seed(6)
    state = torch.get_rng_state()
    generator = torch.Generator()
    generator.set_state(state)
    expected = torch.Generator().manual_seed(5)
    assert torch.equal(
        torch.randn(100, generator=generator), torch.randn(100, generator=expected)
    )
    assert torch.equal(generator.get_state(), expected.get_state())
    torch.manual_seed(5)


def test_the_generators_own_method_seeds_too() -> None:
    def program(mesh: Any) -> None:
        torch.manual_seed(3)
        draw(mesh)
        torch.default_generator.manual_seed(4)
        assert weft.rng_state() == (4, 0)
        found = draw(mesh)
        torch.manual_seed(4)
        assert torch.equal(found, draw(mesh))
        weft.manual_seed(9)
        assert weft.rng_state() == (9, 0)

    on_two_ranks(program)


def test_ranks_of_a_run_have_states_of_their_own() -> None:
    """The baton passes in the middle of a program; the caller's state is untouched."""
    torch.manual_seed(21)
    before = weft.rng_state()

    def program(mesh: Any) -> Any:
        assert weft.rng_state() == before
        for _ in range(mesh.rank):
            with weft.fork_rng():
                weft.manual_seed(mesh.rank)
        states = []
        for _ in range(3):
            draw(mesh)  # a collective each
            states.append(weft.rng_state())
        return states

    for states in weft.testing.run(program, mesh={"x": 3}):
        assert states == [(21, 1), (21, 2), (21, 3)]
    assert weft.rng_state() == before


def test_ranks_that_are_seeded_differently_are_told() -> None:
    def program(mesh: Any) -> None:
        torch.manual_seed(100 + mesh.rank)
        weft.rand(3, mesh=mesh)

    with pytest.raises(weft.CommunicationError) as caught:
        weft.testing.run(program, mesh={"x": 3})
    text = str(caught.value)
    assert "3 different random states" in text and "weft.manual_seed(0)" in text
    assert all(f"rank {rank}: seed {100 + rank}, call 0" in text for rank in range(3))


def test_torchs_seeds_may_differ_where_wefts_do_not() -> None:
    def program(mesh: Any) -> Any:
        torch.manual_seed(100 + mesh.rank)
        weft.manual_seed(5)
        return draw(mesh), torch.rand(3)

    (first, mine), (second, other) = on_two_ranks(program)
    assert torch.equal(first, second) and not torch.equal(mine, other)


def test_in_debug_mode_every_call_is_compared() -> None:
    def program(mesh: Any) -> None:
        weft.rand(3, mesh=mesh)
        with weft.debug():
            weft.rand(3, mesh=mesh)
            if mesh.rank == 1:
                weft.set_rng_state((0, 50))
            weft.rand(3, mesh=mesh)

    with pytest.raises(weft.CommunicationError, match="call 50"):
        on_two_ranks(program)


def _block(weight: Tensor, x: Tensor) -> Tensor:
    return F.dropout(torch.tanh(F.dropout(x, 0.5) @ weight), 0.5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
def test_a_checkpoint_replays_its_masks(reentrant: bool, spec: P) -> None:
    def program(mesh: Any) -> None:
        torch.manual_seed(3)
        weight = weft.randn(6, 6, mesh=mesh, spec=spec, dtype=torch.float64, requires_grad=True)
        x = weft.randn(5, 6, mesh=mesh, spec=P("x"), dtype=torch.float64, requires_grad=True)
        state = weft.rng_state()
        out = _block(weight, _block(weight, x))
        out.sum().backward()
        after = weft.rng_state()
        grads = [one.grad.full_tensor() for one in (weight, x)]
        weight.grad = x.grad = None
        weft.set_rng_state(state)
        again = x
        for _ in range(2):
            again = checkpoint(_block, weight, again, use_reentrant=reentrant)
        assert torch.equal(again.full_tensor(), out.full_tensor())
        again.sum().backward()
        for one, grad in zip((weight, x), grads):
            torch.testing.assert_close(one.grad.full_tensor(), grad, rtol=1e-12, atol=1e-12)
        assert weft.rng_state() == after

    on_two_ranks(program)


class Layer(nn.Module):
    """A transformer's layer with dropout where GPT-2 has it."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.p = nn.Dropout(p), p

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm2(x))))))


SHARDINGS: dict[str, tuple[dict[str, int], dict[str, P], P]] = {
    "one": ({"dp": 1, "tp": 1}, {}, P()),
    "data": ({"dp": 4, "tp": 1}, {}, P("dp")),
    "tensor": ({"dp": 1, "tp": 4}, {
        "*.up.weight": P("tp", None), "*.up.bias": P("tp"), "*.down.weight": P(None, "tp"),
        "*.qkv.weight": P(None, "tp"),
    }, P()),
    "both": ({"dp": 2, "tp": 2}, {
        "*.up.weight": P("tp", None), "*.up.bias": P("tp"), "*.down.weight": P(None, "tp"),
    }, P("dp")),
}


def test_a_transformer_with_dropout_trains_alike_on_one_rank_and_on_four() -> None:
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(4, 6, 16, generator=generator, dtype=torch.float64)

    def program(mesh: Any, shardings: Any, spec: P) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(*(Layer(16, 0.2) for _ in range(2))).double()
        weft.distribute_module(model, mesh, shardings=shardings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = weft.distribute_tensor(data, mesh, spec, src_data_rank=None)
        torch.manual_seed(11)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [one.grad.full_tensor() for one in model.parameters()]

    results = {
        name: weft.testing.run(lambda mesh, a=shardings, b=spec: program(mesh, a, b), mesh=axes)[0]
        for name, (axes, shardings, spec) in SHARDINGS.items()
    }
    losses, grads = results["one"]
    assert len(set(losses)) == 3
    for name, (others, theirs) in results.items():
        assert others == pytest.approx(losses, rel=1e-12), name
        for mine, other in zip(grads, theirs):
            torch.testing.assert_close(other, mine, rtol=1e-10, atol=1e-12)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "rand_like": torch.rand_like, "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "dropout": lambda x: F.dropout(x, 0.3), "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3),
    "rrelu": lambda x: F.rrelu(x, training=True), "gumbel": lambda x: F.gumbel_softmax(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()), "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x.exp()), "uniform_": lambda x: x.clone().uniform_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2),
}


@pytest.mark.parametrize("name", DRAWS)
@ranks(x=2)
def test_calls_leave_torchs_own_state_alone(mesh: Any, name: str) -> None:
    """By a new recipe as by one that is known: else what follows would depend on caches."""
    x = weft.zeros(7, 11 + len(name), mesh=mesh, spec=P("x"))
    torch.manual_seed(3)
    expected = torch.rand(3)
    for _ in range(2):
        torch.manual_seed(3)
        DRAWS[name](x)
        assert torch.equal(torch.rand(3), expected)
