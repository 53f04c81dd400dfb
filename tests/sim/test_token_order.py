"""Zig-zag order: values and gradients are those of the order of positions, work is even."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.harness import check_op, local_part
from tests.models.catalogue import hf
from weft import LayoutError, P, ShardTensor
from weft.core import Layout, Mesh
from weft.ops.attending import fused, sequence, ways

sdpa: Any = F.scaled_dot_product_attention
ON_SEQUENCE = P(None, None, "x")


def operands(heads: int, key_heads: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, num, length, 4, generator=generator, dtype=torch.float64)
            for num in (heads, key_heads, key_heads)]


def test_two_stretches_of_a_shard_are_mirror_images() -> None:
    assert weft.zigzag(16, 2).spans == ((0, 4), (12, 16), (4, 8), (8, 12))
    assert weft.zigzag(10, 4).positions.tolist() == [0, 1, 9, 2, 3, 8, 4, 5, 7, 6]
    for length in range(12):
        for ranks in range(1, 6):
            order = weft.zigzag(length, ranks)
            assert order.positions.sort().values.tolist() == list(range(length))
            x = torch.randn(2, length)
            assert torch.equal(order.restore(order.apply(x, 1), 1), x)


@pytest.mark.parametrize("way", ["heads", "blocks", "tiles"])
@pytest.mark.parametrize("heads, key_heads", [(4, 4), (3, 1), (8, 2)])
def test_values_and_gradients(
    heads: int, key_heads: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's part, in shards that the order is made for, and in others."""
    monkeypatch.setattr(ways.Attention, "_by_heads", lambda *_: way == "heads")
    if way == "blocks":
        monkeypatch.setattr(sequence, "BUFFER_NBYTES", 1)
    if way == "tiles":
        monkeypatch.setattr(fused, "serves", lambda *_: False)
    for ranks, length, sizes in ((4, 16, None), (3, 11, None), (2, 9, (7, 2)), (3, 8, (0, 5, 3))):
        order = weft.zigzag(length, ranks)
        tensors = operands(heads, key_heads, length)
        due = sdpa(*tensors, is_causal=True, enable_gqa=heads != key_heads)
        mine = [order.apply(one, 2) for one in tensors]
        torch.testing.assert_close(order.restore(order.attend(*mine), 2), due)
        layouts = [Layout(Mesh({"x": ranks}), tuple(one.shape), ON_SEQUENCE,
                          sizes={2: sizes} if sizes else None) for one in mine]
        outcomes = check_op(order.attend, mine, {"x": ranks}, layouts)
        assert outcomes[0].results[0].layout.spec == ON_SEQUENCE


def test_other_layouts() -> None:
    order, mesh = weft.zigzag(10, 2), {"x": 2, "y": 2}
    for heads, key_heads in ((4, 4), (4, 2)):
        tensors = operands(heads, key_heads, 10)
        for specs in ([P("y", None, "x")] * 3, [P(None, "y", "x")] * 3, [P(None, "x")] * 3,
                      [P(), ON_SEQUENCE, ON_SEQUENCE], [ON_SEQUENCE, P(), P()],
                      [P(None, None, ("y", "x"))] * 3):
            check_op(order.attend, tensors, mesh, [
                Layout(Mesh(mesh), tuple(one.shape), spec) for one, spec in zip(tensors, specs)])


