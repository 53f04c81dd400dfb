"""Convolutions and pools over sharded positions: values, gradients, bytes, memory."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases.halos import FIELDS, WAYS, Field, drawn, judge, layout_of, on_rank, ways_of
from tests.harness import held
from tests.oracle import check
from weft import Layout, P
from weft.testing import peak_memory


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("field, way", [
    pytest.param(field, way, id=f"{field.name}-{way}")
    for field in FIELDS for way in ways_of(field.name)
])
def test_fields_stay_sharded(field: Field, way: str) -> None:
    """Every rank's part of results and gradients; the axes that shard x shard the result."""
    axes = WAYS[way][0]
    judge(field, way, weft.testing.run(lambda mesh: on_rank(mesh, field, way), mesh=axes))


# Bytes.


def bytes_of(mesh: Any, field: Field, way: str) -> tuple[int, int]:
    """What this rank receives of halos, forward and backward."""
    x, *weights = drawn(field)
    x = weft.distribute_tensor(x, mesh, layout_of(mesh.abstract, x.shape, way), src_data_rank=None)
    with weft.explain() as log:
        field.fn(x.requires_grad_(), *weights).sum().backward()
    totals = [sum(event.nbytes for event in log.events if event.collective == name)
              for name in ("Halo", "HaloSum")]
    assert {event.collective for event in log.events} <= {"Halo", "HaloSum", "AllReduce"}
    return totals[0], totals[1]


ROW, COLUMN = 2 * 4 * 7 * 8, 2 * 4 * 8 * 8
"""Bytes of a row, and of a column, of a field of 2 x 4 x 8 x 7."""

EXCHANGES = ("Halo", "HaloSum", "Exchange", "AllToAll")

HALOS = {
    ("plain", "rows"): ([ROW, 2 * ROW, 2 * ROW, ROW], [ROW, 2 * ROW, 2 * ROW, ROW]),
    ("plain", "one row each"): ([ROW, *[2 * ROW] * 6, ROW], [ROW, *[2 * ROW] * 6, ROW]),
    ("far", "one row each"): (
        [ROW * n for n in (3, 4, 5, 6, 6, 5, 4, 3)], [ROW * n for n in (3, 4, 5, 6, 6, 5, 4, 3)]),
    ("strided", "rows"): ([0, ROW, ROW, ROW], [ROW, ROW, ROW, 0]),
    ("patches", "rows"): ([0, 0, 0, 0], [0, 0, 0, 0]),
    ("back", "rows"): ([ROW, 2 * ROW, 2 * ROW, ROW], [ROW, 2 * ROW, 2 * ROW, ROW]),
    ("plain", "columns"): ([COLUMN, 2 * COLUMN, COLUMN], [COLUMN, 2 * COLUMN, COLUMN]),
    ("plain", "empty"): ([ROW, 0, ROW, 0], [ROW, 0, ROW, 0]),
    # Edges and corners: 5 x 5 and 5 x 4 of which 4 x 4 and 4 x 3 are owned.
    ("plain", "grid"): ([64 * 9, 64 * 8, 64 * 9, 64 * 8], [64 * 9, 64 * 8, 64 * 9, 64 * 8]),
}


@pytest.mark.parametrize("name, way", HALOS)
def test_bytes_are_the_halo(name: str, way: str) -> None:
    (field,) = [one for one in FIELDS if one.name == name]
    got = weft.testing.run(lambda mesh: bytes_of(mesh, field, way), mesh=WAYS[way][0])
    assert tuple(map(list, zip(*got))) == HALOS[name, way]


REPEATED = {"by_slices", "by_rolls", "in_place", "by_fluxes", "apart", "rolled_by_cat"}
"""Programs that call one op several times."""


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("way", ["rows", "ragged grid"])
@pytest.mark.parametrize("field", [one for one in FIELDS if one.name not in REPEATED],
                         ids=lambda one: one.name)
