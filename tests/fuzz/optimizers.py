"""The optimizers of a trial, which work as one, their schedule, and the scaler of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from tests.fuzz.draws import Trial

__all__ = ["Optimizers"]


class Optimizers:
    """Of all parameters, so that those may learn later that do not yet. Muon is of matrices alone:
    another one steps the rest."""

    def __init__(self, trial: Trial, model: nn.Module) -> None:
        self.every = _made(trial, [*model.parameters()])
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=4.0, growth_interval=1, enabled=trial.scaled)
        self.schedules = [_schedule(trial.schedule, one) for one in self.every]
        if trial.hooks == "step":
            for one in self.every:
                one.register_step_pre_hook(_halve)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.every:
            one.zero_grad(set_to_none=set_to_none)

    def unscale(self) -> None:
        for one in self.every:
            if _has_gradients(one):
                self.scaler.unscale_(one)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return self.every[0].step(closure)
        stepped = [one for one in self.every if _has_gradients(one)]
        for one in stepped:
            self.scaler.step(one)
        if stepped:
            self.scaler.update()

    def scheduled(self, loss: Any) -> None:
        """Once a step."""
        for one in self.schedules:
            if isinstance(one, schedules.ReduceLROnPlateau):
                one.step(loss)
            elif one is not None:
                one.step()

    def state_dict(self) -> list[Any]:
        return [one.state_dict() for one in self.every]

    def load_state_dict(self, states: list[Any]) -> None:
        for one, state in zip(self.every, states, strict=True):
            one.load_state_dict(state)


def _has_gradients(optimizer: Any) -> bool:
    """torch's scaler refuses an optimizer without any."""
    return any(one.grad is not None for group in optimizer.param_groups for one in group["params"])


def _halve(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one.grad is not None:
                one.grad.mul_(0.5)


def _made(trial: Trial, every: list[Any]) -> list[Any]:
    name, _, how = trial.optimizer.partition(" ")
    options: dict[str, Any] = {how: True} if how else {}
    match name:
        case "LBFGS":
            return [torch.optim.LBFGS(every, 0.1, max_iter=3)]
        case "Muon":
            others = [one for one in every if one.dim() != 2]
            matrices = [one for one in every if one.dim() == 2]
            return [torch.optim.Muon(matrices, 0.01, eps=1e-3),
                    torch.optim.AdamW(others, 0.01, eps=1e-3)]
        case "SGD":
            options |= {"lr": 0.1}  # torch's fused one has no momentum beside a gradient of None
            if how != "fused":
                options["momentum"] = 0.9
        case "Adafactor":
            options |= {"lr": 0.01, "eps": (1e-3, 1e-3)}
        case "ASGD":
            options |= {"lr": 0.1, "t0": 1}
        case _:
            options |= {"lr": 0.01, "eps": 1e-3}
    groups: Any = every
    if trial.groups:
        groups = [{"params": [one for one in every if one.dim() > 1], "weight_decay": 0.1},
                  {"params": [one for one in every if one.dim() < 2], "lr": 0.02}]
    return [getattr(torch.optim, name)(groups, **options)]


def _schedule(name: str, optimizer: Any) -> Any:
    match name:
        case "":
            return None
        case "halved":
            return schedules.MultiplicativeLR(optimizer, lambda _: 0.5)
        case "StepLR":
            return schedules.StepLR(optimizer, 1, 0.7)
        case "LambdaLR":
            return schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        case "OneCycleLR":
            return schedules.OneCycleLR(optimizer, 0.05, total_steps=8, cycle_momentum=False)
        case "ReduceLROnPlateau":
            return schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        case "SWALR":
            return SWALR(optimizer, 0.02, anneal_epochs=2)
        case _:
            parts = [schedules.LinearLR(optimizer, 0.5, total_iters=2),
                     schedules.CosineAnnealingLR(optimizer, 4)]
            return schedules.SequentialLR(optimizer, parts, [1])
