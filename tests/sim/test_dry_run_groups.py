"""torch.distributed in a dry run: groups, values of collectives, messages, and who sends them."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import P
from weft.cli.main import main
from weft.errors import CommunicationError


def test_collectives_have_the_values_and_bytes_of_equal_ranks() -> None:
    seen: list[Any] = []

    def program(mesh: Any) -> None:
        dist.init_process_group("nccl")
        assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (3, 8)
        count, told = torch.tensor([3.0]), [None] * 8
        dist.all_reduce(count)
        dist.all_gather_object(told, {"rows": 5})
        group: Any = dist.new_group([1, 3, 5])
        assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == 1 and dist.get_global_rank(group, 2) == 5
        dist.all_gather([torch.empty(16) for _ in range(3)], torch.empty(16), group=group)
        dist.broadcast(torch.empty(4), 0, group=mesh.get_group("tp"))
        dist.broadcast(torch.empty(4), 3)
        dist.all_to_all_single(torch.empty(24), torch.empty(24), group=group)
        dist.reduce_scatter(torch.empty(4), [torch.empty(4)] * 4, group=mesh.get_group("tp"))
        dist.barrier()
        dist.destroy_process_group()
        seen.append((count.item(), told, mesh.get_group("tp") is mesh.get_group("tp")))

    found = weft.dry_run(program, {"dp": 2, "tp": 4}, "h100", rank=3)
    assert seen == [(24.0, [{"rows": 5}] * 8, True)]
    moved = [(one.op, one.axes, one.received_nbytes) for one in found.recorded]
    assert moved[0] == ("all_reduce", ("dp", "tp"), 2 * 4 * 7 // 8)
    few = ("ranks 1, 3, 5",)
    assert moved[-5:] == [
        ("all_gather", few, 2 * 64), ("broadcast", ("tp",), 16), ("broadcast", ("dp", "tp"), 0),
        ("all_to_all", few, 64), ("reduce_scatter", ("tp",), 3 * 16)]
    assert [(event.op, event.nbytes) for event in found.log.events] == [
        (f"torch.distributed.{op}", nbytes) for op, _, nbytes in moved]
    assert found.log.seconds == pytest.approx(found.seconds)
    assert not dist.is_initialized() and not distributed_c10d._world.pg_map


def test_a_device_mesh_of_the_program_is_the_mesh() -> None:
    def program(_: Any) -> None:
        theirs = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        x = weft.distribute_tensor(torch.zeros(8, 8), theirs, P("dp", "tp"))
        assert x.to_local().shape == (4, 2)
        x.sum(1).full_tensor()
        weft.distribute_tensor(torch.zeros(8), theirs["tp"], P("tp")).full_tensor()

    found = weft.dry_run(program, {"dp": 2, "tp": 4})
    assert {event.axes for event in found.log.events} == {("dp",), ("tp",)}


def shapes_go_round(mesh: Any) -> list[Any]:
    """Each rank sends a larger tensor on, the last one back to the first."""
    group, here = mesh.get_group("x"), mesh.rank
    random.seed(here)
    torch.manual_seed(here)
    rows = torch.tensor([1])
    if here:
        dist.recv(rows, here - 1, group=group)
    x = torch.empty(int(rows) * 4)
    dist.isend(rows + 1, (here + 1) % 4, group=group, tag=here == 3)
    if not here:
        dist.recv(rows, 3, group=group, tag=1)
    return [int(rows), len(x), random.random(), torch.rand(1).item()]


def test_a_rank_that_is_waited_for_runs_as_well() -> None:
    due = [[random.Random(rank).random(), torch.rand(
        1, generator=torch.Generator().manual_seed(rank)).item()] for rank in range(4)]
    seen: list[Any] = []
    for rank, rows in enumerate((5, 2, 3, 4)):
        found = weft.dry_run(
            lambda mesh: seen.append((mesh.rank, shapes_go_round(mesh))), {"x": 4}, rank=rank)
        assert dict(seen)[rank] == [rows, 4 * (rows if rank else 1), *due[rank]]
        assert [(one.op, one.ranks, one.received_nbytes) for one in found.recorded] == sorted([
            ("recv", ((rank - 1) % 4, rank), 8), ("send", (rank, (rank + 1) % 4), 0)
        ], reverse=rank == 0)
        assert len(found.log.events) == 1 and found.nbytes == 8


def test_errors_of_messages() -> None:
    def nobody_sends(mesh: Any) -> None:
        dist.recv(torch.empty(4), 1 - mesh.rank)

    with pytest.raises(CommunicationError, match=r"(?s)none can run on.*rank 0 waits for rank 1"):
        weft.dry_run(nobody_sends, {"x": 2})

    def fails(mesh: Any) -> None:
        if mesh.rank:
            raise KeyError("there")
        dist.recv(torch.empty(4), 1)

    with pytest.raises(KeyError, match="there") as caught:
        weft.dry_run(fails, {"x": 2})
    assert caught.value.__notes__ == ["on rank 1, for whose message rank 0 waits"]

    def other_sizes(mesh: Any) -> None:
        (dist.send if mesh.rank else dist.recv)(torch.empty(4 + mesh.rank), 1 - mesh.rank)

    with pytest.raises(CommunicationError, match="rank 1 sends 20 bytes, and rank 0 receives 16"):
        weft.dry_run(other_sizes, {"x": 2})
    assert torch.tensor([1]).item() == 1 and not dist.is_initialized()


def test_each_rank_of_a_script_has_its_number(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["weft"])
    monkeypatch.setattr("sys.path", ["", *sys.path])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    script, main_module = tmp_path / "train.py", sys.modules["__main__"]
    script.write_text(
        "import os, torch, weft, __main__\n"
        "from torch import distributed as dist\n"
        "dist.init_process_group()\n"
        "here = int(os.environ['RANK'])\n"
        "x = torch.tensor([here])\n"
        "dist.recv(x, here - 1) if here else dist.send(x, 1)\n"
        "assert int(os.environ['RANK']) == here == __main__.here\n"
        "print(here, x.item())\n")
    done = CliRunner().invoke(main, ["dry", "--mesh", "x=2", "--rank", "1", str(script)])
    due = ["0 0", "1 0", "rank 1 of 2 (x=2), the program"]
    assert done.output.splitlines()[:3] == due, done
    assert sys.modules["__main__"] is main_module and os.environ["RANK"] == "0"


def test_ddp_sums_over_an_axis_beside_the_mesh_of_its_module() -> None:
    def program(_: Any) -> None:
        mesh = weft.init_mesh({"dp": 2, "tp": 2})
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        weft.distribute_module(model, mesh["tp"], shardings={
            "0.*": P("tp"), "1.weight": P(None, "tp")})
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        optimizer = torch.optim.SGD(wrapped.parameters())
        for _ in range(3):
            wrapped(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = weft.dry_run(program, {"dp": 2, "tp": 2})
    sums = [event.nbytes for event in found.log.events
            if event.op == "torch.distributed.all_reduce"]
    assert max(sums) == 4 * (8 * 8 + 8 + 8 * 8 + 8)  # of two ranks, each receives as much