def test_an_op_exchanges_once(field: Field, way: str) -> None:
    """Forward and backward. Ranks first tell each other how many values come where these say
    themselves where they go; their gradients come back in one exchange."""
    def program(mesh: Any) -> list[Counter[str]]:
        x, *weights = drawn(field)
        x = weft.distribute_tensor(
            x, mesh, layout_of(mesh.abstract, x.shape, way), src_data_rank=None)
        with weft.explain() as forward:
            out = field.fn(x.requires_grad_(), *weights)
        with weft.explain() as backward:
            (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
        return [
            Counter(event.op for event in log.events if event.collective in EXCHANGES)
            for log in (forward, backward)]

    for found in weft.testing.run(program, mesh=WAYS[way][0]):
        for counts, told in zip(found, (1, 0)):
            assert all(
                count <= 1 + ("max_unpool" in op) * told for op, count in counts.items()), found


def test_one_exchange_serves_equal_reads() -> None:
    """Two convolutions of one field with windows alike fetch once, and sum once in backward."""
    def program(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(torch.randn(1, 2, 8), mesh, P(None, None, "x")).requires_grad_()
        with weft.explain() as log:
            one = F.conv1d(x, torch.ones(2, 2, 3), padding=1)
            other = F.conv1d(x, torch.ones(4, 2, 3), padding=1)
            (one.sum() + other.sum()).backward()
        return [event.collective for event in log.events if "Halo" in event.collective]

    assert weft.testing.run(program, mesh={"x": 2}) == [["Halo", "HaloSum"]] * 2


FAR: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "rows": ((2, 4, 16, 6), (3, 4, 3, 3), {"padding": 6, "dilation": 6}, (4, 5, 3, 4)),
    "zeros alone": ((1, 4, 16, 6), (4, 4, 3, 1), {"padding": (20, 0), "dilation": 20}, ()),
    "no tap at all": ((1, 2, 8), (2, 2, 2), {"padding": 18, "dilation": 36}, ()),
    "even": ((4, 16, 5), (2, 2, 2, 3), {"padding": "same", "dilation": (8, 1), "groups": 2}, ()),
    "line": ((1, 2, 16), (2, 2, 3), {"dilation": 6}, (3, 0, 9, 4)),
    "more channels": ((1, 2, 16), (3, 2, 3), {"dilation": 6}, ()),
    "space": ((1, 2, 12, 3, 4), (2, 2, 3, 2, 1),
              {"padding": (5, 1, 0), "dilation": (5, 1, 1), "stride": (1, 2, 1)}, ()),
}


@pytest.mark.parametrize("name", FAR)
def test_taps_that_are_further_apart_than_a_shard_is_long(name: str) -> None:
    """Each tap's part of the result moves. A rank holds no box."""
    shape, kernel, how, sizes = FAR[name]
    make = torch.Generator().manual_seed(2)
    full, weight, bias = [
        torch.randn(one, generator=make, dtype=torch.float64)
        for one in (shape, kernel, kernel[:1])]
    op = getattr(F, f"conv{len(kernel) - 2}d")
    dim = len(shape) - len(kernel) + 2

    def step(x: Any) -> list[Any]:
        given = [x.requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        out = op(*given, **how)
        return [out, *torch.autograd.grad(out.sin().sum(), given)]

    def program(mesh: Any) -> Any:
        spec = P(*[None] * dim, "x")
        layout = Layout(mesh, shape, spec, sizes={dim: sizes} if sizes else {})
        found = step(weft.distribute_tensor(full, mesh, layout))
        is_sharded = bool(found[0].sharding.dims[dim])
        return [one if type(one) is Tensor else one.full_tensor() for one in found], is_sharded

    for got, is_sharded in weft.testing.run(program, mesh={"x": 4}):
        assert is_sharded
        for mine, one in zip(got, step(full.clone())):
            torch.testing.assert_close(mine, one, rtol=1e-11, atol=1e-12)


def test_far_taps_take_no_box() -> None:
    """Windows of 25 rows over shards of 4: 2 more shards of the result travel at most."""
    def program(mesh: Any) -> Any:
        x = weft.distribute_tensor(torch.randn(1, 32, 16, 8), mesh, P(None, None, "x"))
        weight = torch.randn(4, 32, 3, 3)
        with weft.explain() as log, peak_memory(x, weight) as memory:
            F.conv2d(x, weight, padding=12, dilation=12)
        return log.nbytes, memory.peak - memory.start

    made = 4 * 4 * 8 * 4
    for nbytes, peak in weft.testing.run(program, mesh={"x": 4}):
        assert nbytes <= 2 * made and peak <= 12 * made, (nbytes, peak)


def test_parts_of_a_cat_are_read_at_once() -> None:
    """A roll that is written as a `cat` of slices takes one exchange of a roll's bytes."""
    def program(mesh: Any) -> list[tuple[str, int]]:
        u = weft.distribute_tensor(torch.randn(32, 4), mesh, P("x")).requires_grad_()
        with weft.explain() as log:
            out = torch.cat([u[3:], u[:3]])
            torch.autograd.grad(out, u, out)
        return [(event.collective, event.nbytes) for event in log.events]

    assert weft.testing.run(program, mesh={"x": 4}) == [[("Halo", 48), ("HaloSum", 48)]] * 4


def test_a_partial_field_is_reduced_once() -> None:
    """It comes to shards, of which each call then reads a halo of its own."""
    torch.manual_seed(3)
    full, weight = torch.randn(1, 1, 8), torch.randn(1, 1, 5)

    def program(mesh: Any) -> Any:
        layout = Layout(mesh.abstract, full.shape, P(partial={"x": "sum"}))
        x = weft.ShardTensor.from_local(full - 1 if mesh.rank else full - full + 1, mesh, layout)
        with weft.explain() as log:
            out = [F.max_pool1d(x, 3, 1, 1), F.max_pool1d(x, 5, 1, 2), F.conv1d(x, weight)]
        names = [event.collective for event in log.events]
        return [held(one) for one in out], names

    got = weft.testing.run(program, mesh={"x": 2})
    due = [F.max_pool1d(full, 3, 1, 1), F.max_pool1d(full, 5, 1, 2), F.conv1d(full, weight)]
    for place, one in enumerate(due):
        check(one, [out[place] for out, _ in got], f"result {place}", 1e-5)
    assert [names.count("ReduceScatter") + names.count("AllReduce") for _, names in got] == [1, 1]


def test_strict_names_the_gather() -> None:
    def program(mesh: Any) -> str:
        x = weft.distribute_tensor(torch.randn(1, 2, 8), mesh, P(None, None, "x"))
        w = weft.distribute_tensor(torch.ones(2, 2, 3), mesh, P())
        with weft.strict(), pytest.raises(weft.StrictError) as refused:
            F.conv1d(x, w, padding=1)
        return str(refused.value)

    for text in weft.testing.run(program, mesh={"x": 2}):
        assert "what it needs of other blocks would be sent over ['x']" in text
        assert "placements=[Replicate()]" in text


# Memory.


def test_a_halo_wider_than_the_shards_is_told() -> None:
    def program(mesh: Any, kernel: int) -> list[str]:
        x = weft.distribute_tensor(torch.randn(1, 1, 8, 8), mesh, P(None, None, "x"))
        w = weft.distribute_tensor(torch.ones(1, 1, kernel, 1), mesh, P())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            F.conv2d(x, w, padding=(kernel // 2, 0))
        return [str(one.message) for one in told]

    before = weft.warn_if_whole(0)
    try:
        one, *_ = weft.testing.run(lambda mesh: program(mesh, 7), mesh={"x": 8})
        assert len(one) == 1 and "holds 32 bytes of an operand [1, 1, 8@x, 8] reads 224" in one[0]
        assert weft.testing.run(lambda mesh: program(mesh, 3), mesh={"x": 2}) == [[], []]
    finally:
        weft.warn_if_whole(before)


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1, dtype=torch.float64)
        self.norm = nn.GroupNorm(2, after, dtype=torch.float64)
        self.second = nn.Conv2d(after, after, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x))))


