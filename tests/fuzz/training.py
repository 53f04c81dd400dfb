"""A drawn trial, trained by one process and by simulated ranks: losses and parameters agree."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils._pytree import tree_map_only

import weft
from tests.fuzz import events, steps
from tests.fuzz.blocks import Block
from tests.fuzz.draws import Trial, specs_of
from tests.fuzz.models import VOCABULARY, dtype_of
from tests.fuzz.optimizers import Optimizers
from tests.fuzz.places import built, layout_of

__all__ = ["Run", "check"]

_TOLERANCE, _OF_FLOATS = 1e-8, 2e-4
_OF_BFLOAT16 = 0.05

Run = Callable[[Callable[..., Any], Any, Trial], list[Any]]


def simulated(fn: Callable[..., Any], axes: Any, trial: Trial) -> list[Any]:
    """`fn(mesh, trial)` on every rank."""
    return weft.testing.run(lambda mesh: fn(mesh, trial), mesh=axes)


def check(trial: Trial, run: Run = simulated) -> None:
    """Raise where the ranks differ from one process."""
    due = _Training(trial, None).run()
    narrow = trial.precision == "autocast"
    exact = _Training(replace(trial, precision=""), None).run() if narrow else {}
    found = run(_on_rank, trial.mesh, trial)
    is_float = "grouped" in trial.kinds or "cast" in trial.events or (
        trial.precision in ("computed", "reduced"))
    close = _OF_FLOATS if is_float else _TOLERANCE
    for rank, one in enumerate(found):
        assert one.keys() == due.keys(), f"rank {rank}: {one.keys() ^ due.keys()}"
        for name, value in due.items():
            if narrow:
                if name.startswith(("loss 0", "gradient")):  # the next depend on it wildly
                    _check_narrow(f"{name} on rank {rank}", one[name], value, exact[name])
                continue
            torch.testing.assert_close(
                one[name], value, rtol=close, atol=close, equal_nan=True,
                check_dtype=trial.precision != "computed",
                msg=lambda text, at=f"{name} on rank {rank}": f"{at}: {text}")


def _check_narrow(what: str, found: Tensor, due: Tensor, exact: Tensor) -> None:
    """Sums of products in bfloat16 are right as a whole; an element near zero need not be. Where
    one process is far from the exact value itself, ranks are not much farther."""
    assert found.dtype == due.dtype, f"{what}: {found.dtype}, not {due.dtype}"
    away, size = (found - due).double().norm(), due.double().norm()
    few = 1e-3 * due.numel() ** 0.5
    if away > _OF_BFLOAT16 * size + few:
        far, due_far = (found - exact).double().norm(), (due - exact).double().norm()
        assert far <= 2 * due_far + few, f"{what}: {away:.3g} of {size:.3g} away, {far:.3g} of " \
            f"the exact value, from which one process is {due_far:.3g} away"


def _on_rank(mesh: Any, trial: Trial) -> dict[str, Tensor]:
    return _Training(trial, mesh).run()


class _Training:
    """A model, its optimizer and what has come out. `mesh`: None in one process."""

    def __init__(self, trial: Trial, mesh: Any) -> None:
        self.trial, self.mesh = trial, mesh
        self.spec, self.batch = trial.spec, trial.batch
        self.out: dict[str, Tensor] = {}
        self.draw = torch.Generator().manual_seed(trial.seed)
        self.begin(built(trial, mesh))
        averages: dict[str, Any] = {
            "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, "swa": {},
            "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True}}
        self.mean = AveragedModel(
            self.model, **averages[trial.average]) if trial.average else None

    def begin(self, model: nn.Module) -> None:
        """Go on with this model, its parameters in an optimizer of their own."""
        self.model = model
        self.optimizer = Optimizers(self.trial, model)
        self.hooks = events.hooked(self.trial.hooks, model)

    def run(self) -> dict[str, Tensor]:
        """The losses, the norms, the first gradients and the last parameters, by name."""
        trial = self.trial
        for step in range(trial.num_steps):
            events.happen(trial.events[step], self, step)
            self.optimizer.scheduled(self._step(step))
            if self.mean is not None:
                self.mean.update_parameters(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        if self.mean is not None:
            if trial.average == "swa":
                update_bn([self.placed()], self.mean)
            named += [(f"mean {name}", one) for name, one in self.mean.named_parameters()]
            named += [(f"mean {name}", one) for name, one in self.mean.named_buffers()]
        return self.out | {name: full(one) for name, one in named}

    def _step(self, step: int) -> Any:
        trial, optimizer = self.trial, self.optimizer
        batches = [self.placed() for _ in range(trial.num_batches)]
        if trial.optimizer == "LBFGS":
            def closure() -> Any:
                optimizer.zero_grad()
                return steps.backward(trial, self.model, batches[0])[0]

            self.out[f"loss {step}"] = full(loss := optimizer.step(closure))
            return loss
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        held, loss = self.mesh is not None and trial.accumulate, None
        with weft.nn.accumulate(self.model) if held else nullcontext():
            for at, ids in enumerate(batches):
                losses = steps.backward(trial, self.model, ids, optimizer.scaler.scale)
                for part, loss in enumerate(losses):
                    self.out[f"loss {step}.{at}.{part}"] = full(loss)
        if step == 0:
            self.out |= {f"gradient of {name}": full(one.grad)
                         for name, one in self.model.named_parameters() if one.grad is not None}
        events.on_gradients(trial.events[step], self.model)
        optimizer.unscale()
        self.out |= {f"{name} {step}": full(one) for name, one in steps.clip(trial, self.model)}
        optimizer.step()
        return loss

    def placed(self) -> Any:
        """The next batch of ids."""
        ids = torch.randint(VOCABULARY, self.batch, generator=self.draw)
        if self.mesh is None:
            return ids
        layout = layout_of(self.spec, self.mesh, self.batch, self.trial.seed)
        return weft.distribute_tensor(ids, self.mesh, layout, src_data_rank=None)

    def copied(self) -> None:
        """Go on with a deep copy, and a new optimizer that has the old one's state."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self._unhooked()
        self.begin(copy.deepcopy(self.model))
        self.optimizer.load_state_dict(state)

    def saved(self) -> None:
        """Go on with a new model, on a mesh with its axes swapped and with another table."""
        if self.mesh is not None:
            self.mesh = weft.init_mesh(dict(reversed([*self.trial.mesh.items()])))
        model = built(self.trial, self.mesh, salt=3)
        state, of_optimizer = self.model.state_dict(), self.optimizer.state_dict()
        if self.mesh is not None:
            state = weft.reshard(state, model.state_dict())
            of_optimizer = [weft.reshard(one, self.mesh) for one in of_optimizer]
        self._go_on(model, state, of_optimizer)

    def loaded(self, event: str) -> None:
        """Go on with a new model, from a file of each rank's blocks, or from full tensors."""
        states: Any = self.model.state_dict(), self.optimizer.state_dict()
        if event == "pickled":
            torch.save(states, file := io.BytesIO())
            file.seek(0)
            states = torch.load(file, weights_only=True)
        else:
            states = tree_map_only(Tensor, full, states)
        salt = 1 if event == "pickled" else 5
        self._go_on(built(self.trial, self.mesh, salt), *states)

    def _go_on(self, model: nn.Module, state: Any, of_optimizer: Any) -> None:
        for param, one in zip(model.parameters(), self.model.parameters(), strict=True):
            param.requires_grad_(one.requires_grad)
        self.begin(model)
        model.load_state_dict(state)
        self.optimizer.load_state_dict(of_optimizer)

    def replaced(self, step: int) -> None:
        """The first block gives way to a new one, which need not be distributed."""
        trial, model = self.trial, self.model
        self._unhooked()
        torch.manual_seed(trial.seed + step)
        block = Block(trial.kinds[0], trial.width, trial.heads).to(dtype_of(trial))
        if self.mesh is not None and trial.seed % 2:
            weft.distribute_module(block, self.mesh, shardings=specs_of(trial, block, 7))
        model.layers[0] = block  # type: ignore[index, operator]
        self.begin(model)

    def moved(self, step: int) -> None:
        """Parameters take other layouts where they are."""
        if self.mesh is None:
            return
        table = specs_of(self.trial, self.model, 9 + step)
        for name, one in self.model.named_parameters():
            if name in table and isinstance(one, weft.ShardTensor):
                one.data = one.detach().redistribute(placements=table[name])

    def _unhooked(self) -> None:
        for hook in self.hooks:
            hook.remove()


def full(tensor: Any) -> Tensor:
    """The whole of it, as it is now."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, weft.ShardTensor) else tensor.clone()