def test_second_derivatives() -> None:
    order, tensors = weft.zigzag(6, 2), operands(1, 1, 6)

    def second(*given: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = order.attend(*given)
            if not given[0].requires_grad:  # the value alone is asked for
                return out.sum()
            found = torch.autograd.grad((out * out).sum(), given, create_graph=True)
        total: Any = sum([(one * one).sum() for one in found])
        return total

    check_op(second, tensors, {"x": 2}, [
        Layout(Mesh({"x": 2}), tuple(one.shape), ON_SEQUENCE) for one in tensors])


@pytest.mark.parametrize("zigzag", [False, True])
def test_work_of_the_ranks(zigzag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that a rank computes: in the order of positions 1, 3, 5 and 7 parts of 16."""
    ranks, length = 4, 64
    order, tensors = weft.zigzag(length, ranks), operands(1, 1, length)
    monkeypatch.setattr(ways.Attention, "_by_heads", lambda *_: False)
    kernel, scores = fused.attend, Counter()

    def counted(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Any:
        rows = q.shape[-2]
        scores[threading.get_ident()] += rows * (rows + 1) // 2 if is_causal else (
            rows * k.shape[-2])
        return kernel(q, k, v, is_causal, scale)

    def on_rank(mesh: Any) -> int:
        layouts = [Layout(mesh, tuple(one.shape), ON_SEQUENCE) for one in tensors]
        given = [ShardTensor.from_local(local_part(layout, one, mesh.here, 0), mesh, layout)
                 for one, layout in zip(tensors, layouts)]
        order.attend(*given) if zigzag else sdpa(*given, is_causal=True)
        return scores[threading.get_ident()]

    monkeypatch.setattr(fused, "attend", counted)
    found = weft.testing.run(on_rank, ranks, {"x": ranks})
    assert sum(found) == length * (length + 1) // 2
    if zigzag:
        assert max(found) == min(found)
    else:
        assert max(found) > 1.7 * sum(found) / ranks


def test_a_llama_in_zigzag_order() -> None:
    """Hugging Face's own model, whose attention is that of the order; labels are shifted first."""
    length, ranks = 22, 4
    order = weft.zigzag(length, ranks)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float,
               **__: Any) -> Any:
        return order.attend(query, key, value, scale=scaling).transpose(1, 2), None

    hf.AttentionInterface.register("zigzag", attend)

    def llama(attention: str) -> Any:
        torch.manual_seed(0)
        return hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=32, hidden_size=12, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=3, num_key_value_heads=1, attn_implementation=attention))

    tokens = torch.randint(0, 32, (1, length + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    due = llama("sdpa")
    loss = due(input_ids=inputs, labels=labels, shift_labels=labels).loss
    loss.backward()

    def on_rank(mesh: Any) -> None:
        model = llama("zigzag")
        weft.distribute_module(model, mesh)
        given = [weft.distribute_tensor(order.apply(one, 1), mesh, P(None, "x"))
                 for one in (inputs, labels, torch.arange(length)[None])]
        out = model(input_ids=given[0], labels=given[1], shift_labels=given[1],
                    position_ids=given[2])
        out.loss.backward()
        assert out.logits.sharding.spec == P(None, "x")
        assert abs(out.loss.item() - loss.item()) < 1e-6
        for mine, one in zip(model.parameters(), due.parameters()):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-6)

    weft.testing.run(on_rank, ranks, {"x": ranks})


def test_the_mode_and_what_it_refuses() -> None:
    order, tensors = weft.zigzag(9, 2), operands(2, 2, 9)
    mine = [order.apply(one, 2) for one in tensors]
    with order.causal():
        out = sdpa(*mine, is_causal=True, scale=0.3)
        every = sdpa(*mine)
        with pytest.raises(LayoutError, match="a mask does not know the order of tokens"):
            sdpa(*mine, attn_mask=torch.ones(9, 9, dtype=torch.bool))
        with pytest.raises(LayoutError, match="dropout_p"):
            sdpa(*mine, dropout_p=0.1, is_causal=True)
    torch.testing.assert_close(order.restore(out, 2), sdpa(*tensors, is_causal=True, scale=0.3))
    torch.testing.assert_close(order.restore(every, 2), sdpa(*tensors))
    with pytest.raises(LayoutError, match=r"sequences of 9, 8, 9 tokens, and an order of 9"):
        order.attend(mine[0], mine[1][..., 1:, :], mine[2])
    with pytest.raises(LayoutError, match="there is at least one shard"):
        weft.zigzag(9, 0)
