"""Models whose input is sharded along the sequence, all parameters being whole.

Attention leaves the sequence sharded, whatever the number of heads; so do rotary embeddings, masks
that models make, and all else between the tokens and the logits. The loss is that of labels which
are shifted by one over borders of shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.harness import local_part
from tests.models.catalogue import hf
from weft import P, ShardTensor
from weft.core import Layout
from weft.testing import peak_memory

LENGTH, WIDTH, RANKS = 32, 8, 4
HEADS = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "4": (4, 4), "8, of keys 2": (8, 2)}


def llama(heads: int, key_heads: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=64, hidden_size=heads * WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=64,
        attn_implementation="sdpa",
    ))


def bert(heads: int, key_heads: int) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(
        vocab_size=64, hidden_size=heads * WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=heads, max_position_embeddings=64, attn_implementation="sdpa",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))


class Layers(nn.Module):
    """torch's own attention, with a causal mask or without."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        width = heads * WIDTH
        self.tokens = nn.Embedding(64, width)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.out = nn.Linear(width, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.tokens(input_ids)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = x + self.attend(x, x, x, need_weights=False, attn_mask=hidden, is_causal=True)[0]
        x = self.out(x + self.attend(x, x, x, need_weights=False)[0])
        loss = nn.functional.cross_entropy(x[:, :-1].transpose(1, 2), labels[:, 1:])
        return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=x)


MODELS = {"llama": llama, "bert": bert, "torch's layers": Layers}


def step(model: nn.Module, tokens: Tensor) -> Any:
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_the_sequence_stays_sharded(name: str, heads: str) -> None:
    torch.manual_seed(0)
    num_heads, key_heads = HEADS[heads]
    if name != "llama":
        key_heads = num_heads
    model = MODELS[name](num_heads, key_heads)
    tokens = torch.randint(0, 64, (2, LENGTH))
    loss = step(model, tokens).loss.detach()
    state = model.state_dict()

    def on_rank(mesh: Any) -> None:
        mine = MODELS[name](num_heads, key_heads)
        mine.load_state_dict(state)
        layout = Layout(mesh, (2, LENGTH), P(None, "x"))
        local = local_part(layout, tokens, mesh.here, 0)
        with weft.explain() as log:
            out = step(mine, ShardTensor.from_local(local, mesh, layout))
        assert out.logits.sharding.spec == P(None, "x")
        torch.testing.assert_close(torch.tensor(float(out.loss)), loss, rtol=1e-5, atol=1e-6)
        for one, other in zip(mine.parameters(), model.parameters()):
            gradient: Any = one.grad
            torch.testing.assert_close(gradient.full_tensor() if isinstance(
                gradient, ShardTensor) else gradient, other.grad, rtol=2e-4, atol=2e-6)
        labels = 2 * LENGTH * 8
        gathered = [event for event in log.events if event.direction == "forward"
                    and event.collective == "AllGather" and event.nbytes > labels]
        assert gathered == [], str(log)
        attention = sum([event.nbytes for event in log.events if "attention" in event.op])
        assert attention <= 2 * _blocks(key_heads, name == "llama")

    weft.testing.run(on_rank, RANKS, {"x": RANKS})


def _blocks(key_heads: int, is_causal: bool) -> int:
    """Bytes of a layer's blocks of keys and values, of which a rank lacks three quarters: once
    forward, and backward once more and as gradients, of which a causal mask hides as many."""
    nbytes = 2 * 2 * LENGTH * key_heads * WIDTH * 4
    return nbytes * 3 // 4 * (2 if is_causal else 3)


def gpt2(heads: int, key_heads: int) -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=64, n_embd=heads * WIDTH, n_layer=2, n_head=heads, n_positions=LENGTH,
        bos_token_id=None, eos_token_id=None, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_views_of_tokens_move_nothing(name: str) -> None:
    """Of two samples on four ranks, tokens stay where they are, from the linears to the loss."""
    torch.manual_seed(0)
    build = gpt2 if name == "gpt2" else MODELS[name]
    model = build(4, 4)
    tokens = torch.randint(0, 64, (2, LENGTH - 3))
    loss = step(model, tokens).loss.detach()
    state = model.state_dict()

    def on_rank(mesh: Any) -> None:
        mine = build(4, 4)
        mine.load_state_dict(state)
        with weft.sharded_factories(), weft.explain() as log:
            out = step(mine, weft.distribute_tensor(tokens, mesh, P(None, "x")))
        torch.testing.assert_close(torch.tensor(float(out.loss)), loss, rtol=1e-5, atol=1e-6)
        for one, other in zip(mine.parameters(), model.parameters()):
            gradient: Any = one.grad
            torch.testing.assert_close(gradient.full_tensor() if isinstance(
                gradient, ShardTensor) else gradient, other.grad, rtol=2e-4, atol=2e-6)
        moved = [event for event in log.events if event.nbytes and event.op.startswith(
            ("aten.view", "aten.reshape"))]
        assert not moved, str(log)

    weft.testing.run(on_rank, RANKS, {"x": RANKS})


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_memory_falls_with_the_ranks(heads: int) -> None:
    """The peak of a rank is at most 1.3 of its part of the peak of one process."""
    assert share(heads) <= 1.3


def share(heads: int) -> float:
    """The peak of a rank, in its part of the peak of one process."""
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads, attn_implementation="sdpa",
        use_cache=False)
    tokens = torch.randint(0, 256, (1, 511))

    def peak(tokens: Tensor, mesh: Any = None) -> int:
        model = hf.LlamaForCausalLM(config)
        if mesh is not None:
            weft.distribute_module(model, mesh)
        with peak_memory(model, tokens) as memory:
            step(model, tokens)
        return memory.peak

    ranks = weft.testing.run(
        lambda mesh: peak(weft.distribute_tensor(tokens, mesh, P(None, "x")), mesh), RANKS,
        {"x": RANKS})
    return max(ranks) * RANKS / peak(tokens)
