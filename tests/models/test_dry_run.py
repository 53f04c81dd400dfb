"""A dry run of a model says what a run says: the same collectives, and the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from bench.training import models
from tests.effort import drawn
from tests.models import test_autoencoders, test_sequences
from tests.models.catalogue import MODELS
from tests.models.fields import FIELDS
from tests.models.peaks import MESHES
from tests.models.training import WAYS, distributed
from weft import P
from weft.testing import peak_memory


def two_steps(model: Any, given: list[Tensor], loss: Callable[[], Tensor]) -> tuple[Any, int]:
    """What the second says."""
    optimizer = torch.optim.AdamW(model.parameters())
    events, peak = [], 0
    for _ in range(2):
        with peak_memory(model, optimizer, *given) as memory, weft.explain() as log:
            loss().backward()
            optimizer.step()
        optimizer.zero_grad()
        events, peak = log.events, memory.peak
    return [facts(event) for event in events], peak


def facts(event: Any) -> tuple[Any, ...]:
    return (event.op, event.line, event.module, event.transition, event.axes, event.collective,
            event.nbytes, event.direction)


def of_catalogue(mesh: Any, name: str, way: str, size: str) -> tuple[Any, int]:
    model, inputs = distributed(mesh, WAYS[way], name, size, "sdpa", 0.0)
    return two_steps(model, list(inputs.values()), lambda: model(**inputs).loss)


def of_field(mesh: Any, name: str, spec: P) -> tuple[Any, int]:
    shape = (mesh.axis_sizes[0] if spec[0] else 1, *FIELDS[name].uneven[1:])
    model, field = FIELDS[name].make(shape)
    weft.distribute_module(model, mesh)
    field = weft.distribute_tensor(field, mesh, spec)
    return two_steps(model, [field], lambda: model(field).square().mean())


def of_autoencoder(mesh: Any) -> tuple[Any, int]:
    build, shape = test_autoencoders.MODELS["kl"]
    model: Any = build()
    weft.distribute_module(model, mesh)
    x = weft.distribute_tensor(torch.randn(1, *shape), mesh, P(None, None, "x", "y"))
    return two_steps(
        model, [x], lambda: model.decode(model.encode(x).latent_dist.mode()).sample.square().mean())


def of_sequence(mesh: Any) -> tuple[Any, int]:
    model = test_sequences.llama(3, 3)
    weft.distribute_module(model, mesh)
    ids = weft.distribute_tensor(torch.randint(0, 64, (2, 32)), mesh, P(None, "x"))
    return two_steps(model, [ids], lambda: model(input_ids=ids, labels=ids).loss)


def fully_sharded(mesh: Any) -> tuple[Any, int]:
    """Groups of parameters, checkpoints, and two microbatches for a step."""
    shape = models.Shape(layers=3, width=64, batch=2, length=32, checkpoints=True)
    made = models.MODELS["Llama"]
    model = made.make(shape)
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    given = weft.distribute_tensor(made.given(shape, 8), mesh, P("dp"))

    def loss() -> Tensor:
        with weft.nn.accumulate(model):
            made.loss(model(given), given).backward()
        return made.loss(model(given), given)

    return two_steps(model, [given], loss)


def cast_in_groups(mesh: Any) -> tuple[Any, int]:
    """Gathered parameters travel in autocast's dtype."""
    shape, made = models.Shape(layers=3, width=64, batch=2, length=32), models.MODELS["Llama"]
    model = made.make(shape)
    weft.distribute_module(model, mesh, shardings={"*": P("dp")})
    given = weft.distribute_tensor(made.given(shape, 8), mesh, P("dp"))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made.loss(model(given), given)

    return two_steps(model, [given], loss)


def cast(mesh: Any) -> tuple[Any, int]:
    shape, made = models.Shape(layers=2, width=64, batch=2, length=32), models.MODELS["Llama"]
    model = made.make(shape)
    weft.distribute_module(model, mesh)
    given = weft.distribute_tensor(made.given(shape, 8), mesh, P("dp"))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(given)
            assert out.dtype is out.to_local().dtype is torch.bfloat16
            return made.loss(out, given)

    return two_steps(model, [given], loss)


Program = tuple[Mapping[str, int], Callable[[Any], tuple[Any, int]]]

OF_MODELS: dict[str, Program] = {
    **{f"{name}, {way}": (WAYS[way].mesh, partial(of_catalogue, name=name, way=way, size="uneven"))
       for name in MODELS if name != "mixtral" for way in WAYS if way != "one rank"},
    **{f"{name}, {way}": (MESHES[way][0], partial(of_field, name=name, spec=P(*MESHES[way][1])))
       for name in FIELDS for way in ("samples and rows",)},
}
PROGRAMS: dict[str, Program] = {
    **{name: OF_MODELS[name] for name in drawn([*OF_MODELS])},
    "autoencoder": (MESHES["two dims"][0], of_autoencoder),
    "long sequence": ({"x": 4}, of_sequence),
    "autocast": ({"dp": 4}, cast),
    "autocast in groups": ({"dp": 4}, cast_in_groups),
    "fully sharded": ({"dp": 4}, fully_sharded),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_a_run(name: str) -> None:
    """Bytes are equal, collective by collective; memory within 1 %."""
    axes, program = PROGRAMS[name]
    real = weft.testing.run(program, mesh=axes)
    for rank in (0, 2 if axes == WAYS["dp"].mesh else 3):  # there the last has no sample
        dry = weft.dry_run(program, axes, rank=rank)
        expected, peak = real[rank]
        assert [facts(event) for event in dry.log.events] == expected
        assert dry.log.events
        assert dry.memory.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("way", ["tp", "dp x tp", "tp with sequences"])
def test_experts_of_a_tensor_parallel_model(way: str) -> None:
    """Their routes are those of random data; positions that follow from them are known."""
    program = partial(of_catalogue, name="mixtral", way=way, size="uneven")
    axes = WAYS[way].mesh
    real, dry = weft.testing.run(program, mesh=axes), weft.dry_run(program, axes)
    (expected, peak), found = real[0], [facts(event) for event in dry.log.events]
    assert abs(len(found) - len(expected)) <= 4
    due = sum(event[6] for event in expected)
    assert sum(event[6] for event in found) == pytest.approx(due, rel=0.15)
    assert dry.memory.peak == pytest.approx(peak, rel=0.02)


def test_experts_get_about_as_many_tokens_as_in_a_run() -> None:
    """Which, data decide: positions that nobody knows are those of random data."""
    def program(mesh: Any) -> tuple[Any, int]:
        return of_catalogue(mesh, "mixtral", "dp", "uneven")

    def of_tokens(events: list[tuple[Any, ...]]) -> tuple[int, int]:
        received = [event[6] for event in events if event[5] == "AllToAll"]
        return len(received), sum(received)

    real = weft.testing.run(program, mesh={"dp": 4})
    dry = weft.dry_run(program, {"dp": 4})
    (expected, peak), found = real[0], [facts(event) for event in dry.log.events]
    (due, of_run), (num, nbytes) = of_tokens(expected), of_tokens(found)
    assert num == due and of_run / 2 < nbytes < of_run * 2
    assert dry.memory.peak == pytest.approx(peak, rel=0.01)
