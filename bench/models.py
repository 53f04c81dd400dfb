"""A step of a small Llama of transformers, unmodified, beside the same model on plain tensors.

weft's runs data-parallel on rank 0 of the fake world, plain torch what is that rank's share. What
weft takes more is the host's work, the same for a model of any width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import weft
from bench import world
from bench.item import Row, timed

BATCH, LENGTH = 4, 16
WIDTHS = (32, 256)


def llama(width: int) -> Any:
    """Two layers, with grouped heads."""
    import transformers  # noqa: PLC0415  (seconds, which other items should not pay)

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    ))


def step(system: str, width: int) -> Callable[[], Any]:
    """Forward and backward, without an optimizer."""
    model = llama(width)
    share = torch.randint(0, 512, (BATCH, LENGTH))
    tokens: Any = share
    if system == "weft":
        mesh = world.weft_line()
        weft.distribute_module(model, mesh)
        tokens = weft.distribute_tensor(
            share.repeat(world.NUM_RANKS, 1), mesh, weft.P("dp"), src_data_rank=None
        )

    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        for each in model.parameters():
            each.grad = None

    return run


def measure(num_rounds: int) -> list[Row]:
    return [
        timed(
            f"Llama of width {width}, forward and backward",
            {system: step(system, width) for system in ("plain", "weft")}, num_rounds,
        )
        for width in WIDTHS
    ]
