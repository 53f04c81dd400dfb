"""Modules on the meta device: laid out without memory, materialized shard by shard, and the same
on every mesh as on one rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models import llama

import weft
from tests.harness import ranks
from weft import P, ShardTensor, UnsupportedOpError
from weft.errors import ModuleError
from weft.nn import materialize

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 9),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Embedding": lambda: nn.Embedding(7, 5, padding_idx=2),
    "EmbeddingBag": lambda: nn.EmbeddingBag(7, 5),
    "LayerNorm": lambda: nn.LayerNorm(5),
    "RMSNorm": lambda: nn.RMSNorm(5),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "BatchNorm": lambda: nn.BatchNorm1d(5),
    "Conv2d": lambda: nn.Conv2d(3, 5, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(3, 5, 3),
    "PReLU": lambda: nn.PReLU(5),
    "LSTM": lambda: nn.LSTM(3, 4, bidirectional=True),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(6, 2, add_bias_kv=True),
    "MultiheadAttention of other widths": lambda: nn.MultiheadAttention(6, 2, kdim=3, vdim=5),
    "Transformer": lambda: nn.Transformer(6, 2, 1, 1, 9, batch_first=True),
}

def laid(module: nn.Module, mesh: Any) -> nn.Module:
    shardings = {
        name: P("x") if each.ndim == 1 else P(None, "x") if "weight" in name else P()
        for name, each in [*module.named_parameters(), *module.named_buffers()]
    }
    return weft.distribute_module(module, mesh, shardings=shardings)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def full_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.full_tensor() for name, each in module.state_dict().items()}


def everywhere(fn: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `fn` gives on one rank, once two and three ranks have given the same."""
    first, *_ = weft.testing.run(fn, mesh={"x": 1})
    for num_ranks in (2, 3):
        for found in weft.testing.run(fn, mesh={"x": num_ranks}):
            assert found.keys() == first.keys()
            for name in first:
                torch.testing.assert_close(found[name], first[name], rtol=0, atol=0)
    return first


@pytest.mark.parametrize("name", LAYERS)
def test_layers_start_alike_on_every_mesh(name: str) -> None:
    def on_rank(mesh: Any) -> dict[str, Tensor]:
        module = laid(on_meta(LAYERS[name]), mesh)
        assert all(each.is_meta and each.device.type == "meta" for each in module.parameters())
        torch.manual_seed(3)
        assert materialize(module) is module
        assert not any(each.is_meta for each in module.state_dict().values())
        return full_state(module)

    found = everywhere(on_rank)
    dense = LAYERS[name]().state_dict()
    assert {key: each.shape for key, each in found.items()} == {
        key: each.shape for key, each in dense.items()}
    for key, each in dense.items():  # as torch initializes: the same constants, ranges of draws
        if each.numel() and (each == each.flatten()[0]).all():
            assert torch.equal(found[key], each), key
        else:
            assert found[key].abs().max() <= 3 * each.abs().max() and found[key].std() > 0, key


def test_it_is_what_the_module_draws_itself() -> None:
    """No other values than `reset_parameters` on tensors that have memory."""
    def on_rank(mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        made = [laid(on_meta(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))), mesh)
                for _ in range(2)]
        torch.manual_seed(3)
        materialize(made[0])
        made[1].to_empty(device="cpu")
        torch.manual_seed(3)
        for part in made[1]:  # type: ignore[attr-defined]
            part.reset_parameters()
        return full_state(made[0]), full_state(made[1])

    for one, other in weft.testing.run(on_rank, mesh={"x": 2}):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_what_a_module_does_to_its_parts_is_done_after_them() -> None:
    """`nn.Transformer` draws all matrices anew, from wider ranges than its Linears."""
    def on_rank(mesh: Any) -> dict[str, Tensor]:
        module = laid(on_meta(LAYERS["Transformer"]), mesh)
        torch.manual_seed(3)
        return full_state(materialize(module))

    torch.manual_seed(3)
    dense = nn.Transformer(6, 2, 1, 1, 9, batch_first=True).state_dict()
    name = "encoder.layers.0.linear1.weight"
    for weight in (everywhere(on_rank)[name], dense[name]):
        assert 6**-0.5 < weight.abs().max() <= (6 / (6 + 9)) ** 0.5


