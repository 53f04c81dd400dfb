"""A ShardTensor's local tensor holds its own bytes, however it was made, and no more."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.harness import ranks
from weft import Layout, P, ShardTensor, spmd
from weft.transport.transition import Transition

MESH = {"a": 2, "b": 2}
SHAPE = (8, 6)
SPECS: dict[str, Any] = {
    "rows": P("a"), "rows_of_b": P("b"), "rows_of_both": P(("a", "b")), "turned": P(("b", "a")),
    "blocks": P("a", "b"), "columns": P(None, ("a", "b")), "whole": P(),
    "terms": P("a", partial={"b": "sum"}),
}
RAGGED = {0: (7, 1)}


def full(requires_grad: bool = False) -> Tensor:
    return torch.arange(48.0).view(SHAPE).clone().requires_grad_(requires_grad)


def held(tensor: Any) -> tuple[int, int]:
    """The bytes of the memory that keeps the local tensor, and its own."""
    local = tensor.to_local() if isinstance(tensor, ShardTensor) else tensor
    local = local.detach()
    return local.untyped_storage().nbytes(), local.numel() * local.element_size()


def layout_on(mesh: Any, spec: P) -> Layout:
    if spec == P("a"):
        return Layout(mesh, SHAPE, spec, sizes=RAGGED)
    return Layout(mesh, SHAPE, spec)


def sources(mesh: Any) -> Iterator[ShardTensor]:
    for spec in SPECS.values():
        yield weft.distribute_tensor(full(), mesh, spec, src_data_rank=None)
    yield weft.distribute_tensor(full(), mesh, layout_on(mesh, P("a")), src_data_rank=None)


def saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def redistributed(mesh: Any, spec: P) -> Iterator[Any]:
    for to in (spec, layout_on(mesh, spec)):
        for x in sources(mesh):
            yield x.redistribute(placements=to)
            yield x.redistribute(placements=to, async_op=True)
            y = x.detach().requires_grad_()
            z = y.redistribute(placements=to)
            yield z
            z.sum().backward()
            yield y.grad
            weighed = y.redistribute(placements=to) * full()
            weighed.sum().backward()
            yield y.grad


def parameters(mesh: Any, spec: P) -> Iterator[Any]:
    for x in sources(mesh):
        parameter: Any = nn.Parameter(x)
        parameter.data = parameter.redistribute(placements=spec)
        yield parameter
        parameter.data = full()
        yield parameter
        parameter.grad = full()
        yield parameter.grad
        yield copy.deepcopy(parameter)
        yield saved(parameter)


def distributed(mesh: Any, spec: P) -> Iterator[Any]:
    for source in (0, None):
        yield weft.distribute_tensor(full(), mesh, spec, src_data_rank=source)
    yield weft.scatter_tensor(full(), 3, mesh, spec)
    local = weft.distribute_tensor(full(), mesh, spec).to_local()
    for run_check in (False, True):
        yield ShardTensor.from_local(local.clone(), mesh, spec, run_check=run_check)


def modules(mesh: Any, spec: P) -> Iterator[Any]:
    if any(Layout(mesh, SHAPE, spec).partial):
        return
    for source in (0, None):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        weft.distribute_module(
            model, mesh, shardings={"0.weight": spec, "1.bias": P(*spec.entries[:1])},
            src_data_rank=source,
        )
        yield from model.parameters()
        model(full()).square().sum().backward()
        yield model[0].weight.grad  # of replicated parameters they lie in one bucket
        model.load_state_dict({name: torch.ones(one.shape)
                               for name, one in model.state_dict().items()}, assign=True)
        yield from model.parameters()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8))
    weft.distribute_module(model, mesh, shardings={"0.weight": spec})
    yield from weft.nn.materialize(model).parameters()


def marked(mesh: Any, spec: P) -> Iterator[Any]:
    if any(Layout(mesh, SHAPE, spec).partial):
        return
    yield spmd.mark_sharding(full(), mesh, spec)
    yield spmd.mark_sharding(full(True), mesh, spec)
    yield spmd.mark_sharding(nn.Parameter(full()), mesh, spec)
    for x in sources(mesh):
        yield spmd.mark_sharding(x, mesh, spec)
        yield from spmd.shard_as(spmd.mark_sharding(full(), mesh, spec), x)
    yield spmd.shard_as(spmd.mark_sharding(full(), mesh, spec), full())[1]
    block = spmd.enable_manual_sharding(full(), spec, mesh=mesh)
    yield block
    yield block.mul_(2)
    yield spmd.disable_manual_sharding(block, spec, SHAPE, mesh=mesh)
    yield weft.local_map(lambda x: x, in_specs=spec, out_specs=spec, mesh=mesh)(full())
    yield spmd.ShardingSpec(mesh, spec).apply(full())
    loader = spmd.ShardedLoader(DataLoader(TensorDataset(full()), batch_size=3), spec, mesh=mesh)
    for (batch,) in loader:
        yield batch


def made(mesh: Any, spec: P) -> Iterator[Any]:
    for factory in (weft.zeros, weft.ones, weft.empty):
        yield factory(*SHAPE, mesh=mesh, spec=spec)
    yield weft.full(SHAPE, 2, mesh=mesh, spec=spec)
    for draw in (weft.rand, weft.randn):
        yield draw(*SHAPE, mesh=mesh, spec=spec)
        yield draw(7, 5, mesh=mesh, spec=spec, dtype=torch.float64)
    yield weft.randint(0, 5, SHAPE, mesh=mesh, spec=spec)
    line = P(*spec.entries[:1])
    yield weft.randperm(9, mesh=mesh, spec=line)
    yield weft.arange(9, mesh=mesh, spec=line)


def computed(mesh: Any, spec: P) -> Iterator[Any]:
    for x in sources(mesh):
        y = x.redistribute(placements=spec)
        yield from (x * y, x + 1, y.clone(), torch.rand_like(y), y.full_tensor())
        yield x.topk(2, 0)[0]
        yield x.double().logcumsumexp(0)
        yield torch.where(y > 3, x, y)


WAYS: list[Callable[..., Iterator[Any]]] = [
    redistributed, parameters, distributed, modules, marked, made, computed,
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_tensor_holds_its_own_bytes(way: Any, spec: str) -> None:
    def on_rank(mesh: Any) -> list[str]:
        return [
            f"{place}: {memory} bytes for {own} of {one}"
            for place, one in enumerate(way(mesh, SPECS[spec]))
            for memory, own in [held(one)] if memory > own
        ]

    assert weft.testing.run(on_rank, mesh=MESH) == [[]] * 4


@pytest.mark.parametrize("spec", ["rows", "blocks", "columns", "whole"])
def test_gradients_hold_together_what_they_are(spec: str) -> None:
    """Those of replicated parameters are parts of one buffer, with the loss if it came along."""
    def on_rank(mesh: Any) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        weft.distribute_module(model, mesh, shardings={"0.weight": SPECS[spec]})
        loss = model(full()).square().sum()
        loss.backward()
        grads = [one.grad.to_local().detach() for one in model.parameters()]
        memory = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in grads}
        return sum(memory.values()), sum(one.nbytes for one in grads) + loss.element_size()

    assert all(memory <= own for memory, own in weft.testing.run(on_rank, mesh=MESH))


def test_it_is_seen_where_more_is_held() -> None:
    def on_rank(mesh: Any) -> tuple[int, int]:
        return held(ShardTensor.from_local(full()[:4], mesh, P("a")))

    assert weft.testing.run(on_rank, mesh=MESH) == [(192, 96)] * 4


@pytest.mark.parametrize("grad", [False, True])
def test_a_file_has_the_block_alone(grad: bool) -> None:
    def on_rank(mesh: Any) -> bool:
        whole = torch.zeros(4096, 4)
        x = weft.distribute_tensor(whole, mesh, P()).requires_grad_(grad)
        file = io.BytesIO()
        torch.save(x.redistribute(placements=P(("a", "b"))).detach(), file)
        return 1 <= file.tell() / (whole.nbytes / 4) < 1.3

    assert weft.testing.run(on_rank, mesh=MESH) == [True] * 4


@pytest.mark.parametrize("to", [P(), P("a"), P(("a", "b"))], ids=str)
@ranks(**MESH)
def test_results_are_values(mesh: Any, to: P) -> None:
    """A write to either is not seen by the other, and copies no more than the block."""
    x = weft.distribute_tensor(full(), mesh, P())
    plain = full()
    y = x.redistribute(placements=to)
    marks = spmd.mark_sharding(x, mesh, to)
    blocks = spmd.enable_manual_sharding(plain, to, mesh=mesh)
    y.add_(1)
    blocks.add_(1)
    if to != P():
        marks.add_(1)
        assert torch.equal(marks.full_tensor(), full() + 1)
    assert torch.equal(y.full_tensor(), full() + 1)
    assert torch.equal(x.full_tensor(), full()) and torch.equal(plain, full())
    for one in (y, blocks):
        memory, own = held(one)
        assert memory == own
    x.sub_(1)
    assert torch.equal(y.full_tensor(), full() + 1)


@pytest.mark.parametrize("lent", [False, True])
def test_what_a_graph_keeps(lent: bool) -> None:
    """One op may read a view of an operand; a graph that keeps it would keep all of the operand,
    which costs nothing of a leaf alone: that lives on."""
    def on_rank(mesh: Any) -> list[int]:
        move = Transition(mesh, Layout(mesh, SHAPE, P()), Layout(mesh, SHAPE, P(("a", "b"))))
        leaf = full(True)
        with torch.no_grad():
            unrecorded = move(full(), read_only_use=lent)
        outs = [unrecorded, move(full(), read_only_use=lent), move(leaf, read_only_use=lent),
                move(leaf + 1, read_only_use=lent)]
        assert all(torch.equal(one, outs[0]) for one in outs[:3]) and outs[3].requires_grad
        return [held(one)[0] for one in outs]

    due = [192, 192, 192, 48] if lent else [48] * 4
    assert weft.testing.run(on_rank, mesh=MESH) == [due] * 4


@pytest.mark.parametrize("of_leaf", [False, True])
@ranks(**MESH)
def test_a_write_to_what_an_op_has_read_is_found(mesh: Any, of_leaf: bool) -> None:
    move = Transition(mesh, Layout(mesh, SHAPE, P()), Layout(mesh, SHAPE, P(("a", "b"))))
    x = full(True) if of_leaf else full(True) + 1
    y = move(x, read_only_use=True).square()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    def on_rank(_: Any) -> tuple[int, int]:
        mesh = weft.init_mesh({"a": 2}, ranks=(0, 1))
        return held(ShardTensor.from_local(full(), mesh, P("a"), shape=(16, 6)))

    assert weft.testing.run(on_rank, 3) == [(192, 192)] * 2 + [(0, 0)]


@ranks(x=4)
def test_an_index_expanded_beside_sharded_features_takes_no_memory(mesh: Any) -> None:
    """As graphs sum over edges: the index moves, and is not repeated for each feature."""
    index = weft.distribute_tensor(torch.arange(6), mesh, P("x"))
    values = weft.zeros(6, 10, mesh=mesh, spec=P(None, "x"))
    places = index[:, None].expand_as(values)
    assert places.spec == values.spec and places.stride() == (1, 0)
    assert held(places)[0] == 6 * 8
    index.add_(1)
    assert torch.equal(places.full_tensor(), torch.arange(1, 7)[:, None].expand(6, 10))
