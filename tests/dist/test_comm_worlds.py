"""How a process comes into its world: a launcher's environment, or torch's fake backend."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm import as_bound_mesh, init_mesh
from weft.core import Mesh
from weft.errors import CommunicationError, MeshError, ShardTypeError

SCRIPT = """
import torch, torch.distributed as dist, weft.comm
mesh = weft.comm.init_mesh({"x": 2})
total = mesh.comm((0,)).all_reduce(torch.tensor([mesh.rank + 1]), "sum").item()
timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
print(mesh.rank, mesh.here, total, dist.get_backend(), timeout.total_seconds())
try:
    weft.comm.init_mesh({"x": 3})
except weft.errors.MeshError as error:
    print(str(error).splitlines()[0])
"""


def test_the_environment_of_a_launcher_starts_the_world() -> None:
    """Open MPI's; `weft run` and torchrun are started by other tests."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
              "MASTER_PORT": str(port), "WEFT_TIMEOUT": "40", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | shared | {"OMPI_COMM_WORLD_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out for out, _ in outputs] == [
        f"{rank} ({rank},) 3 gloo 40.0\n"
        "init_mesh(axes): Mesh({'x': 3}) needs 3 ranks up to rank 2, the world has 2.\n"
        for rank in range(2)
    ]


@pytest.fixture
def fake_world() -> Iterator[None]:
    """512 ranks of torch's fake backend, of which this process is rank 100."""
    dist.init_process_group("fake", rank=100, world_size=512, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_torchs_fake_backend(fake_world: None) -> None:
    mesh = init_mesh({"dp": 8, "cp": 8, "tp": 8})
    assert mesh.here == (1, 4, 4)
    x = torch.ones(6)
    for axes in ((0,), (1, 2), (0, 2), (0, 1, 2)):
        comm = mesh.comm(axes)
        assert comm.size == 8 ** len(axes)
        sizes = tuple(range(comm.size))
        assert comm.all_reduce(x, "sum").shape == (6,)
        assert comm.all_gather(torch.ones(comm.index), sizes).numel() == sum(sizes)
        assert comm.reduce_scatter(torch.ones(sum(sizes)), sizes, "sum").numel() == comm.index
    theirs = init_device_mesh("cpu", (64, 8), mesh_dim_names=("a", "b"))
    assert as_bound_mesh(theirs) == Mesh({"a": 64, "b": 8})
    assert as_bound_mesh(theirs).here == (12, 4)
    with pytest.raises(MeshError, match="the world has 512"):
        init_mesh({"dp": 1024})


def test_a_world_ends_with_its_process_group() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    first = init_mesh({"x": 4})
    connected = first.comm((0,))
    theirs = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    wrapped = as_bound_mesh(theirs)
    dist.destroy_process_group()
    with pytest.raises(MeshError, match="the world has 1"):
        init_mesh({"x": 4})
    with pytest.raises(ShardTypeError, match=r"while torch\.distributed runs"):
        as_bound_mesh(theirs)
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        second = init_mesh({"x": 4})
        assert second is not first
        assert (first.here, second.here) == ((0,), (2,))
        assert second.comm((0,)).all_reduce(torch.ones(1), "sum").shape == (1,)
        with pytest.raises(CommunicationError, match="that its mesh was bound in has ended"):
            connected.all_reduce(torch.ones(1), "sum")
        assert as_bound_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("x",))) is not wrapped
    finally:
        dist.destroy_process_group()
