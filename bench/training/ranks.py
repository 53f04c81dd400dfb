"""One of the ranks of `weft bench train`: steps of each system, in turns.

Started as `weft run -n N ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object per case.
Before the clock every system trains from the same weights on the same batch: its losses are those
of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import weft
from bench.by_turns import as_rank, by_turns
from bench.training.models import Shape
from bench.training.systems import WAYS, Trained, make

__all__ = ["PARTS", "measured"]

_FIRST = 3
"""Steps before the clock."""


def _cases(asked: Any) -> Iterator[Mapping[str, Any]]:
    weft.init_mesh({"all": asked["ranks"]})
    for way, model, shape, part in asked["cases"]:
        yield measured(way, model, Shape(**shape), part, asked["rounds"])


def measured(way: str, model: str, shape: Shape, part: str, rounds: int) -> dict[str, Any]:
    """Rounds of seconds and CPU seconds of each system.

    Raises:
        AssertionError: one has other losses.
    """
    systems: dict[str, Trained] = {}
    for system in WAYS[way].systems:
        try:
            systems[system] = make(system, way, model, shape)
        except KeyError:
            continue
    losses = {
        name: [float(_value(one.step())) for _ in range(_FIRST)] for name, one in systems.items()
    }
    for name, its in losses.items():
        apart = max(abs(one - due) / due for one, due in zip(its, losses["weft"]))
        if apart > 1e-3:
            raise AssertionError(f"{way}, {model}: the losses of {name} are {its}, "
                                 f"those of weft {losses['weft']}")
    return {
        "way": way, "model": model, "part": part,
        "times": by_turns({name: PARTS[part](one) for name, one in systems.items()}, rounds),
    }


def _value(loss: Any) -> Any:
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def _clip(one: Trained) -> Callable[[], Any]:
    one.backward()
    parameters = list(one.model.parameters())
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9)


def _adamw(one: Trained) -> Callable[[], Any]:
    one.backward()
    return one.optimizer.step


PARTS: dict[str, Callable[[Trained], Callable[[], Any]]] = {
    "step": lambda one: one.step, "clip_grad_norm_": _clip, "AdamW": _adamw,
}
"""What is timed: a whole step, or that part of it."""


if __name__ == "__main__":
    as_rank(_cases)
