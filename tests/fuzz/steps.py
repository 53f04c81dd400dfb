"""How a drawn model comes from a batch to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.nn import functional as F

from tests.fuzz.draws import Trial

__all__ = ["backward", "clip", "loss_of"]


def loss_of(trial: Trial, model: Any, ids: Any, weights: Any = None) -> Any:
    """The loss of a batch, by `weights` in the place of the model's own."""
    with _casts(trial), save_on_cpu() if trial.hooks == "on cpu" else nullcontext():
        scores = model(ids) if weights is None else functional_call(model, weights, (ids,))
        return _loss(trial.loss, scores.flatten(0, 1), ids.flatten()) / trial.num_batches


def _casts(trial: Trial) -> Any:
    if trial.precision == "autocast":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return torch.autocast("cpu", enabled=False) if trial.precision == "off" else nullcontext()


def _loss(kind: str, scores: Any, ids: Any) -> Any:
    match kind:
        case "ignored":
            return F.cross_entropy(scores, ids, ignore_index=1, reduction="sum") / len(ids)
        case "smooth":
            return F.cross_entropy(scores, ids, label_smoothing=0.1)
        case "weighted":
            weight = torch.linspace(0.5, 1.5, scores.shape[1], dtype=scores.dtype)
            return F.cross_entropy(scores, ids, weight)
        case "likelihood":
            return F.nll_loss(F.log_softmax(scores, -1), ids)
        case "squares":
            return F.mse_loss(scores, F.one_hot(ids, scores.shape[1]).to(scores.dtype))
        case _:
            return F.cross_entropy(scores, ids)


def backward(
    trial: Trial, model: Any, ids: Any, scale: Callable[[Any], Any] = lambda loss: loss
) -> list[Any]:
    """Add to the gradients, of scaled losses, in the drawn way; gives losses as they are."""
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
        scale(sum(losses)).backward()
        return losses
    for loss in losses:
        if trial.way == "retained":
            scale(loss).backward(retain_graph=True)
        scale(loss).backward()
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
    elif trial.clip == "in two":
        grads = [one.grad for one in params if one.grad is not None]
        yield "norm", (norm := of.get_total_norm(grads))
        of.clip_grads_with_norm_(params, 0.1, norm)
    elif trial.clip:
        for at, one in enumerate(params):
            yield f"norm {at}", of.clip_grad_norm_(one, 0.1, foreach=bool(at % 2) or None)