class Net(nn.Module):
    """Down and up again, beside a way straight on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep, self.leave = Block(2, 8), Block(8, 16), Block(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        straight = self.enter(x)
        deep = self.deep(F.max_pool2d(straight, 2))
        size = deep.shape[-2:]
        wide = deep[..., :, None, :, None].expand(*deep.shape[:2], size[0], 2, size[1], 2)
        wide = wide.reshape(*deep.shape[:2], 2 * size[0], 2 * size[1])
        return self.leave(torch.cat([straight, wide], 1))


class Saved:
    """Bytes of the storages, each once, that autograd keeps."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.kept: list[Tensor] = []

    def __enter__(self) -> Saved:
        def pack(one: Tensor) -> Tensor:
            storage = one.untyped_storage()
            self.storages[storage._cdata] = storage.nbytes()
            self.kept.append(one)
            return one

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one)
        self.hooks.__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        self.hooks.__exit__(*what)


def _net() -> tuple[Net, Tensor]:
    torch.manual_seed(5)
    return Net(), torch.randn(1, 2, 64, 32, dtype=torch.float64)


def test_a_network_of_windows_takes_memory_by_ranks() -> None:
    """What autograd keeps of a step falls with the ranks, but for halos and weights; the step is
    that of one process."""
    net, x = _net()
    with Saved() as alone:
        due = net(x.clone().requires_grad_())
    due.square().mean().backward()
    whole = sum(alone.storages.values())
    weights = sum(one.nbytes for one in net.parameters())

    def program(mesh: Any) -> Any:
        mine, x = _net()
        x = weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None)
        with Saved() as saved:
            out = mine(x.requires_grad_())
        out.square().mean().backward()
        grads = [one.grad.clone() for one in mine.parameters()]
        return held(out.detach()), sum(saved.storages.values()), grads

    for ranks in (2, 4):
        got = weft.testing.run(program, mesh={"x": ranks})
        check(due.detach(), [out for out, _, _ in got], "out", 1e-12)
        for _, kept, grads in got:
            assert kept < 1.35 * (whole - weights) / ranks + weights, (kept, whole, ranks)
            for mine, one in zip(grads, net.parameters()):
                assert one.grad is not None
                torch.testing.assert_close(mine, one.grad, rtol=1e-11, atol=1e-12)


