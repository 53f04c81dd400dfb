"""What happens to a model in training between its steps, and the hooks on it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tests.fuzz import steps

__all__ = ["happen", "hooked", "on_gradients"]


class _Planned(Exception):
    """Raised in the middle of a forward or of a backward."""


def happen(event: str, run: Any, step: int) -> None:
    """Before a step. `run` is the training."""
    model = run.model
    match event:
        case "evaluated" | "inferred":
            model.eval()
            with torch.no_grad() if event == "evaluated" else torch.inference_mode():
                loss = steps.loss_of(run.trial, model, run.placed())
                run.out[f"{event} {step}"] = torch.tensor(loss.item(), dtype=torch.float64)
            model.train()
        case "failed" | "failed back":
            _fail(event, run)
        case "shorter":
            run.batch = (max(1, run.batch[0] - 1), run.batch[1] + 1)
        case "whole":
            run.spec = "none"
        case "toggled":
            for one in model.layers[0].parameters():
                one.requires_grad_(not one.requires_grad)
        case "copied":
            run.copied()
        case "saved":
            run.saved()
        case "pickled" | "full":
            run.loaded(event)
        case "replaced":
            run.replaced(step)
        case "moved":
            run.moved(step)
        case "vector":
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())
        case "shrunk":
            with torch.no_grad():
                for one in model.parameters():
                    one.mul_(0.9)
                next(model.parameters()).data *= 0.9
        case "cast":
            dtype = model.place.dtype
            model.float()
            model.to(dtype)
        case _:
            pass


def _fail(event: str, run: Any) -> None:
    """A step that ends by an exception, in the forward or in the backward."""
    def fail(*_: Any) -> None:
        raise _Planned

    def watch(_: Any, __: Any, out: Any) -> None:
        if out.requires_grad:
            out.register_hook(fail)

    norm = run.model.norm
    hook = norm.register_forward_pre_hook(fail) if event == "failed" else (
        run.model.layers[0].register_forward_hook(watch))
    with suppress(_Planned):
        steps.backward(run.trial, run.model, run.placed())
    hook.remove()
    run.optimizer.zero_grad()


def on_gradients(event: str, model: nn.Module) -> None:
    """Between backward and step."""
    for at, one in enumerate(model.parameters()):
        if one.grad is None:
            continue
        if event == "overflow":  # one element of one
            one.grad.flatten()[-1:].mul_(torch.inf)
            return
        if event == "dropped" and at % 2:
            one.grad = None
        if event == "scaled":
            one.grad.mul_(0.5)
        elif event == "assigned":
            one.grad = one.grad * 0.5 + one.detach() * 0.01


def hooked(kind: str, model: Any) -> list[Any]:
    """Hooks of one kind on layers or parameters; gives what removes them."""
    layers, params = [*model.layers], [*model.parameters()][::2]
    match kind:
        case "forward":
            return [one.register_forward_hook(lambda _, __, out: out * 0.9) for one in layers]
        case "backward":
            return [one.register_full_backward_hook(_halved) for one in layers]
        case "before":
            return [one.register_forward_pre_hook(lambda _, given: given[0] * 0.9)
                    for one in layers]
        case "before back":
            return [one.register_full_backward_pre_hook(
                lambda _, grads: tuple(one * 0.5 for one in grads)) for one in layers]
        case "output":
            return [one.register_forward_hook(_watched) for one in layers]
        case "tensor":
            return [one.register_hook(lambda grad: grad * 0.5) for one in params
                    if one.requires_grad]
        case "after":
            return [one.register_post_accumulate_grad_hook(_shrunk) for one in params
                    if one.requires_grad]
        case _:
            return []


def _watched(_: Any, __: Any, out: Any) -> None:
    if out.requires_grad:
        out.register_hook(lambda grad: grad * 0.5)


def _halved(_: Any, grads: Any, __: Any) -> Any:
    return tuple(None if one is None else one * 0.5 for one in grads)


def _shrunk(param: Any) -> None:
    param.grad.mul_(0.9)
