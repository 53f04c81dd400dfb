"""Training libraries that would distribute by themselves, over processes."""

from __future__ import annotations

import copy
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.gloo import GlooWorld
from weft import MeshError, ModuleError, P

MESH = {"dp": 2, "tp": 2}


def variables(rank: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    }


def wrapped(mesh: Any) -> list[str]:
    """The module is refused; so are the inputs of a plain one, which goes on with plain inputs."""
    torch.manual_seed(0)
    said = []
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    plain = DistributedDataParallel(copy.deepcopy(module))
    weft.distribute_module(module, mesh, shardings={"0.*": P("tp")})
    with pytest.raises(ModuleError) as error:
        DistributedDataParallel(module)
    said.append(str(error.value))
    x = weft.ones(4, 6, mesh=mesh, spec=P("dp"))
    for call in (lambda: plain(x), lambda: plain(input=x)):
        with pytest.raises(ModuleError) as error:
            call()
        said.append(str(error.value))
    plain(torch.ones(4, 6) * mesh.rank).square().sum().backward()
    said.append(str(plain.module[0].weight.grad.shape))
    return said


def test_ddp_is_refused_on_every_rank(gloo: GlooWorld) -> None:
    outcomes = gloo.run(wrapped, MESH)
    assert all(said == outcomes[0] for said in outcomes)
    module, inputs, by_name, grad = outcomes[0]
    assert module.startswith("DistributedDataParallel(module): 7 of 7 parameters and buffers are")
    assert all("with weft.nn.as_one_process():" in one for one in (module, inputs))
    assert inputs.startswith("DistributedDataParallel.forward(...): 1 of its inputs are")
    assert by_name == inputs and grad == "torch.Size([4, 6])"


def collated(samples: list[Any]) -> dict[str, Any]:
    x, y = (torch.stack(parts) for parts in zip(*samples))
    return {"x": x, "parts": [y, (x.sum(), "name")]}


def loop(mesh: Any) -> list[Any]:
    """Inside, no variable is left, also where the block stands in itself; then all are back."""
    data = TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7.0))
    with mock.patch.dict(os.environ, variables(mesh.rank)):
        with weft.nn.as_one_process(), weft.nn.as_one_process():
            assert not set(variables(0)) & os.environ.keys()
            collate = weft.nn.ShardedCollator(collated, mesh, P("dp", "tp"))
            batches = list(DataLoader(data, batch_size=4, collate_fn=collate))
        assert variables(mesh.rank).items() <= os.environ.items()
    total, name = batches[0]["parts"][1]
    assert name == "name" and total.sharding.is_replicated
    return [
        (str(one["x"].sharding), str(one["parts"][0].sharding), one["x"].full_tensor())
        for one in batches
    ]


def test_a_loader_whose_batches_are_laid_out(gloo: GlooWorld) -> None:
    whole = torch.arange(14.0).view(7, 2)
    for batches in gloo.run(loop, MESH):
        assert [batch[:2] for batch in batches] == [
            ("[4@dp, 2@tp]", "[4@dp]"), ("[3@dp, 2@tp]", "[3@dp]")
        ]
        assert torch.equal(torch.cat([batch[2] for batch in batches]), whole)


def test_variables_are_hidden_after_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="has not met the others"), weft.nn.as_one_process():
        raise AssertionError
    assert os.environ["RANK"] == "1"


needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="no accelerate")


def trained(mesh: Any, way: str) -> tuple[list[float], list[Tensor]]:
    """Losses (of training, then of evaluation) and weights of two epochs; None: in one process."""
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    ))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(33, (7,), generator=generator) for _ in range(11)]
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    collate: Any = default_data_collator
    if mesh is not None:
        collate = weft.nn.ShardedCollator(default_data_collator, mesh, P("dp"))
    if way == "dp x tp":
        weft.distribute_module(model, mesh, shardings={
            "*.gate_proj.weight": P("tp"), "*.up_proj.weight": P("tp"),
            "*.down_proj.weight": P(None, "tp"),
        })
    with tempfile.TemporaryDirectory() as folder, weft.nn.as_one_process():
        trainer = Trainer(
            model, TrainingArguments(
                output_dir=folder, per_device_train_batch_size=4, num_train_epochs=2, seed=3,
                report_to=[], save_strategy="no", eval_strategy="epoch", use_cpu=True,
                logging_steps=1, disable_tqdm=True, learning_rate=0.01, max_grad_norm=0.5,
            ), train_dataset=data, eval_dataset=data[:5], data_collator=collate)
        trainer.train()
    history = trainer.state.log_history
    losses = [one[name] for name in ("loss", "eval_loss") for one in history if name in one]
    weights = [
        one.detach().full_tensor() if type(one) is weft.ShardTensor else one.detach()
        for one in model.parameters()
    ]
    return losses, weights


def trained_by_trainer(mesh: Any, way: str) -> tuple[list[float], list[Tensor]]:
    with mock.patch.dict(os.environ, variables(mesh.rank)):
        import warnings  # noqa: PLC0415

        warnings.simplefilter("ignore", FutureWarning)  # of accelerate and transformers
        warnings.simplefilter("ignore", UserWarning)
        return trained(mesh, way)


@needs_accelerate
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["dp", "dp x tp"])
def test_trainer_of_transformers(gloo: GlooWorld, way: str) -> None:
    losses, weights = trained(None, way="plain")
    assert len(losses) == 8
    for found, others in gloo.run(trained_by_trainer, MESH, way):
        assert torch.allclose(torch.tensor(found), torch.tensor(losses), atol=1e-5)
        for one, other in zip(weights, others):
            assert torch.allclose(one, other, atol=1e-5)


def saved(mesh: Any, folder: str) -> Any:
    """A model with the same values on every rank, saved by all of them together."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    ))
    if mesh is not None:
        weft.distribute_module(model, mesh, shardings={"*.weight": P(("tp", "dp"))})
        model.save_pretrained(folder)
        assert torch.distributed.get_rank() == mesh.rank  # hidden from transformers meanwhile
    return None if mesh is not None else (model, LlamaForCausalLM.from_pretrained(folder))


@pytest.mark.filterwarnings("ignore")
def test_save_pretrained_is_a_call_of_all_ranks(gloo: GlooWorld, tmp_path: Path) -> None:
    gloo.run(saved, MESH, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"]
    model, found = saved(None, str(tmp_path))
    for name, value in found.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