# Causal convolutions of sequences.

KERNEL, CHANNELS = 4, 6

CAUSAL = {
    "padded before": lambda x, w: F.conv1d(F.pad(x, (KERNEL - 1, 0)), w, groups=CHANNELS),
    "cropped after": lambda x, w: F.conv1d(
        x, w, padding=KERNEL - 1, groups=CHANNELS)[..., : x.shape[-1]],
}


@pytest.mark.parametrize(("way", "sizes"), [
    ("padded before", None), ("cropped after", None), ("cropped after", (5, 13, 4, 8))])
def test_a_causal_convolution_reads_what_comes_before(way: str, sizes: Any) -> None:
    """Three rows of the rank before, and nothing else: the sequence lies as it lay."""
    torch.manual_seed(0)
    x, w, along = torch.randn(1, CHANNELS, 30), torch.randn(CHANNELS, 1, KERNEL), CAUSAL[way]
    due = along(x, w)

    def run(mesh: Any) -> list[int]:
        layout = Layout(mesh, x.shape, P(None, None, "x"), sizes={2: sizes} if sizes else {})
        mine = weft.distribute_tensor(x, mesh, layout).requires_grad_()
        with weft.explain() as log:
            out = along(mine, w)
            out.sum().backward()
        assert out.sharding == layout
        torch.testing.assert_close(out.full_tensor(), due)
        return [sum([event.nbytes for event in log.events if event.collective == name])
                for name in ("Halo", "HaloSum")]

    three = (KERNEL - 1) * CHANNELS * 4
    assert weft.testing.run(run, mesh={"x": 4}) == [[0, three], *[[three, three]] * 2, [three, 0]]
