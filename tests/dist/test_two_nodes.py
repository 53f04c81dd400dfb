"""Two agents of torchrun, as on two nodes: a rank is killed, both start theirs again, and the run
goes on from its checkpoint."""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import forked

SCRIPT = """
import os, signal, sys, torch, weft
import torch.distributed.checkpoint as dcp
from weft import P

mesh = weft.init_mesh({"dp": 2})
folder = sys.argv[1]
w = weft.full((5, 3), 1.0, mesh=mesh, spec=P("dp"))
state = {"w": w, "step": 0}
if os.path.exists(f"{folder}/done/.metadata"):
    dcp.load(state, checkpoint_id=f"{folder}/done")
first = state["step"]
for step in range(first, 4):
    x = torch.arange(15.0).view(5, 3) / (step + 1)
    w += weft.distribute_tensor(x, mesh, P("dp")) * w.mean()
    if step == 1:
        dcp.save({"w": w, "step": step + 1}, checkpoint_id=f"{folder}/done")
    if step == 2 and first == 0 and mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
total = w.sum().item()
if mesh.rank == 0:
    print(f"began at {first} and gives {total:.3f}", flush=True)
"""


@pytest.mark.timeout(600)
def test_ranks_of_two_nodes_are_restarted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1",
        "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "two",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
        str(script), str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_TIMEOUT": "200"}

    def node(_: int) -> subprocess.CompletedProcess[str]:
        return forked.run(
            "torch.distributed.run", *arguments, environment=environment, timeout=500)

    with ThreadPoolExecutor(2) as pool:
        nodes = [*pool.map(node, range(2))]
    w = [1.0] * 15
    for step in range(4):
        mean = sum(w) / 15
        w = [one + at / (step + 1) * mean for at, one in enumerate(w)]
    assert [node.returncode for node in nodes] == [0, 0], nodes
    due = f"began at 2 and gives {sum(w):.3f}\n"
    assert [node.stdout for node in nodes if node.stdout] == [due], nodes
