"""Whole states between meshes: every rank's block, the bytes, the staging, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.oracle import block
from weft import (
    Layout,
    LayoutError,
    Mesh,
    P,
    PlacementError,
    Replicate,
    Shard,
    ShardTypeError,
)

FULL: dict[str, Tensor] = {
    "matrix": torch.randn(7, 6), "half": torch.randn(5, 4, 3).bfloat16(), "number": torch.ones(()),
    "flags": torch.eye(4) > 0, "none": torch.empty(0, 3), "turned": torch.randn(6, 8).t(),
    "row": torch.arange(9),
}
FOUR, EIGHT = Mesh({"dp": 2, "tp": 2}), Mesh({"a": 4, "b": 2})
ENDS = {
    "fully sharded to tensor parallel": (FOUR, P(("tp", "dp")), FOUR, P(None, "tp")),
    "to ranks elsewhere": (FOUR, P("dp", "tp"), Mesh({"x": 3}, (7, 5, 4)), P("x")),
    "to fewer ranks": (EIGHT, P(None, "a"), Mesh({"x": 3}), P("x")),
    "to more ranks, ragged": (Mesh({"x": 3}, (2, 3, 4)), P("x"), EIGHT, P(("b", "a"))),
    "to one rank": (EIGHT, P("b"), Mesh({"x": 1}, (6,)), P()),
    "replicas to blocks": (EIGHT, P(), Mesh({"x": 4}, (4, 5, 6, 7)), P("x")),
    "as it is": (EIGHT, P("a"), EIGHT, P("a")),
}


def spec_for(full: Tensor, spec: P) -> P:
    return P(*spec[: full.dim()])


def layouts(mesh: Mesh, spec: P, ragged: bool) -> dict[str, Layout]:
    out = {name: Layout(mesh, one.shape, spec_for(one, spec)) for name, one in FULL.items()}
    if ragged:
        out["matrix"] = Layout(mesh, (7, 6), P("x"), sizes={0: (0, 6, 1)})
    return out


def missing(src: Layout, dst: Layout) -> int:
    """Elements that ranks lack, by listing them."""
    where = torch.arange(torch.Size(src.shape).numel()).view(src.shape)

    def held(layout: Layout, rank: int) -> set[int]:
        at = layout.mesh.position_of_rank(rank)
        return set() if at is None else set(
            block(layout, where, layout.mesh.coordinate(at)).flatten().tolist())

    return sum(len(held(dst, rank) - held(src, rank)) for rank in range(8))


@pytest.mark.parametrize("bucket", [32, 1 << 20])
@pytest.mark.parametrize("case", ENDS)
def test_every_rank_gets_its_blocks(case: str, bucket: int) -> None:
    one, spec, other, target = ENDS[case]
    begin = layouts(one, spec, "ragged" in case)
    end = layouts(other, target, False)

    def on_rank(_: Any) -> int:
        source, there = weft.init_mesh(one), weft.init_mesh(other)
        state = {name: weft.distribute_tensor(full, source, begin[name], src_data_rank=None)
                 for name, full in FULL.items()}
        with weft.explain() as log, weft.strict():
            moved = weft.reshard({**state, "epoch": 3}, {
                name: weft.zeros(layout.shape, mesh=there, placements=layout)
                for name, layout in end.items()
            }, bucket_nbytes=bucket)
        assert list(moved) == [*FULL, "epoch"] and moved["epoch"] == 3
        for name, full in FULL.items():
            x = moved[name]
            assert (x.sharding, x.device_mesh, x.dtype) == (end[name], there, full.dtype)
            if there.here is not None:
                due = block(end[name], full, there.here)
                assert torch.equal(x.to_local(), due) and not x.requires_grad
                assert x.stride() == full.stride()
        if bucket == 32:  # the first write to either copies
            moved["matrix"].zero_()
            assert source.here is None or torch.equal(
                state["matrix"].to_local(), block(begin["matrix"], FULL["matrix"], source.here))
        return log.nbytes

    found = weft.testing.run(on_rank, num_ranks=8)
    assert sum(found) == sum(
        missing(begin[name], end[name]) * full.element_size() for name, full in FULL.items())


def test_a_module_and_its_optimizer_by_a_table() -> None:
    """Trained on four ranks, resharded to two, loaded there, and trained on as before."""
    def module() -> nn.Module:
        torch.manual_seed(0)
        out = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 5))
        out[2].weight = out[0].weight
        return out.double()

    def step(net: nn.Module, optimizer: Any, mesh: Any) -> None:
        x = weft.distribute_tensor(
            torch.arange(24.0, dtype=torch.float64).view(4, 6).sin(), mesh, src_data_rank=None)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    def on_rank(mesh: Any) -> list[Tensor]:
        there = weft.init_mesh({"tp": 2}, ranks=(3, 1))
        net = weft.distribute_module(module(), mesh, shardings={"*weight": P("dp", "tp")})
        optimizer = torch.optim.Adam(net.parameters())
        step(net, optimizer, mesh)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        table = {"net.*weight": P("tp"), "*exp_avg*": P(None)}
        with weft.explain() as log:
            moved = weft.reshard(state, there, table)
        tied = [moved["net"][f"{at}.weight"] for at in (0, 2)]
        assert tied[0] is tied[1] and tied[0].sharding.text() == "[5@tp, 6]"
        assert [one.collective for one in log.events] == ["AllToAll"]  # `step` is a plain tensor
        step(net, optimizer, mesh)
        due = [x.full_tensor().detach() for x in net.parameters()]
        other = weft.distribute_module(module(), there, shardings={"*weight": P("tp")})
        other.load_state_dict(moved["net"])
        further = torch.optim.Adam(other.parameters())
        further.load_state_dict(moved["optimizer"])
        step(other, further, there)
        if there.here is None:
            return []
        return [one - x.full_tensor().detach() for one, x in zip(due, other.parameters())]  # type: ignore

    found = weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2})
    assert [len(one) for one in found] == [0, 5, 0, 5]
    assert max(float(one.abs().max()) for each in found for one in each) < 1e-12


def test_what_cannot_move() -> None:
    def on_rank(mesh: Any) -> list[str]:
        x, part = weft.ones(4, mesh=mesh, spec=P("x")), weft.init_mesh({"x": 1})
        term, said = weft.ones(4, mesh=mesh, spec=P(partial={"x": "sum"})), []
        for state, to, table, kind in [
            ({"a": x, "b": term, "c": x, "d": 1}, {"a": weft.ones(5, mesh=mesh), "b": x}, None,
             LayoutError),
            ({"a": x}, part, {"b*": P("x")}, ShardTypeError),
            ({"a": x}, part, {"a": P(None, "x")}, PlacementError),
            ({"a": x}, {"a": x}, {"a": P()}, ShardTypeError),
            ({"a": x}, "x", None, ShardTypeError),
        ]:
            with pytest.raises(kind) as caught:
                weft.reshard(state, to, table)
            said.append(str(caught.value))
        return said

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other
    assert first[0] == (
        "reshard(state, to): 3 of 3 tensors cannot move.\n"
        "  Rule: each ShardTensor of the state has one in `to`, of the same shape; neither "
        "is partial.\n"
        "  Offenders: a: [4@x], and [5] in `to`, b: [4] partial(sum@x) is partial, "
        "c: it is not in `to`\n"
        "  Fix: x.redistribute(placements=P()) for partial values; the state dict of the same "
        "model as `to`")
    assert "1 of 1 patterns match no tensor" in first[1]


def test_old_blocks_and_new_ones_and_two_buckets() -> None:
    """What a rank holds at most, of tensors much larger than a bucket."""
    bucket = 40_000

    def on_rank(mesh: Any) -> tuple[int, int]:
        state = {str(at): weft.ones(1000, 40, mesh=mesh, spec=P("x")) for at in range(4)}
        there = weft.init_mesh({"x": 2})
        meta = weft.distribute_tensor(torch.empty(1000, 40, device="meta"), there, P(None, "x"))
        to = dict.fromkeys(state, meta)
        with weft.testing.peak_memory(state) as memory:
            moved = weft.reshard(state, to, bucket_nbytes=bucket)
        new = sum(one.to_local().nbytes for one in moved.values())
        return memory.start + new, memory.peak

    for blocks, peak in weft.testing.run(on_rank, mesh={"x": 4}):
        assert blocks < peak <= blocks + 2 * bucket


def test_a_table_alone_is_for_the_mesh_of_the_state() -> None:
    full = torch.arange(42.0).view(7, 6)

    def on_rank(mesh: Any) -> None:
        state = {"up": weft.distribute_tensor(full, mesh, P("dp")),
                 "down": weft.distribute_tensor(full, mesh, P(None, "tp")), "step": 3}
        moved = weft.reshard(state, {"up": P("tp", "dp"), "*": [Replicate(), Shard(0)]})
        assert moved["up"].spec == P("tp", "dp") and moved["down"].spec == P("tp")
        assert moved["step"] == 3
        for name in ("up", "down"):
            assert moved[name].device_mesh == mesh
            assert torch.equal(moved[name].full_tensor(), full)
        with pytest.raises(ShardTypeError, match="patterns match no tensor"):
            weft.reshard(state, {"*": P(), "other": P("dp")})
        part = weft.distribute_tensor(full, mesh["tp"], P())
        with pytest.raises(ShardTypeError, match="the tensors are on 2 meshes"):
            weft.reshard({**state, "part": part}, {"*": P()})

    weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2})
