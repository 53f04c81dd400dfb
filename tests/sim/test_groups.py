"""Parameters gathered for their module: values, collectives, memory, and what may go wrong."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import ranks
from weft import P, StrictError
from weft.nn.groups.hooks import _STATES

IDS = torch.randint(11, (7, 5), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 9), nn.Linear(9, dim)
        self.left: Any = None

    def forward(self, x: Any) -> Any:
        hidden = F.gelu(self.up(self.norm(x)))
        self.left = hidden.square().mean() + (self.down.weight ** 2).sum()
        return x + self.down(hidden)


class Model(nn.Module):
    """Tied weights, a view of a parameter, a list of blocks, and how each of them runs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.place = nn.Parameter(torch.randn(8, 6))
        self.layers = nn.ModuleList(Block(6) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.token.weight
        self.runs: Callable[[Any, Any], Any] = lambda block, x: block(x)

    def forward(self, ids: Any) -> Any:
        x = self.token(ids) + self.place[: ids.shape[1]]
        for block in self.layers:
            x = self.runs(block, x)
        return self.head(self.norm(x))


def make(change: Callable[[Any], Any] = lambda model: None) -> Any:
    torch.manual_seed(0)
    model = Model().double()
    change(model)
    return model


def loss_of(model: Any, ids: Any) -> Any:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: one.grad.full_tensor() if isinstance(one, weft.ShardTensor) else one.grad.clone()
        for name, one in model.named_parameters() if one.grad is not None
    }


def alike(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(mine[name], grad, msg=lambda said, name=name: name + said)


def on_ranks(
    program: Callable[[Any, Any], Any], change: Callable[[Any], Any] = lambda model: None,
    spec: Any = None, mesh: dict[str, int] | None = None, **more: Any,
) -> list[Any]:
    """`program(model, ids)` on plain tensors and on a mesh: the same gradients and results."""
    plain = make(change)
    expected = program(plain, IDS)

    def on_rank(mesh: Any) -> Any:
        model = make(change)
        weft.distribute_module(model, mesh, shardings=spec or {"*": P("dp")}, **more)
        with weft.explain() as log:
            found = program(model, weft.distribute_tensor(IDS, mesh, P("dp")))
        alike(gradients(model), gradients(plain))
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found.full_tensor(), expected.detach())
        assert not any(one._meta.varying for one in model.parameters())
        return log.events

    return weft.testing.run(on_rank, mesh=mesh or {"dp": 4})


def step(model: Any, ids: Any, loss_of: Callable[[Any, Any], Any] = loss_of) -> Any:
    loss = loss_of(model, ids)
    loss.backward()
    return loss


