"""How ranks leave: in order when a script ends, and with its error when it raises.

What a careless end runs into is told in weft.comm.pending_buffers. It takes luck to see, so these
scripts bring it about: gloo's threads yield their core to the main thread, which keeps Python's
lock from its last collective to its end.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import forked

START = """
import os, sys, time, torch, torch.distributed as dist
if "theirs" in sys.argv:
    dist.init_process_group("gloo")
import weft
from weft import P
mesh = weft.init_mesh({"dp": 2, "tp": int(os.environ["WORLD_SIZE"]) // 2})
x = weft.distribute_tensor(torch.arange(15.).reshape(5, 3), mesh, P("dp", "tp"))
"""

WORK = START + """
w = weft.distribute_tensor(torch.ones(3, 4), mesh, P("tp")).requires_grad_()
(x @ w).sum().backward()
grad = w.grad.full_tensor().sum().item()
kept = mesh.get_group("dp")
assert "torch._dynamo" not in sys.modules  # whose import takes longer than all of this
print(f"rank {mesh.rank} {grad} {x.sum().item()}\\n", end="", flush=True)
cores = sorted(os.sched_getaffinity(0))
for thread in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(thread, {cores[mesh.rank % len(cores)]})
    if thread != os.getpid():
        os.setpriority(os.PRIO_PROCESS, thread, 19)
sys.setswitchinterval(60)
x.sum().item()
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
if "destroys" in sys.argv:
    dist.destroy_process_group()
"""

RAISING = START + """
x.sum().item()
if mesh.rank == 1:
    raise ValueError("only here")
x.full_tensor()
"""


APART = START + """
b = torch.nn.Parameter(torch.ones(4))
y = x @ torch.nn.Parameter(torch.ones(3, 4))
if mesh.rank == 0:
    y = y + b
y.sum().backward()
x.full_tensor()
"""
"""On rank 0 the gradients that are reduced take more bytes: gloo ends its process for that."""


def torchrun(
    script: Path, *arguments: str, num_ranks: int = 4, max_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    return forked.run(
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--max-restarts", str(max_restarts), str(script), *arguments,
        environment={**os.environ, "OMP_NUM_THREADS": "1", "WEFT_TIMEOUT": "300"},
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's threads")
@pytest.mark.parametrize("how, num_ranks", [("theirs", 2), ("destroys", 4)])
def test_ranks_leave_in_order(how: str, num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORK)
    done = torchrun(script, how, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} 420.0 105.0" for rank in range(num_ranks)]


def test_a_rank_that_raises_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    done = torchrun(script, num_ranks=2)  # in less than WEFT_TIMEOUT
    assert done.returncode == 1
    assert "ValueError: only here" in done.stderr
    assert "exitcode  : 1" in done.stderr
    assert "terminate called" not in done.stderr


def test_a_rank_that_the_backend_ends_says_where_it_was(tmp_path: Path) -> None:
    """One branch that the other rank does not take, outside of debug mode."""
    script = tmp_path / "apart.py"
    script.write_text(APART)
    done = torchrun(script, num_ranks=2)
    assert done.returncode == 1 and "terminate called" in done.stderr, done.stderr
    line = APART.splitlines().index("y.sum().backward()") + 1
    words = done.stderr.split("rank ", 1)[1].splitlines()
    assert words[0].split(": ", 1)[1] == (
        "all_reduce over axes (dp), ranks 0, 1: the backend ends the process, as it does when "
        f"ranks disagree: it was at backward, at {script}:{line}."
    )
    assert words[1].startswith("  Rule: all ranks of a group issue the same collectives")
    assert words[2].startswith("  Fix: WEFT_DEBUG=1 compares what the ranks ask for")
