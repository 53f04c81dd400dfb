"""What else models are used for: generation, checkpoints, outputs, losses by count, saving."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.models.catalogue import MODELS
from tests.models.training import WAYS, distributed
from weft import P, ShardTensor

WAY = WAYS["dp x tp"]


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, ShardTensor) else value).detach()


def both(use: Any, name: str, attention: str = "sdpa") -> tuple[Any, list[Any]]:
    """What `use(model, inputs)` gives on plain tensors, and on the ranks of a mesh."""
    model = MODELS[name].make("uneven", attention)
    expected = use(model, MODELS[name].inputs("uneven"))
    return expected, weft.testing.run(
        lambda mesh: use(*distributed(mesh, WAY, name, "uneven", attention, 0.0)), mesh=WAY.mesh
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_generation(name: str) -> None:
    """With a cache of keys and values that grows by a position at a time."""
    def use(model: Any, inputs: Any) -> Tensor:
        model.eval()
        prompt = inputs["input_ids"][:4, :5]
        return full(model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        ))

    expected, got = both(use, name)
    for mine in got:
        assert torch.equal(mine, expected)


def test_sampling_gathers_no_parameter() -> None:
    """Sampled tokens are sharded as the prompt, so the model stays where it is."""
    def program(mesh: Any) -> Any:
        model, inputs = distributed(mesh, WAY, "llama", "uneven", "sdpa", 0.0)
        model.eval()
        prompt = inputs["input_ids"][:4, :5]
        with weft.explain() as log:
            found = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3,
                do_sample=True, top_k=7, top_p=0.9, pad_token_id=0, eos_token_id=None)
        return prompt.sharding.spec, found.sharding.spec, [event.op for event in log.events]

    for given, found, ops in weft.testing.run(program, mesh=WAY.mesh):
        assert found == given
        assert not [op for op in ops if op.startswith("parameters of")]


@pytest.mark.filterwarnings("ignore:__setitem__")  # into a plain tensor
def test_beams_without_groups_gather_no_parameter() -> None:
    def use(model: Any, prompt: Tensor) -> Tensor:
        return full(model.eval().generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3,
            num_beams=3, pad_token_id=0, eos_token_id=None))

    model, prompt = MODELS["llama"].make("uneven", "sdpa"), torch.arange(20).view(4, 5)

    def program(mesh: Any) -> Any:
        mine = copy.deepcopy(model)
        weft.distribute_module(mine, mesh, shardings=MODELS["llama"].shardings, gather=False)
        with weft.explain() as log:
            found = use(mine, weft.distribute_tensor(prompt, mesh, WAY.batch))
        return found, [event.op for event in log.events]

    for found, ops in weft.testing.run(program, mesh=WAY.mesh):
        assert torch.equal(found, use(copy.deepcopy(model), prompt))
        assert not [op for op in ops if op.startswith("parameters of")]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    """The blocks run again in backward, and do the same."""
    def use(model: Any, inputs: Any) -> list[Tensor]:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model(**inputs, use_cache=False).loss.backward()
        return [full(each.grad) for each in model.parameters()]

    expected, got = both(use, "llama")
    for mine in got:
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-5)


def test_outputs_and_a_loss_by_count() -> None:
    def use(model: Any, inputs: Any) -> list[Tensor]:
        out = model(
            **inputs, output_hidden_states=True, output_attentions=True,
            num_items_in_batch=torch.tensor(17),
        )
        return [full(each) for each in (out.loss, out.logits, *out.hidden_states, *out.attentions)]

    expected, got = both(use, "llama", "eager")
    for mine in got:
        torch.testing.assert_close(mine, expected)


def test_autocast() -> None:
    def use(model: nn.Module, inputs: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        return loss.item()

    expected, got = both(use, "llama")
    for mine in got:
        assert mine == pytest.approx(expected, rel=2 ** -8)  # bfloat16's


def test_no_op_of_a_step_gathers() -> None:
    """Under strict mode what moves is refused by the call that would move it. All that a step over
    dp asks for is what the program writes down: counts of a mask, those of a mean, and the loss."""
    def program(mesh: Any) -> list[str]:
        model, inputs = distributed(mesh, WAYS["dp"], "llama", "uneven", "sdpa", 0.0)
        with weft.explain() as log:
            model(**inputs).loss.backward()
        return [event.op for event in log.events if event.direction == "forward"]

    for ops in weft.testing.run(program, mesh=WAYS["dp"].mesh):
        assert set(ops) <= {"aten.eq.Scalar", "aten.index.Tensor", "aten.div.Tensor",
                            "aten.cross_entropy_loss.default"}


def test_saving_as_one_process_does(tmp_path: Path) -> None:
    """Each rank writes its blocks; the files are those of the plain model."""
    def program(mesh: Any) -> Any:
        model, _ = distributed(mesh, WAY, "llama", "uneven", "sdpa", 0.0)
        model.save_pretrained(tmp_path)

    weft.testing.run(program, mesh=WAY.mesh)
    original = MODELS["llama"].make("uneven", "sdpa")
    loaded = type(original).from_pretrained(tmp_path)
    for (name, mine), each in zip(loaded.named_parameters(), original.parameters()):
        assert torch.equal(mine, each), name


def test_plain_parameters() -> None:
    """Without any call: parameters count as replicated, their gradients are whole on every rank."""
    def program(mesh: Any) -> list[Tensor | None]:
        model = MODELS["gpt2"].make("uneven", "sdpa")
        inputs = MODELS["gpt2"].inputs("uneven")
        model(**{
            name: weft.distribute_tensor(each, mesh, P("dp")) for name, each in inputs.items()
        }).loss.backward()
        return [each.grad for each in model.parameters()]

    model = MODELS["gpt2"].make("uneven", "sdpa")
    model(**MODELS["gpt2"].inputs("uneven")).loss.backward()
    expected = [each.grad for each in model.parameters()]
    for mine in weft.testing.run(program, mesh={"dp": 2}):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-5)
