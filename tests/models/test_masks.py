"""Masks that transformers makes of sharded padding masks, positions and blocks, by broadcasting or
by vmap, for `sdpa` and `eager`; and a model whose masks are made by vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.harness import ranks
from tests.models.catalogue import hf
from weft import P

UTILS = hf.masking_utils
FULL = torch.ones(2, 10, dtype=torch.long)
PADDED = FULL.index_put((torch.tensor([0, 0, 0]), torch.arange(3)), torch.tensor(0))
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]])
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1], [0, 0, -1, -1, -1, 1, 1, 1, 1, -1]])

MAKERS: dict[str, Any] = {
    "causal": lambda c, e, a, p, b: UTILS.create_causal_mask(c, e, a, None, p),
    "sliding": lambda c, e, a, p, b: UTILS.create_sliding_window_causal_mask(c, e, a, None, p),
    "chunked": lambda c, e, a, p, b: UTILS.create_chunked_causal_mask(c, e, a, None, p),
    "both ways": lambda c, e, a, p, b: UTILS.create_bidirectional_mask(c, e, a),
    "or, by vmap": lambda c, e, a, p, b: UTILS.create_causal_mask(
        c, e, a, None, p,
        or_mask_function=lambda i, h, q, k: (b[i, q] == b[i, k]) & (b[i, q] >= 0)),
    "and, by vmap": lambda c, e, a, p, b: UTILS.create_causal_mask(
        c, e, a, None, p, and_mask_function=lambda i, h, q, k: b[i, k] >= 0),
    "blocks": lambda c, e, a, p, b: UTILS.create_causal_mask(
        c, e, a, None, p, block_sequence_ids=b),
}
SPECS = {"rows": P("y"), "sequence": P(None, "x"), "both": P("y", "x")}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MAKERS)
def test_as_in_one_process(name: str, way: str, spec: str) -> None:
    config = hf.LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    config.sliding_window, config.attention_chunk_size = 3, 4
    config._attn_implementation = way
    embedded = torch.randn(2, 10, 16)
    given = [(None, None), (FULL, None), (PADDED, None), (None, PACKED)]
    due = [MAKERS[name](config, embedded, *one, BLOCKS) for one in given]

    @ranks(y=2, x=4)
    def run(mesh: Any) -> None:
        def laid(one: Tensor | None) -> Any:
            return None if one is None else weft.distribute_tensor(one, mesh, SPECS[spec])

        for pair, whole in zip(given, due):
            mask = MAKERS[name](config, laid(embedded), *map(laid, pair), laid(BLOCKS))
            assert (mask is None) == (whole is None)
            if whole is not None:
                found = mask.full_tensor() if isinstance(mask, weft.ShardTensor) else mask
                assert torch.equal(found, whole)

    run()


def t5gemma2() -> nn.Module:
    text = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    return hf.T5Gemma2ForConditionalGeneration(hf.T5Gemma2Config(
        encoder={"text_config": text, "vision_config": vision, "vocab_size": 64}, decoder=text,
        vocab_size=64, dropout_rate=0.0, attention_dropout=0.0, eoi_token_index=62,
        image_token_index=61))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "sequence"])
def test_a_model_with_masks_by_vmap(spec: P) -> None:
    torch.manual_seed(0)
    model = t5gemma2()
    state = model.state_dict()
    given = {"input_ids": torch.randint(3, 60, (4, 12)), "labels": torch.randint(3, 60, (4, 8)),
             "attention_mask": torch.ones(4, 12, dtype=torch.long)}
    given["attention_mask"][0, :4] = 0
    loss = model(**given).loss
    loss.backward()

    @ranks(x=4)
    def run(mesh: Any) -> None:
        mine = t5gemma2()
        mine.load_state_dict(state)
        out = mine(**{name: weft.distribute_tensor(one, mesh, spec)
                      for name, one in given.items()})
        out.loss.backward()
        torch.testing.assert_close(out.loss.full_tensor(), loss.detach())
        for one, other in zip(mine.parameters(), model.parameters()):
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=2e-3, atol=1e-5)

    run()
