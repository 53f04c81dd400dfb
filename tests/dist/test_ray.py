"""`weft.ray.run`: ranks as actors of a local Ray; skipped where Ray is not installed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from weft import P
from weft import ray as page
from weft.errors import CommunicationError, MeshError, ShardTypeError, UnsupportedOpError


def training(mesh: Any) -> tuple[int, float, torch.Tensor]:
    torch.manual_seed(0)
    w = weft.distribute_tensor(torch.randn(5, 3), mesh, P("tp")).requires_grad_()
    loss = (weft.randn(4, 5, mesh=mesh, spec=P(None, "tp")) @ w).square().mean()
    loss.backward()
    return mesh.rank, loss.item(), w.grad.full_tensor()


def raises(mesh: Any) -> None:
    if mesh.rank == 1:
        {}["missing"]
    weft.ones(4, mesh=mesh, spec=P("tp")).sum().item()


def dies(mesh: Any) -> None:
    if mesh.rank == 1:
        os._exit(3)
    weft.ones(4, mesh=mesh, spec=P("tp")).sum().item()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason='pip install "ray>=2.40"')
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
             object_store_memory=100 << 20)
    yield ray
    ray.shutdown()


@pytest.mark.timeout(600)  # six actors import torch
def test_actors_are_ranks(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they return, the error of one, a rank that dies, and too many: one cluster for all."""
    due = weft.testing.run(training, {"tp": 2})
    for found, simulated in zip(page.run(training, {"tp": 2}), due):
        assert found[:2] == simulated[:2] and torch.equal(found[2], simulated[2])

    begin = time.monotonic()
    with pytest.raises(KeyError, match="missing") as caught:
        page.run(raises, {"tp": 2})
    assert caught.value.__notes__ == ["on rank 1 of 2, an actor of Ray"]
    with pytest.raises(CommunicationError, match="rank 1 of 2 died"):
        page.run(dies, {"tp": 2})
    assert time.monotonic() - begin < 250  # WEFT_TIMEOUT is 300

    monkeypatch.setenv("WEFT_TIMEOUT", "2")
    with pytest.raises(CommunicationError, match="CPU: 3 needed, 2 in the cluster"):
        page.run(training, {"tp": 3})


def test_ranks_of_one_machine_are_neighbours() -> None:
    order, variables = page._ranks([("a", "1.1.1.1", 7), ("b", "2.2.2.2", 8), ("a", "1.1.1.1", 9)])
    assert order == [0, 2, 1]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in variables] == [
        ("0", "0"), ("1", "1"), ("2", "0")]
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"], each["WORLD_SIZE"]) for each in variables
            } == {("1.1.1.1", "7", "3")}
    _, alone = page._ranks([("a", "1.1.1.1", 7)] * 2)
    assert alone[1]["MASTER_ADDR"] == "127.0.0.1" and alone[1]["LOCAL_RANK"] == "1"


def test_a_shard_tensor_is_no_result() -> None:
    def made(mesh: Any) -> Any:
        return {"x": weft.ones(3, mesh=mesh, spec=P("tp"))}

    with pytest.raises(ShardTypeError) as error:
        weft.testing.run(lambda mesh: page._Rank().call(made, mesh.abstract, "cpu"), {"tp": 2})
    assert str(error.value) == (
        "weft.ray.run(fn): fn returns 1 ShardTensors.\n"
        "  Rule: what fn returns leaves its rank, and a ShardTensor is of use on the ranks of its "
        "mesh alone.\n"
        "  Offenders: [3@tp]\n"
        "  Fix: return x.full_tensor(), or x.to_local() for each rank's own block"
    )


def test_the_error_that_explains_the_others_is_raised() -> None:
    waited = CommunicationError("all_reduce: rank 0 stopped waiting: closed")
    assert page._cause({0: waited, 1: KeyError("x")}, 2).__notes__[0].startswith("on rank 1 of 2")
    assert page._cause({0: waited}, 2) is waited


def test_what_it_refuses_without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="needs 4 ranks, num_ranks is 2"):
        page.run(training, 2, {"tp": 4})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedOpError, match="pip install") as caught:
        page.run(training, 2)
    assert str(caught.value).splitlines()[1:] == [
        "  Rule: Ray runs the ranks; weft itself does not need it.",
        "  Offenders: ray",
        '  Fix: pip install "ray>=2.40"',
    ]
