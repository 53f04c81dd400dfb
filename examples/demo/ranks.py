"""What every rank of the demo runs: `weft run -n 4 ranks.py RUN`, RUN as JSON.

Events go to standard output, one JSON object per line; whoever started the ranks shows them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, cast

import torch

import weft
from demo.follow import Traffic
from demo.text import standard_library
from demo.train import MESH, Run, distributed

__all__ = ["OBSERVED_STEP", "main"]

OBSERVED_STEP = 1
"""The step whose traffic is recorded; the first one also makes the recipes."""


def main() -> None:
    """Train; tell where the parameters live, the loss of every step, and what one step moves."""
    torch.set_num_threads(1)
    run = Run.from_dict(json.loads(sys.argv[1]))
    mesh = weft.init_mesh(MESH)
    model, steps = distributed(run, standard_library(), mesh)
    if mesh.rank == 0:
        for name, parameter in model.named_parameters():
            _tell("parameter", name=name, layout=str(cast(weft.ShardTensor, parameter).sharding))
    for step in range(run.num_steps):
        if step == OBSERVED_STEP:
            with weft.explain() as log:
                made = next(steps)
            _tell_traffic(log)
        else:
            made = next(steps)
        if mesh.rank == 0:
            _tell("step", step=step, loss=made.loss, seconds=made.seconds)


def _tell_traffic(log: Any) -> None:
    kinds: dict[tuple[str, ...], list[int]] = {}
    for event in log.events:
        key = (",".join(event.axes), event.op, event.direction, event.collective)
        kinds.setdefault(key, []).append(event.nbytes)
    for key, sizes in kinds.items():
        _tell("traffic", row=asdict(Traffic(*key, num_calls=len(sizes), nbytes=sum(sizes))))


def _tell(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    main()