class Largest(TorchDispatchMode):
    """The largest memory behind any result of any op of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor) and not one.is_meta and type(one) is not ShardTensor:
                self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return out


def test_no_rank_ever_holds_a_whole_parameter() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(512, 64, padding_idx=0), nn.Linear(64, 512), nn.Linear(512, 64),
            nn.LSTM(64, 64))

    def on_rank(mesh: Any) -> tuple[int, int]:
        with Largest() as built:
            module = on_meta(build)
            weft.distribute_module(module, mesh, shardings={
                "2.weight": P(None, "x"), "*weight*": P("x"), "*": P("x")})
        with Largest() as seen:
            materialize(module)
        blocks = [each.to_local().nbytes for each in module.parameters()]  # type: ignore
        assert max(blocks) == 512 * 64 * 4 // 4
        return built.nbytes, seen.nbytes // max(blocks)

    # (A draw of a narrow block looks at up to all that lies between its rows, in bits of 8 bytes,
    # a piece at a time.)
    for built, blocks in weft.testing.run(on_rank, mesh={"x": 4}):
        assert built == 0 and blocks <= 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
        self.head.weight = self.token.weight


def test_of_tied_weights_the_first_owner_initializes() -> None:
    def on_rank(mesh: Any) -> dict[str, Tensor]:
        tied: Any = on_meta(Tied)
        module = weft.distribute_module(
            tied, mesh, shardings={"token.*": P("x"), "head.bias": P("x")})
        weight = module.token.weight
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        torch.manual_seed(3)
        materialize(module)
        assert module.head.weight is module.token.weight is weight
        state = full_state(module)
        torch.manual_seed(3)
        expected = weft.randn(7, 5, mesh=mesh)
        assert torch.equal(state["token.weight"], expected.to_local())
        module.head(module.token(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
        assert not torch.equal(module.token.weight.full_tensor(), state["token.weight"])
        return state

    everywhere(on_rank)


def test_a_function_of_the_user_s_initializes_as_by_apply() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6, bias=False)
            self.scale = nn.Parameter(torch.empty(6))
            self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, Scaled):
            nn.init.ones_(module.scale)
            module.steps = torch.arange(3)

    called: list[str] = []

    def on_rank(mesh: Any) -> dict[str, Tensor]:
        module: Any = laid(on_meta(Scaled), mesh)
        torch.manual_seed(3)
        materialize(module, init)
        steps = module.steps
        assert type(steps) is Tensor  # what the function put there stays
        return {"weight": module.inner.weight.full_tensor(), "scale": module.scale.full_tensor()}

    assert everywhere(on_rank)["weight"].std() < 0.05
    assert called[:2] == ["Linear", "Scaled"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_llama_initializes_itself() -> None:
    """By what its library gives to `Module.apply`, which makes the rotary tables, too."""
    config = llama.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=36, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)

    def on_rank(mesh: Any) -> dict[str, Tensor]:
        model: Any = on_meta(lambda: llama.LlamaForCausalLM(config))
        weft.distribute_module(model, mesh, shardings={
            "*.embed_tokens.weight": P("x"), "*.[qkv]_proj.weight": P("x"),
            "*.o_proj.weight": P(None, "x"), "*.up_proj.weight": P("x"),
            "*.down_proj.weight": P(None, "x")})
        torch.manual_seed(3)
        materialize(model, model._init_weights)
        out = model(input_ids=torch.arange(10).view(2, 5)).logits.detach()
        assert out.full_tensor().isfinite().all()
        frequencies = model.model.rotary_emb.inv_freq
        if type(frequencies) is ShardTensor:
            frequencies = frequencies.full_tensor()
        return full_state(model) | {"inv_freq": frequencies}

    found = everywhere(on_rank)
    assert torch.equal(found["inv_freq"], llama.LlamaForCausalLM(config).model.rotary_emb.inv_freq)
    assert found["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)


def test_modules_that_cannot_be_materialized() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("scale", torch.ones(1))

    def on_rank(mesh: Any) -> list[str]:
        texts = []

        def told(call: Callable[[], Any]) -> None:
            with pytest.raises(ModuleError) as caught:
                call()
            texts.append(str(caught.value))

        module = on_meta(lambda: nn.Sequential(Norm(), nn.Linear(4, 4)))
        told(lambda: materialize(module))
        weft.distribute_module(module, mesh, shardings={"0.weight": P("x"), "1.*": P("x")})
        told(lambda: materialize(module))
        assert all(each.is_meta for each in module.parameters())
        # (Of scale there is one element, so that it is on the second rank that nothing is known.)
        told(lambda: materialize(module, lambda part: (
            nn.init.ones_(part.weight) if isinstance(part, (Norm, nn.Linear)) else None)))
        return texts

    first, second, third = weft.testing.run(on_rank, mesh={"x": 2})[1]
    assert first.startswith("materialize(module): 4 of 4 tensors on the meta device are plain")
    assert second == """\
