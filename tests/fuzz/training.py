"""A drawn trial, trained by one process and by simulated ranks: losses and parameters agree."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.fuzz.draws import VOCABULARY, Lora, Model, Trial, specs_of
from weft import P

__all__ = ["check"]

_SPECS = {"dp": P("dp"), "none": P(), "tokens": P(None, "dp")}
_TOLERANCE, _OF_FLOATS = 1e-8, 2e-4


def check(trial: Trial) -> None:
    """Raise where the ranks differ from one process."""
    due = _trained(trial, Model(trial), None)
    found = weft.testing.run(lambda mesh: _on_rank(trial, mesh), mesh=trial.mesh)
    close = _OF_FLOATS if "grouped" in trial.kinds else _TOLERANCE
    for rank, one in enumerate(found):
        assert one.keys() == due.keys(), f"rank {rank}: {one.keys() ^ due.keys()}"
        for name, value in due.items():
            torch.testing.assert_close(
                one[name], value, rtol=close, atol=close,
                msg=lambda text, at=f"{name} on rank {rank}": f"{at}: {text}")


def _on_rank(trial: Trial, mesh: Any) -> dict[str, Tensor]:
    model = Model(trial)
    gather: Any = {
        "auto": None, "none": False, "kept": {"": weft.nn.Gather(free=False)},
        "layers": {"layers.*": True}}[trial.gather]
    weft.distribute_module(model, mesh, shardings=specs_of(trial, model), gather=gather)
    return _trained(trial, model, mesh)


def _trained(trial: Trial, model: nn.Module, mesh: Any) -> dict[str, Tensor]:
    """The losses, the norms and the last parameters."""
    if trial.lora:
        _put_lora_in(trial, model, mesh)
    optimizer = _optimizer(trial, model)
    draw = torch.Generator().manual_seed(trial.seed)
    out: dict[str, Tensor] = {}
    for step in range(trial.num_steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with weft.nn.accumulate(model) if mesh is not None and trial.accumulate else nullcontext():
            for at in range(trial.num_batches):
                ids = _placed(trial, torch.randint(VOCABULARY, trial.batch, generator=draw), mesh)
                loss = _loss(trial, model, ids)
                if loss.requires_grad:
                    loss.backward()
                out[f"loss {step}.{at}"] = _full(loss)
        if trial.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            out[f"norm {step}"] = _full(norm)
        optimizer.step()
    return out | {name: _full(one) for name, one in model.named_parameters()}


def _loss(trial: Trial, model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False) if trial.autocast else nullcontext():
        scores = model(ids)
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten()) / trial.num_batches


def _full(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, weft.ShardTensor) else tensor.clone()


def _placed(trial: Trial, ids: Tensor, mesh: Any) -> Any:
    if mesh is None:
        return ids
    spec = P(tuple(trial.mesh)) if trial.spec == "both" else _SPECS[trial.spec]
    return weft.distribute_tensor(ids, mesh, spec, src_data_rank=None)


def _put_lora_in(trial: Trial, model: Any, mesh: Any) -> None:
    torch.manual_seed(trial.seed + 2)
    model.head = Lora(model.head, trial.width, VOCABULARY)
    if mesh is not None and trial.lora == "sharded":
        weft.distribute_module(model.head, mesh, shardings={"up": P("dp"), "down": P(None, "dp")})


def _optimizer(trial: Trial, model: nn.Module) -> torch.optim.Optimizer:
    wanted = [one for one in model.parameters() if one.requires_grad]
    name, _, how = trial.optimizer.partition(" ")
    if name == "sgd":
        return torch.optim.SGD(wanted, lr=0.1, momentum=0.9)
    if name == "rmsprop":
        return torch.optim.RMSprop(wanted, lr=0.01, eps=1e-3)
    options: dict[str, Any] = {how: True} if how else {}
    return torch.optim.AdamW(wanted, lr=0.01, eps=1e-3, **options)
