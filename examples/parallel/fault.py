"""Fault drill: a rank is killed in the middle of an epoch, and the run goes on with one rank less.

Every second step is saved. torchrun starts all ranks again; they load the last checkpoint onto a
mesh of another size, and reach the losses of a run that nothing has interrupted.

    torchrun --nproc-per-node 3 --max-restarts 1 examples/parallel/fault.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import plain
import weft
from weft import P

EVERY, DIES_IN = 2, 3
"""Steps between checkpoints; the step in which a rank is killed."""


def last_step(folder: Path) -> int:
    """Of the last whole checkpoint: its metadata are written at its end."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def sharded(folder: Path, mesh: Any, dies: bool) -> list[float]:
    model = weft.distribute_module(plain.make(), mesh, shardings={"*": P("dp")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = weft.zeros(plain.NUM_STEPS, mesh=mesh)
    start = last_step(folder)

    def state() -> dict[str, Any]:
        ours, its = get_state_dict(model, optimizer)
        return {"model": ours, "optimizer": its, "losses": losses, "rng": torch.get_rng_state()}

    if start:
        found = state()
        dcp.load(found, checkpoint_id=folder / str(start))
        set_state_dict(model, optimizer, model_state_dict=found["model"],
                       optim_state_dict=found["optimizer"])
        torch.set_rng_state(found["rng"])
    for step, (ids, targets) in enumerate(plain.batches()):
        if step < start:
            continue
        ids, targets = (weft.distribute_tensor(one, mesh, P("dp")) for one in (ids, targets))
        loss = plain.loss_of(model(ids), targets)
        if dies and step == DIES_IN and mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        if (step + 1) % EVERY == 0:
            dcp.save(state(), checkpoint_id=folder / str(step + 1))
    return losses.full_tensor().tolist() if mesh.here is not None else []


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("torchrun --nproc-per-node 3 --max-restarts 1 examples/parallel/fault.py FOLDER")
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    mesh = weft.init_mesh({"dp": plain.num_ranks() - restarts})
    losses = sharded(Path(sys.argv[1]), mesh, dies=restarts == 0)
    if losses:  # the spare rank has none
        plain.beside(losses, plain.alone())
