"""A drawn trial, trained by one process and by simulated ranks: losses and parameters agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from tests.fuzz import events, steps
from tests.fuzz.draws import Trial, specs_of
from tests.fuzz.models import VOCABULARY, Lora, Model
from weft import P

__all__ = ["Run", "check"]

_SPECS = {"dp": P("dp"), "none": P(), "tokens": P(None, "dp")}
_TOLERANCE, _OF_FLOATS = 1e-8, 2e-4

Run = Callable[[Callable[..., Any], Any, Trial], list[Any]]


def simulated(fn: Callable[..., Any], axes: Any, trial: Trial) -> list[Any]:
    """`fn(mesh, trial)` on every rank."""
    return weft.testing.run(lambda mesh: fn(mesh, trial), mesh=axes)


def check(trial: Trial, run: Run = simulated) -> None:
    """Raise where the ranks differ from one process."""
    due = _Training(trial, None).run()
    found = run(_on_rank, trial.mesh, trial)
    is_float = "grouped" in trial.kinds or "cast" in trial.events
    close = _OF_FLOATS if is_float else _TOLERANCE
    for rank, one in enumerate(found):
        assert one.keys() == due.keys(), f"rank {rank}: {one.keys() ^ due.keys()}"
        for name, value in due.items():
            torch.testing.assert_close(
                one[name], value, rtol=close, atol=close,
                msg=lambda text, at=f"{name} on rank {rank}": f"{at}: {text}")


def _on_rank(mesh: Any, trial: Trial) -> dict[str, Tensor]:
    return _Training(trial, mesh).run()


class _Training:
    """A model, its optimizer and what has come out. `mesh`: None in one process."""

    def __init__(self, trial: Trial, mesh: Any) -> None:
        self.trial, self.mesh = trial, mesh
        self.spec, self.batch = trial.spec, trial.batch
        self.out: dict[str, Tensor] = {}
        self.draw = torch.Generator().manual_seed(trial.seed)
        self.begin(self.built(mesh))
        self.mean = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if trial.average else None

    def built(self, mesh: Any, salt: int = 1) -> nn.Module:
        """The model on a mesh, with what is put in later."""
        trial, model = self.trial, Model(self.trial)
        if mesh is not None:
            gather: Any = {
                "auto": None, "none": False, "kept": {"": weft.nn.Gather(free=False)},
                "layers": {"layers.*": True}}[trial.gather]
            stream = {"layers.0": P("dp")} if trial.activations else None
            weft.distribute_module(
                model, mesh, shardings=specs_of(trial, model, salt), gather=gather,
                activations=stream)
        if trial.lora:
            torch.manual_seed(trial.seed + 2)
            model.head = Lora(model.head, trial.width, VOCABULARY)  # type: ignore[assignment]
            if mesh is not None and trial.lora == "sharded":
                weft.distribute_module(
                    model.head, mesh, shardings={"up": P("dp"), "down": P(None, "dp")})
        return model

    def begin(self, model: nn.Module) -> None:
        """Go on with this model, its parameters in an optimizer of their own."""
        self.model = model
        self.optimizer = steps.optimizer(self.trial, model)
        self.hooks = events.hooked(self.trial.hooks, model)

    def run(self) -> dict[str, Tensor]:
        """The losses, the norms and the last parameters, by name."""
        trial = self.trial
        for step in range(trial.num_steps):
            events.happen(trial.events[step], self, step)
            if trial.schedule:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5
            self._step(step)
            if self.mean is not None:
                self.mean.update_parameters(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        if self.mean is not None:
            named += [(f"mean {name}", one) for name, one in self.mean.named_parameters()]
        return self.out | {name: full(one) for name, one in named}

    def _step(self, step: int) -> None:
        trial, optimizer = self.trial, self.optimizer
        batches = [self.placed() for _ in range(trial.num_batches)]
        if trial.optimizer == "LBFGS":
            def closure() -> Any:
                optimizer.zero_grad()
                return steps.backward(trial, self.model, batches[0])[0]

            self.out[f"loss {step}"] = full(optimizer.step(closure))  # type: ignore[arg-type]
            return
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        held = self.mesh is not None and trial.accumulate
        with weft.nn.accumulate(self.model) if held else nullcontext():
            for at, ids in enumerate(batches):
                for part, loss in enumerate(steps.backward(trial, self.model, ids)):
                    self.out[f"loss {step}.{at}.{part}"] = full(loss)
        events.on_gradients(trial.events[step], self.model)
        self.out |= {f"{name} {step}": full(one) for name, one in steps.clip(trial, self.model)}
        optimizer.step()

    def placed(self) -> Any:
        """The next batch of ids."""
        ids = torch.randint(VOCABULARY, self.batch, generator=self.draw)
        if self.mesh is None:
            return ids
        spec = P(tuple(self.trial.mesh)) if self.spec == "both" else _SPECS[self.spec]
        return weft.distribute_tensor(ids, self.mesh, spec, src_data_rank=None)

    def copied(self) -> None:
        """Go on with a deep copy, and a new optimizer that has the old one's state."""
        state = copy.deepcopy(self.optimizer.state_dict())
        for hook in self.hooks:
            hook.remove()
        self.begin(copy.deepcopy(self.model))
        self.optimizer.load_state_dict(state)

    def saved(self) -> None:
        """Go on with a new model, on a mesh with its axes swapped and with another table."""
        if self.mesh is not None:
            self.mesh = weft.init_mesh(dict(reversed([*self.trial.mesh.items()])))
        before, of_optimizer = self.model.state_dict(), self.optimizer.state_dict()
        model = self.built(self.mesh, salt=3)
        flags = [one.requires_grad for one in self.model.parameters()]
        for param, flag in zip(model.parameters(), flags):
            param.requires_grad_(flag)
        if self.mesh is not None:
            before = weft.reshard(before, model.state_dict())
            of_optimizer = weft.reshard(of_optimizer, self.mesh)
        self.begin(model)
        model.load_state_dict(before)
        self.optimizer.load_state_dict(of_optimizer)


def full(tensor: Any) -> Tensor:
    """The whole of it, as it is now."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, weft.ShardTensor) else tensor.clone()
