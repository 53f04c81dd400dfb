"""Where the model and the batches of a trial lie on a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import weft
from tests.cases.layouts import ragged
from tests.fuzz.draws import Trial, specs_of
from tests.fuzz.models import VOCABULARY, Lora, Model
from weft import P

__all__ = ["built", "layout_of"]


def built(trial: Trial, mesh: Any, salt: int = 1) -> nn.Module:
    """The model, on a mesh (None: in one process), with what is put in later."""
    model = Model(trial)
    if mesh is not None:
        model = _from_meta(trial, mesh, model, salt) if trial.meta else (
            _distributed(trial, mesh, model, salt))
    if trial.lora:
        torch.manual_seed(trial.seed + 2)
        model.head = Lora(model.head, trial.width, VOCABULARY)  # type: ignore[assignment]
        if mesh is not None and trial.lora == "sharded":
            weft.distribute_module(
                model.head, mesh, shardings={"up": P("dp"), "down": P(None, "dp")})
    return model


def _distributed(trial: Trial, mesh: Any, model: Model, salt: int) -> Model:
    stream = {"layers.0": P("dp")} if trial.activations else None
    return weft.distribute_module(
        model, mesh, shardings=specs_of(trial, model, salt), gather=_gather(trial),
        activations=stream)


def _gather(trial: Trial) -> Any:
    if trial.gather == "none":
        return False
    wide, narrow = torch.float64, torch.float32
    options: dict[str, Any] = {}
    if trial.precision == "computed":
        options = {"compute_dtype": narrow, "reduce_dtype": [None, wide][trial.seed % 2]}
    elif trial.precision == "reduced":
        options = {"reduce_dtype": narrow}
    every = weft.nn.Gather(free=trial.gather != "kept", **options)
    if options:
        axes = "dp" if trial.seed % 3 == 0 else None
        return {"": replace(every, axes=axes), "layers.*": replace(every, axes=axes)}
    return {"auto": None, "kept": {"": every}, "layers": {"layers.*": True}}[trial.gather]


def _from_meta(trial: Trial, mesh: Any, plain: Model, salt: int) -> Model:
    """Built without memory; the values are those of a plain model."""
    with torch.device("meta"):
        model = Model(trial)
    _distributed(trial, mesh, model, salt)
    state = plain.state_dict()
    if trial.meta == "assign":
        model.load_state_dict(state, assign=True)
    elif trial.meta == "empty":
        model.to_empty(device="cpu").load_state_dict(state)
    else:
        values = {id(part): own for part, own in zip(model.modules(), plain.modules())}

        def copy(part: nn.Module) -> None:
            with torch.no_grad():
                own = values[id(part)]
                for mine, value in zip(part.parameters(recurse=False), own.parameters(False)):
                    mine.copy_(value)
                for mine, value in zip(part.buffers(recurse=False), own.buffers(False)):
                    mine.copy_(value)

        weft.nn.materialize(model, copy)
    return model


def layout_of(spec: str, mesh: Any, shape: tuple[int, int], seed: int) -> Any:
    """Of a batch of ids."""
    match spec:
        case "both":
            return P(tuple(mesh.mesh_dim_names))
        case "tokens":
            return P(None, "dp")
        case "grid":
            others = [one for one in mesh.mesh_dim_names if one != "dp"]
            return P("dp", *others[-1:])
        case "ragged":
            sizes = ragged(shape[0], mesh.size(mesh.mesh_dim_names.index("dp")), str(seed))
            return weft.Layout(mesh.abstract, shape, P("dp"), sizes={0: sizes})
        case "none":
            return P()
        case _:
            return P("dp")
