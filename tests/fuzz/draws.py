"""Random models, tables of shardings and ways to train, each known by a seed.

A `Trial` says all that is drawn, in plain values, so that one process and all ranks build the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tests.fuzz.blocks import KINDS
from weft import P

__all__ = ["EVENTS", "WAYS", "Trial", "drawn", "specs_of"]

_MESHES: list[dict[str, int]] = [
    {"dp": 2}, {"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 1, "tp": 2},
    {"dp": 2, "one": 1, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 2, "tp": 2, "sp": 2}]
WAYS = ("plain", "functional", "two losses", "twice", "retained", "inner", "penalty")
"""How a loss comes to gradients: see `steps`."""
EVENTS = (
    "evaluated", "inferred", "failed", "failed back", "shorter", "whole", "scaled", "assigned",
    "toggled", "copied", "saved", "cast", "pickled", "full", "replaced", "moved", "vector",
    "shrunk", "dropped", "overflow")
"""What happens before a step: see `events`."""
_OPTIMIZERS = (
    "SGD", "SGD nesterov", "SGD fused", "AdamW", "AdamW foreach", "AdamW fused", "Adam amsgrad",
    "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta", "Adafactor", "ASGD", "Muon",
    "Muon", "LBFGS")
_SCHEDULES = (
    "halved", "StepLR", "LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "SWALR", "SequentialLR")
_LOSSES = ("ignored", "smooth", "weighted", "likelihood", "squares")
_HOOKS = (
    "forward", "backward", "tensor", "after", "before", "before back", "output", "step", "on cpu")
_NOT_CAST = {"batch", "sync", "written", "spectral", "orthogonal"}
"""Kinds that mix parameters with buffers, which keep their dtype."""
_NOT_NARROW = {"loop", "grouped", "gated", "masked", "spectral"}
"""Kinds that choose by values, which the last bit of bfloat16 turns; or that are only of floats."""


@dataclass(frozen=True)
class Trial:
    """All that is drawn for a seed. `width`, `heads`: of all blocks; `kinds`: one a block."""

    seed: int
    mesh: dict[str, int]
    width: int
    heads: int
    kinds: tuple[str, ...]
    tied: bool
    shared: bool
    meta: str
    frozen: tuple[str, ...]
    lora: str
    batch: tuple[int, int]
    spec: str
    gather: str
    activations: bool
    optimizer: str
    groups: bool
    schedule: str
    scaled: bool
    num_steps: int
    num_batches: int
    accumulate: bool
    clip: str
    checkpoint: str
    precision: str
    loss: str
    density: float
    way: str
    hooks: str
    average: str
    events: tuple[str, ...]


def drawn(seed: int) -> Trial:
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3])
    optimizer, way = draw.choice(_OPTIMIZERS), draw.choice(["plain"] * 4 + [*WAYS])
    if optimizer == "LBFGS" and way != "functional":
        way = "plain"
    num_batches = 1 if optimizer == "LBFGS" else draw.choice([1, 1, 2, 3])
    # torch has no second derivative of an embedding without ids: no rank may be without.
    is_second = way in ("inner", "penalty")
    num_steps = draw.choice([2, 3])
    kinds = tuple(draw.choices([*KINDS], k=draw.randint(1, 3)))
    if is_second:  # those of torch's fused weight norm are wrong
        kinds = tuple(["mlp" if kind == "weight norm" else kind for kind in kinds])
    scaled = optimizer != "LBFGS" and draw.random() < 0.25
    events = tuple(draw.choice([*EVENTS, *[""] * len(EVENTS)]) for _ in range(num_steps))
    tied, shared = draw.random() < 0.3, draw.random() < 0.15
    if kinds[0] == "spectral" or way in ("functional", "inner") or "replaced" in events:
        shared = False  # each use changes what the one before has saved; torch does not give back
    lora = draw.choice(["", "", "", "plain", "sharded"])
    metas = ["", "", "", "materialize", *["assign", "empty"] * (not tied | shared)]
    precision = _precision(draw, way, kinds, lora)
    without = {*["overflow"] * (not scaled), *["saved"] * (optimizer == "LBFGS"),
               *["replaced"] * (precision == "computed")}  # LBFGS has partial state
    events = tuple("" if event in without else event for event in events)
    trial = Trial(
        seed=seed, mesh=draw.choice(_MESHES), width=heads * draw.choice([2, 4]), heads=heads,
        kinds=kinds, tied=tied, shared=shared,
        meta="" if "orthogonal" in kinds else draw.choice(metas),  # torch has no such on meta
        frozen=tuple(draw.sample(["token", "layers.0", "norm", "head"], draw.choice([0, 0, 1, 2]))),
        lora=lora,
        batch=(8 if is_second else draw.choice([1, 2, 3, 4, 6]), draw.choice([1, 3, 5])),
        spec=draw.choice(["dp", "dp", "dp", "dp", "none", "both",
                          *["tokens", "grid", "ragged"] * (not is_second)]),
        gather=draw.choice(["auto", "auto", "none", "kept", "layers"]),
        activations=draw.random() < 0.15, optimizer=optimizer, groups=draw.random() < 0.3,
        schedule=draw.choice(["", *_SCHEDULES]) if draw.random() < 0.5 else "", scaled=scaled,
        num_steps=num_steps, num_batches=num_batches,
        accumulate=num_batches > 1 and draw.random() < 0.6,
        clip=draw.choice(["", "", "", "2", "inf", "value", "one by one", "in two"]),
        checkpoint=_checkpoint(draw, way, kinds, events), precision=precision,
        loss=draw.choice(["", "", "", *_LOSSES]), density=draw.choice([0.0, 0.3, 0.7, 1.0, 1.0]),
        way=way, hooks=draw.choice([*[""] * 5, *_HOOKS]),
        average="" if {"saved", "full", "pickled", "replaced"} & {*events} else draw.choice(
            [*[""] * 6, "ema", "buffers", "swa"]), events=events)
    if trial.hooks == "after" and trial.checkpoint == "reentrant":
        return replace(trial, hooks="")  # a group reduces once in a backward, also of several inner
    return trial


def _precision(draw: random.Random, way: str, kinds: tuple[str, ...], lora: str) -> str:
    """Of what is float64 elsewhere: autocast, or a dtype that groups gather in, or reduce in."""
    ways = [*[""] * 8, "off", "reduced"]
    if not _NOT_NARROW & {*kinds}:
        ways += ["autocast"]
    if not (_NOT_CAST & {*kinds} or lora or way in ("functional", "inner", "penalty")):
        ways += ["computed"]
    return draw.choice(ways)


def _checkpoint(
    draw: random.Random, way: str, kinds: tuple[str, ...], events: tuple[str, ...]
) -> str:
    """torch has no derivative of reentrant checkpoints but by backward(), once; none but that of
    selective ones either, which do not take what is written in place (recurrences do that).

    Where a backward fails, how much has been computed again by then is nobody's promise: batch
    norms count it, and spectral norms iterate.
    """
    if "failed back" in events and {"sync", "batch", "written", "spectral"} & {*kinds}:
        return ""
    if way == "inner":  # computed again with the module's weights, not with those of the call
        return ""
    if way == "penalty" and "spectral" in kinds:
        return ""  # torch recomputes for each derivative, and each time it iterates the vectors
    ways = ["", "", "other"]
    if way not in ("penalty", "retained"):
        ways += ["reentrant", *["selective"] * (not {"written", "lstm", "gru"} & {*kinds})]
    return draw.choice(ways)


def specs_of(trial: Trial, model: nn.Module, salt: int = 1) -> dict[str, Any]:
    """A table: for some of the parameters axes for some of their dims."""
    draw = random.Random(trial.seed + salt)
    table: dict[str, Any] = {}
    whole = draw.random() < 0.3  # all in dim 0, as most people do
    for name, param in model.named_parameters():
        if draw.random() >= trial.density or not param.dim():
            continue
        axes = draw.sample([*trial.mesh], draw.randint(1, len(trial.mesh)))
        entries: list[Any] = [None] * param.dim()
        if whole:
            entries[0] = "dp"
        elif draw.random() < 0.5:
            entries[draw.randrange(param.dim())] = tuple(axes)
        else:
            for axis in axes:
                at = draw.randrange(param.dim())
                entries[at] = (*(entries[at] or ()), axis)
        table[name] = P(*entries)
    return table