def twice(model: Any, ids: Any, step: Callable[[Any, Any], Any] = step) -> Any:
    """Two steps: the second one knows the order of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, ids)
    optimizer.step()
    optimizer.zero_grad()
    return step(model, ids)


CASES = {
    "two steps": (twice, lambda model: None),
    "checkpoints": (twice, lambda model: setattr(
        model, "runs", lambda block, x: checkpoint(block, x, use_reentrant=False))),
    "reentrant": (twice, lambda model: setattr(
        model, "runs", lambda block, x: checkpoint(block, x, use_reentrant=True))),
    "called past": (twice, lambda model: setattr(
        model, "runs", lambda block, x: block.forward(x))),
    "a block twice": (twice, lambda model: setattr(
        model, "runs", lambda block, x: block(block(x)))),
    "frozen": (twice, lambda model: [
        one.requires_grad_(False) for one in (*model.layers[0].parameters(), model.place)]),
    "tied over groups": (twice, lambda model: setattr(
        model.layers[0].up, "weight", model.layers[2].up.weight)),
}


SPECS = pytest.mark.parametrize("spec", [P("dp"), P()], ids=["sharded", "replicated"])


@SPECS
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, spec: P) -> None:
    program, change = CASES[name]
    on_ranks(program, change, {"*": spec}, {"dp": 3})


def left_behind(model: Any, ids: Any) -> Any:
    """A loss of what modules leave in attributes, some of it of weights alone."""
    out = loss_of(model, ids)
    loss = out + sum(block.left for block in model.layers)
    loss.backward()
    return loss


def two_graphs(model: Any, ids: Any) -> Any:
    one, other = loss_of(model, ids), loss_of(model, ids[:, :3])
    other.backward()
    one.backward()
    return one


def again(model: Any, ids: Any) -> Any:
    loss = loss_of(model, ids)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def without_backward(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        loss_of(model, ids)
    loss_of(model, ids)
    with torch.inference_mode():
        loss_of(model, ids)
    return step(model, ids)


def fails_and_goes_on(model: Any, ids: Any) -> Any:
    def fail(*_: Any) -> Any:
        raise ArithmeticError("as told")

    hook = model.layers[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(ids)
    hook.remove()
    loss = loss_of(model, ids)
    seen = model.layers[1].left
    handle = seen.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (loss + seen).backward()
    handle.remove()
    model.zero_grad()
    return step(model, ids)


def skips(model: Any, ids: Any) -> Any:
    """Another order of blocks, and a block that is not used."""
    step(model, ids)
    model.layers = nn.ModuleList([model.layers[2], model.layers[0]])
    return step(model, ids)


def second_order(model: Any, ids: Any) -> Any:
    names = ("token.weight", "layers.1.up.weight", "layers.2.down.bias")
    weights = [model.get_parameter(name) for name in names]
    grads = torch.autograd.grad(loss_of(model, ids), weights, create_graph=True)
    loss = sum((grad ** 2).sum() for grad in grads)
    loss.backward()
    return loss


def new_weight(model: Any, ids: Any) -> Any:
    """Weights that are replaced, written to, or laid elsewhere between steps."""
    step(model, ids)
    block = model.layers[1]
    block.up.weight = nn.Parameter(block.up.weight.detach() * 2)
    with torch.no_grad():
        model.layers[0].down.bias.add_(1)
    model.token.weight.requires_grad_(False)
    step(model, ids)
    for one in model.layers:
        one.left = None
    model = copy.deepcopy(model)
    model.zero_grad()
    return step(model, ids)


def written_inside(model: Any, ids: Any) -> Any:
    """A forward that writes to its own weights."""
    def halved(block: Any, args: Any) -> None:
        with torch.no_grad():
            block.up.weight.mul_(0.5)

    hook = model.layers[1].register_forward_pre_hook(halved)
    loss_of(model, ids)
    hook.remove()
    return step(model, ids)


def hooked(model: Any, ids: Any) -> Any:
    """A hook sees the whole gradient, once."""
    seen = []
    weight = model.layers[1].up.weight
    weight.register_hook(lambda grad: seen.append(grad.sum()))
    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.sum()))
    step(model, ids)
    assert len(seen) == 2
    return seen[0] + seen[1]


def other_weights(model: Any, ids: Any) -> Any:
    """A forward with other weights between a forward and its backward."""
    loss = loss_of(model, ids)
    others = {name: one * 2 for name, one in model.named_parameters()}
    other = torch.func.functional_call(model, others, (ids,)).square().mean()
    with torch.no_grad():
        loss_of(model, ids)
    gc.collect()
    (loss + other).backward()
    return loss


PROGRAMS = [
    other_weights, left_behind, two_graphs, again, without_backward, fails_and_goes_on, skips,
    second_order, new_weight, written_inside, hooked,
]


@SPECS
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_programs(program: Callable[[Any, Any], Any], spec: P) -> None:
    on_ranks(program, spec={"*": spec}, mesh={"dp": 3})


@SPECS
@ranks(dp=3)
def test_weights_outlive_their_module(mesh: Any, spec: P) -> None:
    plain = nn.Linear(6, 5)
    layer = weft.distribute_module(copy.deepcopy(plain), mesh, shardings={"*": spec})
    loss = layer(weft.ones(4, 6, mesh=mesh, spec=P("dp"))).square().mean()
    weights, pack = list(layer.parameters()), weakref.ref(_STATES[layer].group.packs[0])
    del layer
    loss.backward()
    plain(torch.ones(4, 6)).square().mean().backward()
    for mine, expected in zip(weights, plain.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
    del loss
    assert pack() is None


@SPECS
@ranks(dp=3)
def test_a_model_that_is_gone_leaves_no_memory(mesh: Any, spec: P) -> None:
    model = make()
    weft.distribute_module(model, mesh, shardings={"*": spec})
    optimizer = torch.optim.AdamW(model.parameters())
    ids = weft.distribute_tensor(IDS, mesh, P("dp"))
    for _ in range(2):  # the first may import, which leaves cycles of torch's
        gc.collect()
        step(model, ids)
        optimizer.step()
    parameters = [weakref.ref(one) for one in model.parameters()]
    del model, optimizer
    assert not [one for one in parameters if one() is not None]  # without a collection


def test_a_rank_without_any_shard_of_a_group() -> None:
    def change(model: Any) -> None:
        model.layers = nn.ModuleList([nn.Linear(6, 1).double()])
        model.runs = lambda block, x: x + block(x)

    on_ranks(step, change, {"*": P(("tp", "dp"))}, {"dp": 2, "tp": 2})


TABLES = {
    "2-D": {"*.up.*": P(("tp", "dp")), "*.down.weight": P("dp", "tp"), "*": P("dp")},
    "last dims": {"*.weight": P(*[None] * 0, "dp"), "layers.*.down.weight": P(None, "dp")},
    "replicas": {"*": P("tp")},
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    on_ranks(twice, spec=TABLES[name], mesh={"dp": 2, "tp": 2})


def counted(events: Any, collective: str) -> list[Any]:
    return [one for one in events if one.op.startswith("parameters of")
            and one.collective == collective]


def test_one_gather_each_way_and_one_reduction_per_group() -> None:
    events = on_ranks(step)[0]
    gathers = counted(events, "AllGather")
    assert [one.direction for one in gathers].count("forward") == 4  # three blocks and the rest
    assert [one.direction for one in gathers].count("backward") == 3  # the rest has stayed
    assert len(counted(events, "ReduceScatter")) == 4
    others = [one for one in events if not one.op.startswith("parameters of")]
    assert sum(one.nbytes for one in others) < 100  # the loss


def test_patterns_say_what_is_gathered() -> None:
    kept = on_ranks(step, gather={"layers.*": weft.nn.Gather(free=False)})[0]
    assert len(counted(kept, "AllGather")) == 4
    some = on_ranks(step, gather={"layers.0": False, "layers.1": True})[0]
    assert {one.op for one in counted(some, "AllGather")} == {
        "parameters of the module", "parameters of layers.1"}
    assert not counted(on_ranks(step, gather=False)[0], "AllGather")


@pytest.mark.parametrize("case, times", [("two steps", 6), ("checkpoints", 9)])
def test_what_is_freed_has_no_bytes(case: str, times: int) -> None:
    weft.testing.run(lambda mesh: look_at_storages(mesh, CASES[case][1], times), mesh={"dp": 2})


def look_at_storages(mesh: Any, change: Callable[[Any], Any], times: int) -> None:
    model = make(change)
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    seen: list[list[int]] = []

    def look(*_: Any) -> None:
        groups = [state.group for block, state in _STATES.items() if block in [*model.layers]]
        seen.append([
            sum(pack.storage.nbytes() > 0 for pack in group.packs)
            for group in groups if group is not None
        ])

    for block in model.layers:
        block.register_forward_pre_hook(look)
        block.norm.register_full_backward_hook(look)
    step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    assert max(map(sum, seen)) == 1 and len(seen) == times


@ranks(dp=2)
def test_a_write_between_forward_and_backward_raises(mesh: Any) -> None:
    for change in (lambda model: None, lambda model: setattr(
        model, "runs", lambda block, x: checkpoint(block, x, use_reentrant=False))):
        model = make()
        weft.distribute_module(model, mesh, shardings={"*": P("dp")})
        ids = weft.distribute_tensor(IDS, mesh, P("dp"))
        loss = loss_of(model, ids)
        with torch.no_grad():
            model.layers[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        change(model)
        model.zero_grad()
        step(model, ids)


@ranks(dp=2)
def test_copies_and_pickles(mesh: Any) -> None:
    model = make()
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    ids = weft.distribute_tensor(IDS, mesh, P("dp"))
    step(model, ids)
    del model.runs
    for block in model.layers:
        block.left = None
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.runs = lambda block, x: block(x)
        other.zero_grad()
        step(other, ids)
        alike(gradients(other), gradients(model))


@ranks(dp=2)
def test_handed_out_memory_stays(mesh: Any) -> None:
    model = make()
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    taken: list[Any] = []
    up = model.layers[0].up
    up.register_forward_hook(lambda module, args, out: taken.extend(
        (module.weight.to_local(), module.weight.detach().numpy(), module.weight.t())))
    step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    whole = up.weight.detach().full_tensor()
    assert torch.equal(taken[0], whole) and (taken[1] == whole.numpy()).all()
    assert torch.equal(taken[2].detach().full_tensor(), whole.t())


@ranks(dp=2)
def test_strict_wants_it_told(mesh: Any) -> None:
    x = weft.ones(4, 3, mesh=mesh, spec=P("dp"))
    for gather in (None, {"0": weft.nn.Gather()}):
        model = nn.Sequential(nn.Linear(3, 4))
        weft.distribute_module(model, mesh, shardings={"*": P("dp")}, gather=gather)
        with weft.strict():
            if gather is None:
                with pytest.raises(StrictError, match="gather="):
                    model(x)
            else:
                model(x)


@ranks(dp=2)
def test_what_does_not_fit_is_refused(mesh: Any) -> None:
    wrong: list[Any] = [{"nothing.*": True}, {"layers.*": 3}, 3]
    for gather in wrong:
        with pytest.raises(weft.WeftError, match="gather="):
            weft.distribute_module(make(), mesh, gather=gather)
    with pytest.raises(weft.ShardTypeError, match="compute_dtype"):
        weft.nn.Gather(compute_dtype=torch.int32)


def test_debug_mode_compares_the_collectives() -> None:
    with weft.debug():
        on_ranks(twice)


@ranks(dp=4)
def test_weights_are_cast_before_they_travel(mesh: Any) -> None:
    plain = make().float()
    step(plain, IDS)
    model = make().float()
    weft.distribute_module(model, mesh, shardings={"*": P("dp")}, gather={
        "layers.*": weft.nn.Gather(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)})
    model.runs = lambda block, x: block(x.bfloat16()).float()
    with weft.explain() as log:
        step(model, weft.distribute_tensor(IDS, mesh, P("dp")))
    layer = next(one for one in log.events if one.op == "parameters of layers.0")
    params = sum(one.numel() - one._local.numel() for one in model.layers[0].parameters())
    assert layer.nbytes == 2 * params
    for name, grad in gradients(model).items():
        expected = plain.get_parameter(name).grad
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected, atol=3e-2, rtol=3e-2)


def microbatches(model: Any, ids: Any) -> Any:
    """Three backwards; on a mesh one reduction at their end."""
    losses = [loss_of(model, ids[:, at: at + 2]) for at in (0, 1, 2)]
    for loss in losses:
        loss.backward()
    return sum(losses)


@SPECS
def test_gradients_stay_partial_until_the_end_of_the_block(spec: P) -> None:
    plain = make()
    microbatches(plain, IDS)

    @ranks(dp=3)
    def on_rank(mesh: Any) -> None:
        model = make()
        weft.distribute_module(model, mesh, shardings={"*": spec})
        ids = weft.distribute_tensor(IDS, mesh, P("dp"))
        step(model, ids)
        model.zero_grad()
        with weft.explain() as log, weft.nn.accumulate(model):
            microbatches(model, ids)
            assert all(one.grad is None for one in model.parameters())
        alike(gradients(model), gradients(plain))
        reduced = [one.nbytes for one in log.events if one.direction == "backward"
                   and one.collective != "AllGather" and "the loss" not in one.reason]
        numel = sum(one.numel() for one in model.parameters())
        own = sum(one._local.numel() for one in model.parameters())
        assert sum(reduced) == (2 * own * 8 if spec else 2 * numel * 8 * 2 // 3)
        assert spec or len(reduced) == 1
        with pytest.raises(ArithmeticError), weft.nn.accumulate(model):
            step(model, ids)
            raise ArithmeticError
        model.zero_grad()
        microbatches(model, ids)
        alike(gradients(model), gradients(plain))

    on_rank()