materialize(module): 2 of 4 tensors belong to modules without reset_parameters: Norm.
  Rule: a module has reset_parameters, or `init` gives its tensors values.
  Offenders: 0.weight, 0.scale
  Fix: def init(module):
           if isinstance(module, ...): nn.init.normal_(module.weight)
       weft.nn.materialize(model, init)"""
    assert "Offenders: 0.scale, 1.bias\n" in third


def test_state_dicts_fill_what_to_empty_has_made() -> None:
    dense = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def on_rank(mesh: Any) -> None:
        for assign in (False, True):
            module = laid(on_meta(lambda: copy.deepcopy(dense).to("meta")), mesh)
            layouts = {name: each.sharding for name, each in module.state_dict().items()}
            identities = list(map(id, module.parameters()))
            if not assign:
                module.to_empty(device="cpu")
                assert list(map(id, module.parameters())) == identities
            module.load_state_dict(dense.state_dict(), assign=assign)
            assert layouts == {name: each.sharding for name, each in module.state_dict().items()}
            found = full_state(module)
            assert all(torch.equal(found[k], each) for k, each in dense.state_dict().items())
            layer: Any = module[0]  # type: ignore[index]
            layer(torch.ones(3, 4)).sum().backward()
            assert all(each.grad is not None for each in layer.parameters())

    weft.testing.run(on_rank, mesh={"x": 2})


@ranks(x=2)
def test_gradients_go_to_the_meta_device_and_come_back(mesh: Any) -> None:
    module: Any = laid(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), mesh)
    module(torch.ones(3, 4)).sum().backward()
    for change, device, dtype in (
        (lambda: module.double(), "cpu", torch.float64),
        (lambda: module.to("meta"), "meta", torch.float64),
        (lambda: module.half(), "meta", torch.float16),
        (lambda: module.to_empty(device="cpu"), "cpu", torch.float16),
    ):
        change()
        for each in module.parameters():
            assert each.grad.dtype is each.dtype is dtype
            assert each.grad.device.type == each.device.type == device
            assert each.grad.sharding == each.sharding and each.grad.shape == each.shape


@ranks(x=2)
def test_a_tensor_without_memory(mesh: Any) -> None:
    x = weft.distribute_tensor(
        torch.empty(5, 4, device="meta", requires_grad=True), mesh, P("x"))
    assert x.is_meta and not x.is_cpu and x.device == torch.device("meta")
    assert x.requires_grad and x.to_local().is_meta and x.shape == (5, 4)
    assert x.to_local().shape == ((3, 4) if mesh.rank == 0 else (2, 4))
    weft.manual_seed(1)
    with torch.no_grad():
        nn.init.normal_(x)
        x.copy_(torch.ones(5, 4)).zero_()
    assert weft.rng_state()[1] == 0  # nothing was drawn
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.half(), x.clone()):
        assert other.is_meta and other.sharding == x.sharding
        assert other.device_mesh is mesh
    with pytest.raises(UnsupportedOpError, match="no values to bring along"):
        x.to("cpu")
    filled = torch.empty_like(x, device="cpu")
    assert not filled.is_meta and filled.is_cpu and filled.sharding == x.sharding
    back = filled.to("meta")
    assert back.is_meta and back.sharding == x.sharding
