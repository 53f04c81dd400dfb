"""How a drawn model comes from a batch to gradients, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.fuzz.draws import Trial

__all__ = ["backward", "clip", "loss_of", "optimizer"]


def loss_of(trial: Trial, model: Any, ids: Any, weights: Any = None) -> Any:
    """The loss of a batch, by `weights` in the place of the model's own."""
    with torch.autocast("cpu", enabled=False) if trial.autocast else nullcontext():
        scores = model(ids) if weights is None else functional_call(model, weights, (ids,))
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten()) / trial.num_batches


def backward(trial: Trial, model: Any, ids: Any) -> list[Any]:
    """Add to the gradients in the drawn way; gives losses."""
    match trial.way:
        case "functional":
            losses = [loss_of(trial, model, ids, dict(model.named_parameters()))]
        case "two losses" | "twice":  # two graphs that share the leaves
            losses = [loss_of(trial, model, ids), loss_of(trial, model, ids.flip(1))]
        case "inner" | "penalty":
            losses = _second_order(trial, model, ids)
        case _:
            losses = [loss_of(trial, model, ids)]
    if not any(loss.requires_grad for loss in losses):
        return losses
    if trial.way == "twice":
        sum(losses).backward()
        return losses
    for loss in losses:
        if trial.way == "retained":
            loss.backward(retain_graph=True)
        loss.backward()
    return losses


def _second_order(trial: Trial, model: Any, ids: Any) -> list[Any]:
    """After an inner step of gradient descent, or with a penalty on gradients."""
    weights = dict(model.named_parameters())
    wanted = [name for name, one in weights.items() if one.requires_grad]
    before = loss_of(trial, model, ids)
    if not before.requires_grad:
        return [before]
    found = torch.autograd.grad(
        before, [weights[name] for name in wanted], create_graph=True, allow_unused=True)
    slopes = {name: one for name, one in zip(wanted, found) if one is not None}
    if trial.way == "penalty":
        return [before + 0.1 * sum((one ** 2).sum() for one in slopes.values())]
    stepped = {name: weights[name] - 0.1 * slope for name, slope in slopes.items()}
    return [loss_of(trial, model, ids.flip(0), weights | stepped)]


def clip(trial: Trial, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Clip in the drawn way; gives norms."""
    params, of = [*model.parameters()], nn.utils
    if trial.clip in ("2", "inf"):
        yield "norm", of.clip_grad_norm_(params, 0.1, float(trial.clip))
    elif trial.clip == "value":
        of.clip_grad_value_(params, 0.01)
    elif trial.clip:
        for at, one in enumerate(params):
            yield f"norm {at}", of.clip_grad_norm_(one, 0.1, foreach=bool(at % 2) or None)


def optimizer(trial: Trial, model: nn.Module) -> Any:
    """Of all parameters, so that those may learn later that do not yet."""
    every = [*model.parameters()]
    name, _, how = trial.optimizer.partition(" ")
    options: dict[str, Any] = {how: True} if how else {}
    if name == "LBFGS":
        return torch.optim.LBFGS(every, 0.1, max_iter=3)
    if name == "SGD":
        options |= {"lr": 0.1, "momentum": 0.9}
    else:
        options |= {"lr": 0.01, "eps": 1e-3}
    groups: Any = every
    if trial.groups:
        groups = [{"params": [one for one in every if one.dim() > 1], "weight_decay": 0.1},
                  {"params": [one for one in every if one.dim() < 2], "lr": 0.02}]
    return getattr(torch.optim, name)(groups, **options)
